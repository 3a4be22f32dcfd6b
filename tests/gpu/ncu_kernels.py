"""Kernels whose memory accesses a profiler and the emulator should count alike.

``python -m tests.gpu.ncu_kernels`` launches each of them once on the GPU, for
``scripts/compare_ncu.py`` to profile. The compiler may not merge, repeat or drop an access, or the
comparison would be one of compilers: every value that is loaded reaches an output, strides are
arguments, and neighbouring elements are not loaded by one thread, except as a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, float32, float64, int32

import numba_flash as nf
from numba_flash.emulator import Report, emulate
from numba_flash.ptx import load_x2, load_x4, store_x4

BLOCKS, THREADS = 48, 128
STRIDES = (0, 1, 2, 8, 32, 33)
TILE = 32
MATMUL_TILE, MATMUL_ROW = 16, 17


@dataclass(frozen=True)
class Case:
    """Something to launch on both sides.

    Attributes
    ----------
    name : str
    on_gpu : callable
        Launches ``launches`` kernels.
    on_emulator : callable
        Does the same, and returns a report for each.
    shared : bool
        Whether wavefronts compare too. They do not where the compiler merges accesses, nor where
        lanes of different halves or quarters of a warp meet at a vector: a GPU may serve those
        together, and the emulator never does.
    """

    name: str
    on_gpu: Callable[[], Any]
    on_emulator: Callable[[], list[Report]]
    launches: int = 1
    shared: bool = True


# Global memory


@cuda.jit
def load_strided(source, out, stride, shift):
    i = cuda.grid(1)
    out[i] = source[i * stride + shift]


@cuda.jit
def load_strided_x2(source, out, stride, shift):
    i = cuda.grid(1)
    words = cuda.local.array(2, float32)
    load_x2(words, 0, source, 2 * (i * stride + shift))
    out[i] = words[0] + words[1]


@cuda.jit
def load_strided_x4(source, out, stride, shift):
    i = cuda.grid(1)
    words = cuda.local.array(4, float32)
    load_x4(words, 0, source, 4 * (i * stride + shift))
    out[i] = (words[0] + words[1]) + (words[2] + words[3])


@cuda.jit
def store_strided(source, out, stride, shift):
    i = cuda.grid(1)
    out[i * stride + shift] = source[i]


@cuda.jit
def load_some(source, out, stride, shift):
    """Some lanes of a warp, and others from block to block."""
    i = cuda.grid(1)
    if (i * 7 + cuda.blockIdx.x) % 5 < 2:
        out[i] = source[i * stride + shift]


def global_case(name: str, kernel: Any, dtype: str, width: int, stride: int, shift: int) -> Case:
    """A launch over arrays that are long enough for loads and stores with the stride."""
    count = BLOCKS * THREADS
    source = np.ones(width * (count * max(stride, 1) + shift), dtype)
    out = np.zeros(len(source) if kernel is store_strided else count, dtype)
    arguments = source, out, np.int64(stride), np.int64(shift)
    return case(name, kernel, (BLOCKS, THREADS), arguments)


def case(name: str, kernel: Any, configuration: tuple, arguments: tuple) -> Case:
    """A launch of one kernel."""
    return Case(
        name,
        lambda: kernel[configuration](*arguments),
        lambda: [emulate(kernel)[configuration](*arguments)],
    )


# Shared memory


def make_shared_strided(dtype: Any) -> Any:
    """A kernel that reads a shared array with a stride, one element a lane."""
    SIZE = TILE * 33

    @cuda.jit
    def shared_strided(source, out, stride):
        tile = cuda.shared.array(SIZE, dtype)
        for i in range(cuda.threadIdx.x, SIZE, cuda.blockDim.x):
            tile[i] = source[i]
        cuda.syncthreads()
        out[cuda.grid(1)] = tile[cuda.threadIdx.x * stride]

    return shared_strided


@cuda.jit
def shared_strided_x4(source, out, stride):
    """Reads and writes of 16 bytes a lane, with a stride of as many vectors."""
    tile = cuda.shared.array(32 * 4 * 33, float32, alignment=16)
    for i in range(cuda.threadIdx.x, 32 * 4 * 33, cuda.blockDim.x):
        tile[i] = source[i]
    cuda.syncthreads()
    words = cuda.local.array(4, float32)
    place = 4 * cuda.threadIdx.x * stride
    load_x4(words, 0, tile, place)
    for u in range(4):
        words[u] += float32(1)
    cuda.syncthreads()
    store_x4(tile, place, words, 0)
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[4 * cuda.threadIdx.x]


@cuda.jit
def shared_gather_x2(source, index, out):
    tile = cuda.shared.array(64, float32, alignment=16)
    for i in range(cuda.threadIdx.x, 64, cuda.blockDim.x):
        tile[i] = source[i]
    cuda.syncthreads()
    words = cuda.local.array(2, float32)
    load_x2(words, 0, tile, 2 * index[cuda.threadIdx.x])
    out[cuda.grid(1)] = words[0] + words[1]


@cuda.jit
def shared_gather_x4(source, index, out):
    tile = cuda.shared.array(128, float32, alignment=16)
    for i in range(cuda.threadIdx.x, 128, cuda.blockDim.x):
        tile[i] = source[i]
    cuda.syncthreads()
    words = cuda.local.array(4, float32)
    load_x4(words, 0, tile, 4 * index[cuda.threadIdx.x])
    out[cuda.grid(1)] = (words[0] + words[1]) + (words[2] + words[3])


LANE = np.arange(32)
MEETINGS = {
    "all at one": 0 * LANE,
    "in pairs": LANE // 2,
    "in fours": LANE // 4,
    "in eights": LANE // 8,
    "halves alike": LANE % 16,
    "quarters alike": LANE % 8,
    "every second alike": LANE % 2,
    "anywhere": np.random.default_rng(2).integers(0, 32, 32),
}
"""Which vector each lane of a warp reads, where lanes meet at one."""


def make_transpose(width: int) -> Any:
    """A tile through shared memory; each row has ``width`` numbers."""

    @cuda.jit
    def transpose(source, out):
        tile = cuda.shared.array((TILE, width), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        for r in range(y, TILE, cuda.blockDim.y):
            tile[r, x] = source[row + r, column + x]
        cuda.syncthreads()
        for r in range(y, TILE, cuda.blockDim.y):
            out[column + r, row + x] = tile[x, r]

    return transpose


@cuda.jit
def transpose_directly(source, out):
    row, column = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    x = cuda.threadIdx.x
    for r in range(cuda.threadIdx.y, TILE, cuda.blockDim.y):
        out[column + x, row + r] = source[row + r, column + x]


@cuda.jit
def matmul(A, B, C):
    """Tiles of one row too much, so that no four neighbours can be loaded as one vector."""
    sA = cuda.shared.array((MATMUL_TILE, MATMUL_ROW), float32)
    sB = cuda.shared.array((MATMUL_TILE, MATMUL_ROW), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * MATMUL_TILE + y, cuda.blockIdx.x * MATMUL_TILE + x
    acc = float32(0)
    for first in range(0, A.shape[1], MATMUL_TILE):
        sA[y, x] = A[row, first + x]
        sB[y, x] = B[first + y, column]
        cuda.syncthreads()
        for i in range(MATMUL_TILE):
            acc += sA[y, i] * sB[i, x]
        cuda.syncthreads()
    C[row, column] = acc


@cuda.jit
def histogram(values, counts):
    """Data-dependent places in shared memory: conflicts that no formula tells."""
    local = cuda.shared.array(1024, int32)
    for i in range(cuda.threadIdx.x, 1024, cuda.blockDim.x):
        local[i] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    counts[i] = local[values[i]]


def square(n: int) -> np.ndarray:
    return np.random.default_rng(0).random((n, n), np.float32)


# The rungs


def rung_case(name: str, launches: int, seqlen: int, head_dim: int, **options: Any) -> Case:
    """A forward of the library. Its compiler reads shared memory in vectors, so only sectors."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, seqlen, head_dim)).astype(np.float32) for _ in range(3))

    def run() -> None:
        nf.attention(q, k, v, kernel=name, **options)

    def emulated() -> list[Report]:
        with nf.emulation() as reports:
            run()
        return reports

    title = f"{name} forward, N {seqlen}, d {head_dim}" + ", causal" * bool(options)
    return Case(title, run, emulated, launches, shared=False)


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every comparison, in the order of the launches."""
    found: list[Case] = []
    loads = [
        ("4 bytes", load_strided, "float32", 1),
        ("8 bytes", load_strided, "float64", 1),
        ("2 x 4 bytes", load_strided_x2, "float32", 2),
        ("4 x 4 bytes", load_strided_x4, "float32", 4),
    ]
    for size, kernel, dtype, width in loads:
        for stride in STRIDES:
            title = f"global load, {size}, stride {stride}"
            found.append(global_case(title, kernel, dtype, width, stride, 0))
    shifted = "global load, 4 bytes, one element off a sector"
    found.append(global_case(shifted, load_strided, "float32", 1, 1, 1))
    found.append(global_case("global load, two lanes of five", load_some, "float32", 1, 3, 0))
    for stride in (1, 2, 8):
        title = f"global store, 4 bytes, stride {stride}"
        found.append(global_case(title, store_strided, "float32", 1, stride, 0))
    for kind in (float32, float64):
        shared_kernel = make_shared_strided(kind)
        elements = np.ones(TILE * 33, str(kind))
        for stride in STRIDES:
            title = f"shared load, {elements.itemsize} bytes, stride {stride}"
            out = np.zeros(BLOCKS * 32, elements.dtype)
            found.append(
                case(title, shared_kernel, (BLOCKS, 32), (elements, out, np.int64(stride)))
            )
    source = np.ones(32 * 4 * 33, np.float32)
    for stride in (1, 2, 8, 33):
        title = f"shared load and store, 4 x 4 bytes, stride {stride}"
        out = np.zeros(BLOCKS * 32, np.float32)
        vectors = source, out, np.int64(stride)
        found.append(case(title, shared_strided_x4, (BLOCKS, 32), vectors))
    for name, index in MEETINGS.items():
        for words, kernel in ((2, shared_gather_x2), (4, shared_gather_x4)):
            out = np.zeros(BLOCKS * 32, np.float32)
            title = f"shared load, {words} x 4 bytes, {name}"
            found.append(case(title, kernel, (BLOCKS, 32), (source, index, out)))
    grid, block = (256 // TILE, 256 // TILE), (TILE, 8)
    transposes = [
        ("transpose without shared memory", transpose_directly),
        ("transpose, columns of a square tile", make_transpose(TILE)),
        ("transpose, columns of a padded tile", make_transpose(TILE + 1)),
    ]
    for title, kernel in transposes:
        found.append(case(title, kernel, (grid, block), (square(256), np.zeros_like(square(256)))))
    tiles = 128 // MATMUL_TILE
    matrices = square(128), square(128), np.zeros_like(square(128))
    grid, block = (tiles, tiles), (MATMUL_TILE, MATMUL_TILE)
    found.append(case("matmul in tiles", matmul, (grid, block), matrices))
    values = np.random.default_rng(1).integers(0, 1024, BLOCKS * THREADS).astype(np.int32)
    title = "shared load, random places"
    found.append(case(title, histogram, (BLOCKS, THREADS), (values, np.zeros_like(values))))
    found.append(rung_case("naive", 3, 100, 40))
    found.append(rung_case("minimal", 1, 100, 32))
    found.append(rung_case("fa2", 1, 200, 64))
    found.append(rung_case("fa2", 1, 200, 40, causal=True))
    return tuple(found)


if __name__ == "__main__":
    for each in cases():
        each.on_gpu()
    cuda.synchronize()
