"""Tensor copies and products of warpgroups whose result is used before it is waited for."""

import ml_dtypes
import numpy as np
from numba import cuda, float32, uint16, uint32, uint64

from numba_flash.ptx import (
    fence_mbarrier_init,
    make_wgmma,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    tma_load_2d,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_flash.tensor_map import TensorMap

from .case import faulty, noise, zeros

TILE = 64 * 64
TILE_BYTES = 2 * TILE
product = make_wgmma(n=64, k=64, dtype="bf16", a="shared", a_rows=64, b_rows=64)
product_of_registers = make_wgmma(n=64, k=64, dtype="bf16", a="registers")


def tile_map(rows):
    """Random bfloat16 numbers in rows of 64, fetched 64 rows at a time."""
    numbers = noise(rows, 64).astype(ml_dtypes.bfloat16).view(np.uint16)
    return TensorMap(numbers, (64, 64))


def float_map(rows):
    """Random numbers in rows of 32, fetched 8 rows at a time."""
    return TensorMap(noise(rows, 32), (32, 8), swizzled=False)


@faulty(
    "the copy announces itself at a barrier, and nobody waits there",
    lambda: (float_map(8), zeros(8, 32)),
)
@cuda.jit
def tensor_copy_without_wait(rows, out):
    tile = cuda.shared.array(256, float32, 128)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 1024)
        tma_load_2d(tile, 0, rows, 0, 0, full, 0)
    cuda.syncthreads()
    for r in range(8):
        out[r, t] = tile[32 * r + t]  # fault: missing-wait


@faulty(
    "the parity never changes: from the second turn on the wait is over before it begins",
    lambda: (float_map(32), zeros(32)),
)
@cuda.jit
def parity_that_never_flips(rows, out):
    tile = cuda.shared.array(256, float32, 128)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    total = float32(0)
    for step in range(4):
        if t == 0:
            mbarrier_arrive_expect_tx(full, 0, 1024)
            tma_load_2d(tile, 0, rows, 0, 8 * step, full, 0)
        mbarrier_wait(full, 0, 0)
        for r in range(8):
            total += tile[32 * r + t]  # fault: missing-wait
        cuda.syncthreads()
    out[t] = total


@faulty(
    "two stages on their way, and the wait is for the other one",
    lambda: (float_map(16), zeros(32)),
)
@cuda.jit
def wait_for_the_other_stage(rows, out):
    tile = cuda.shared.array(512, float32, 128)
    full = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        for stage in range(2):
            mbarrier_arrive_expect_tx(full, stage, 1024)
            tma_load_2d(tile, 256 * stage, rows, 0, 8 * stage, full, stage)
    total = float32(0)
    for step in range(2):
        mbarrier_wait(full, (step + 1) % 2, 0)
        for r in range(8):
            total += tile[256 * step + 32 * r + t]  # fault: missing-wait
    out[t] = total


@faulty(
    "the sums are stored while the product is still being computed",
    lambda: (tile_map(64), tile_map(64), zeros(128, 32)),
    block=128,
)
@cuda.jit
def sums_read_before_the_product_is_done(a_map, b_map, out):
    a = cuda.shared.array(TILE, uint16, 1024)
    b = cuda.shared.array(TILE, uint16, 1024)
    full = cuda.shared.array(1, uint64)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 2 * TILE_BYTES)
        tma_load_2d(a, 0, a_map, 0, 0, full, 0)
        tma_load_2d(b, 0, b_map, 0, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    wgmma_fence()
    product(acc, a, 0, b, 0, False)
    wgmma_commit()
    for i in range(32):
        out[t, i] = acc[i]  # fault: missing-wait
    wgmma_wait(0)


@faulty(
    "a product that was not committed belongs to no group, and no wait is for it",
    lambda: (tile_map(64), tile_map(64), zeros(128, 32)),
    block=128,
)
@cuda.jit
def product_never_committed(a_map, b_map, out):
    a = cuda.shared.array(TILE, uint16, 1024)
    b = cuda.shared.array(TILE, uint16, 1024)
    full = cuda.shared.array(1, uint64)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 2 * TILE_BYTES)
        tma_load_2d(a, 0, a_map, 0, 0, full, 0)
        tma_load_2d(b, 0, b_map, 0, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    wgmma_fence()
    product(acc, a, 0, b, 0, False)
    wgmma_wait(0)
    for i in range(32):
        out[t, i] = acc[i]  # fault: missing-wait


@faulty(
    "the operands are multiplied before the copy of one of them has landed",
    lambda: (tile_map(64), tile_map(64), zeros(128, 32)),
    block=128,
)
@cuda.jit
def product_of_a_tile_on_its_way(a_map, b_map, out):
    a = cuda.shared.array(TILE, uint16, 1024)
    b = cuda.shared.array(TILE, uint16, 1024)
    full = cuda.shared.array(2, uint64)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        mbarrier_init(full, 1, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, TILE_BYTES)
        tma_load_2d(a, 0, a_map, 0, 0, full, 0)
        mbarrier_arrive_expect_tx(full, 1, TILE_BYTES)
        tma_load_2d(b, 0, b_map, 0, 0, full, 1)
    mbarrier_wait(full, 0, 0)
    wgmma_fence()
    product(acc, a, 0, b, 0, False)  # fault: missing-wait
    wgmma_commit()
    wgmma_wait(0)
    for i in range(32):
        out[t, i] = acc[i]  # fault: missing-wait


@faulty(
    "the tile is given back while the product still reads it",
    lambda: (tile_map(64), tile_map(256), zeros(128, 32)),
    block=256,
)
@cuda.jit
def stage_given_back_before_the_product_is_done(a_map, b_map, out):
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
                tma_load_2d(a, 0, a_map, 0, 0, full, 0)  # fault: race, missing-wait
                tma_load_2d(b, 0, b_map, 0, 64 * step, full, 0)  # fault: race, missing-wait
    else:
        for step in range(4):
            mbarrier_wait(full, 0, step % 2)
            wgmma_fence()
            product(acc, a, 0, b, 0, step > 0)  # fault: race, missing-wait
            wgmma_commit()
            mbarrier_arrive(free, 0)  # fault: race, missing-wait
            wgmma_wait(0)
        for i in range(32):
            out[t - 128, i] = acc[i]


@faulty(
    "the barrier is told of a tile of float32, and the box delivers half as much",
    lambda: (tile_map(64), zeros(32)),
)
@cuda.jit
def bytes_that_never_come(rows, out):
    tile = cuda.shared.array(TILE, uint16, 1024)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 4 * TILE)
        tma_load_2d(tile, 0, rows, 0, 0, full, 0)
    mbarrier_wait(full, 0, 0)  # fault: deadlock
    out[t] = float32(tile[t])


@faulty(
    "the next tile is fetched while another warp reads this one, or waits for a phase long past",
    lambda: (float_map(32), zeros(64)),
    block=64,
)
@cuda.jit
def next_tile_fetched_too_early(rows, out):
    tile = cuda.shared.array(256, float32, 128)
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    total = float32(0)
    for step in range(4):
        if t == 0:
            mbarrier_arrive_expect_tx(full, 0, 1024)
            tma_load_2d(tile, 0, rows, 0, 8 * step, full, 0)  # fault: race, missing-wait
        mbarrier_wait(full, 0, step % 2)  # fault: deadlock
        for r in range(8):
            total += tile[32 * r + t // 2]  # fault: race, missing-wait
    out[t] = total


@faulty(
    "threads store a tile and wgmma reads it past them: their stores need a proxy fence",
    lambda: (np.ones((64, 64), np.uint16), zeros(128, 32)),
    block=128,
)
@cuda.jit
def product_of_stores_without_a_fence(x, out):
    a = cuda.shared.array(TILE, uint16, 1024)
    acc = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    for e in range(t, TILE, 128):
        a[e] = x[e // 64, e % 64]
    cuda.syncthreads()
    wgmma_fence()
    product(acc, a, 0, a, 0, False)  # fault: missing-wait
    wgmma_commit()
    wgmma_wait(0)
    for i in range(32):
        out[t, i] = acc[i]


@faulty(
    "the registers of P are packed anew while the product of the last P still reads them",
    lambda: (tile_map(64), zeros(128, 32)),
    block=128,
)
@cuda.jit
def registers_changed_under_the_product(b_map, out):
    b = cuda.shared.array(TILE, uint16, 1024)
    full = cuda.shared.array(1, uint64)
    acc = cuda.local.array(32, float32)
    p = cuda.local.array(16, uint32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, TILE_BYTES)
        tma_load_2d(b, 0, b_map, 0, 0, full, 0)
    for i in range(16):
        p[i] = uint32(0x3F803F80)
    mbarrier_wait(full, 0, 0)
    wgmma_fence()
    product_of_registers(acc, p, 0, b, 0, False)
    wgmma_commit()
    for i in range(16):
        p[i] = uint32(0)  # fault: missing-wait
    wgmma_wait(0)
    for i in range(32):
        out[t, i] = acc[i]  # fault: missing-wait


@faulty("nobody has made a barrier of the word at which the threads arrive", lambda: (zeros(32),))
@cuda.jit
def arrival_without_init(out):
    done = cuda.shared.array(1, uint64)
    mbarrier_arrive(done, 0)  # fault: uninitialised-read
    out[cuda.threadIdx.x] = 1


@faulty("bytes are announced at a word that nobody made a barrier of", lambda: (zeros(32),))
@cuda.jit
def announcement_without_init(out):
    full = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_arrive_expect_tx(full, 0, 1024)  # fault: uninitialised-read
    out[t] = 1


@faulty("the threads wait at a word that nobody made a barrier of", lambda: (zeros(32),))
@cuda.jit
def wait_without_init(out):
    full = cuda.shared.array(1, uint64)
    mbarrier_wait(full, 0, 0)  # fault: uninitialised-read
    out[cuda.threadIdx.x] = 1
