"""Compiling and assembling kernels without a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from numba import cuda


class Assembled(NamedTuple):
    """What the compilers say about one kernel."""

    ptx: str
    log: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def ptxas():
    """The assembler of the package nvidia-cuda-nvcc."""
    name = "ptxas.exe" if sys.platform == "win32" else "ptxas"
    folders = importlib.import_module("nvidia").__path__
    found = [path for folder in folders for path in Path(folder).glob(f"*/bin/{name}")]
    assert found, "there is no ptxas here: pip install nvidia-cuda-nvcc"
    return found[0]


def assemble(kernel, signature, architecture, folder, launch_bounds=None):
    """Compile a Python function as a kernel for ``architecture``, (8, 0) or (9, 0, "a")."""
    pretended = SimpleNamespace(compute_capability=architecture[:2])
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=pretended):
        ptx, _ = cuda.compile(
            kernel,
            signature,
            cc=architecture,
            output="ptx",
            device=False,
            abi="numba",
            launch_bounds=launch_bounds,
        )
    ptx = ptx if isinstance(ptx, str) else ptx.decode()
    source = Path(folder) / "kernel.ptx"
    source.write_text(ptx)
    target = "sm_" + "".join(map(str, architecture))
    command = [ptxas(), "-v", f"-arch={target}", source, "-o", source.with_suffix(".cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def number(pattern):
        found = re.search(pattern, done.stderr)
        assert found, f"ptxas no longer says {pattern!r}:\n{done.stderr}"
        return int(found[1])

    return Assembled(
        ptx,
        done.stderr,
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )
