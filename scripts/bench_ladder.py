"""Time the ladder on this GPU, next to flash.cu where its path is given, and record the result.

    python scripts/bench_ladder.py --flash-cu PATH --out notebooks/data/ladder.json

Every kernel is first checked against float64. Times are medians of CUDA-event timings after a
warm-up, one call of every kernel in turn, so that all of them see the same card.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from cuda.bindings import driver, nvrtc
from rich.console import Console
from rich.progress import track
from rich.table import Table

import numba_flash as nf

SHAPES = [(16, 12, 64, 64), (16, 12, 1024, 64), (4, 32, 4096, 64)]
"""(batch, heads, seqlen, head_dim), float32."""

SLOWEST = {"flash.cu": 1024, "minimal": 1024, "naive": 4096}
"""The longest sequence at which a kernel is timed."""


def compile_flash_cu(path: Path):
    """The forward kernel of flash.cu as a function (q, k, v) -> o, through NVRTC."""
    text = path.read_text()
    source = text[text.index("__global__") : text.index("torch::Tensor forward")]
    source = "#define INFINITY __int_as_float(0x7f800000)\n" + source
    source = source.replace("__global__\nvoid", 'extern "C" __global__ void', 1)
    major, minor = torch.cuda.get_device_capability()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"flash.cu", 0, [], [])
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise typer.BadParameter(f"{path} does not compile: {log.decode()}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    _, module = driver.cuModuleLoadData(cubin)
    _, function = driver.cuModuleGetFunction(module, b"forward_kernel")

    def forward(q, k, v):
        batch, heads, seqlen, d = q.shape
        tile = 32
        tiles = -(-seqlen // tile)
        o = torch.zeros_like(q)
        l = torch.zeros(q.shape[:3], device=q.device)
        m = torch.full(q.shape[:3], -torch.inf, device=q.device)
        pointers = [x.data_ptr() for x in (q, k, v)]
        values = (*pointers, seqlen, d, tiles, tiles, tile, tile, d**-0.5)
        values += tuple(x.data_ptr() for x in (l, m, o))
        types = (ctypes.c_void_p,) * 3 + (ctypes.c_int,) * 6 + (ctypes.c_float,)
        types += (ctypes.c_void_p,) * 3
        shared = 4 * (3 * tile * d + tile * tile)
        stream = torch.cuda.current_stream().cuda_stream
        (status,) = driver.cuLaunchKernel(
            function, batch, heads, 1, tile, 1, 1, shared, stream, (values, types), 0
        )
        if int(status):
            raise RuntimeError(f"flash.cu failed to launch: {status.name}")
        return o

    return forward


def median_ms(functions: dict, repeats: int) -> dict[str, float]:
    """Median milliseconds of each function, called in turn."""
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def host_microseconds(functions: dict, repeats: int = 500) -> dict[str, float]:
    """Median host time of warm calls, one of each in turn, the GPU never more than one behind."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken[50:]) * 1e6 for name, taken in times.items()}


def check(name: str, o, q, k, v) -> None:
    """Refuse to time a wrong result."""
    exact = torch.nn.functional.scaled_dot_product_attention(
        q[:1].double(), k[:1].double(), v[:1].double()
    )
    error = float((o[:1].double() - exact).norm() / exact.norm())
    if not error < 1e-5:
        raise SystemExit(f"{name} is wrong at {tuple(q.shape)}: relative error {error:.1e}")


def time_shape(shape, peer, repeats: int) -> list[dict]:
    """Check and time every kernel at one shape, forward and backward."""
    batch, heads, seqlen, d = shape
    q, k, v, do = (torch.randn(shape, device="cuda") for _ in range(4))
    o, lse = nf.attention(q, k, v, return_lse=True)
    forward = {"flash.cu": lambda: peer(q, k, v)} if peer else {}
    backward = {}
    for rung in nf.LADDER:
        forward[rung.name] = lambda name=rung.name: nf.attention(q, k, v, kernel=name)
        backward[rung.name] = lambda name=rung.name: nf.attention_backward(
            do, q, k, v, o, lse, kernel=name
        )
    rows = []
    for direction, functions in (("forward", forward), ("backward", backward)):
        functions = {n: f for n, f in functions.items() if seqlen <= SLOWEST.get(n, seqlen)}
        if direction == "forward":
            for name, function in functions.items():
                check(name, function(), q, k, v)
        flop = (4 if direction == "forward" else 10) * batch * heads * seqlen**2 * d
        for name, ms in median_ms(functions, repeats).items():
            rows.append(
                {
                    "kernel": name,
                    "direction": direction,
                    "batch": batch,
                    "heads": heads,
                    "seqlen": seqlen,
                    "head_dim": d,
                    "ms": ms,
                    "tflops": flop / ms / 1e9,
                }
            )
    return rows


def main(
    flash_cu: Annotated[Path | None, typer.Option(help="path of flash.cu")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
    repeats: int = 15,
) -> None:
    """Time every rung of the ladder, forward and backward, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.ones(1, device="cuda")
    peer = compile_flash_cu(flash_cu) if flash_cu else None
    rows = []
    for shape in track(SHAPES, description="shapes"):
        rows += time_shape(shape, peer, repeats)
    small = [torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    host = host_microseconds(
        {
            "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(*small),
            "numba_flash": lambda: nf.attention(*small),
        }
    )
    record = {
        "command": "python scripts/bench_ladder.py --flash-cu PATH --out FILE",
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {n: version(n) for n in ("torch", "numba", "numba-cuda")}
        | {"numpy": np.__version__},
        "dtype": "float32",
        "rows": rows,
        "host_microseconds_of_a_bfloat16_forward": host,
    }
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    table = Table(title=f"float32 on {record['gpu']}, medians of {repeats}")
    for column in ("kernel", "direction", "shape", "ms", "TFLOP/s"):
        table.add_column(column)
    for row in rows:
        shape = f"B{row['batch']} H{row['heads']} N{row['seqlen']} D{row['head_dim']}"
        table.add_row(
            row["kernel"], row["direction"], shape, f"{row['ms']:.3f}", f"{row['tflops']:.2f}"
        )
    console = Console()
    console.print(table)
    console.print(re.sub(r"[{}']", "", f"host microseconds of a warm bfloat16 forward: {host}"))


if __name__ == "__main__":
    typer.run(main)
