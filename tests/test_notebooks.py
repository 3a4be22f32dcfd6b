"""Every notebook runs from top to bottom, and what is committed is what its source builds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "build_notebooks.py"
spec = importlib.util.spec_from_file_location("build_notebooks", SCRIPT)
assert spec is not None
assert spec.loader is not None
build_notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_notebooks)

SOURCES = build_notebooks.sources()


def kernel_excerpts(notebook):
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    return [o.data["text/markdown"] for o in outputs if "text/markdown" in o.get("data", ())]


def test_there_are_notebooks():
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_the_kernel_as_it_is_now(source):
    executed = build_notebooks.execute(source)
    built = build_notebooks.nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert kernel_excerpts(built) == kernel_excerpts(executed)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_built_notebook_has_the_cells_of_its_source_and_their_outputs(source):
    assert build_notebooks.difference(source) is None


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_opens_with_objectives_and_minutes_and_asks_a_question(source):
    cells = build_notebooks.cells(build_notebooks.jupytext.read(source))
    kind, first = cells[0]
    assert kind == "markdown"
    assert first.startswith("# ")
    assert "minutes" in first
    assert "After this notebook you can" in first
    assert any("<details>" in text for kind, text in cells if kind == "markdown")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda nb: nb.cells[0].update(source="# Other"), "other cells"),
        (lambda nb: nb.cells[1].update(execution_count=None), "never ran"),
        (lambda nb: nb.cells[1].update(outputs=[]), "no outputs"),
    ],
)
def test_a_notebook_that_differs_or_did_not_run_is_told(tmp_path, change, sentence):
    source = tmp_path / "01-small.py"
    source.write_text("# %% [markdown]\n# # Small\n\n# %%\nprint(1)\n")
    notebook = build_notebooks.strip(build_notebooks.execute(source))
    build_notebooks.nbformat.write(notebook, source.with_suffix(".ipynb"))
    assert build_notebooks.difference(source) is None
    change(notebook)
    build_notebooks.nbformat.write(notebook, source.with_suffix(".ipynb"))
    assert sentence in build_notebooks.difference(source)


def test_a_notebook_that_was_never_built_is_told(tmp_path):
    source = tmp_path / "01-small.py"
    source.write_text("# %%\nprint(1)\n")
    assert "does not exist" in build_notebooks.difference(source)
