"""Shared memory that is changed while a tensor store or a product of a warpgroup still reads it."""

import numpy as np
from numba import cuda, float32, uint16, uint64

from numba_flash.ptx import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    fence_mbarrier_init,
    fence_proxy_async,
    make_wgmma,
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

from .case import faulty, zeros

product = make_wgmma(n=64, k=64)


def rows_map(rows):
    return TensorMap(zeros(rows, 32), (32, 16), swizzled=False)


@faulty(
    "barriers order threads, and a tensor store that still reads is none",
    lambda: (rows_map(16),),
)
@cuda.jit
def stored_tile_overwritten_between_barriers(target):
    tile = cuda.shared.array(512, float32, alignment=128)
    t = cuda.threadIdx.x
    for i in range(16):
        tile[t + 32 * i] = t
    fence_proxy_async()
    cuda.syncthreads()
    if t == 0:
        tma_store_2d(target, 0, 0, tile, 0)
        bulk_commit()
    cuda.syncthreads()
    tile[t] = 5  # fault: missing-wait
    cuda.syncthreads()
    if t == 0:
        bulk_wait(0)


@faulty(
    "with two buffers, one store may be left over when the other buffer is filled, not two",
    lambda: (rows_map(64),),
    block=64,
)
@cuda.jit
def buffer_filled_while_it_is_stored(target):
    tile = cuda.shared.array(1024, float32, alignment=128)
    t = cuda.threadIdx.x
    for turn in range(4):
        if t == 0:
            bulk_wait_read(2)
        cuda.syncthreads()
        for i in range(8):
            tile[512 * (turn & 1) + t + 64 * i] = t  # fault: missing-wait
        fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            tma_store_2d(target, 0, 16 * turn, tile, 512 * (turn & 1))
            bulk_commit()
    if t == 0:
        bulk_wait(0)


@faulty(
    "the thread that has begun the store writes on into its tile",
    lambda: (rows_map(16),),
)
@cuda.jit
def tile_changed_by_the_thread_that_stores_it(target):
    tile = cuda.shared.array(512, float32, alignment=128)
    t = cuda.threadIdx.x
    for i in range(16):
        tile[t + 32 * i] = t
    fence_proxy_async()
    cuda.syncwarp()
    if t == 0:
        tma_store_2d(target, 0, 0, tile, 0)
        bulk_commit()
        tile[0] = 5  # fault: missing-wait
        bulk_wait(0)


@faulty(
    "the only store is the youngest too, and this wait leaves the youngest alone",
    lambda: (rows_map(32),),
)
@cuda.jit
def wait_leaves_the_only_store(target):
    tile = cuda.shared.array(512, float32, alignment=128)
    t = cuda.threadIdx.x
    for turn in range(2):
        for i in range(16):
            tile[t + 32 * i] = turn  # fault: missing-wait
        fence_proxy_async()
        cuda.syncwarp()
        if t == 0:
            tma_store_2d(target, 0, 16 * turn, tile, 0)
            bulk_commit()
            bulk_wait(1)
        cuda.syncwarp()
    if t == 0:
        bulk_wait(0)


@faulty(
    "the block ends, and its shared memory goes, while the store still reads",
    lambda: (rows_map(16),),
)
@cuda.jit
def store_outlives_its_block(target):
    tile = cuda.shared.array(512, float32, alignment=128)
    t = cuda.threadIdx.x
    for i in range(16):
        tile[t + 32 * i] = t
    fence_proxy_async()
    cuda.syncwarp()
    if t == 0:
        tma_store_2d(target, 0, 0, tile, 0)  # fault: missing-wait
        bulk_commit()


@faulty(
    "barriers order threads, and a product that still reads is none",
    lambda: (zeros(128),),
    block=128,
)
@cuda.jit
def operand_overwritten_between_barriers(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    for i in range(64):
        tiles[t + 128 * i] = 0
    fence_proxy_async()
    cuda.syncthreads()
    wgmma_fence()
    product(acc, tiles, 0, tiles, 4096, False)
    wgmma_commit()
    cuda.syncthreads()
    tiles[4096 + t] = 1  # fault: missing-wait
    cuda.syncthreads()
    wgmma_wait(0)
    out[t] = acc[0]


@faulty(
    "the next tile is fetched over the one that the product still reads",
    lambda: (TensorMap(zeros(256, 64, dtype=np.uint16), (64, 64)), zeros(128)),
    block=128,
)
@cuda.jit
def operands_fetched_before_the_product_is_done(rows, out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    full = cuda.shared.array(1, uint64)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    for i in range(32):
        acc[i] = 0
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for step in range(4):
        if t == 0:
            mbarrier_arrive_expect_tx(full, 0, 16384)
            tma_load_2d(tiles, 0, rows, 0, 64 * step, full, 0)  # fault: missing-wait
            tma_load_2d(tiles, 4096, rows, 0, 64 * step, full, 0)  # fault: missing-wait
        mbarrier_wait(full, 0, step & 1)
        wgmma_fence()
        product(acc, tiles, 0, tiles, 4096, True)
        wgmma_commit()
        cuda.syncthreads()
    wgmma_wait(0)
    out[t] = acc[0]
