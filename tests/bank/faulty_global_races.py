"""Races in global memory: within a block, and between blocks, which no barrier orders."""

import numpy as np
from numba import cuda, float32, int32

from .case import faulty, noise, ramp, zeros


@faulty(
    "every block adds to one number",
    lambda: (ramp(128), zeros(1)),
    grid=4,
    block=32,
)
@cuda.jit
def blocks_add_to_one_number(x, out):
    value = x[cuda.grid(1)]
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
    if cuda.threadIdx.x == 0:
        out[0] += value  # fault: race


@faulty(
    "tiles of 16 rows, one every 15: two blocks write one row",
    lambda: (noise(46, 8), zeros(46, 8)),
    grid=3,
    block=(8, 16),
)
@cuda.jit
def tiles_overlap_by_a_row(x, out):
    c = cuda.threadIdx.x
    row = cuda.blockIdx.x * 15 + cuda.threadIdx.y
    out[row, c] = x[row, c] * float32(cuda.blockIdx.x + 1)  # fault: race


@faulty(
    "right within a block, but the left neighbour of its first thread belongs to another block",
    lambda: (ramp(256),),
    grid=4,
    block=64,
)
@cuda.jit
def neighbour_block_writes_what_is_read(x):
    i = cuda.grid(1)
    left = x[i - 1] if i > 0 else float32(0)  # fault: race
    cuda.syncthreads()
    x[i] = float32(2) * left  # fault: race


@faulty(
    "global memory within a block wants a barrier as well",
    lambda: (ramp(64), zeros(64), zeros(64)),
    block=64,
)
@cuda.jit
def exchange_through_global_memory(x, scratch, out):
    t = cuda.threadIdx.x
    scratch[t] = x[t] * x[t]  # fault: race
    out[t] = scratch[63 - t]  # fault: race


@faulty(
    "a block a key tile: all of them add to the same rows of dQ",
    lambda: (noise(32, 64), noise(64, 8), zeros(32, 8)),
    grid=2,
    block=32,
)
@cuda.jit
def dq_summed_over_key_blocks(ds, k, dq):
    row = cuda.threadIdx.x
    first = cuda.blockIdx.x * 32
    for c in range(8):
        part = float32(0)
        for j in range(first, first + 32):
            part += ds[row, j] * k[j, c]
        dq[row, c] += part  # fault: race


@faulty(
    "compare and store are two steps; another thread may come between",
    lambda: (noise(128), zeros(1)),
    grid=2,
    block=64,
)
@cuda.jit
def maximum_without_atomics(x, out):
    i = cuda.grid(1)
    if x[i] > out[0]:  # fault: race
        out[0] = x[i]  # fault: race


@faulty(
    "a queue whose end is read and moved in two steps",
    lambda: (noise(64), np.zeros(1, np.int32), zeros(64)),
    block=64,
)
@cuda.jit
def queue_without_atomics(x, count, queue):
    t = cuda.threadIdx.x
    if x[t] > float32(0):
        end = count[0]  # fault: race
        count[0] = end + 1  # fault: race
        queue[end] = x[t]  # fault: race


@faulty(
    "block 0 clears the bins while the others count already",
    lambda: (np.arange(128, dtype=np.int32) % 8, np.zeros(8, np.int32)),
    grid=2,
    block=64,
)
@cuda.jit
def bins_cleared_while_others_count(values, bins):
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x < 8:
        bins[cuda.threadIdx.x] = 0  # fault: race
    cuda.syncthreads()
    cuda.atomic.add(bins, values[cuda.grid(1)], 1)  # fault: race


@faulty(
    "a stride of the block where the whole grid was meant: each block does everybody's work",
    lambda: (ramp(256),),
    grid=4,
    block=32,
)
@cuda.jit
def stride_of_the_block(x):
    for i in range(cuda.grid(1), x.shape[0], cuda.blockDim.x):
        x[i] += float32(1)  # fault: race


def shifted():
    buffer = ramp(97)
    return buffer[:-1], buffer[1:]


@faulty(
    "input and output are views of one buffer, one element apart",
    shifted,
    grid=3,
)
@cuda.jit
def shift_onto_itself(x, out):
    i = cuda.grid(1)
    out[i] = x[i]  # fault: race


@faulty(
    "the ticket says that the block is the last one, but no fence says that the sums have arrived",
    lambda: (ramp(128), zeros(4), np.zeros(1, np.int32), zeros(1)),
    grid=4,
)
@cuda.jit
def last_block_without_fence(x, partial, tickets, out):
    is_last = cuda.shared.array(1, int32)
    value = x[cuda.grid(1)]
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = value  # fault: race
        ticket = cuda.atomic.add(tickets, 0, 1)
        is_last[0] = ticket == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0] and cuda.threadIdx.x == 0:
        total = float32(0)
        for b in range(cuda.gridDim.x):
            total += partial[b]  # fault: race
        out[0] = total


@faulty(
    "thread 0 takes the ticket as soon as its own part is there, not its block's",
    lambda: (noise(4, 64), zeros(4, 64), np.zeros(1, np.int32), zeros(64)),
    grid=4,
    block=64,
)
@cuda.jit
def ticket_before_the_block_is_done(x, partial, tickets, out):
    is_last = cuda.shared.array(1, int32)
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    partial[b, t] = x[b, t] * x[b, t]  # fault: race
    cuda.threadfence()
    if t == 0:
        is_last[0] = cuda.atomic.add(tickets, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        total = float32(0)
        for block in range(cuda.gridDim.x):
            total += partial[block, t]  # fault: race
        out[t] = total


@faulty(
    "query heads of one group write their own dK where the sum over the group belongs",
    lambda: (noise(4, 16, 8), zeros(2, 16, 8)),
    grid=4,
    block=16,
)
@cuda.jit
def heads_of_a_group_overwrite_each_other(dk_of_head, dk):
    head, j = cuda.blockIdx.x, cuda.threadIdx.x
    for c in range(8):
        dk[head // 2, j, c] = dk_of_head[head, j, c]  # fault: race


@faulty(
    "the last of 200 blocks writes the row that the first one read long ago, or will read",
    lambda: (noise(200, 64), zeros(200, 64)),
    grid=200,
    block=64,
)
@cuda.jit
def last_block_writes_what_the_first_reads(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    out[b, t] = x[b, t]  # fault: race
    if b == cuda.gridDim.x - 1:
        x[0, t] = float32(0)  # fault: race
