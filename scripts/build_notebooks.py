"""Build notebooks/NN-name.ipynb, outputs included, from notebooks/NN-name.py.

    python scripts/build_notebooks.py             execute and write every notebook
    python scripts/build_notebooks.py 02 03       only those whose name starts so
    python scripts/build_notebooks.py --check     say which .ipynb differ from their .py; exit 1

The .py is the source; the .ipynb stands beside it so that the notebook can be read, pictures and
all, where nothing runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
MAX_BYTES = 1_000_000
"""A notebook larger than this is slow to load on a code host; shrink its pictures."""


def sources(prefixes: list[str] | None = None) -> list[Path]:
    """The notebook sources, in order; only those that start with one of ``prefixes`` if given."""
    found = sorted(NOTEBOOKS.glob("[0-9][0-9]-*.py"))
    return [p for p in found if not prefixes or p.name.startswith(tuple(prefixes))]


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """What must be the same in a .py and its .ipynb: the type and the text of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def difference(source: Path) -> str | None:
    """Why the .ipynb beside ``source`` is not its build, as a sentence; None if it is."""
    built_path = source.with_suffix(".ipynb")
    if not built_path.exists():
        return f"{built_path.name} does not exist"
    built = nbformat.read(built_path, as_version=4)
    if cells(built) != cells(jupytext.read(source)):
        return f"{built_path.name} has other cells than {source.name}"
    code = [cell for cell in built.cells if cell.cell_type == "code"]
    if any(cell.execution_count is None for cell in code):
        return f"{built_path.name} has cells that never ran"
    outputs = [output for cell in code for output in cell.outputs]
    if not outputs:
        return f"{built_path.name} has no outputs"
    if any(output.output_type == "error" for output in outputs):
        return f"{built_path.name} holds an error"
    return None


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook of ``source``, run from top to bottom in a fresh kernel."""
    notebook = jupytext.read(source)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    return NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    ).execute()


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leave nothing that changes from build to build, the outputs themselves aside."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        cell.metadata = nbformat.from_dict({})
    return notebook


def build(source: Path) -> None:
    start = time.perf_counter()
    text = nbformat.writes(strip(execute(source))) + "\n"
    if len(text) > MAX_BYTES:
        sys.exit(f"{source.name} builds to {len(text):,} bytes; the limit is {MAX_BYTES:,}.")
    source.with_suffix(".ipynb").write_text(text, encoding="utf-8")
    print(f"{source.stem}: {time.perf_counter() - start:.1f} s, {len(text) / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefix", nargs="*", help="which notebooks, as in 02; all if left out")
    parser.add_argument("--check", action="store_true", help="compare only; run nothing")
    arguments = parser.parse_args()
    found = sources(arguments.prefix)
    if not found:
        sys.exit(f"No notebook starts with {' or '.join(arguments.prefix)}.")
    if not arguments.check:
        for source in found:
            build(source)
        return
    differing = [sentence for sentence in map(difference, found) if sentence]
    if differing:
        sys.exit("\n".join([*differing, "Run python scripts/build_notebooks.py"]))


if __name__ == "__main__":
    main()
