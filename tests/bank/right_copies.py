"""cp.async without a fault: copies, groups, waits, barriers."""

import numpy as np
from numba import cuda, float32

from numba_flash.ptx import cp_async_16, cp_async_commit, cp_async_wait

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
