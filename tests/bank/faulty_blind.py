"""Faulty kernels that were written without sight of the others, as a second opinion."""

import math

import numpy as np
from numba import cuda, float32, int32, uint16, uint64

from numba_flash.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    make_touch,
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

from .case import faulty

RNG = np.random.default_rng(0)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def halves(*shape):
    """Some bfloat16, as bit patterns."""
    return (f32(*shape).view(np.uint32) >> 16).astype(np.uint16)


@faulty(
    "the last warp adds as if its lanes ran in step, as taught before Volta",
    lambda: (f32(512), np.zeros(2, np.float32)),
    grid=2,
    block=256,
)
@cuda.jit
def tree_ends_in_step(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    step = 128
    while step > 32:
        if t < step:
            s[t] += s[t + step]
        cuda.syncthreads()
        step >>= 1
    if t < 32:
        s[t] += s[t + 32]
        s[t] += s[t + 16]  # fault: race
        s[t] += s[t + 8]  # fault: race
        s[t] += s[t + 4]  # fault: race
        s[t] += s[t + 2]  # fault: race
        s[t] += s[t + 1]  # fault: race
    if t == 0:
        out[cuda.blockIdx.x] = s[0]


@cuda.jit(device=True)
def reduce_with_one_scratch(v, scratch, take_max):
    lane = cuda.threadIdx.x & 31
    warp = cuda.threadIdx.x >> 5
    for d in (16, 8, 4, 2, 1):
        o = cuda.shfl_xor_sync(0xFFFFFFFF, v, d)
        v = max(v, o) if take_max else v + o
    if lane == 0:
        scratch[warp] = v  # fault: race
    cuda.syncthreads()
    r = scratch[0]  # fault: race
    for i in range(1, cuda.blockDim.x >> 5):
        r = max(r, scratch[i]) if take_max else r + scratch[i]  # fault: race
    return r


@faulty(
    "the second reduction refills the scratch while slow threads read the maximum",
    lambda: (f32(3, 128), np.zeros((3, 128), np.float32)),
    grid=3,
    block=128,
)
@cuda.jit
def softmax_with_one_scratch(x, y):
    scratch = cuda.shared.array(4, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    v = x[row, t]
    m = reduce_with_one_scratch(v, scratch, True)
    e = math.exp(v - m)
    y[row, t] = e / reduce_with_one_scratch(e, scratch, False)


@faulty(
    "a stage is refilled before the barrier that ends its reading",
    lambda: (f32(5 * 1024), np.zeros(256, np.float32), 5),
    grid=1,
    block=256,
)
@cuda.jit
def stage_refilled_a_barrier_too_early(K, out, n_tiles):
    sK = cuda.shared.array(2048, float32)
    t = cuda.threadIdx.x
    acc = float32(0)
    cp_async_16(sK, 4 * t, K, 4 * t, True)
    cp_async_commit()
    for tile in range(n_tiles):
        now, nxt = tile & 1, (tile + 1) & 1
        if tile + 1 < n_tiles:
            cp_async_16(sK, 1024 * nxt + 4 * t, K, 1024 * (tile + 1) + 4 * t, True)  # fault: race
        cp_async_commit()
        cp_async_wait(1)
        cuda.syncthreads()
        for i in range(4):
            acc += sK[1024 * now + (4 * t + 16 + i) % 1024]  # fault: race
    out[t] = acc


@faulty(
    "counting begins before all bins are cleared",
    lambda: (RNG.integers(0, 64, 2000).astype(np.int32), np.zeros(64, np.int32)),
    grid=2,
    block=128,
)
@cuda.jit
def histogram_cleared_without_barrier(x, hist):
    h = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    if t < 64:
        h[t] = 0  # fault: race
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(h, x[i] & 63, 1)  # fault: race
    cuda.syncthreads()
    if t < 64:
        cuda.atomic.add(hist, t, h[t])


@faulty(
    "the parts of a long sum add to one element of C",
    lambda: (f32(32, 32), f32(32, 32), np.zeros((32, 32), np.float32)),
    grid=(2, 2, 2),
    block=(16, 16),
)
@cuda.jit
def split_k_adds_without_atomics(A, B, C):
    i = cuda.blockIdx.x * 16 + cuda.threadIdx.y
    j = cuda.blockIdx.y * 16 + cuda.threadIdx.x
    chunk = A.shape[1] // cuda.gridDim.z
    acc = float32(0)
    for k in range(cuda.blockIdx.z * chunk, (cuda.blockIdx.z + 1) * chunk):
        acc += A[i, k] * B[k, j]
    C[i, j] += acc  # fault: race


@faulty(
    "an exclusive scan shifts its result by one, past the end",
    lambda: (f32(256), np.zeros(256, np.float32), np.zeros(2, np.float32)),
    grid=2,
    block=128,
)
@cuda.jit
def scan_writes_one_past(x, y, totals):
    s = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    d = 1
    while d < 128:
        add = s[t - d] if t >= d else float32(0)
        cuda.syncthreads()
        s[t] += add
        cuda.syncthreads()
        d *= 2
    y[cuda.grid(1) + 1] = s[t]  # fault: out-of-bounds
    if t == 127:
        totals[cuda.blockIdx.x] = s[t]


@faulty(
    "the tail of V is never filled, since P is zero there",
    lambda: (f32(32, 20), f32(20, 16), np.zeros((32, 16), np.float32), 20),
    grid=1,
    block=32,
)
@cuda.jit
def tail_of_v_left_out(S, V, O, n):
    sV = cuda.shared.array((32, 16), float32)
    sP = cuda.shared.array((32, 33), float32)
    t = cuda.threadIdx.x
    acc = cuda.local.array(16, float32)
    for x in range(16):
        acc[x] = 0
    for tile in range((n + 31) // 32):
        key = 32 * tile + t
        if key < n:
            for x in range(16):
                sV[t, x] = V[key, x]
        for r in range(32):
            sP[r, t] = math.exp(S[r, key]) if key < n else float32(0)
        cuda.syncthreads()
        for k in range(32):
            for x in range(16):
                acc[x] += sP[t, k] * sV[k, x]  # fault: uninitialised-read
        cuda.syncthreads()
    for x in range(16):
        O[t, x] = acc[x]


@faulty(
    "a row that is done leaves the loop that holds the barriers",
    lambda: (
        f32(256),
        np.where(np.arange(64) == 63, 64, 256).astype(np.int32),
        np.zeros(64, np.float32),
    ),
    grid=1,
    block=64,
)
@cuda.jit
def short_row_breaks_out(x, lengths, out):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    row = cuda.grid(1)
    total = float32(0)
    for tile in range(4):
        if tile * 64 >= lengths[row]:
            break
        s[t] = x[tile * 64 + t]
        cuda.syncthreads()  # fault: barrier-divergence
        for i in range(64):
            if tile * 64 + i < lengths[row]:
                total += s[i]
        cuda.syncthreads()  # fault: barrier-divergence
    out[row] = total


@faulty(
    "the producer waits for the first release of a stage that is empty",
    lambda: (TensorMap(f32(96, 32), (32, 16), swizzled=False), np.zeros(32, np.float32), 6),
    grid=1,
    block=64,
)
@cuda.jit
def ring_begins_with_the_wrong_parity(x_map, out, n_tiles):
    ring = cuda.shared.array(2 * 512, float32, alignment=128)
    bars = cuda.shared.array(4, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        for s in range(2):
            mbarrier_init(bars, s, 1)
            mbarrier_init(bars, 2 + s, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t >= 32:
        if t == 32:
            for tile in range(n_tiles):
                s, phase = tile % 2, (tile // 2) & 1
                mbarrier_wait(bars, 2 + s, phase)  # fault: deadlock
                mbarrier_arrive_expect_tx(bars, s, 2048)
                tma_load_2d(ring, 512 * s, x_map, 0, 16 * tile, bars, s)
    else:
        acc = float32(0)
        for tile in range(n_tiles):
            s, phase = tile % 2, (tile // 2) & 1
            mbarrier_wait(bars, s, phase)  # fault: deadlock
            for i in range(16):
                acc += ring[512 * s + 32 * i + t]
            cuda.syncwarp()
            if t == 0:
                mbarrier_arrive(bars, 2 + s)
        out[t] = acc


@faulty(
    "without a commit in the last round, one group less is waited for",
    lambda: (f32(3 * 1024), np.zeros(256, np.float32), 3),
    grid=1,
    block=256,
)
@cuda.jit
def last_round_waits_for_too_little(K, out, n_tiles):
    sK = cuda.shared.array(2048, float32)
    t = cuda.threadIdx.x
    acc = float32(0)
    cp_async_16(sK, 4 * t, K, 4 * t, True)
    cp_async_commit()
    for tile in range(n_tiles):
        now, nxt = tile & 1, (tile + 1) & 1
        if tile + 1 < n_tiles:
            cp_async_16(sK, 1024 * nxt + 4 * t, K, 1024 * (tile + 1) + 4 * t, True)
            cp_async_commit()
        cp_async_wait(1)
        cuda.syncthreads()
        for i in range(4):
            acc += sK[1024 * now + (4 * t + 16 + i) % 1024]  # fault: missing-wait
        cuda.syncthreads()
    out[t] = acc


@faulty(
    "math.sqrt of an integer is a double, and so is all that it touches",
    lambda: (f32(32, 16), f32(32, 16), np.zeros((32, 32), np.float32)),
    grid=(2, 2),
    block=(16, 16),
)
@cuda.jit
def scale_from_the_square_root_of_an_integer(Q, K, S):
    i, j = cuda.grid(2)
    acc = float32(0)
    for x in range(Q.shape[1]):
        acc += Q[i, x] * K[j, x]
    scale = 1 / math.sqrt(Q.shape[1])  # fault: float64
    S[i, j] = acc * scale  # fault: float64


qk = make_wgmma(n=64, k=64)
touch = make_touch(32)


@faulty(
    "two products are in flight, and the wait covers the first",
    lambda: (
        TensorMap(halves(64, 64), (64, 64)),
        TensorMap(halves(128, 64), (64, 64)),
        np.zeros((64, 128), np.float32),
    ),
    grid=1,
    block=128,
)
@cuda.jit
def second_product_read_too_early(a_map, b_map, C):
    s = cuda.shared.array(3 * 4096, uint16, alignment=1024)
    bars = cuda.shared.array(1, uint64)
    one = cuda.local.array(32, float32)
    two = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(bars, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(bars, 0, 3 * 8192)
        tma_load_2d(s, 0, a_map, 0, 0, bars, 0)
        tma_load_2d(s, 4096, b_map, 0, 0, bars, 0)
        tma_load_2d(s, 8192, b_map, 0, 64, bars, 0)
    mbarrier_wait(bars, 0, 0)
    wgmma_fence()
    qk(one, s, 0, s, 4096, False)
    wgmma_commit()
    qk(two, s, 0, s, 8192, False)
    wgmma_commit()
    wgmma_wait(1)
    touch(one)
    row = 16 * (t >> 5) + ((t & 31) >> 2)
    col = 2 * (t & 3)
    for i in range(32):
        C[row + 8 * (i >> 1 & 1), col + 8 * (i >> 2) + (i & 1)] = one[i]
    for i in range(32):
        C[row + 8 * (i >> 1 & 1), 64 + col + 8 * (i >> 2) + (i & 1)] = two[i]  # fault: missing-wait
    wgmma_wait(0)
