"""Time the emulator, next to Numba's own CUDA simulator on a smaller problem.

    python scripts/bench_emulator.py

The simulator has no warp operations and no alignment of shared arrays, so it runs fa2 with teams
of one thread, which need no shuffle, from a source without them. It must be chosen before Numba is
imported, so it runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = (1, 1, 128, 32)
EMULATED = [("fa2", (1, 1, 128, 32)), ("fa2", (1, 1, 512, 64)), ("minimal", (1, 12, 128, 32))]
SMALL = [("mma", 1024, 64), ("hopper", 1024, 128)]
"""The forwards of special instructions in ``tests/kernels``: name, seqlen, head_dim."""
REPEATS = 3


def inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


def simulate() -> float:
    """Seconds that Numba's simulator takes for fa2's forward kernel."""
    from numba_flash.launch import contiguous_layout
    from numba_flash.problem import make_problem
    from numba_flash.reference import naive_forward

    q, k, v = inputs(SIMULATED)
    problem = make_problem(*[contiguous_layout(x.shape, "float32") for x in (q, k, v)])
    fa2 = fa2_for_the_simulator()
    (step,) = fa2.forward(problem, fa2.Config(32, 32, team=1)).steps
    arrays = {"q": q, "k": k, "v": v, "o": np.zeros_like(q)}
    arrays |= {"lse": np.zeros(q.shape[:3], np.float32), "mask": np.zeros((1, 1, 1, 1), np.uint8)}
    numbers = (np.int64(arg) if isinstance(arg, int) else arg for arg in step.args)
    args = [arrays[arg] if isinstance(arg, str) else arg for arg in numbers]
    begin = time.perf_counter()
    step.kernel[step.grid, step.block](*args)
    seconds = time.perf_counter() - begin
    assert np.allclose(arrays["o"], naive_forward(q, k, v)[0], atol=1e-5)
    return seconds


def fa2_for_the_simulator() -> ModuleType:
    """The module of the rung, in the words that the simulator knows."""
    from numba_flash.kernels import fa2

    module = ModuleType("numba_flash.kernels.fa2_simulated")
    module.__package__ = fa2.__package__
    sys.modules[module.__name__] = module
    source = Path(fa2.__file__).read_text().replace(", alignment=16", "")
    source = source.replace("cuda.syncwarp()", "cuda.syncthreads()")
    exec(compile(source, fa2.__file__, "exec"), module.__dict__)
    return module


def emulate(kernel: str, shape: tuple[int, ...]) -> float:
    """Seconds of one forward on the emulator with every check and count on, the best of some."""
    import numba_flash as nf

    times = []
    for _ in range(REPEATS):
        with nf.emulation(limit=None):
            begin = time.perf_counter()
            nf.attention(*inputs(shape), kernel=kernel)
            times.append(time.perf_counter() - begin)
    return min(times)


def emulate_small(name: str, seqlen: int, head_dim: int) -> float:
    """The same of one of the small forwards, for one head in bfloat16."""
    from importlib import import_module

    import ml_dtypes

    import numba_flash as nf

    module = import_module(f"tests.kernels.{name}_forward")
    arrays = [x.astype(ml_dtypes.bfloat16).view(np.uint16) for x in inputs((1, seqlen, head_dim))]
    if name == "hopper":
        operands, tile = module.tensor_maps(*arrays), module.TILE_M
    else:
        operands, tile = [x.reshape(-1) for x in arrays], module.TILE
    o, lse = np.zeros(seqlen * head_dim // 2, np.uint32), np.zeros(seqlen, np.float32)
    sizes = np.int32(seqlen), np.int32(seqlen)
    scale = np.float32(np.log2(np.e) / np.sqrt(head_dim))
    shared = module.shared_bytes(head_dim)
    launch = nf.emulate(module.make_forward(head_dim))[
        (seqlen // tile, 1), module.THREADS, 0, shared
    ]
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        report = launch(*operands, o, lse, *sizes, scale)
        times.append(time.perf_counter() - begin)
        assert report.ok, report
    return min(times)


def show(seconds: float, what: str) -> None:
    print(f"| {what} | {seconds:.2f} |", flush=True)


def main() -> None:
    """Print one line of a Markdown table a measurement."""
    sys.path.insert(0, str(ROOT))
    if "NUMBA_ENABLE_CUDASIM" in os.environ:
        show(simulate(), f"Numba's simulator, `fa2` forward, N {SIMULATED[2]}, head_dim 32")
        return
    for kernel, shape in EMULATED:
        _, heads, seqlen, head_dim = shape
        what = f"`{kernel}` forward, {heads} head(s), N {seqlen}, head_dim {head_dim}"
        show(emulate(kernel, shape), what)
    for name, seqlen, head_dim in SMALL:
        what = f"`tests/kernels/{name}_forward.py`, bfloat16, N {seqlen}, head_dim {head_dim}"
        show(emulate_small(name, seqlen, head_dim), what)
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


if __name__ == "__main__":
    main()
