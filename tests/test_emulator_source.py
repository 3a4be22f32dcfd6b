"""The emulator finds the source of a kernel wherever it is written, and names the right place."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_flash.emulator import UnsupportedConstruct, emulate


def load(path, source):
    """The module of this source, written to ``path``."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INDENTED = '''from numba import cuda
def make():
{indent}@cuda.jit
{indent}def kernel(x, out):
{indent}{indent}"""Doubles.

x : in; out : out.
{indent}{indent}"""
# a comment at the margin
{indent}{indent}out[cuda.threadIdx.x] = 2 * x[cuda.threadIdx.x]
{indent}{indent}out[cuda.threadIdx.x + 8] = 1
{indent}return kernel
'''


@pytest.mark.parametrize("indent", ["    ", "\t"], ids=["spaces", "tabs"])
def test_nested_kernel_may_have_lines_that_are_indented_less_than_it(tmp_path, indent):
    module = load(tmp_path / "indented.py", INDENTED.format(indent=indent))
    out = np.zeros(8)
    (fault,) = emulate(module.make())[1, 8](np.arange(8.0), out).faults
    np.testing.assert_array_equal(out, 2 * np.arange(8))
    assert (fault.file, fault.line) == (str(tmp_path / "indented.py"), 11)
    assert fault.source == "out[cuda.threadIdx.x + 8] = 1"
    assert str(fault).startswith("out-of-bounds at indented.py:11: index (8) ")
    assert ", in `out[cuda.threadIdx.x + 8] = 1` (8 times)" in str(fault)


@pytest.mark.parametrize(
    "source",
    [
        "kernel = lambda out: None",
        "kernel = [\n    lambda out: None,\n][0]",
        "for kernel in (lambda out: None,):\n    pass",
        "kernel = max([1, lambda out:\n  None], key=callable)",
        "def make(): return lambda out: None\nkernel = make()",
    ],
    ids=["assigned", "in a list", "in a loop", "inside a line", "in a function"],
)
def test_lambda_is_refused_wherever_it_is_written(tmp_path, source):
    kernel = load(tmp_path / "lambdas.py", source).kernel
    with pytest.raises(UnsupportedConstruct, match="<lambda> is not written as a 'def' statement"):
        emulate(kernel)[1, 8](np.zeros(8))


def test_fault_of_equal_kernels_in_two_files_names_the_file_of_its_own(tmp_path):
    source = "def kernel(x):\n    x[9] = 1\n"
    for name in ("one.py", "two.py"):
        kernel = load(tmp_path / name, source).kernel
        (fault,) = emulate(kernel)[1, 1](np.zeros(8)).faults
        assert fault.file == str(tmp_path / name)


def test_fault_in_a_statement_of_several_lines_names_the_line_of_the_access(tmp_path):
    source = "def kernel(x):\n    x[0] = (\n        x[1]\n        + x[9]\n        * 2\n    )\n"
    (fault,) = emulate(load(tmp_path / "long.py", source).kernel)[1, 1](np.zeros(8)).faults
    assert (fault.line, fault.source) == (4, "+ x[9]")


NOTEBOOK = '''
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
cells = [
    "import numpy as np\\nimport numba_flash as nf\\nfrom numba import cuda, float32",
    """@cuda.jit(device=True)
def last(x):
    return x[x.size]""",
    """%precision 3
@cuda.jit
def kernel(x, out):
    acc = 0.0
    acc += last(x)
    out[0] = acc

report = nf.emulate(kernel)[1, 1](np.ones(4, np.float32), np.ones(1, np.float32))""",
    "print(*report.faults, sep=chr(10))",
    # The cell is run again with a change: the lines are those of the new one.
    """@cuda.jit
def kernel(x, out):
    out[1] = last(x)

print(*nf.emulate(kernel)[1, 1](np.ones(4), np.ones(1)).faults, sep=chr(10))""",
]
for cell in cells:
    shell.run_cell(cell, store_history=True).raise_error()
print("refused:", shell.run_cell("%%time\\n" + cells[-1]).error_in_exec)
'''


def test_fault_in_a_notebook_names_the_cell_and_quotes_its_line(tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK)
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    places = re.findall(r"^(\S+) at (.*?):(\d+): .*, in `(.*?)`", done.stdout, re.MULTILINE)
    assert places == [
        ("out-of-bounds", "Cell In[2]", "3", "return x[x.size]"),
        ("float64", "Cell In[3]", "4", "acc = 0.0"),
        ("out-of-bounds", "Cell In[2]", "3", "return x[x.size]"),
        ("out-of-bounds", "Cell In[5]", "3", "out[1] = last(x)"),
    ]
    assert "refused: the source of kernel" in done.stdout
    assert "not in one that begins with %%time" in done.stdout
