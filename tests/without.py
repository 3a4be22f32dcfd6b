"""Python without some of the installed packages: not hidden from it, but nowhere on its path."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lend_packages(folder: Path, *missing: str) -> Path:
    """Fill a folder with links to what is installed, except what has such a name."""
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages"):
            for entry in place.iterdir():
                link = folder / entry.name
                if not entry.name.lower().lstrip("_").startswith(missing) and not link.exists():
                    link.symlink_to(entry)
    return folder


def run_with_packages(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with nothing on its path but this repository, the folder and the standard library.

    ``-S`` keeps the places away that Python finds by itself.
    """
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
