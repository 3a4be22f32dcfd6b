"""Reads of memory that nobody has written."""

from numba import cuda, float32

from numba_flash.emulator import empty

from .case import cell, faulty, noise, ramp, zeros


@faulty(
    "the guard spares the load of the tail, and nothing zeroes it",
    lambda: (ramp(50), zeros(2)),
    grid=2,
)
@cuda.jit
def tail_of_the_tile_not_loaded(x, out):
    tile = cuda.shared.array(32, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    if i < x.shape[0]:
        tile[t] = x[i]
    cuda.syncthreads()
    if t == 0:
        total = float32(0)
        for j in range(32):
            total += tile[j]  # fault: uninitialised-read
        out[cuda.blockIdx.x] = total


@faulty(
    "registers hold anything before they are set",
    lambda: (noise(32, 8), noise(8, 4), zeros(32, 4)),
)
@cuda.jit
def accumulator_not_zeroed(a, b, out):
    i = cuda.threadIdx.x
    acc = cuda.local.array(4, float32)
    for k in range(8):
        for c in range(4):
            acc[c] += a[i, k] * b[k, c]  # fault: uninitialised-read
    for c in range(4):
        out[i, c] = acc[c]  # fault: uninitialised-read


@faulty(
    "the output comes from an allocation that clears nothing",
    lambda: (ramp(64), empty(64)),
    grid=2,
)
@cuda.jit
def output_added_to_without_clearing(x, out):
    i = cuda.grid(1)
    out[i] += x[i]  # fault: uninitialised-read


@faulty(
    "the loop fills the other buffer for the next turn; nobody filled the one of the first turn",
    lambda: (ramp(4, 32), zeros(32)),
)
@cuda.jit
def first_buffer_never_filled(x, out):
    tile = cuda.shared.array((2, 32), float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for step in range(4):
        if step + 1 < 4:
            tile[(step + 1) % 2, t] = x[step + 1, t]
        total += tile[step % 2, 31 - t]  # fault: uninitialised-read
        cuda.syncthreads()
    out[t] = total


@faulty(
    "rows are padded against bank conflicts, and the sum takes the padding for data",
    lambda: (noise(16, 16), zeros(16)),
    block=(16, 16),
)
@cuda.jit
def padding_summed_up(x, out):
    tile = cuda.shared.array((16, 17), float32)
    c, r = cuda.threadIdx.x, cuda.threadIdx.y
    tile[r, c] = x[r, c]
    cuda.syncthreads()
    if r == 0:
        total = float32(0)
        for j in range(tile.shape[1]):
            total += tile[c, j]  # fault: uninitialised-read
        out[c] = total


@cuda.jit(device=True, inline="always")
def sum_of_warps(sums):
    total = float32(0)
    for w in range(8):
        total += sums[w]  # fault: uninitialised-read
    return total


@faulty(
    "eight partial sums are added, and the block has four warps",
    lambda: (ramp(128), zeros(1)),
    block=128,
)
@cuda.jit
def more_partial_sums_than_warps(x, out):
    sums = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    value = x[t]
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
    if t % 32 == 0:
        sums[t // 32] = value
    cuda.syncthreads()
    if t == 0:
        out[0] = sum_of_warps(sums)


@faulty(
    "the preprocessing clears 64 rows of a workspace that is read to row 96",
    lambda: (empty((96, 4)), noise(96, 4), zeros(96, 4)),
    block=96,
)
@cuda.jit
def part_of_the_workspace_left_unset(dq, ds, out):
    i = cuda.threadIdx.x
    if i < 64:
        for c in range(4):
            dq[i, c] = float32(0)
    for c in range(4):
        dq[i, c] += ds[i, c]  # fault: uninitialised-read
    for c in range(4):
        out[i, c] = dq[i, c]


CELL = """\
from numba import cuda, float32


@cuda.jit(device=True, inline="always")
def largest_positive(best, x, i):
    for j in range(x.shape[1]):
        if x[i, j] > float32(0):
            best[0] = x[i, j]
    return best[0]  # fault: uninitialised-read


@cuda.jit
def no_default_when_nothing_is_found(x, out):
    i = cuda.threadIdx.x
    best = cuda.local.array(1, float32)
    out[i] = largest_positive(best, x, i)
"""

faulty(
    "a row without a positive number leaves the register as it was (written in a notebook cell)",
    lambda: (ramp(32, 3) - 40, zeros(32)),
)(cell(7, CELL)["no_default_when_nothing_is_found"])
