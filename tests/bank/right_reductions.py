"""Sums, maxima, counts and scans without a fault."""

import numpy as np
from numba import cuda, float32, int32

from .case import noise, ramp, right, zeros

FULL = 0xFFFFFFFF


@right(
    "a barrier after every level of the tree",
    lambda: (ramp(256), zeros(2)),
    lambda x, out: x.reshape(2, 128).sum(axis=1),
    grid=2,
    block=128,
)
@cuda.jit
def tree_with_barriers(x, out):
    sums = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    sums[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = 64
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        out[cuda.blockIdx.x] = sums[0]


@right(
    "barriers of the block down to one warp, then barriers of the warp between load and store",
    lambda: (ramp(128), zeros(1)),
    lambda x, out: x.sum(),
    block=128,
)
@cuda.jit
def last_warp_with_syncwarp(x, out):
    sums = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    if t < 64:
        sums[t] += sums[t + 64]
    cuda.syncthreads()
    if t < 32:
        value = sums[t] + sums[t + 32]
        cuda.syncwarp()
        for step in (16, 8, 4, 2, 1):
            sums[t] = value
            cuda.syncwarp()
            value += sums[t + step]
            cuda.syncwarp()
        if t == 0:
            out[0] = value


@cuda.jit(device=True, inline="always")
def warp_sum(value):
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, step)
    return value


@cuda.jit(device=True, inline="always")
def block_sum(scratch, value):
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value = warp_sum(value)
    cuda.syncthreads()
    if lane == 0:
        scratch[warp] = value
    cuda.syncthreads()
    total = float32(0)
    for w in range(cuda.blockDim.x // 32):
        total += scratch[w]
    return total


@right(
    "scratch memory is used twice, with a barrier before each use",
    lambda: (noise(128), zeros(128)),
    lambda x, out: (x - x.mean()) / x.var(),
    block=128,
    rtol=1e-5,
)
@cuda.jit
def two_block_sums_in_one_scratch(x, out):
    scratch = cuda.shared.array(4, float32)
    t = cuda.threadIdx.x
    value = x[t]
    distance = value - block_sum(scratch, value) / float32(128)
    variance = block_sum(scratch, distance * distance) / float32(128)
    out[t] = distance / variance


@right(
    "shuffles need no memory and no barrier",
    lambda: (noise(8, 32), zeros(8)),
    lambda x, out: x.max(axis=1),
    block=256,
)
@cuda.jit
def maximum_by_shuffles(x, out):
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value = x[warp, lane]
    offset = 16
    while offset > 0:
        value = max(value, cuda.shfl_down_sync(FULL, value, offset))
        offset >>= 1
    if lane == 0:
        out[warp] = value


@right(
    "each subgroup of eight lanes names itself in the mask",
    lambda: (ramp(32), zeros(32)),
    lambda x, out: np.where(np.arange(32) < 8, x[:8].sum(), -x),
)
@cuda.jit
def eight_lanes_shuffle_by_themselves(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    if lane < 8:
        for step in (4, 2, 1):
            value += cuda.shfl_xor_sync(0xFF, value, step)
    else:
        value = -value
    out[lane] = value


@right(
    "counts in shared memory by atomics, then in global memory by atomics",
    lambda: (np.arange(512, dtype=np.int32) * 7 % 13, np.zeros(16, np.int32)),
    lambda values, out: np.bincount(values, minlength=16),
    grid=4,
    block=128,
)
@cuda.jit
def histogram_with_atomics(values, out):
    bins = cuda.shared.array(16, int32)
    t = cuda.threadIdx.x
    if t < 16:
        bins[t] = 0
    cuda.syncthreads()
    cuda.atomic.add(bins, values[cuda.grid(1)], 1)
    cuda.syncthreads()
    if t < 16:
        cuda.atomic.add(out, t, bins[t])


@right(
    "the last block to take a ticket adds the sums of all; a fence stands before the ticket",
    lambda: (ramp(512), zeros(4), np.zeros(1, np.int32), zeros(1)),
    lambda x, partial, tickets, out: x.sum(),
    grid=4,
    block=128,
)
@cuda.jit
def last_block_adds_up(x, partial, tickets, out):
    scratch = cuda.shared.array(4, float32)
    is_last = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    total = block_sum(scratch, x[cuda.grid(1)])
    if t == 0:
        partial[cuda.blockIdx.x] = total
        cuda.threadfence()
        ticket = cuda.atomic.add(tickets, 0, 1)
        is_last[0] = ticket == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        cuda.threadfence()
        value = partial[t] if t < cuda.gridDim.x else float32(0)
        value = block_sum(scratch, value)
        if t == 0:
            out[0] = value


@right(
    "every thread leaves a part, a barrier comes before the ticket, and the last block adds up",
    lambda: (noise(4, 64), zeros(4, 64), np.zeros(1, np.int32), zeros(64)),
    lambda x, partial, tickets, out: (x * x).sum(axis=0),
    grid=4,
    block=64,
    rtol=1e-5,
)
@cuda.jit
def ticket_after_the_block_is_done(x, partial, tickets, out):
    is_last = cuda.shared.array(1, int32)
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    partial[b, t] = x[b, t] * x[b, t]
    cuda.threadfence()
    cuda.syncthreads()
    if t == 0:
        is_last[0] = cuda.atomic.add(tickets, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        cuda.threadfence()
        total = float32(0)
        for block in range(cuda.gridDim.x):
            total += partial[block, t]
        out[t] = total


@right(
    "two buffers take turns: nobody writes what is read",
    lambda: (ramp(64), zeros(64)),
    lambda x, out: np.cumsum(x),
    block=64,
)
@cuda.jit
def prefix_sum_in_two_buffers(x, out):
    sums = cuda.shared.array((2, 64), float32)
    t = cuda.threadIdx.x
    source = 0
    sums[0, t] = x[t]
    distance = 1
    while distance < 64:
        cuda.syncthreads()
        value = sums[source, t]
        if t >= distance:
            value += sums[source, t - distance]
        source = 1 - source
        sums[source, t] = value
        distance *= 2
    out[t] = sums[source, t]


@right(
    "in place, because a barrier stands between all loads and all stores of a step",
    lambda: (ramp(64), zeros(64)),
    lambda x, out: np.cumsum(x),
    block=64,
)
@cuda.jit
def prefix_sum_in_place_with_two_barriers(x, out):
    sums = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    for power in range(6):
        distance = 1 << power
        value = sums[t - distance] if t >= distance else float32(0)
        cuda.syncthreads()
        sums[t] += value
        cuda.syncthreads()
    out[t] = sums[t]


@right(
    "barriers that count, agree and find",
    lambda: (noise(3, 64), np.zeros((3, 3), np.int32)),
    lambda x, out: np.stack([(x > 0).sum(1), (x > -9).all(1), (x > 9).any(1)], axis=1),
    grid=3,
    block=64,
)
@cuda.jit
def barriers_with_a_vote(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    count = cuda.syncthreads_count(int32(x[b, t] > float32(0)))
    every = cuda.syncthreads_and(int32(x[b, t] > float32(-9)))
    some = cuda.syncthreads_or(int32(x[b, t] > float32(9)))
    if t == 0:
        out[b, 0] = count
        out[b, 1] = every
        out[b, 2] = some


@right(
    "a vote before the guard: every lane of the tail takes part",
    lambda: (noise(50), np.zeros(50, np.int32)),
    lambda x, out: np.repeat([(x[:32] > 0).sum(), (x[32:] > 0).sum()], 32)[:50],
    block=64,
)
@cuda.jit
def vote_outside_the_guard(x, out):
    i = cuda.threadIdx.x
    here = i < x.shape[0]
    positive = cuda.ballot_sync(FULL, here and x[i] > float32(0))
    if here:
        out[i] = cuda.popc(positive)


@right(
    "the last thread of a warp leaves its sum, the first warp scans the sums of the warps",
    lambda: (ramp(256), zeros(256)),
    lambda x, out: np.cumsum(x),
    block=256,
)
@cuda.jit
def scan_over_warps(x, out):
    warps = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    lane, warp = t % 32, t // 32
    value = x[t]
    for power in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << power)
        if lane >= 1 << power:
            value += below
    if lane == 31:
        warps[warp] = value
    cuda.syncthreads()
    if warp == 0:
        part = warps[lane] if lane < 8 else float32(0)
        for power in range(3):
            below = cuda.shfl_up_sync(FULL, part, 1 << power)
            if lane >= 1 << power:
                part += below
        if lane < 8:
            warps[lane] = part
    cuda.syncthreads()
    if warp > 0:
        value += warps[warp - 1]
    out[t] = value


@right(
    "blocks take turns at one number under a lock, with a fence on either side",
    lambda: (ramp(128), np.zeros(1, np.int32), zeros(1)),
    lambda x, lock, out: x.sum(),
    grid=4,
)
@cuda.jit
def sum_under_a_lock(x, lock, out):
    value = warp_sum(x[cuda.grid(1)])
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            cuda.nanosleep(20)
        cuda.threadfence()
        out[0] += value
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)


@right(
    "block 0 publishes a tile and raises a flag, the other blocks wait for the flag",
    lambda: (ramp(32), np.zeros(1, np.int32), zeros(32), zeros(3, 32)),
    lambda x, flag, squares, out: (x * x) * np.array([[0], [1], [1]]),
    grid=3,
)
@cuda.jit
def tile_handed_to_other_blocks(x, flag, squares, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    if b == 0:
        squares[t] = x[t] * x[t]
        cuda.threadfence()
        cuda.syncthreads()
        if t == 0:
            cuda.atomic.exch(flag, 0, 1)
    else:
        if t == 0:
            while cuda.atomic.add(flag, 0, 0) == 0:
                cuda.nanosleep(20)
        cuda.syncthreads()
        cuda.threadfence()
        out[b, t] = squares[t]
