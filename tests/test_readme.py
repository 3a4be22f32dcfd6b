"""What the README says, works."""

import json
import linecache
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA GPU")


def test_its_python_runs_and_finds_the_planted_mistake(capsys):
    source = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    name = "<README>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"```\n(transpose: .*?)```", README, re.DOTALL)
    where = re.compile(r"at \S+:\d+:|at line \d+")
    assert where.sub("at", printed).endswith(where.sub("at", shown))


def test_its_table_is_what_was_recorded():
    script = runpy.run_path(str(ROOT / "scripts" / "ladder_table.py"))
    record = json.loads(script["RECORDED"].read_text())
    assert script["table"](record) in README


def test_its_files_exist():
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", prose)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_ci_runs_the_test_command_that_it_gives():
    (command,) = re.findall(r"&& (pytest[^`\n]*)", README)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()
