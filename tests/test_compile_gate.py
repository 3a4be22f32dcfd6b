"""What NVVM and ptxas make of the kernels, without a GPU: no spill, no stack, no stray float64.

A spilled register or a local array in memory is a kernel several times slower than its source
looks, and nothing else in the suite would notice. The specialisations below cover every rung, both
directions, the common head dimensions and every dtype, with and without a mask; the architectures
(the oldest supported, a data centre's, the newest) take turns.
"""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from numba import cuda, types

import numba_flash as nf
from numba_flash import interface, launch
from numba_flash.kernels.rung import STATIC_SHARED_BYTES
from numba_flash.problem import Device, make_problem

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler runs on macOS")

REGISTERS_PER_BLOCK = 65_536
ARCHITECTURES = [(7, 5), (9, 0), (12, 0)]
SHARED_BYTES = {(7, 5): 65_536, (9, 0): 232_448, (12, 0): 101_376}

COVERED = [
    (32, "float32", True),
    (32, "bfloat16", False),
    (64, "float16", True),
    (64, "float32", False),
    (128, "bfloat16", True),
    (128, "float16", False),
    (256, "float32", True),
    (256, "bfloat16", False),
    (64, "float64", True),
    (128, "float64", False),
]
"""(head_dim, dtype, mask): every head_dim and every dtype with and without a mask."""

WAIVED_SPILLS = {("minimal", "float64", (12, 0), "backward_kernel"): 304}
"""Spilled bytes that may stay, with the reason. ptxas 13.5 unrolls minimal's backward for sm_120
alone until it spills, whatever the tiles; for sm_75 and sm_90 the same kernel takes at most 104
registers. float64 runs at 1/64 of the rate on those cards and is there to check gradients with."""


def specialisations():
    """Every rung with all of `COVERED` that it takes.

    A dtype and a rung meet a new architecture each time.
    """
    for m, rung in enumerate(nf.LADDER):
        for n, covered in enumerate(COVERED):
            architecture = ARCHITECTURES[(n + n // 3 + m) % 3]
            if rung.refuses(make_arrays(*covered)[0], device_of(architecture)) is None:
                values = (rung.name, *covered[:2], "mask" if covered[2] else "no_mask")
                yield pytest.param(rung, *covered, architecture, id="-".join(map(str, values)))


class Compiled(NamedTuple):
    """What the compilers say about one kernel."""

    ptx: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def device_of(architecture):
    return Device("a GPU", architecture, SHARED_BYTES[architecture], 80 << 30)


def make_arrays(head_dim, dtype, has_mask):
    """A problem, and the layouts of its operands and of its mask."""
    operand = launch.contiguous_layout((1, 2, 96, head_dim), dtype)
    mask = launch.contiguous_layout((1, 2, 96, 96), "bool") if has_mask else None
    return make_problem(operand, operand, operand, mask=mask), operand, mask


def make_plan(rung, head_dim, dtype, has_mask, architecture, backward):
    """A plan as a call on that architecture would get it, and the layouts of its arrays."""
    device = device_of(architecture)
    problem, operand, mask = make_arrays(head_dim, dtype, has_mask)
    config = rung.default_config(problem, device, backward)
    plan = (rung.backward if backward else rung.forward)(problem, config)
    layouts = dict.fromkeys(("q", "k", "v", "do", "o", "dq", "dk", "dv"), operand)
    layouts["lse"] = launch.contiguous_layout(problem.lse_shape, problem.acc_dtype)
    layouts["mask"] = mask or interface.NO_MASK
    layouts |= {n: launch.contiguous_layout(*spec) for n, spec in plan.workspaces.items()}
    return plan, layouts, rung.shared_bytes(problem, config, backward)


def ptxas():
    """The assembler of the package nvidia-cuda-nvcc."""
    name = "ptxas.exe" if sys.platform == "win32" else "ptxas"
    folders = importlib.import_module("nvidia").__path__
    found = [path for folder in folders for path in Path(folder).glob(f"*/bin/{name}")]
    assert found, "there is no ptxas here: pip install nvidia-cuda-nvcc"
    return found[0]


def compile_step(step, layouts, architecture, folder):
    """Compile one kernel for its arguments as a launch would, and assemble it."""
    signature = types.void(*[launch._numba_type(arg, layouts) for arg in step.args])
    pretended = SimpleNamespace(compute_capability=architecture)
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=pretended):
        ptx, _ = cuda.compile(
            step.kernel.py_func, signature, cc=architecture, output="ptx", device=False, abi="numba"
        )
    ptx = ptx if isinstance(ptx, str) else ptx.decode()
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    major, minor = architecture
    command = [ptxas(), "-v", f"-arch=sm_{major}{minor}", source, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def number(pattern, default=None):
        found = re.search(pattern, done.stderr)
        assert found or default is not None, f"ptxas no longer says {pattern!r}:\n{done.stderr}"
        return int(found[1]) if found else default

    return Compiled(
        ptx,
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem", default=0),  # left out where there is none
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("rung", "head_dim", "dtype", "has_mask", "architecture"), list(specialisations())
)
def test_kernels_stay_in_registers_and_in_the_shared_memory_they_claim(
    rung, head_dim, dtype, has_mask, architecture, backward, tmp_path
):
    plan, layouts, claimed = make_plan(rung, head_dim, dtype, has_mask, architecture, backward)
    assert claimed <= STATIC_SHARED_BYTES
    for step in {step.kernel: step for step in plan.steps}.values():
        name = step.kernel.py_func.__name__
        threads = math.prod(step.block)
        compiled = compile_step(step, layouts, architecture, tmp_path)
        waived = WAIVED_SPILLS.get((rung.name, dtype, architecture, name), 0)
        spills, stack = compiled.spill_bytes, compiled.stack_bytes
        assert spills <= waived, f"{name} spills {spills} bytes"
        assert stack == 0 or waived, f"{name} keeps {stack} bytes on a stack"
        assert compiled.shared_bytes <= claimed, f"{name} takes more shared memory than it claims"
        assert compiled.registers * threads <= REGISTERS_PER_BLOCK, f"{name} cannot be launched"
        if dtype != "float64":
            assert ".f64" not in compiled.ptx, f"{name} computes in float64"
        assert not step.kernel.targetoptions.get("fastmath"), f"{name} is built with fast maths"
