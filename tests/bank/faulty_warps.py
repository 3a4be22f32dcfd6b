"""Warps with roles of their own: races past mbarriers and named barriers."""

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
    "lane 0 announces the tile of its warp without waiting for the other lanes",
    lambda: (ramp(32), zeros(32)),
    block=64,
)
@cuda.jit
def one_lane_announces_too_early(x, out):
    tile = cuda.shared.array(32, float32)
    full = cuda.shared.array(1, uint64)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        tile[lane] = x[lane]  # fault: race
        if lane == 0:
            mbarrier_arrive(full, 0)
    else:
        mbarrier_wait(full, 0, 0)
        out[lane] = tile[31 - lane]  # fault: race


@faulty(
    "a stage is filled again without asking whether the consumer is done with it",
    lambda: (noise(6, 32), zeros(32)),
    block=64,
)
@cuda.jit
def producer_never_asks(x, out):
    tile = cuda.shared.array((2, 32), float32)
    full = cuda.shared.array(2, uint64)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 32)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        for step in range(6):
            tile[step % 2, lane] = x[step, lane]  # fault: race
            mbarrier_arrive(full, step % 2)
    else:
        total = float32(0)
        for step in range(6):
            mbarrier_wait(full, step % 2, step // 2 % 2)  # fault: deadlock
            total += tile[step % 2, 31 - lane]  # fault: race
        out[lane] = total


@faulty(
    "the consumer gives the stage back first and reads it afterwards",
    lambda: (noise(6, 32), zeros(32)),
    block=64,
)
@cuda.jit
def stage_given_back_before_it_is_read(x, out):
    tile = cuda.shared.array((2, 32), float32)
    full = cuda.shared.array(2, uint64)
    free = cuda.shared.array(2, uint64)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 32)
            mbarrier_init(free, stage, 32)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(free, stage, parity ^ 1)
            tile[stage, lane] = x[step, lane]  # fault: race
            mbarrier_arrive(full, stage)
    else:
        total = float32(0)
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)
            mbarrier_arrive(free, stage)
            total += tile[stage, 31 - lane]  # fault: race
        out[lane] = total


@faulty(
    "warps of one pair meet, and a warp reads what the other pair wrote",
    lambda: (ramp(128), zeros(128)),
    block=128,
)
@cuda.jit
def wrong_pair_of_warps_meets(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]  # fault: race
    named_barrier_sync(1 + t // 64, 64)
    out[t] = tile[127 - t]  # fault: race, uninitialised-read


@faulty(
    "the first warp announces its tile before it has written the second half",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def announced_before_it_is_written(x, out):
    tile = cuda.shared.array(64, float32)
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    if t < 32:
        tile[lane] = x[lane]
        named_barrier_arrive(1, 64)
        tile[lane + 32] = x[lane + 32]  # fault: race
    else:
        named_barrier_sync(1, 64)
        out[lane] = tile[31 - lane]
        out[lane + 32] = tile[63 - lane]  # fault: race, uninitialised-read


@faulty(
    "a fresh mbarrier, and no barrier of the block before the other warp waits there",
    lambda: (ramp(32), zeros(32)),
    block=64,
)
@cuda.jit
def mbarrier_used_before_all_know_it(x, out):
    tile = cuda.shared.array(32, float32)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 32)
        fence_mbarrier_init()
    if t < 32:
        tile[t] = x[t]
        mbarrier_arrive(full, 0)
    else:
        mbarrier_wait(full, 0, 0)  # fault: race
        out[t - 32] = tile[63 - t]
