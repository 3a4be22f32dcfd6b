"""Tiles, strides, views and types without a fault."""

import math

import numpy as np
from numba import cuda, float32, float64, int32, types, uint8, uint32

from numba_flash.emulator import empty

from .case import cell, noise, ramp, right, zeros

float16 = types.float16


@right(
    "a stride of the whole grid: each element has one thread",
    lambda: (ramp(1000),),
    lambda x: 2 * x + 1,
    grid=3,
    block=64,
)
@cuda.jit
def grid_stride_loop(x):
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        x[i] = float32(2) * x[i] + float32(1)


@right(
    "a transpose by way of a padded tile, with both tails guarded",
    lambda: (noise(40, 24), zeros(24, 40)),
    lambda x, out: x.T,
    grid=(2, 3),
    block=(16, 16),
)
@cuda.jit
def transpose_by_a_padded_tile(x, out):
    tile = cuda.shared.array((16, 17), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.blockIdx.x * 16 + tx, cuda.blockIdx.y * 16 + ty
    if row < x.shape[0] and column < x.shape[1]:
        tile[ty, tx] = x[row, column]
    cuda.syncthreads()
    column, row = cuda.blockIdx.y * 16 + tx, cuda.blockIdx.x * 16 + ty
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = tile[tx, ty]


@right(
    "matrix product in tiles, barriers before and after the use, zeros beyond the edges",
    lambda: (noise(20, 27), noise(27, 13), zeros(20, 13)),
    lambda a, b, out: a @ b,
    grid=(2, 3),
    block=(8, 8),
    rtol=1e-5,
)
@cuda.jit
def matmul_with_tails(a, b, out):
    a_tile = cuda.shared.array((8, 8), float32)
    b_tile = cuda.shared.array((8, 8), float32)
    column, row = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    acc = float32(0)
    for k in range(0, a.shape[1], 8):
        a_tile[y, x] = a[row, k + x] if row < a.shape[0] and k + x < a.shape[1] else float32(0)
        inside = k + y < b.shape[0] and column < b.shape[1]
        b_tile[y, x] = b[k + y, column] if inside else float32(0)
        cuda.syncthreads()
        for j in range(8):
            acc += a_tile[y, j] * b_tile[j, x]
        cuda.syncthreads()
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = acc


@right(
    "two buffers and one barrier a turn: the next tile goes where nobody reads any more",
    lambda: (noise(6, 64), zeros(64)),
    lambda x, out: np.roll(x, -1, axis=1).sum(axis=0),
    block=64,
    rtol=1e-5,
)
@cuda.jit
def double_buffer_with_one_barrier(x, out):
    tile = cuda.shared.array((2, 64), float32)
    t = cuda.threadIdx.x
    total = float32(0)
    tile[0, t] = x[0, t]
    for step in range(x.shape[0]):
        cuda.syncthreads()
        if step + 1 < x.shape[0]:
            tile[(step + 1) % 2, t] = x[step + 1, t]
        total += tile[step % 2, (t + 1) % 64]
    out[t] = total


@right(
    "threads beyond the end leave before a barrier, which sm_70 and later do not mind",
    lambda: (ramp(100), zeros(100)),
    lambda x, out: np.concatenate([x[:64][::-1], x[64:][::-1]]),
    grid=2,
    block=64,
)
@cuda.jit
def return_before_the_barrier(x, out):
    tile = cuda.shared.array(64, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    if i >= x.shape[0]:
        return
    tile[t] = x[i]
    cuda.syncthreads()
    last = min(cuda.blockDim.x, x.shape[0] - cuda.blockIdx.x * cuda.blockDim.x) - 1
    out[i] = tile[last - t]


@right(
    "whoever finds something writes the same word into one cell",
    lambda: (noise(128), np.zeros(1, np.int32)),
    lambda x, out: 1,
    grid=2,
    block=64,
)
@cuda.jit
def all_raise_the_same_flag(x, out):
    found = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()
    if x[cuda.grid(1)] > float32(1):
        found[0] = 1
    cuda.syncthreads()
    if cuda.threadIdx.x == 0 and found[0] == 1:
        out[0] = 1


@right(
    "two blocks write the two halves of one array, each backwards into its own",
    lambda: (ramp(128), empty(128)),
    lambda x, out: np.concatenate([x[:64][::-1], x[64:][::-1]]),
    grid=2,
    block=64,
)
@cuda.jit
def two_halves_of_one_array(x, out):
    first = cuda.blockIdx.x * 64
    out[first + 63 - cuda.threadIdx.x] = x[first + cuda.threadIdx.x]


@right(
    "each thread reads and writes its own element, in shared memory and in global",
    lambda: (ramp(64),),
    lambda x: (2 * x) ** 2,
    block=64,
)
@cuda.jit
def own_elements_need_no_barrier(x):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    tile[t] += tile[t]
    tile[t] *= tile[t]
    x[t] = tile[t]


@right(
    "one dynamic buffer, counted in floats here and in integers behind them",
    lambda: (ramp(32), np.arange(32, dtype=np.int32)[::-1].copy(), zeros(32)),
    lambda x, order, out: x[order],
    shared_bytes=256,
)
@cuda.jit
def dynamic_memory_of_two_types(x, order, out):
    floats = cuda.shared.array(0, float32)
    integers = cuda.shared.array(0, int32)
    t = cuda.threadIdx.x
    floats[t] = x[t]
    integers[32 + t] = order[t]
    cuda.syncthreads()
    out[t] = floats[integers[32 + (t ^ 1) ^ 1]]


@right(
    "the same bytes as words and as single bytes, with a barrier between",
    lambda: (np.arange(32, dtype=np.uint32) * 0x01020304, np.zeros(32, np.uint32)),
    lambda words, out: words.view(np.uint8).reshape(32, 4).sum(axis=1),
    shared_bytes=128,
)
@cuda.jit
def words_read_as_bytes(words, out):
    as_words = cuda.shared.array(0, uint32)
    as_bytes = cuda.shared.array(0, uint8)
    t = cuda.threadIdx.x
    as_words[31 - t] = words[31 - t]
    cuda.syncthreads()
    total = uint32(0)
    for b in range(4):
        total += uint32(as_bytes[4 * t + b])
    out[t] = total


@right(
    "two branches of one warp work in two arrays, and meet at a barrier",
    lambda: (ramp(64), zeros(64)),
    lambda x, out: np.where(np.arange(64) % 2, -x[::-1], x[::-1]),
    block=64,
)
@cuda.jit
def branches_with_arrays_of_their_own(x, out):
    even = cuda.shared.array(32, float32)
    odd = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    if t % 2 == 0:
        even[t // 2] = x[t]
    else:
        odd[t // 2] = x[t]
    cuda.syncthreads()
    other = 63 - t
    out[t] = even[other // 2] if other % 2 == 0 else odd[other // 2]
    if t % 2 == 1:
        out[t] = -out[t]


@right(
    "float64 arrays and float64 arithmetic, on purpose",
    lambda: (noise(32, 8, dtype=np.float64), zeros(32, dtype=np.float64)),
    lambda x, out: 0.5 * np.sqrt((x * x).sum(axis=1)),
    rtol=1e-13,
)
@cuda.jit
def float64_on_purpose(x, out):
    i = cuda.threadIdx.x
    acc = 0.0
    for k in range(8):
        acc += x[i, k] * x[i, k]
    out[i] = 0.5 * acc**0.5


@right(
    "float32 numbers, summed in float64 because the author says so",
    lambda: (noise(32, 8), zeros(32)),
    lambda x, out: x.astype(np.float64).sum(axis=1),
    rtol=1e-6,
)
@cuda.jit
def float64_sum_that_is_asked_for(x, out):
    i = cuda.threadIdx.x
    acc = float64(0)
    for k in range(8):
        acc += float64(x[i, k])
    out[i] = float32(acc)


@right(
    "integers, indices and float32 constants leave float32 alone",
    lambda: (noise(32, 8), np.float32(0.125), zeros(32)),
    lambda x, scale, out: scale * x.mean(axis=1) + np.arange(32) // 2,
    rtol=1e-5,
)
@cuda.jit
def float32_throughout(x, scale, out):
    i = cuda.threadIdx.x
    total = float32(0)
    for k in range(x.shape[1]):
        total += x[i, k]
    out[i] = scale * total / float32(x.shape[1]) + float32(i // 2)


@right(
    "constants are cast before they meet a float32, even those that module math brings",
    lambda: (noise(32, 16), zeros(32)),
    lambda x, out: np.log(np.exp(x / 4 - 0.5).sum(axis=1)) + np.pi / 4,
    rtol=1e-5,
)
@cuda.jit
def constants_cast_first(x, out):
    i = cuda.threadIdx.x
    softmax_scale = float32(1) / math.sqrt(float32(x.shape[1]))
    row_max, row_sum = float32(-math.inf), float32(0)
    for j in range(x.shape[1]):
        score = x[i, j] * softmax_scale - float32(0.5)
        new_max = max(row_max, score)
        row_sum = row_sum * math.exp(row_max - new_max) + math.exp(score - new_max)
        row_max = new_max
    out[i] = row_max + math.log(row_sum) + float32(math.pi / 4)


@right(
    "16-bit storage, 32-bit arithmetic",
    lambda: (noise(32, 8, dtype=np.float16), zeros(32, dtype=np.float16)),
    lambda x, out: x.astype(np.float32).sum(axis=1).astype(np.float16),
    rtol=2e-3,
)
@cuda.jit
def half_precision_storage(x, out):
    tile = cuda.shared.array((32, 8), float16)
    i = cuda.threadIdx.x
    for k in range(8):
        tile[i, k] = x[i, k]
    acc = float32(0)
    for k in range(8):
        acc += float32(tile[i, k])
    out[i] = float16(acc)


def make_stencil(radius):
    width = 64 + 2 * radius

    @cuda.jit
    def stencil_with_halo(x, out):
        tile = cuda.shared.array(width, float32)
        t, i = cuda.threadIdx.x, cuda.grid(1)
        for c in range(t, width, cuda.blockDim.x):
            at = cuda.blockIdx.x * cuda.blockDim.x + c - radius
            tile[c] = x[at] if 0 <= at < x.shape[0] else float32(0)
        cuda.syncthreads()
        total = float32(0)
        for c in range(2 * radius + 1):
            total += tile[t + c]
        if i < x.shape[0]:
            out[i] = total

    return stencil_with_halo


right(
    "the halo is loaded in turns, zero beyond the ends",
    lambda: (ramp(150), zeros(150)),
    lambda x, out: np.convolve(x, np.ones(7), "same"),
    grid=3,
    block=64,
)(make_stencil(3))

CELL = """\
from numba import cuda, float32


@cuda.jit
def softmax_of_rows(x, out):
    tile = cuda.shared.array((8, 32), float32)
    c, r = cuda.threadIdx.x, cuda.threadIdx.y
    score = x[r, c]
    tile[r, c] = score
    cuda.syncthreads()
    largest = tile[r, 0]
    for j in range(1, 32):
        largest = max(largest, tile[r, j])
    cuda.syncthreads()
    tile[r, c] = cuda.libdevice.expf(score - largest)
    cuda.syncthreads()
    total = float32(0)
    for j in range(32):
        total += tile[r, j]
    out[r, c] = tile[r, c] / total
"""

right(
    "a barrier on both sides of every change of hands (notebook cell)",
    lambda: (noise(8, 32), zeros(8, 32)),
    lambda x, out: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True),
    block=(32, 8),
    rtol=1e-5,
)(cell(21, CELL)["softmax_of_rows"])


@right(
    "blocks skip or run a barrier as a whole, each by its own number of turns",
    lambda: (noise(4, 64), np.array([0, 3, 1, 4], np.int32), zeros(4, 64)),
    lambda x, turns, out: np.stack(
        [np.roll(row, -int(n)) for row, n in zip(x, turns, strict=True)]
    ),
    grid=4,
    block=64,
)
@cuda.jit
def turns_of_the_block(x, turns, out):
    tile = cuda.shared.array(64, float32)
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    value = x[b, t]
    for _ in range(turns[b]):
        tile[t] = value
        cuda.syncthreads()
        value = tile[(t + 1) % 64]
        cuda.syncthreads()
    out[b, t] = value


@right(
    "within a block, global memory is ordered by the same barrier",
    lambda: (ramp(128), zeros(128), zeros(128)),
    lambda x, scratch, out: (x * x).reshape(2, 64)[:, ::-1].ravel(),
    grid=2,
    block=64,
)
@cuda.jit
def exchange_through_global_memory_with_barrier(x, scratch, out):
    t, first = cuda.threadIdx.x, cuda.blockIdx.x * cuda.blockDim.x
    scratch[first + t] = x[first + t] * x[first + t]
    cuda.syncthreads()
    out[first + t] = scratch[first + 63 - t]


@right(
    "a queue whose end moves by an atomic: every thread gets a place of its own",
    lambda: (ramp(64), np.zeros(1, np.int32), np.zeros(64, np.int32)),
    lambda x, count, taken: (np.array([32], np.int32), np.repeat([1, 0], 32)),
    grid=2,
)
@cuda.jit
def queue_with_atomics(x, count, taken):
    i = cuda.grid(1)
    if i % 2 == 0:
        place = cuda.atomic.add(count, 0, 1)
        taken[place] = 1


@right(
    "each half of a warp names itself, and exchanges within itself",
    lambda: (ramp(32), zeros(32)),
    lambda x, out: np.concatenate([x[:16][::-1], -x[16:][::-1]]),
)
@cuda.jit
def halves_of_a_warp_synchronised(x, out):
    tile = cuda.shared.array(32, float32)
    lane = cuda.threadIdx.x
    tile[lane] = x[lane]
    if lane < 16:
        cuda.syncwarp(0x0000FFFF)
        out[lane] = tile[15 - lane]
    else:
        cuda.syncwarp(0xFFFF0000)
        out[lane] = -tile[47 - lane]


@right(
    "a row of 32 threads is a warp, so a barrier of the warp is enough for it",
    lambda: (noise(4, 32), zeros(4, 32)),
    lambda x, out: x[:, ::-1],
    block=(32, 4),
)
@cuda.jit
def a_warp_per_row(x, out):
    tile = cuda.shared.array((4, 32), float32)
    lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
    tile[warp, lane] = x[warp, lane]
    cuda.syncwarp()
    out[warp, lane] = tile[warp, 31 - lane]


@right(
    "bytes next to each other are different places, for all that they share a word",
    lambda: (np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)),
    lambda x, out: x[::-1] + 1,
    block=128,
)
@cuda.jit
def bytes_of_one_word(x, out):
    tile = cuda.shared.array(128, uint8)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    tile[t] += uint8(1)
    cuda.syncthreads()
    out[t] = tile[127 - t]


@right(
    "everybody reads one cell, in shared memory and in global",
    lambda: (ramp(64) + 1, zeros(64)),
    lambda x, out: x / x[0] + x[-1],
    grid=2,
)
@cuda.jit
def all_read_one_cell(x, out):
    last = cuda.shared.array(1, float32)
    i = cuda.grid(1)
    if cuda.threadIdx.x == 31:
        last[0] = x[x.shape[0] - 1]
    cuda.syncthreads()
    out[i] = x[i] / x[0] + last[0]


@right(
    "an atomic maximum, read after a barrier",
    lambda: (np.arange(64, dtype=np.int32) * 37 % 64, np.zeros(64, np.int32)),
    lambda x, out: np.full(64, 63),
    block=64,
)
@cuda.jit
def maximum_read_when_all_have_come(x, out):
    best = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t == 0:
        best[0] = 0
    cuda.syncthreads()
    cuda.atomic.max(best, 0, x[t])
    cuda.syncthreads()
    out[t] = best[0]


@right(
    "blocks read rows that their neighbours read too, and write rows of their own",
    lambda: (noise(66, 4), zeros(64, 4)),
    lambda x, out: x[:-2] + x[1:-1] + x[2:],
    grid=4,
    block=(4, 16),
    rtol=1e-6,
)
@cuda.jit
def overlapping_reads_disjoint_writes(x, out):
    c, r = cuda.threadIdx.x, cuda.blockIdx.x * 16 + cuda.threadIdx.y
    out[r, c] = x[r, c] + x[r + 1, c] + x[r + 2, c]


@right(
    "odd-even sort until a turn changes nothing; the flag is read and reset a barrier apart",
    lambda: (noise(3, 128),),
    lambda x: np.sort(x, axis=1),
    grid=3,
    block=64,
)
@cuda.jit
def sort_until_settled(x):
    tile = cuda.shared.array(128, float32)
    changed = cuda.shared.array(1, int32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    tile[t] = x[b, t]
    tile[t + 64] = x[b, t + 64]
    while True:
        cuda.syncthreads()
        if t == 0:
            changed[0] = 0
        cuda.syncthreads()
        for phase in range(2):
            i = 2 * t + phase
            if i + 1 < 128 and tile[i] > tile[i + 1]:
                tile[i], tile[i + 1] = tile[i + 1], tile[i]
                changed[0] = 1
            cuda.syncthreads()
        if changed[0] == 0:
            break
    x[b, t] = tile[t]
    x[b, t + 64] = tile[t + 64]


@right(
    "each thread has a slice of shared memory to itself",
    lambda: (noise(64, 4), zeros(64, 4)),
    lambda x, out: np.sort(x, axis=1),
    block=64,
)
@cuda.jit
def slices_of_their_own(x, out):
    tile = cuda.shared.array((64, 4), float32)
    t = cuda.threadIdx.x
    mine = tile[t]
    for c in range(4):
        mine[c] = x[t, c]
        for k in range(c, 0, -1):
            if mine[k] < mine[k - 1]:
                mine[k], mine[k - 1] = mine[k - 1], mine[k]
    for c in range(4):
        out[t, c] = mine[c]


@right(
    "more blocks than a card runs at once, each with rows of its own and a row they all read",
    lambda: (noise(300, 64), zeros(300, 64)),
    lambda x, out: x[:, ::-1] - x[0],
    grid=300,
    block=64,
    rtol=1e-6,
)
@cuda.jit
def hundreds_of_blocks(x, out):
    tile = cuda.shared.array(64, float32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    tile[t] = x[b, t]
    cuda.syncthreads()
    out[b, t] = tile[63 - t] - x[0, t]


@right(
    "bitonic sort: whom a thread meets changes at every step, with a barrier between",
    lambda: (noise(128), zeros(128)),
    lambda x, out: np.sort(x),
    block=128,
)
@cuda.jit
def bitonic_sort(x, out):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    size = 2
    while size <= 128:
        distance = size // 2
        while distance > 0:
            other = t ^ distance
            if other > t and (tile[t] > tile[other]) == (t & size == 0):
                tile[t], tile[other] = tile[other], tile[t]
            cuda.syncthreads()
            distance //= 2
        size *= 2
    out[t] = tile[t]
