"""Accesses outside an array."""

import numpy as np
from numba import cuda, float32

from .case import faulty, noise, ramp, zeros


@faulty(
    "100 elements, 128 threads and no guard",
    lambda: (ramp(100), zeros(100)),
    grid=4,
)
@cuda.jit
def tail_not_guarded(x, out):
    i = cuda.grid(1)
    out[i] = float32(2) * x[i]  # fault: out-of-bounds


@faulty(
    "the guard comes after the load that it should guard",
    lambda: (ramp(100), zeros(100)),
    grid=2,
    block=64,
)
@cuda.jit
def guard_after_the_load(x, out):
    i = cuda.grid(1)
    value = x[i]  # fault: out-of-bounds
    if i >= out.shape[0]:
        return
    out[i] = value


@faulty(
    "the last element has no right neighbour",
    lambda: (ramp(128), zeros(128)),
    grid=2,
    block=64,
)
@cuda.jit
def last_element_has_a_neighbour(x, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        out[i] = x[i + 1] - x[i]  # fault: out-of-bounds


@faulty(
    "the first element reads index -1, which wraps around without a word",
    lambda: (ramp(64), zeros(64)),
    block=64,
)
@cuda.jit
def first_element_reads_the_last(x, out):
    i = cuda.threadIdx.x
    left = x[i - 1]  # fault: out-of-bounds
    out[i] = x[i] - left


@faulty(
    "an inclusive bound where the range ends before it",
    lambda: (noise(32, 20), zeros(32)),
)
@cuda.jit
def row_sum_takes_one_more(rows, out):
    i = cuda.threadIdx.x
    total = float32(0)
    j = 0
    while j <= rows.shape[1]:
        total += rows[i, j]  # fault: out-of-bounds
        j += 1
    out[i] = total


@faulty(
    "the output has the shape of the transpose, and the store does not",
    lambda: (noise(24, 40), zeros(40, 24)),
    grid=(5, 3),
    block=(8, 8),
)
@cuda.jit
def transposed_store_forgets_to_swap(x, out):
    column, row = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        out[row, column] = x[row, column]  # fault: out-of-bounds


@faulty(
    "x of the grid runs over columns, the kernel takes it for rows",
    lambda: (noise(16, 48), zeros(16, 48)),
    grid=(6, 2),
    block=(8, 8),
)
@cuda.jit
def grid_axes_swapped(x, out):
    row, column = cuda.grid(2)
    out[row, column] = x[row, column]  # fault: out-of-bounds


@faulty(
    "a halo of one on each side needs a tile of two more, not one more",
    lambda: (ramp(66), zeros(64)),
    block=64,
)
@cuda.jit
def halo_does_not_fit(x, out):
    tile = cuda.shared.array(65, float32)
    t = cuda.threadIdx.x
    tile[t + 1] = x[t + 1]
    if t == 0:
        tile[0] = x[0]
    if t == cuda.blockDim.x - 1:
        tile[t + 2] = x[t + 2]  # fault: out-of-bounds
    cuda.syncthreads()
    if t < 63:
        out[t] = (tile[t] + tile[t + 1] + tile[t + 2]) / float32(3)


@cuda.jit(device=True, inline="always")
def row_of_token(table, token, column):
    return table[token, column]  # fault: out-of-bounds


@faulty(
    "padding has the token -1, and one sequence of many is padded",
    lambda: (
        noise(50, 8),
        np.where(np.arange(96) == 77, -1, np.arange(96) % 50).astype(np.int32),
        zeros(96, 8),
    ),
    grid=12,
    block=(8, 8),
)
@cuda.jit
def padding_token_is_looked_up(table, tokens, out):
    column = cuda.threadIdx.x
    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    out[row, column] = row_of_token(table, tokens[row], column)


@faulty(
    "n sequences have n + 1 boundaries; one block too many asks for the next one",
    lambda: (np.array([0, 10, 25, 60], np.int32), zeros(4, dtype=np.int32)),
    grid=4,
)
@cuda.jit
def one_sequence_too_many(cu_seqlens, lengths):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        lengths[b] = cu_seqlens[b + 1] - cu_seqlens[b]  # fault: out-of-bounds


@faulty(
    "a slice has the length of the sequence, the loop that of the tile",
    lambda: (noise(2, 20, 4), zeros(2, 4)),
    grid=2,
    block=4,
)
@cuda.jit
def slice_shorter_than_the_tile(x, out):
    rows = x[cuda.blockIdx.x, 16:]
    c = cuda.threadIdx.x
    total = float32(0)
    for r in range(16):
        total += rows[r, c]  # fault: out-of-bounds
    out[cuda.blockIdx.x, c] = total


def make_gather(head_dim):
    """A row in registers, with the number of registers captured."""

    @cuda.jit
    def registers_end_before_the_row(x, out):
        i = cuda.threadIdx.x
        row = cuda.local.array(head_dim, float32)
        for c in range(x.shape[1]):
            row[c] = x[i, c]  # fault: out-of-bounds
        out[i] = row[0] * row[1]

    return registers_end_before_the_row


faulty(
    "the factory was told head_dim 64, the rows have 80 columns",
    lambda: (noise(32, 80), zeros(32)),
)(make_gather(64))
