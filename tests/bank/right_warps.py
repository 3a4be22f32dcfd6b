"""Warps that wait for each other at mbarriers and named barriers, without a fault."""

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

from .case import noise, ramp, right, zeros


@right(
    "two warps play ping-pong: one fills the stages that the other has emptied",
    lambda: (noise(7, 32), zeros(32)),
    lambda x, out: x.sum(axis=0)[::-1],
    block=64,
    rtol=1e-5,
)
@cuda.jit
def producer_and_consumer(x, out):
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
        for step in range(7):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(empty, stage, parity ^ 1)
            tile[stage, lane] = x[step, lane]
            mbarrier_arrive(full, stage)
    else:
        total = float32(0)
        for step in range(7):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)
            total += tile[stage, 31 - lane]
            mbarrier_arrive(empty, stage)
        out[lane] = total


@right(
    "one lane arrives for its warp, after a barrier of the warp",
    lambda: (noise(3, 32), zeros(32)),
    lambda x, out: x.sum(axis=0)[::-1],
    block=64,
    rtol=1e-5,
)
@cuda.jit
def one_lane_arrives_for_its_warp(x, out):
    tile = cuda.shared.array((3, 32), float32)
    full = cuda.shared.array(3, uint64)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t == 0:
        for stage in range(3):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        for step in range(3):
            tile[step, lane] = x[step, lane]
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(full, step)
    else:
        total = float32(0)
        for step in range(3):
            mbarrier_wait(full, step, 0)
            total += tile[step, 31 - lane]
        out[lane] = total


@right(
    "two of four warps exchange at a barrier of their own, the other two at another",
    lambda: (ramp(128), zeros(128)),
    lambda x, out: np.concatenate([x[:64][::-1], x[64:][::-1]]),
    block=128,
)
@cuda.jit
def pairs_of_warps_meet(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    pair = t // 64
    tile[t] = x[t]
    named_barrier_sync(1 + pair, 64)
    out[t] = tile[64 * pair + 63 - t % 64]


@right(
    "the first warp announces and goes on, the second one waits for the announcement",
    lambda: (ramp(32), zeros(32)),
    lambda x, out: x[::-1],
    block=64,
)
@cuda.jit
def announced_by_a_named_barrier(x, out):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    if t < 32:
        tile[t] = x[t]
        named_barrier_arrive(1, 64)
    else:
        named_barrier_sync(1, 64)
        out[t - 32] = tile[63 - t]


@right(
    "one lane of each consumer gives the stage back, after a barrier of its warp",
    lambda: (noise(6, 32), zeros(2, 32)),
    lambda x, out: np.stack([x.sum(axis=0)[::-1]] * 2),
    block=96,
    rtol=1e-5,
)
@cuda.jit
def two_consumers_give_stages_back(x, out):
    tile = cuda.shared.array((2, 32), float32)
    full = cuda.shared.array(2, uint64)
    free = cuda.shared.array(2, uint64)
    t, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
            mbarrier_init(free, stage, 2)
        fence_mbarrier_init()
    cuda.syncthreads()
    if warp == 0:
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(free, stage, parity ^ 1)
            tile[stage, lane] = x[step, lane]
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(full, stage)
    else:
        total = float32(0)
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)
            total += tile[stage, 31 - lane]
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(free, stage)
        out[warp - 1, lane] = total


@right(
    "the lane that arrives is the one that wrote",
    lambda: (ramp(32), zeros(32)),
    lambda x, out: np.full(32, x[7]),
    block=64,
)
@cuda.jit
def one_lane_writes_and_arrives(x, out):
    slot = cuda.shared.array(1, float32)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        slot[0] = x[7]
        mbarrier_arrive(full, 0)
    if t >= 32:
        mbarrier_wait(full, 0, 0)
        out[t - 32] = slot[0]


@right(
    "two roles, then a barrier of the whole block, then everybody reads everything",
    lambda: (ramp(32), zeros(64)),
    lambda x, out: np.concatenate([2 * x[::-1], x[::-1]]),
    block=64,
)
@cuda.jit
def roles_end_at_a_barrier_of_the_block(x, out):
    tile = cuda.shared.array(64, float32)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 32)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        tile[t] = x[t]
        mbarrier_arrive(full, 0)
    else:
        mbarrier_wait(full, 0, 0)
        tile[t] = tile[t - 32] * float32(2)
    cuda.syncthreads()
    out[t] = tile[63 - t]
