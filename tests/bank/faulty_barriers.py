"""Barriers and warp functions that not all of those reach who should."""

import numpy as np
from numba import cuda, float32, int32

from .case import faulty, noise, ramp, zeros

FULL = 0xFFFFFFFF


@faulty(
    "the barrier stands under a condition that half the block fulfils",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def barrier_under_a_condition(x, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    if t < 32:
        cuda.syncthreads()  # fault: barrier-divergence
    out[t] = tile[t]


@faulty(
    "warps go round the loop a different number of times, with a barrier inside",
    lambda: (ramp(128), zeros(128)),
    block=128,
)
@cuda.jit
def barrier_in_a_loop_of_its_own_length(x, out):
    t = cuda.threadIdx.x
    total = float32(0)
    for j in range(t // 32 + 1):
        total += x[j]
        cuda.syncthreads()  # fault: barrier-divergence
    out[t] = total


@cuda.jit(device=True, inline="always")
def store_and_wait(tile, t, value):
    tile[t] = value
    cuda.syncthreads()  # fault: barrier-divergence


@faulty(
    "the guard of the tail stands around a device function with a barrier in it",
    lambda: (ramp(100), zeros(100)),
    grid=2,
    block=64,
)
@cuda.jit
def barrier_hidden_in_a_device_function(x, out):
    tile = cuda.shared.array(64, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    if i < x.shape[0]:
        store_and_wait(tile, t, x[i])
        out[i] = tile[t]


@faulty(
    "a thread that is done leaves the loop, and the others wait for it inside",
    lambda: (np.arange(64, dtype=np.int32) % 5 + 1, zeros(64, dtype=np.int32)),
    block=64,
)
@cuda.jit
def break_before_the_barrier(steps, out):
    t = cuda.threadIdx.x
    step = int32(0)
    while True:
        step += int32(1)
        if step > steps[t]:
            break
        cuda.syncthreads()  # fault: barrier-divergence
    cuda.syncthreads()
    out[t] = step


@faulty(
    "continue jumps over the barrier at the end of the loop",
    lambda: (noise(4, 64), zeros(64)),
    block=64,
)
@cuda.jit
def continue_skips_the_barrier(x, out):
    t = cuda.threadIdx.x
    total = float32(0)
    for j in range(x.shape[0]):
        if x[j, t] < float32(0):
            continue
        total += x[j, t]
        cuda.syncthreads()  # fault: barrier-divergence
    out[t] = total


@faulty(
    "two barriers in two branches are two barriers, not one",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def a_barrier_in_each_branch(x, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t < 32:
        tile[t] = x[t]
        cuda.syncthreads()  # fault: barrier-divergence
    else:
        tile[t] = -x[t]
        cuda.syncthreads()  # fault: barrier-divergence
    out[t] = tile[t]


@faulty(
    "the first sixteen lanes ask all 32 for their values",
    lambda: (ramp(32), zeros(32)),
)
@cuda.jit
def shuffle_names_absent_lanes(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    if lane < 16:
        value += cuda.shfl_down_sync(FULL, value, 8)  # fault: barrier-divergence
    out[lane] = value


@faulty(
    "syncwarp without a mask waits for 32 lanes, and four of them went another way",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def syncwarp_in_a_branch(x, out):
    lane = cuda.threadIdx.x % 32
    tile = cuda.shared.array(64, float32)
    if lane < 28:
        tile[cuda.threadIdx.x] = x[cuda.threadIdx.x]
        cuda.syncwarp()  # fault: barrier-divergence
        out[cuda.threadIdx.x] = tile[cuda.threadIdx.x]


@faulty(
    "the tail of the last warp does not come to the vote; the warps before are complete",
    lambda: (noise(120), zeros(120, dtype=np.int32)),
    grid=2,
    block=64,
)
@cuda.jit
def vote_in_a_guarded_tail(x, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        positive = cuda.ballot_sync(FULL, x[i] > float32(0))  # fault: barrier-divergence
        out[i] = cuda.popc(positive)


@faulty(
    "only one block has a tail, and only there the count is asked by part of the block",
    lambda: (noise(150), zeros(3, dtype=np.int32)),
    grid=3,
    block=64,
)
@cuda.jit
def count_in_a_guarded_tail(x, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        count = cuda.syncthreads_count(int32(x[i] > float32(0)))  # fault: barrier-divergence
        if cuda.threadIdx.x == 0:
            out[cuda.blockIdx.x] = count


@faulty(
    "under a causal mask the rows of a tile see different numbers of key tiles",
    lambda: (noise(64, 64), zeros(64)),
    grid=2,
    block=32,
)
@cuda.jit
def causal_range_of_the_row_not_of_the_tile(scores, out):
    row_of_keys = cuda.shared.array(16, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    total = float32(0)
    for first in range(0, i + 1, 16):
        if t < 16:
            row_of_keys[t] = scores[0, first + t]
        cuda.syncthreads()  # fault: barrier-divergence
        for j in range(16):
            if first + j <= i:
                total += row_of_keys[j]  # fault: race
        cuda.syncthreads()  # fault: barrier-divergence
    out[i] = total
