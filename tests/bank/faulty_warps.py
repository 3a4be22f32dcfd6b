"""Warps with roles of their own, and lanes of one warp: mbarriers, named barriers, shuffles."""

import numpy as np
from numba import cuda, float32, int32, uint64

from numba_flash.ptx import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
    tma_load_2d,
)
from numba_flash.tensor_map import TensorMap

from .case import faulty, noise, ramp, zeros


def rows_map(rows):
    return TensorMap(noise(rows, 32), (32, 16), swizzled=False)


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


@faulty(
    "lane 0 waits for the copy, and its warp goes on without meeting it",
    lambda: (rows_map(16), zeros(32)),
)
@cuda.jit
def one_lane_waits_for_all(source, out):
    tile = cuda.shared.array(512, float32, alignment=128)
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(bars, 0, 1)
        fence_mbarrier_init()
    cuda.syncwarp()
    if t == 0:
        mbarrier_arrive_expect_tx(bars, 0, 2048)
        tma_load_2d(tile, 0, source, 0, 0, bars, 0)  # fault: race
        mbarrier_wait(bars, 0, 0)
    out[t] = tile[t]  # fault: race


@faulty(
    "all lanes shuffle, and the mask names half of them",
    lambda: (zeros(32, dtype=np.int32),),
)
@cuda.jit
def shuffle_of_lanes_without_a_name(out):
    t = int32(cuda.threadIdx.x)
    out[t] = cuda.shfl_sync(0xFFFF, t, 3)  # fault: barrier-divergence


@faulty("there are barriers 0 to 15", lambda: (zeros(64),), block=64)
@cuda.jit
def named_barrier_that_is_none(out):
    named_barrier_sync(16, 64)  # fault: barrier-divergence
    out[cuda.threadIdx.x] = 1


@faulty("whole warps come to a barrier", lambda: (zeros(64),), block=64)
@cuda.jit
def named_barrier_for_a_warp_and_a_half(out):
    named_barrier_sync(1, 48)  # fault: barrier-divergence
    out[cuda.threadIdx.x] = 1


@faulty(
    "lane 0 gives the stage back when it has read itself, and the other lanes may not have",
    lambda: (rows_map(96), zeros(32)),
    block=64,
)
@cuda.jit
def stage_given_back_for_lanes_that_still_read(rows, out):
    ring = cuda.shared.array(1024, float32, alignment=128)
    full = cuda.shared.array(2, uint64)
    free = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
            mbarrier_init(free, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 32:
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(free, stage, parity ^ 1)
            mbarrier_arrive_expect_tx(full, stage, 2048)
            tma_load_2d(ring, 512 * stage, rows, 0, 16 * step, full, stage)  # fault: race
    if t < 32:
        total = float32(0)
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)
            total += ring[512 * stage + t]  # fault: race
            if t == 0:
                mbarrier_arrive(free, stage)
        out[t] = total


@faulty(
    "a fresh barrier lets those pass who ask for the parity before its first phase",
    lambda: (rows_map(16), zeros(32)),
)
@cuda.jit
def wait_for_the_phase_before_the_first(rows, out):
    tile = cuda.shared.array(512, float32, alignment=128)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 2048)
        tma_load_2d(tile, 0, rows, 0, 0, full, 0)  # fault: race
    mbarrier_wait(full, 0, 1)
    out[t] = tile[t]  # fault: race, missing-wait
