"""cp.async without a fault: copies, groups, waits, barriers."""

import ml_dtypes
import numpy as np
from numba import cuda, float32, uint16, uint32

from numba_flash.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix_x4,
    mma_m16n8k16_bf16,
)

from .case import noise, ramp, right, zeros


@right(
    "a copy, its group, its wait, a barrier",
    lambda: (ramp(128), zeros(128)),
    lambda x, out: x[::-1],
)
@cuda.jit
def copy_and_wait(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(tile, 4 * t, x, 4 * t, True)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    for i in range(4):
        out[32 * i + t] = tile[127 - 32 * i - t]


@right(
    "a row that does not exist is not copied, and arrives as zeros",
    lambda: (noise(40, 4).ravel(), zeros(64, 4)),
    lambda x, out: np.concatenate([x.reshape(40, 4), np.zeros((24, 4))]),
    block=64,
)
@cuda.jit
def copy_of_a_tail(x, out):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    inside = 4 * t < x.shape[0]
    cp_async_16(tile, 4 * t, x, 4 * t if inside else 0, inside)
    cp_async_commit()
    cp_async_wait(0)
    for i in range(4):
        out[t, i] = tile[4 * t + i]


@right(
    "two tiles take turns: one is used while the other is on its way",
    lambda: (noise(5, 128).ravel(), zeros(32)),
    lambda x, out: np.roll(x.reshape(5, 32, 4), -1, axis=1).sum(axis=(0, 2)),
    rtol=1e-5,
)
@cuda.jit
def copies_in_two_stages(x, out):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    cp_async_16(tile, 4 * t, x, 4 * t, True)
    cp_async_commit()
    for step in range(5):
        if step + 1 < 5:
            stage = (step + 1) % 2
            cp_async_16(tile, stage * 128 + 4 * t, x, (step + 1) * 128 + 4 * t, True)
        cp_async_commit()
        cp_async_wait(1)
        cuda.syncthreads()
        for i in range(4):
            total += tile[step % 2 * 128 + (4 * t + 4 + i) % 128]
        cuda.syncthreads()
    out[t] = total


def tile_product(a, b, out):
    values = [x.view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b)]
    return values[0].reshape(16, 16) @ values[1].reshape(8, 16).T


@right(
    "two tiles of bfloat16 by cp.async, ldmatrix and one mma",
    lambda: (
        noise(256).astype(ml_dtypes.bfloat16).view(np.uint16),
        noise(256)[128:].astype(ml_dtypes.bfloat16).view(np.uint16),
        zeros(16, 8),
    ),
    tile_product,
    rtol=1e-5,
)
@cuda.jit
def product_of_two_tiles(a, b, out):
    tile = cuda.shared.array(512, uint16, 16)
    a_fragment = cuda.local.array(4, uint32)
    b_fragment = cuda.local.array(4, uint32)
    acc = cuda.local.array(4, float32)
    lane = cuda.threadIdx.x
    for i in range(4):
        acc[i] = float32(0)
    cp_async_16(tile, 8 * lane, a, 8 * lane, True)
    cp_async_16(tile, 256 + 8 * lane, b, 8 * (lane % 16), lane < 16)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncwarp()
    ldmatrix_x4(a_fragment, 0, tile, lane % 16 * 16 + lane // 16 * 8)
    ldmatrix_x4(b_fragment, 0, tile, 256 + lane % 8 * 16 + lane // 8 * 8)
    mma_m16n8k16_bf16(acc, 0, a_fragment, 0, b_fragment, 0)
    for i in range(4):
        out[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] = acc[i]


@right(
    "a guarded loop copies fewer chunks than there are threads; the others' indices mean nothing",
    lambda: (noise(256), zeros(32)),
    lambda x, y: x[: 4 * 32 : 4],
)
@cuda.jit
def copies_under_a_guard(x, y):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    for i in range(4):
        chunk = t + 24 * i
        if t < 24 and chunk < 64:
            cp_async_16(tile, 4 * chunk, x, 4 * chunk, True)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    y[t] = tile[4 * t]


@right(
    "some lanes copy, the others store zeros while those copies are on their way",
    lambda: (noise(256), zeros(64)),
    lambda x, y: np.where(np.arange(64) < 40, x[::4], 0),
    block=64,
)
@cuda.jit
def copies_beside_stores(x, y):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    if t < 40:
        cp_async_16(tile, 4 * t, x, 4 * t, True)
    else:
        tile[4 * t] = 0
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    y[t] = tile[4 * t]


@right(
    "what a thread has copied or stored itself, it may read after its wait, without a barrier",
    lambda: (noise(256), zeros(64)),
    lambda x, y: np.where(np.arange(64) < 8, x[::4], 0),
    block=64,
)
@cuda.jit
def own_elements_copied_or_stored(x, y):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    if t < 8:
        cp_async_16(tile, 4 * t, x, 4 * t, True)
    if t >= 8:
        tile[4 * t] = 0
    cp_async_commit()
    cp_async_wait(0)
    y[t] = tile[4 * t]


@right(
    "one thread copies where the indices of the idle one would fall",
    lambda: (noise(8), zeros(8)),
    lambda x, y: x,
    block=2,
)
@cuda.jit
def copies_of_one_thread_alone(x, y):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    if t == 0:
        cp_async_16(tile, 4 * t, x, 4 * t, True)
        cp_async_16(tile, 4 * t + 4, x, 4 * t + 4, True)
        cp_async_commit()
        cp_async_wait(0)
        for i in range(8):
            y[i] = tile[i]


@right(
    "even lanes copy, commit and wait for their neighbours too, and a barrier tells them",
    lambda: (noise(256), zeros(64)),
    lambda x, y: x[::4],
    block=64,
)
@cuda.jit
def even_lanes_copy_for_odd_ones(x, y):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    if t % 2 == 0:
        cp_async_16(tile, 4 * t, x, 4 * t, True)
        cp_async_16(tile, 4 * t + 4, x, 4 * t + 4, True)
        cp_async_commit()
        cp_async_wait(0)
    cuda.syncthreads()
    y[t] = tile[4 * t]
