"""FlashAttention as learners write it: one thread a query row, key tiles in shared memory.

The faults are those of two public CUDA sources: barriers left out, tiles that end with the
sequence or not, a head_dim taken for granted, buffers on top of each other. The names are the
paper's: Br rows of a query tile, Bc of a key tile, Tr and Tc tiles of each.
"""

import math

import numpy as np
from numba import cuda, float32

from numba_flash.emulator import empty

from .case import faulty, noise, zeros

MINUS_INFINITY = np.float32(-np.inf)


def tensors(n, d, count=4):
    return tuple(noise(n, d) for _ in range(count))


@faulty(
    "no barrier after Kj and Vj are loaded: scores of half a tile",
    lambda: (*tensors(64, 16, 3), zeros(64, 16)),
    grid=2,
)
@cuda.jit
def forward_without_barrier_after_the_load(Q, K, V, O):
    Kj = cuda.shared.array((32, 16), float32)
    Vj = cuda.shared.array((32, 16), float32)
    acc = cuda.local.array(16, float32)
    tx, row = cuda.threadIdx.x, cuda.grid(1)
    m, l = MINUS_INFINITY, float32(0)
    for x in range(16):
        acc[x] = float32(0)
    for j in range(2):
        for x in range(16):
            Kj[tx, x] = K[j * 32 + tx, x]  # fault: race
            Vj[tx, x] = V[j * 32 + tx, x]  # fault: race
        for y in range(32):
            s = float32(0)
            for x in range(16):
                s += Q[row, x] * Kj[y, x]  # fault: race
            m_new = max(m, s)
            p, scale = math.exp(s - m_new), math.exp(m - m_new)
            l = l * scale + p
            for x in range(16):
                acc[x] = acc[x] * scale + p * Vj[y, x]  # fault: race
            m = m_new
        cuda.syncthreads()
    for x in range(16):
        O[row, x] = acc[x] / l


@faulty(
    "no barrier at the end of the key loop: a fast thread replaces the tile of a slow one",
    lambda: (*tensors(64, 16, 3), zeros(64, 16)),
    block=64,
)
@cuda.jit
def forward_without_barrier_at_the_end(Q, K, V, O):
    Kj = cuda.shared.array((16, 16), float32)
    Vj = cuda.shared.array((16, 16), float32)
    acc = cuda.local.array(16, float32)
    row = cuda.threadIdx.x
    m, l = MINUS_INFINITY, float32(0)
    for x in range(16):
        acc[x] = float32(0)
    for j in range(4):
        if row < 16:
            for x in range(16):
                Kj[row, x] = K[j * 16 + row, x]  # fault: race
                Vj[row, x] = V[j * 16 + row, x]  # fault: race
        cuda.syncthreads()
        for y in range(16):
            s = float32(0)
            for x in range(16):
                s += Q[row, x] * Kj[y, x]  # fault: race
            m_new = max(m, s)
            p, scale = math.exp(s - m_new), math.exp(m - m_new)
            l = l * scale + p
            for x in range(16):
                acc[x] = acc[x] * scale + p * Vj[y, x]  # fault: race
            m = m_new
    for x in range(16):
        O[row, x] = acc[x] / l


@faulty(
    "40 rows in tiles of 32: the tail of a head is the next head's beginning, or nobody's",
    lambda: (noise(2 * 40 * 8), noise(2 * 40 * 8), zeros(2 * 40 * 8)),
    grid=2,
)
@cuda.jit
def forward_past_the_sequence(Q, K, O):
    Kj = cuda.shared.array((32, 8), float32)
    tx, head, n, d = cuda.threadIdx.x, cuda.blockIdx.x, 40, 8
    offset = head * n * d
    for i in range(2):
        largest = MINUS_INFINITY
        for j in range(2):
            for x in range(d):
                Kj[tx, x] = K[offset + (j * 32 + tx) * d + x]  # fault: out-of-bounds
            cuda.syncthreads()
            for y in range(32):
                s = float32(0)
                for x in range(d):
                    s += Q[offset + (i * 32 + tx) * d + x] * Kj[y, x]  # fault: out-of-bounds
                largest = max(largest, s)
            cuda.syncthreads()
        for x in range(d):
            O[offset + (i * 32 + tx) * d + x] = largest  # fault: race, out-of-bounds


@faulty(
    "rows of shared memory 32 apart, and a head_dim of 40: the end of a row is the next row",
    lambda: (noise(16, 40), noise(16, 40), zeros(16, 16)),
    block=16,
)
@cuda.jit
def forward_rows_wider_than_their_stride(Q, K, S):
    Kj = cuda.shared.array(512, float32)
    tx = cuda.threadIdx.x
    for x in range(Q.shape[1]):
        Kj[tx * 32 + x] = K[tx, x]  # fault: race, out-of-bounds
    cuda.syncthreads()
    for y in range(16):
        s = float32(0)
        for x in range(Q.shape[1]):
            s += Q[tx, x] * Kj[y * 32 + x]  # fault: out-of-bounds
        S[tx, y] = s


@faulty(
    "the running l and m are read from global memory, and the caller only allocated them",
    lambda: (noise(32, 64), empty(32), empty(32)),
)
@cuda.jit
def forward_statistics_never_set(S, l, m):
    row = cuda.threadIdx.x
    for j in range(2):
        row_m = S[row, j * 32]
        for y in range(1, 32):
            row_m = max(row_m, S[row, j * 32 + y])
        row_l = float32(0)
        for y in range(32):
            row_l += math.exp(S[row, j * 32 + y] - row_m)
        m_old = m[row]  # fault: uninitialised-read
        m_new = max(m_old, row_m)
        l_part = row_l * math.exp(row_m - m_new)
        l[row] = l[row] * math.exp(m_old - m_new) + l_part  # fault: uninitialised-read
        m[row] = m_new


@faulty(
    "rows of S are Bc long and begin every Br: right only while both are the same",
    lambda: (noise(16, 8), noise(32, 8), zeros(16)),
    block=16,
)
@cuda.jit
def forward_scores_strided_by_the_wrong_tile(Q, K, l):
    Br, Bc = 16, 32
    S = cuda.shared.array(512, float32)
    tx = cuda.threadIdx.x
    for y in range(Bc):
        s = float32(0)
        for x in range(8):
            s += Q[tx, x] * K[y, x]
        S[Br * tx + y] = s  # fault: race
    row_l = float32(0)
    for y in range(Bc):
        row_l += math.exp(S[Br * tx + y])  # fault: race
    l[tx] = row_l


@faulty(
    "two warps share the keys of a row and meet at the end, without a barrier before they do",
    lambda: (*tensors(32, 8, 1), *tensors(64, 8, 1), zeros(32)),
    block=(32, 2),
)
@cuda.jit
def forward_split_keys_meet_too_early(Q, K, lse):
    maxima = cuda.shared.array((2, 32), float32)
    sums = cuda.shared.array((2, 32), float32)
    row, part = cuda.threadIdx.x, cuda.threadIdx.y
    m, l = MINUS_INFINITY, float32(0)
    for j in range(part * 32, part * 32 + 32):
        s = float32(0)
        for x in range(8):
            s += Q[row, x] * K[j, x]
        m_new = max(m, s)
        l = l * math.exp(m - m_new) + math.exp(s - m_new)
        m = m_new
    maxima[part, row] = m  # fault: race
    sums[part, row] = l  # fault: race
    if part == 0:
        m_all = max(m, maxima[1, row])  # fault: race
        l_all = l * math.exp(m - m_all)
        l_all += sums[1, row] * math.exp(maxima[1, row] - m_all)  # fault: race
        lse[row] = m_all + math.log(l_all)


@faulty(
    "dO is loaded last and read at once: dV needs the rows of every thread",
    lambda: (noise(64, 32), noise(64, 16), zeros(32, 16)),
)
@cuda.jit
def backward_without_barrier_after_dO(P, dO, dV):
    dOi = cuda.shared.array((32, 16), float32)
    Pi = cuda.shared.array((32, 32), float32)
    dVj = cuda.shared.array((32, 16), float32)
    tx = cuda.threadIdx.x
    for y in range(16):
        dVj[tx, y] = float32(0)
    for i in range(2):
        for y in range(32):
            Pi[tx, y] = P[i * 32 + tx, y]
        cuda.syncthreads()
        for y in range(16):
            dOi[tx, y] = dO[i * 32 + tx, y]  # fault: race
        for y in range(16):
            total = float32(0)
            for x in range(32):
                total += Pi[x, tx] * dOi[x, y]  # fault: race
            dVj[tx, y] += total
        cuda.syncthreads()
    for y in range(16):
        dV[tx, y] = dVj[tx, y]


@faulty(
    "a thread writes a row of P and reads a column, and nothing lies between",
    lambda: (noise(32, 32), zeros(32), noise(32, 8), zeros(32, 8)),
)
@cuda.jit
def backward_reads_columns_of_what_rows_wrote(S, lse, dO, dV):
    P = cuda.shared.array((32, 32), float32)
    tx = cuda.threadIdx.x
    for y in range(32):
        P[tx, y] = math.exp(S[tx, y] - lse[tx])  # fault: race
    for c in range(8):
        total = float32(0)
        for x in range(32):
            total += P[x, tx] * dO[x, c]  # fault: race
        dV[tx, c] = total


@faulty(
    "the loop over key tiles counts query tiles: with more queries than keys it leaves K",
    lambda: (noise(64, 16), noise(32, 16), zeros(32, 16)),
)
@cuda.jit
def backward_with_Tr_and_Tc_swapped(Q, K, dK):
    Kj = cuda.shared.array((16, 16), float32)
    tx, Tr = cuda.threadIdx.x, Q.shape[0] // 16
    for j in range(Tr):
        if tx < 16:
            for x in range(16):
                Kj[tx, x] = K[j * 16 + tx, x]  # fault: out-of-bounds
        cuda.syncthreads()
        if tx < 16:
            for x in range(16):
                dK[j * 16 + tx, x] = Q[j * 16 + tx, x] * Kj[tx, x]  # fault: out-of-bounds
        cuda.syncthreads()


@faulty(
    "every buffer gets Bc * d floats, S as well; but S has Br * Bc, and d is less than Br",
    lambda: (noise(64, 16), noise(32, 16), zeros(32, 16)),
    shared_bytes=4 * 16 * 32 * 5,
)
@cuda.jit
def backward_scores_reach_into_dK(Q, K, dK):
    sram = cuda.shared.array(0, float32)
    tx, d, Br, Bc = cuda.threadIdx.x, 16, 32, 32
    tile_size = Bc * d
    Kj, S, dKj = 0, tile_size, 2 * tile_size
    for x in range(d):
        sram[Kj + tx * d + x] = K[tx, x]
        sram[dKj + tx * d + x] = float32(0)
    for i in range(2):
        cuda.syncthreads()
        for y in range(Bc):
            s = float32(0)
            for x in range(d):
                s += Q[i * Br + tx, x] * sram[Kj + y * d + x]
            sram[S + tx * Bc + y] = s  # fault: race
        for x in range(d):
            sram[dKj + tx * d + x] += sram[S + tx * Bc]  # fault: race
    for x in range(d):
        dK[tx, x] = sram[dKj + tx * d + x]  # fault: race


@faulty(
    "dQ of a row is added to by the threads of all its keys",
    lambda: (noise(16, 32), noise(32, 8), zeros(16, 8)),
)
@cuda.jit
def backward_threads_of_keys_add_to_dQ(dS, K, dQ):
    key = cuda.threadIdx.x
    for i in range(16):
        for x in range(8):
            dQ[i, x] += dS[i, key] * K[key, x]  # fault: race
