"""Races in shared memory: two threads, one element, a write, and nothing that orders them."""

import numpy as np
from numba import cuda, float32, int32

from .case import cell, faulty, noise, ramp, zeros

FULL = 0xFFFFFFFF


@faulty(
    "no barrier between the store and the load of another thread's element",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def reverse_without_barrier(x, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]  # fault: race
    out[t] = tile[63 - t]  # fault: race


@faulty(
    "no second barrier: a fast thread loads the next tile while a slow one still reads this one",
    lambda: (noise(4, 64), zeros(64)),
    block=64,
)
@cuda.jit
def next_tile_overwrites_this_one(x, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for step in range(x.shape[0]):
        tile[t] = x[step, t]  # fault: race
        cuda.syncthreads()
        for j in range(64):
            total += tile[j]  # fault: race
    out[t] = total


@faulty(
    "matrix product in tiles, the barrier at the end of the loop is missing",
    lambda: (noise(32, 32), noise(32, 32), zeros(32, 32)),
    grid=(4, 4),
    block=(8, 8),
)
@cuda.jit
def matmul_without_second_barrier(a, b, out):
    a_tile = cuda.shared.array((8, 8), float32)
    b_tile = cuda.shared.array((8, 8), float32)
    column, row = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    acc = float32(0)
    for k in range(0, 32, 8):
        a_tile[y, x] = a[row, k + x]  # fault: race
        b_tile[y, x] = b[k + y, column]  # fault: race
        cuda.syncthreads()
        for j in range(8):
            acc += a_tile[y, j] * b_tile[j, x]  # fault: race
    out[row, column] = acc


@faulty(
    "each level of the tree reads what the level before it wrote, without a barrier",
    lambda: (ramp(128), zeros(1)),
    block=128,
)
@cuda.jit
def tree_without_barriers(x, out):
    sums = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    half = 64
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]  # fault: race
        half //= 2
    if t == 0:
        out[0] = sums[0]


@faulty(
    "every multiple of the stride takes its neighbour; it has to be of twice the stride",
    lambda: (ramp(64), zeros(1)),
    block=64,
)
@cuda.jit
def tree_with_overlapping_pairs(x, out):
    sums = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    stride = 1
    while stride < 64:
        if t % stride == 0 and t + stride < 64:
            sums[t] += sums[t + stride]  # fault: race
        cuda.syncthreads()
        stride *= 2
    if t == 0:
        out[0] = sums[0]


@faulty(
    "the last warp of a reduction trusts that its lanes run together, which ended with Volta",
    lambda: (ramp(128), zeros(1)),
    block=128,
)
@cuda.jit
def last_warp_without_syncwarp(x, out):
    sums = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    if t < 64:
        sums[t] += sums[t + 64]
    cuda.syncthreads()
    if t < 32:
        sums[t] += sums[t + 32]  # fault: race
        sums[t] += sums[t + 16]  # fault: race
        sums[t] += sums[t + 8]  # fault: race
        sums[t] += sums[t + 4]  # fault: race
        sums[t] += sums[t + 2]  # fault: race
        sums[t] += sums[t + 1]  # fault: race
    if t == 0:
        out[0] = sums[0]


@faulty(
    "one barrier of a warp cannot keep its neighbours' reads from the writes of the same line",
    lambda: (ramp(32), zeros(32)),
)
@cuda.jit
def stencil_in_place_within_a_warp(x, out):
    cells = cuda.shared.array(32, float32)
    lane = cuda.threadIdx.x
    cells[lane] = x[lane]
    cuda.syncwarp()
    if lane > 0 and lane < 31:
        cells[lane] = (cells[lane - 1] + cells[lane + 1]) * float32(0.5)  # fault: race
    cuda.syncwarp()
    out[lane] = cells[lane]


@faulty(
    "two threads find the same bin and add one to the same old count",
    lambda: (np.arange(256, dtype=np.int32) * 7 % 16, zeros(16, dtype=np.int32)),
    grid=2,
    block=128,
)
@cuda.jit
def histogram_without_atomics(values, out):
    bins = cuda.shared.array(16, int32)
    t = cuda.threadIdx.x
    if t < 16:
        bins[t] = 0
    cuda.syncthreads()
    bins[values[cuda.grid(1)]] += 1  # fault: race
    cuda.syncthreads()
    if t < 16:
        cuda.atomic.add(out, t, bins[t])


@faulty(
    "every thread leaves its own value in one cell; which one stays is chance",
    lambda: (ramp(96), zeros(96)),
    block=96,
)
@cuda.jit
def every_thread_writes_the_total(x, out):
    total = cuda.shared.array(1, float32)
    t = cuda.threadIdx.x
    total[0] = x[t]  # fault: race
    cuda.syncthreads()
    out[t] = total[0]


@faulty(
    "prefix sum in one buffer: the partner may have added already",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def prefix_sum_in_place(x, out):
    sums = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    distance = 1
    while distance < 64:
        if t >= distance:
            sums[t] += sums[t - distance]  # fault: race
        cuda.syncthreads()
        distance *= 2
    out[t] = sums[t]


@cuda.jit(device=True, inline="always")
def block_sum_that_leaves_early(scratch, value):
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, step)
    if lane == 0:
        scratch[warp] = value  # fault: race
    cuda.syncthreads()
    total = float32(0)
    for w in range(4):
        total += scratch[w]  # fault: race
    return total


@faulty(
    "the second sum overwrites the scratch memory that the first one is still read from",
    lambda: (noise(128), zeros(128)),
    block=128,
)
@cuda.jit
def two_block_sums_share_their_scratch(x, out):
    scratch = cuda.shared.array(4, float32)
    t = cuda.threadIdx.x
    value = x[t]
    mean = block_sum_that_leaves_early(scratch, value) / float32(128)
    distance = value - mean
    variance = block_sum_that_leaves_early(scratch, distance * distance) / float32(128)
    out[t] = distance / variance


@faulty(
    "a barrier of the warp where the neighbour of its last lane is in the next warp",
    lambda: (ramp(128), zeros(128)),
    block=128,
)
@cuda.jit
def neighbour_in_the_next_warp(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]  # fault: race
    cuda.syncwarp()
    if t < 127:
        out[t] = tile[t + 1] - tile[t]  # fault: race


@faulty(
    "thread 0 hands out one number a turn and may be a turn ahead of those who read it",
    lambda: (np.array([5, 3, 8, 1], np.int32), zeros(64, dtype=np.int32)),
    block=64,
)
@cuda.jit
def slot_reused_at_once(tasks, out):
    slot = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    done = int32(0)
    for turn in range(tasks.shape[0]):
        if t == 0:
            slot[0] = tasks[turn]  # fault: race
        cuda.syncthreads()
        done += slot[0]  # fault: race
    out[t] = done


@faulty(
    "both dynamic arrays begin at the same byte; the second was meant to follow the first",
    lambda: (ramp(64), ramp(64), zeros(64)),
    block=64,
    shared_bytes=512,
)
@cuda.jit
def dynamic_arrays_on_top_of_each_other(q, k, out):
    q_row = cuda.shared.array(0, float32)
    k_row = cuda.shared.array(0, float32)
    t = cuda.threadIdx.x
    q_row[t] = q[t]  # fault: race
    k_row[63 - t] = k[t]  # fault: race
    cuda.syncthreads()
    out[t] = q_row[t] * k_row[t]


@faulty(
    "the mask names the lower half of the warp, and the exchange crosses the middle",
    lambda: (ramp(32), zeros(32)),
)
@cuda.jit
def half_a_warp_synchronised(x, out):
    tile = cuda.shared.array(32, float32)
    lane = cuda.threadIdx.x
    tile[lane] = x[lane]  # fault: race
    if lane < 16:
        cuda.syncwarp(0x0000FFFF)
        out[lane] = tile[31 - lane]  # fault: race


@faulty(
    "one block of many takes a short cut past the barrier",
    lambda: (ramp(320), np.array([0, 0, 0, 1, 0], np.int32), zeros(320)),
    grid=5,
    block=64,
)
@cuda.jit
def one_block_skips_the_barrier(x, is_short, out):
    tile = cuda.shared.array(64, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    tile[t] = x[i]  # fault: race
    if is_short[cuda.blockIdx.x] == 0:
        cuda.syncthreads()
    out[i] = tile[t ^ 32]  # fault: race


@faulty(
    "one barrier a turn is enough for two buffers; here the next load goes into the same buffer",
    lambda: (noise(6, 64), zeros(64)),
    block=64,
)
@cuda.jit
def double_buffer_that_never_turns(x, out):
    tile = cuda.shared.array((2, 64), float32)
    t = cuda.threadIdx.x
    total = float32(0)
    current = 0
    tile[current, t] = x[0, t]
    for step in range(6):
        cuda.syncthreads()
        if step + 1 < 6:
            tile[current, t] = x[step + 1, t]  # fault: race
        total += tile[current, (t + 1) % 64]  # fault: race
    out[t] = total


@faulty(
    "a vote brings the lanes together but promises nothing about their memory",
    lambda: (ramp(32), zeros(32)),
)
@cuda.jit
def vote_taken_for_a_barrier(x, out):
    tile = cuda.shared.array(32, float32)
    lane = cuda.threadIdx.x
    tile[lane] = x[lane]  # fault: race
    if cuda.any_sync(FULL, x[lane] > float32(3)):
        out[lane] = tile[31 - lane]  # fault: race


@faulty(
    "the largest score of a row is updated while the others of the row still compare with it",
    lambda: (noise(4, 32), zeros(4)),
    block=(32, 4),
)
@cuda.jit
def row_max_without_atomics(scores, out):
    row_max = cuda.shared.array(4, float32)
    column, row = cuda.threadIdx.x, cuda.threadIdx.y
    if column == 0:
        row_max[row] = scores[row, 0]
    cuda.syncthreads()
    if scores[row, column] > row_max[row]:  # fault: race
        row_max[row] = scores[row, column]  # fault: race
    cuda.syncthreads()
    if column == 0:
        out[row] = row_max[row]


@faulty(
    "counting begins before every thread has cleared its bins",
    lambda: (np.arange(96, dtype=np.int32) % 64, zeros(128, dtype=np.int32)),
    block=96,
)
@cuda.jit
def clearing_meets_counting(values, out):
    bins = cuda.shared.array(128, int32)
    t = cuda.threadIdx.x
    bins[t] = 0  # fault: race
    if t < 32:
        bins[t + 96] = 0
    cuda.atomic.add(bins, values[t], 1)  # fault: race
    cuda.syncthreads()
    out[t] = bins[t]


@faulty(
    "an atomic maximum is right by itself, and still not finished when the next line reads it",
    lambda: (noise(64), zeros(64)),
    block=64,
)
@cuda.jit
def maximum_read_before_all_have_come(x, out):
    best = cuda.shared.array(1, float32)
    t = cuda.threadIdx.x
    if t == 0:
        best[0] = x[0]
    cuda.syncthreads()
    cuda.atomic.max(best, 0, x[t])  # fault: race
    out[t] = best[0]  # fault: race


@faulty(
    "the barrier is only there in the first turn",
    lambda: (noise(3, 64), zeros(64)),
    block=64,
)
@cuda.jit
def barrier_in_the_first_turn_only(x, out):
    tile = cuda.shared.array((3, 64), float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for step in range(3):
        tile[step, t] = x[step, t]  # fault: race
        if step == 0:
            cuda.syncthreads()
        total += tile[step, 63 - t]  # fault: race
    out[t] = total


@faulty(
    "rows of 16 threads: a warp is two of them, and a column has eight warps",
    lambda: (noise(16, 16), zeros(16, 16)),
    block=(16, 16),
)
@cuda.jit
def warp_taken_for_a_column(x, out):
    tile = cuda.shared.array((16, 17), float32)
    c, r = cuda.threadIdx.x, cuda.threadIdx.y
    tile[r, c] = x[r, c]  # fault: race
    cuda.syncwarp()
    out[r, c] = tile[c, r]  # fault: race


@faulty(
    "the tile is padded by one column too few, so that its rows share a cell",
    lambda: (noise(8, 9), zeros(8, 9)),
    block=(9, 8),
)
@cuda.jit
def rows_share_a_cell(x, out):
    tile = cuda.shared.array(72, float32)
    c, r = cuda.threadIdx.x, cuda.threadIdx.y
    tile[r * 8 + c] = x[r, c]  # fault: race
    cuda.syncthreads()
    out[r, c] = tile[r * 8 + c]


@faulty(
    "the flag that ends the loop is reset for the next turn while others still read it",
    lambda: (noise(128), zeros(128)),
    block=64,
)
@cuda.jit
def flag_reset_too_early(x, out):
    tile = cuda.shared.array(128, float32)
    changed = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    tile[t + 64] = x[t + 64]
    while True:
        if t == 0:
            changed[0] = 0  # fault: race
        cuda.syncthreads()
        for phase in range(2):
            i = 2 * t + phase
            if i + 1 < 128 and tile[i] > tile[i + 1]:
                tile[i], tile[i + 1] = tile[i + 1], tile[i]
                changed[0] = 1
            cuda.syncthreads()
        if changed[0] == 0:  # fault: race
            break
    out[t] = tile[t]
    out[t + 64] = tile[t + 64]


@faulty(
    "the step of a bitonic sort is in two halves, and the second one begins too early",
    lambda: (noise(128), zeros(128)),
    block=128,
)
@cuda.jit
def partner_may_have_swapped_already(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    for power in range(7):
        other = t ^ (1 << power)
        low, high = min(tile[t], tile[other]), max(tile[t], tile[other])  # fault: race
        tile[t] = low if t < other else high  # fault: race
        cuda.syncthreads()
    out[t] = tile[t]


@faulty(
    "a flag in plain memory is no barrier: neither it nor what it announces is ordered",
    lambda: (ramp(32), zeros(32)),
    block=64,
)
@cuda.jit
def flag_instead_of_a_barrier(x, out):
    tile = cuda.shared.array(32, float32)
    ready = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t == 0:
        ready[0] = 0
    cuda.syncthreads()
    if t < 32:
        tile[t] = x[t]  # fault: race
        cuda.syncwarp()
        if t == 0:
            ready[0] = 1  # fault: race
    else:
        while ready[0] == 0:  # fault: race
            cuda.nanosleep(20)
        out[t - 32] = tile[63 - t]  # fault: race


CELL = """\
from numba import cuda, float32

ROWS, COLUMNS = 8, 32


@cuda.jit
def exponentials_overwrite_the_scores(x, out):
    tile = cuda.shared.array((ROWS, COLUMNS), float32)
    c, r = cuda.threadIdx.x, cuda.threadIdx.y
    tile[r, c] = x[r, c]
    cuda.syncthreads()
    largest = tile[r, 0]  # fault: race
    for j in range(1, COLUMNS):
        largest = max(largest, tile[r, j])  # fault: race
    tile[r, c] = cuda.libdevice.expf(tile[r, c] - largest)  # fault: race
    cuda.syncthreads()
    total = float32(0)
    for j in range(COLUMNS):
        total += tile[r, j]
    out[r, c] = tile[r, c] / total
"""

faulty(
    "a fast thread stores its exponential while a slow one looks for the maximum (notebook cell)",
    lambda: (noise(8, 32), zeros(8, 32)),
    block=(32, 8),
)(cell(12, CELL)["exponentials_overwrite_the_scores"])
