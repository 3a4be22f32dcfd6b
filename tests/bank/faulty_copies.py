"""cp.async: copies whose result is used before it is waited for."""

import numpy as np
from numba import cuda, float32, uint16, uint32

from numba_flash.ptx import cp_async_16, cp_async_commit, cp_async_wait, ldmatrix_x4

from .case import faulty, noise, ramp, zeros


@faulty(
    "a barrier waits for threads, not for their copies",
    lambda: (ramp(128), zeros(128)),
)
@cuda.jit
def copy_without_wait(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(tile, 4 * t, x, 4 * t, True)
    cp_async_commit()
    cuda.syncthreads()
    for i in range(4):
        out[32 * i + t] = tile[127 - 32 * i - t]  # fault: missing-wait


@faulty(
    "wait(1) leaves the younger of two groups in flight, and the younger one is read",
    lambda: (ramp(128), ramp(128), zeros(128)),
)
@cuda.jit
def wait_leaves_one_group_too_many(q, k, out):
    q_tile = cuda.shared.array(128, float32)
    k_tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(q_tile, 4 * t, q, 4 * t, True)
    cp_async_commit()
    cp_async_16(k_tile, 4 * t, k, 4 * t, True)
    cp_async_commit()
    cp_async_wait(1)
    cuda.syncthreads()
    for i in range(4):
        value = q_tile[32 * i + t]
        out[32 * i + t] = value * k_tile[32 * i + t]  # fault: missing-wait


@faulty(
    "a copy that was not committed belongs to no group, and no wait is for it",
    lambda: (ramp(128), zeros(32)),
)
@cuda.jit
def wait_without_commit(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(tile, 4 * t, x, 4 * t, True)
    cp_async_wait(0)
    cuda.syncthreads()
    out[t] = tile[4 * t]  # fault: missing-wait


@faulty(
    "each thread has waited for its own copies, and reads another's",
    lambda: (ramp(128), zeros(32)),
)
@cuda.jit
def wait_without_barrier(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(tile, 4 * t, x, 4 * t, True)  # fault: race, missing-wait
    cp_async_commit()
    cp_async_wait(0)  # fault: race, missing-wait
    out[t] = tile[127 - 4 * t]  # fault: race, missing-wait


@faulty(
    "the last turn commits no group, so that wait(1) lets its own tile fly on",
    lambda: (noise(4, 128).ravel(), zeros(32)),
)
@cuda.jit
def last_tile_not_waited_for(x, out):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    cp_async_16(tile, 4 * t, x, 4 * t, True)
    cp_async_commit()
    for step in range(4):
        if step + 1 < 4:
            stage = (step + 1) % 2
            cp_async_16(tile, stage * 128 + 4 * t, x, (step + 1) * 128 + 4 * t, True)
            cp_async_commit()
        cp_async_wait(1)
        cuda.syncthreads()
        for i in range(4):
            total += tile[step % 2 * 128 + (4 * t + 4 + i) % 128]  # fault: missing-wait
        cuda.syncthreads()
    out[t] = total


@faulty(
    "the copy for the next turn starts while others still read the tile it goes to",
    lambda: (noise(4, 256).ravel(), zeros(64)),
    block=64,
)
@cuda.jit
def copy_into_the_tile_in_use(x, out):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    cp_async_16(tile, 4 * t, x, 4 * t, True)
    cp_async_commit()
    for step in range(4):
        cp_async_wait(0)
        cuda.syncthreads()
        for i in range(4):
            total += tile[(4 * t + 4 + i) % 256]  # fault: race
        if step + 1 < 4:
            cp_async_16(tile, 4 * t, x, (step + 1) * 256 + 4 * t, True)  # fault: race
            cp_async_commit()
    out[t] = total


@faulty(
    "ldmatrix takes what cp.async has not brought yet",
    lambda: (np.arange(256, dtype=np.uint16), np.zeros((32, 4), np.uint32)),
)
@cuda.jit
def fragments_of_a_tile_on_its_way(x, out):
    tile = cuda.shared.array(256, uint16, 16)
    fragment = cuda.local.array(4, uint32)
    lane = cuda.threadIdx.x
    cp_async_16(tile, 8 * lane, x, 8 * lane, True)
    cp_async_commit()
    cuda.syncwarp()
    ldmatrix_x4(fragment, 0, tile, 8 * lane)  # fault: missing-wait
    for r in range(4):
        out[lane, r] = fragment[r]
    cp_async_wait(0)


@faulty(
    "16 bytes at a time, from one element behind a multiple of four",
    lambda: (ramp(129), zeros(32)),
)
@cuda.jit
def copy_from_between_two_vectors(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(tile, 4 * t, x, 4 * t + 1, True)  # fault: out-of-bounds
    cp_async_commit()
    cp_async_wait(0)
    out[t] = tile[4 * t]


@faulty(
    "the tail is copied whole, where the sequence ends after 100 elements",
    lambda: (ramp(100), zeros(32)),
)
@cuda.jit
def copy_past_the_sequence(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    cp_async_16(tile, 4 * t, x, 4 * t, True)  # fault: out-of-bounds
    cp_async_commit()
    cp_async_wait(0)
    if 4 * t < x.shape[0]:
        out[t] = tile[4 * t]
