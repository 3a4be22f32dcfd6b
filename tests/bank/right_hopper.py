"""Tensor copies and products of warpgroups without a fault."""

import ml_dtypes
import numpy as np
from numba import cuda, float32, uint16, uint64

from numba_flash.ptx import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    fence_mbarrier_init,
    fence_proxy_async,
    make_wgmma,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    tma_load_2d,
    tma_store_2d,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_flash.tensor_map import TensorMap

from .case import noise, right, zeros

TILE = 64 * 64
TILE_BYTES = 2 * TILE
product = make_wgmma(n=64, k=64, dtype="bf16", a="shared", a_rows=64, b_rows=64)
A, B = (noise(2, 256, 64)[i].astype(ml_dtypes.bfloat16) for i in range(2))


def tile_map(matrix):
    """A matrix with rows of 64, fetched 64 rows at a time."""
    return TensorMap(matrix.view(np.uint16), (64, 64))


@right(
    "one thread fetches tiles into two stages, everybody waits at the barrier of the stage",
    lambda: (TensorMap(noise(48, 32), (32, 8), swizzled=False), zeros(32)),
    lambda rows, out: noise(48, 32).sum(axis=0),
    rtol=1e-5,
)
@cuda.jit
def tensor_copies_in_two_stages(rows, out):
    tile = cuda.shared.array(512, float32, 128)
    full = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 1024)
        tma_load_2d(tile, 0, rows, 0, 0, full, 0)
    total = float32(0)
    for step in range(6):
        stage, following = step % 2, (step + 1) % 2
        if t == 0 and step + 1 < 6:
            mbarrier_arrive_expect_tx(full, following, 1024)
            tma_load_2d(tile, 256 * following, rows, 0, 8 * (step + 1), full, following)
        mbarrier_wait(full, stage, step // 2 % 2)
        for r in range(8):
            total += tile[256 * stage + 32 * r + t]
        cuda.syncthreads()
    out[t] = total


@right(
    "a producer warpgroup fetches tiles, a consumer multiplies and gives them back when it is done",
    lambda: (tile_map(A), tile_map(B), zeros(64, 64)),
    lambda a_map, b_map, out: sum(
        A[k : k + 64].astype(np.float32) @ B[k : k + 64].astype(np.float32).T
        for k in range(0, 256, 64)
    ),
    block=256,
    rtol=1e-4,
)
@cuda.jit
def products_of_a_producer_and_a_consumer(a_map, b_map, out):
    a = cuda.shared.array(TILE, uint16, 1024)
    b = cuda.shared.array(TILE, uint16, 1024)
    full = cuda.shared.array(1, uint64)
    free = cuda.shared.array(1, uint64)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        mbarrier_init(free, 0, 128)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t < 128:
        if t == 0:
            for step in range(4):
                mbarrier_wait(free, 0, step % 2 ^ 1)
                mbarrier_arrive_expect_tx(full, 0, 2 * TILE_BYTES)
                tma_load_2d(a, 0, a_map, 0, 64 * step, full, 0)
                tma_load_2d(b, 0, b_map, 0, 64 * step, full, 0)
    else:
        for step in range(4):
            mbarrier_wait(full, 0, step % 2)
            wgmma_fence()
            product(acc, a, 0, b, 0, step > 0)
            wgmma_commit()
            wgmma_wait(0)
            mbarrier_arrive(free, 0)
        first_row, first_column = t // 32 % 4 * 16 + t % 32 // 4, t % 4 * 2
        for i in range(32):
            row, column = first_row + i // 2 % 2 * 8, first_column + i // 4 * 8 + i % 2
            out[row, column] = acc[i]


@right(
    "groups of copies and products without any, which are over before they are waited for",
    lambda: (zeros(128),),
    lambda out: np.ones(128, np.float32),
    block=128,
)
@cuda.jit
def nothing_on_its_way(out):
    fence_proxy_async()
    bulk_commit()
    bulk_wait(0)
    wgmma_fence()
    wgmma_commit()
    wgmma_wait(0)
    out[cuda.threadIdx.x] = 1


def stored_rows():
    """A tensor map, and the memory behind it."""
    rows = zeros(64, 32)
    return TensorMap(rows, (32, 16), swizzled=False), rows


@right(
    "with two buffers, all stores but the youngest have been read when a buffer is filled",
    stored_rows,
    lambda target, rows: np.arange(64 * 32, dtype=np.float32).reshape(64, 32),
    block=64,
)
@cuda.jit
def buffers_stored_in_turn(target, rows):
    tile = cuda.shared.array(1024, float32, alignment=128)
    t = cuda.threadIdx.x
    for turn in range(4):
        if t == 0:
            bulk_wait_read(1)
        cuda.syncthreads()
        for i in range(8):
            tile[512 * (turn & 1) + t + 64 * i] = 512 * turn + t + 64 * i
        fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            tma_store_2d(target, 0, 16 * turn, tile, 512 * (turn & 1))
            bulk_commit()
    if t == 0:
        bulk_wait(0)


@right(
    "lane 0 waits for the copy, and its warp meets it before it reads",
    lambda: (TensorMap(noise(16, 32), (32, 16), swizzled=False), zeros(32)),
    lambda rows, out: noise(16, 32)[3],
)
@cuda.jit
def one_lane_waits_and_its_warp_meets_it(rows, out):
    tile = cuda.shared.array(512, float32, alignment=128)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(full, 0, 2048)
        tma_load_2d(tile, 0, rows, 0, 0, full, 0)
        mbarrier_wait(full, 0, 0)
    cuda.syncwarp()
    out[t] = tile[96 + t]


@right(
    "lane 0 gives the stage back when its warp has met, and so has read",
    lambda: (TensorMap(noise(96, 32), (32, 16), swizzled=False), zeros(32)),
    lambda rows, out: noise(96, 32)[::16].sum(axis=0),
    block=64,
    rtol=1e-5,
)
@cuda.jit
def one_lane_gives_the_stage_back(rows, out):
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
            tma_load_2d(ring, 512 * stage, rows, 0, 16 * step, full, stage)
    if t < 32:
        total = float32(0)
        for step in range(6):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full, stage, parity)
            total += ring[512 * stage + t]
            cuda.syncwarp()
            if t == 0:
                mbarrier_arrive(free, stage)
        out[t] = total
