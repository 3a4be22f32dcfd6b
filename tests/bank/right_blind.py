"""Right kernels that were written without sight of the others: unusual, and legal."""

import math

import ml_dtypes
import numpy as np
from numba import cuda, float32, float64, int32, uint16, uint32, uint64

from numba_flash.emulator import empty
from numba_flash.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    make_touch,
    make_wgmma,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
    tma_load_2d,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_flash.tensor_map import TensorMap

from .case import right

RNG = np.random.default_rng(1)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def unwritten(*shape):
    return empty(shape, np.float32)


def tiles(rows):
    """Rows of 64 bfloat16 numbers, fetched 64 rows at a time."""
    return TensorMap(f32(rows, 64).astype(ml_dtypes.bfloat16).view(np.uint16), (64, 64))


def values(tensor_map):
    return tensor_map.array.view(ml_dtypes.bfloat16).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def lengths_and_values():
    """Small integers, whose sums are exact."""
    lengths = RNG.integers(0, 257, (3, 64)).astype(np.int32)
    lengths[1] = 5
    return RNG.integers(-8, 8, 256).astype(np.float32), lengths, unwritten(3, 64)


def centred(x, mean, y):
    m = x.astype(np.float64).mean(1).astype(np.float32)
    return m, (x - m[:, None]) * np.arange(33, dtype=np.float32) / np.float32(33)


def compacted(x, out, count):
    kept = x[x > 0]
    rest = np.full(128 - kept.size, -1, np.float32)
    return np.concatenate([kept, rest]), np.array([kept.size])


@cuda.jit(device=True)
def reduce_in_turns(v, scratch, side, take_max):
    for d in (16, 8, 4, 2, 1):
        o = cuda.shfl_xor_sync(0xFFFFFFFF, v, d)
        v = max(v, o) if take_max else v + o
    if cuda.threadIdx.x & 31 == 0:
        scratch[side, cuda.threadIdx.x >> 5] = v
    cuda.syncthreads()
    r = scratch[side, 0]
    for i in range(1, 4):
        r = max(r, scratch[side, i]) if take_max else r + scratch[side, i]
    return r


@right(
    "two block reductions in a row with one barrier each: the scratch alternates",
    lambda: (f32(7, 128), unwritten(7, 128)),
    lambda x, y: softmax(x),
    grid=2,
    block=128,
    rtol=1e-5,
)
@cuda.jit
def softmax_with_two_scratches(x, y):
    scratch = cuda.shared.array((2, 4), float32)
    t = cuda.threadIdx.x
    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):
        v = x[row, t]
        m = reduce_in_turns(v, scratch, 0, True)
        e = math.exp(v - m)
        y[row, t] = e / reduce_in_turns(e, scratch, 1, False)


@right(
    "transposes in place, swizzled, held together by syncwarp alone",
    lambda: (f32(6, 32, 32),),
    lambda x: x.transpose(0, 2, 1),
    grid=2,
    block=(32, 4),
)
@cuda.jit
def transposes_of_a_warp_each(x):
    s = cuda.shared.array((4, 32, 32), float32)
    lane, w = cuda.threadIdx.x, cuda.threadIdx.y
    m = cuda.blockIdx.x * 4 + w
    if m >= x.shape[0]:
        return
    for r in range(32):
        s[w, r, lane ^ r] = x[m, r, lane]
    cuda.syncwarp()
    for r in range(32):
        x[m, r, lane] = s[w, lane, r ^ lane]


@right(
    "the last block to finish sums what all have left, and resets the ticket",
    lambda: (f32(640), unwritten(10), np.zeros(1, np.int32), unwritten(1)),
    lambda x, partial, ticket, out: (np.zeros(1), x.sum().reshape(1)),
    grid=10,
    block=64,
    rtol=1e-4,
)
@cuda.jit
def last_block_adds_up_and_resets(x, partial, ticket, out):
    s = cuda.shared.array(64, float32)
    last = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    if t == 0:
        total = float32(0)
        for i in range(64):
            total += s[i]
        partial[cuda.blockIdx.x] = total
        cuda.threadfence()
        last[0] = cuda.atomic.add(ticket, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if last[0] and t == 0:
        cuda.threadfence()
        total = float32(0)
        for i in range(cuda.gridDim.x):
            total += partial[i]
        out[0] = total
        ticket[0] = 0


@right(
    "persistent blocks take their next tile from a counter",
    lambda: (f32(1000), unwritten(1000), np.zeros(1, np.int32)),
    lambda x, y, counter: (2 * x, np.array([19])),
    grid=3,
    block=64,
)
@cuda.jit
def blocks_draw_tiles_from_a_counter(x, y, counter):
    mine = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    while True:
        if t == 0:
            mine[0] = cuda.atomic.add(counter, 0, 1)
        cuda.syncthreads()
        tile = mine[0]
        cuda.syncthreads()
        if tile * 64 >= x.size:
            break
        i = tile * 64 + t
        if i < x.size:
            y[i] = float32(2) * x[i]


@right(
    "producer and consumer warps meet at named barriers, full and empty",
    lambda: (f32(7, 32), 7, unwritten(7, 32)),
    lambda x, n, y: 3 * x[:, ::-1],
    grid=1,
    block=96,
)
@cuda.jit
def two_buffers_between_named_barriers(x, n, y):
    buf = cuda.shared.array((2, 32), float32)
    warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    if warp == 0:
        for i in range(n):
            if i >= 2:
                named_barrier_sync(3 + (i & 1), 64)  # empty
            buf[i & 1, lane] = x[i, lane] * float32(3)
            named_barrier_arrive(1 + (i & 1), 64)  # full
    elif warp == 1:
        for i in range(n):
            named_barrier_sync(1 + (i & 1), 64)
            y[i, lane] = buf[i & 1, 31 - lane]
            if i + 2 < n:
                named_barrier_arrive(3 + (i & 1), 64)


qk = make_wgmma(n=64, k=64)
touch = make_touch(32)


@right(
    "two products in flight; an operand is refilled when its product has ended",
    lambda: (tiles(64), tiles(192), unwritten(64, 192)),
    lambda a_map, b_map, C: values(a_map) @ values(b_map).T,
    grid=1,
    block=128,
    rtol=1e-4,
)
@cuda.jit
def products_waited_for_one_by_one(a_map, b_map, C):
    s = cuda.shared.array(3 * 4096, uint16, alignment=1024)
    bars = cuda.shared.array(2, uint64)
    one = cuda.local.array(32, float32)
    two = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(bars, 0, 1)
        mbarrier_init(bars, 1, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(bars, 0, 3 * 8192)
        tma_load_2d(s, 0, a_map, 0, 0, bars, 0)
        tma_load_2d(s, 4096, b_map, 0, 0, bars, 0)
        tma_load_2d(s, 8192, b_map, 0, 64, bars, 0)
    mbarrier_wait(bars, 0, 0)
    row = 16 * (t >> 5) + ((t & 31) >> 2)
    col = 2 * (t & 3)
    wgmma_fence()
    qk(one, s, 0, s, 4096, False)
    wgmma_commit()
    qk(two, s, 0, s, 8192, False)
    wgmma_commit()
    wgmma_wait(1)
    touch(one)
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(bars, 1, 8192)
        tma_load_2d(s, 4096, b_map, 0, 128, bars, 1)
    for i in range(32):
        C[row + 8 * (i >> 1 & 1), col + 8 * (i >> 2) + (i & 1)] = one[i]
    mbarrier_wait(bars, 1, 0)
    touch(one)
    wgmma_fence()
    qk(one, s, 0, s, 4096, False)
    wgmma_commit()
    wgmma_wait(1)
    touch(two)
    for i in range(32):
        C[row + 8 * (i >> 1 & 1), 64 + col + 8 * (i >> 2) + (i & 1)] = two[i]
    wgmma_wait(0)
    touch(one)
    for i in range(32):
        C[row + 8 * (i >> 1 & 1), 128 + col + 8 * (i >> 2) + (i & 1)] = one[i]


@right(
    "two types side by side, then one over the other",
    lambda: (f32(96), RNG.permutation(96).astype(np.int32), 96, unwritten(96)),
    lambda x, idx, n, y: x[idx[::-1]] + 2 * np.arange(96, dtype=np.float32)[::-1],
    grid=1,
    block=96,
    shared_bytes=768,
)
@cuda.jit
def dynamic_memory_in_two_types(x, idx, n, y):
    values = cuda.shared.array(0, float32)
    keys = cuda.shared.array(0, int32)[n:]
    t = cuda.threadIdx.x
    values[t] = x[t]
    keys[t] = idx[t]
    cuda.syncthreads()
    v = values[keys[n - 1 - t]]
    cuda.syncthreads()
    whole = cuda.shared.array(0, int32)
    whole[t] = t
    whole[n + t] = 2 * t
    cuda.syncthreads()
    y[t] = v + float32(whole[n + (n - 1 - t)])


@right(
    "a thread reads what it has copied itself, after its wait; the tail is zeros",
    lambda: (f32(300), 300, unwritten(512)),
    lambda x, n, y: np.pad(x, (0, 212)),
    grid=1,
    block=64,
)
@cuda.jit
def own_copies_need_no_barrier(x, n, y):
    s = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    for half in range(2):
        at = 4 * (t + 64 * half)
        cp_async_16(s, at, x, at, at < n)
        cp_async_commit()
    for half in range(2):
        if half == 0:
            cp_async_wait(1)
        else:
            cp_async_commit()
            cp_async_wait(1)
        for i in range(4):
            y[4 * (t + 64 * half) + i] = s[4 * (t + 64 * half) + i]


@right(
    "barriers under conditions that a whole block agrees on",
    lengths_and_values,
    lambda x, lengths, out: np.concatenate([[0], x.cumsum()])[lengths],
    grid=3,
    block=64,
)
@cuda.jit
def barriers_on_conditions_of_the_block(x, lengths, out):
    s = cuda.shared.array(64, float32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    n = lengths[b, t]
    total = float32(0)
    done = 0
    while cuda.syncthreads_or(int32(done < n)):
        if b & 1:
            s[t] = x[done + 63 - t]
            cuda.syncthreads()
        else:
            s[63 - t] = x[done + t]
            cuda.syncthreads()
        for i in range(min(64, n - done)):
            total += s[63 - i]
        done += 64
        cuda.syncthreads()
    out[b, t] = total


@right(
    "a sum in double on purpose, and float32 everywhere else",
    lambda: (f32(40, 33), unwritten(40), unwritten(40, 33)),
    centred,
    grid=1,
    block=64,
    rtol=1e-5,
)
@cuda.jit
def mean_in_double_on_purpose(x, mean, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        total = float64(0)
        for k in range(x.shape[1]):
            total += float64(x[i, k])
        m = float32(total / float64(x.shape[1]))
        mean[i] = m
        for k in range(x.shape[1]):
            y[i, k] = (x[i, k] - m) * float32(k) / float32(x.shape[1])


@right(
    "ballots and popc, a scan of shuffles, syncwarp under a branch",
    lambda: (f32(128), np.full(128, -1, np.float32), np.zeros(1, np.int32)),
    compacted,
    grid=1,
    block=128,
)
@cuda.jit
def compaction_by_ballots(x, out, count):
    base = cuda.shared.array(33, int32)
    t = cuda.threadIdx.x
    lane, warp = t & 31, t >> 5
    keep = x[t] > 0
    votes = cuda.ballot_sync(0xFFFFFFFF, keep)
    before = cuda.popc(votes & ((1 << lane) - 1))
    if lane == 0:
        base[warp + 1] = cuda.popc(votes)
    cuda.syncthreads()
    if warp == 0:
        n = base[lane + 1] if lane < 4 else 0
        for d in (1, 2, 4, 8, 16):
            up = cuda.shfl_up_sync(0xFFFFFFFF, n, d)
            if lane >= d:
                n += up
        cuda.syncwarp()
        base[lane + 1] = n
        if lane == 0:
            base[0] = 0
    cuda.syncthreads()
    if keep:
        out[base[warp] + before] = x[t]
    if t == 0:
        count[0] = base[4]


@right(
    "a compare-and-swap loop in shared memory, then one atomic a block",
    lambda: (np.abs(f32(256)).view(np.uint32), np.zeros(1, np.uint32)),
    lambda x, out: x.max().reshape(1),
    grid=4,
    block=64,
)
@cuda.jit
def maximum_by_compare_and_swap(x, out):
    best = cuda.shared.array(1, uint32)
    t = cuda.threadIdx.x
    if t == 0:
        best[0] = 0
    cuda.syncthreads()
    v = x[cuda.grid(1)]
    seen = uint32(0)
    while v > seen:
        old = cuda.atomic.cas(best, 0, seen, v)
        if old == seen:
            break
        seen = old
    cuda.syncthreads()
    if t == 0:
        cuda.atomic.max(out, 0, best[0])
