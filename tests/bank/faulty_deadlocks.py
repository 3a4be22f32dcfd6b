"""Threads that wait for what never comes."""

import numpy as np
from numba import cuda, float32, uint64

from numba_flash.ptx import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
)

from .case import faulty, noise, ramp, zeros


@faulty(
    "the barrier waits for three warps, and two come",
    lambda: (ramp(64), zeros(64)),
    block=96,
)
@cuda.jit
def named_barrier_for_one_warp_too_many(x, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t < 64:
        tile[t] = x[t]
        named_barrier_sync(1, 96)  # fault: deadlock
        out[t] = tile[63 - t]


@faulty(
    "each warp stands at the barrier that the other one comes to next",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def named_barriers_crossed(x, out):
    t = cuda.threadIdx.x
    if t < 32:
        named_barrier_sync(1, 64)  # fault: deadlock
        named_barrier_sync(2, 64)
    else:
        named_barrier_sync(2, 64)  # fault: deadlock
        named_barrier_sync(1, 64)
    out[t] = x[t]


@faulty(
    "the producer announces on barrier 2 what the consumer expects on barrier 1",
    lambda: (ramp(32), zeros(32)),
    block=64,
)
@cuda.jit
def announced_on_the_wrong_barrier(x, out):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    if t < 32:
        tile[t] = x[t]
        named_barrier_arrive(2, 64)
    else:
        named_barrier_sync(1, 64)  # fault: deadlock
        out[t - 32] = tile[63 - t]


@faulty(
    "the mbarrier counts 64 arrivals, and one warp arrives",
    lambda: (ramp(32), zeros(32)),
    block=64,
)
@cuda.jit
def mbarrier_counts_the_waiting_warp(x, out):
    tile = cuda.shared.array(32, float32)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 64)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        tile[t] = x[t]
        mbarrier_arrive(full, 0)
    else:
        mbarrier_wait(full, 0, 0)  # fault: deadlock
        out[t - 32] = tile[63 - t]


@faulty(
    "the producer waits for an empty stage with parity 0: a fresh barrier lets only parity 1 pass",
    lambda: (noise(6, 32), zeros(32)),
    block=64,
)
@cuda.jit
def producer_begins_with_the_wrong_parity(x, out):
    tile = cuda.shared.array((2, 32), float32)
    full = cuda.shared.array(2, uint64)
    empty = cuda.shared.array(2, uint64)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 32)
            mbarrier_init(empty, stage, 32)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(empty, stage, parity)  # fault: deadlock
            tile[stage, lane] = x[step, lane]
            mbarrier_arrive(full, stage)
    else:
        total = float32(0)
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)  # fault: deadlock
            total += tile[stage, 31 - lane]
            mbarrier_arrive(empty, stage)
        out[lane] = total


@faulty(
    "the consumers never give a stage back; two tiles fit, the third one waits for ever",
    lambda: (noise(6, 32), zeros(32)),
    block=64,
)
@cuda.jit
def stages_are_never_given_back(x, out):
    tile = cuda.shared.array((2, 32), float32)
    full = cuda.shared.array(2, uint64)
    empty = cuda.shared.array(2, uint64)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 32)
            mbarrier_init(empty, stage, 32)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(empty, stage, parity ^ 1)  # fault: deadlock
            tile[stage, lane] = x[step, lane]
            mbarrier_arrive(full, stage)
    else:
        total = float32(0)
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)  # fault: deadlock
            total += tile[stage, 31 - lane]
        out[lane] = total


@faulty(
    "one warp waits for the other's arrival, which comes after a barrier of both",
    lambda: (ramp(32), zeros(32)),
    block=64,
)
@cuda.jit
def arrival_behind_a_barrier_of_the_block(x, out):
    tile = cuda.shared.array(32, float32)
    ready = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(ready, 0, 32)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t >= 32:
        mbarrier_wait(ready, 0, 0)  # fault: deadlock
        out[t - 32] = tile[63 - t]
    else:
        tile[t] = x[t]
    cuda.syncthreads()  # fault: deadlock, barrier-divergence
    if t < 32:
        mbarrier_arrive(ready, 0)


@faulty(
    "somebody was to raise the flag, and nobody does",
    lambda: (np.zeros(1, np.int32), zeros(32)),
    grid=2,
)
@cuda.jit
def flag_that_nobody_raises(flag, out):
    if cuda.blockIdx.x == 1:
        while cuda.atomic.add(flag, 0, 0) == 0:  # fault: deadlock
            cuda.nanosleep(100)
        out[cuda.threadIdx.x] = float32(1)


@faulty(
    "the lock is taken and never released; the next block spins for ever",
    lambda: (np.zeros(1, np.int32), zeros(1)),
    grid=4,
)
@cuda.jit
def lock_never_released(lock, out):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:  # fault: deadlock
            pass
        out[0] += float32(1)  # fault: race
