"""A forward pass with mma.sync: the instructions of sm_80 in one small kernel.

A block of four warps computes 64 rows of O, 16 a warp. Keys and values arrive in tiles of 64 rows,
each while the tile before is worked on. Chunks of 8 elements are placed in shared memory as
``chunk ^ row % 8``, so that neither a copy nor ldmatrix meets a bank twice.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda, float32, uint16, uint32

from numba_flash.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
)

from .softmax_rows import PACK, make_softmax_rows

TILE = 64
THREADS = 128
MMA = {"bf16": mma_m16n8k16_bf16, "f16": mma_m16n8k16_f16}


def shared_bytes(head_dim):
    """Q, and two stages of K and V."""
    return 2 * 5 * TILE * head_dim


@functools.cache
def make_forward(head_dim, dtype="bf16", causal=False):
    """The kernel ``(Q, K, V, O, LSE, seqlen_q, seqlen_k, scale_log2)``.

    Q, K and V are uint16 arrays of one dimension, (heads, seqlen, head_dim); O holds the same in
    uint32 words of two. The grid is (query tiles, heads).
    """
    mma, pack = MMA[dtype], PACK[dtype]
    HEAD_DIM, CAUSAL = head_dim, causal
    CHUNKS = head_dim // 8
    LOADS = TILE * CHUNKS // THREADS
    TILE_SIZE = TILE * head_dim
    K_STEPS, P_STEPS = head_dim // 16, TILE // 16
    S_REGISTERS, O_REGISTERS = TILE // 2, head_dim // 2
    Q_REGISTERS, P_REGISTERS = 4 * K_STEPS, 4 * P_STEPS
    NONE = np.float32(-np.inf)
    hide, update, finish = make_softmax_rows(TILE, head_dim, dtype, causal)

    @cuda.jit(device=True)
    def place(row, chunk):
        """Where a chunk of 8 elements is in its tile."""
        return row * uint32(HEAD_DIM) + ((chunk ^ (row & uint32(7))) << uint32(3))

    @cuda.jit(device=True)
    def load_tile(sX, tile, X, head, first_row, seqlen):
        """Begin to copy rows; those beyond the sequence become zeros."""
        for i in range(LOADS):
            e = uint32(i * THREADS) + uint32(cuda.threadIdx.x)
            row, chunk = e // uint32(CHUNKS), e % uint32(CHUNKS)
            source = (head * seqlen + first_row + row) * uint32(HEAD_DIM) + (chunk << uint32(3))
            keep = uint32(first_row + row) < seqlen
            cp_async_16(sX, uint32(tile + place(row, chunk)), X, source, keep)

    @cuda.jit
    def forward(Q, K, V, O, LSE, seqlen_q, seqlen_k, scale_log2):
        sX = cuda.shared.array(0, uint16, alignment=128)
        rQ = cuda.local.array(Q_REGISTERS, uint32)
        rP = cuda.local.array(P_REGISTERS, uint32)
        rB = cuda.local.array(4, uint32)
        acc_S = cuda.local.array(S_REGISTERS, float32)
        acc_O = cuda.local.array(O_REGISTERS, float32)
        row_max = cuda.local.array(2, float32)
        row_sum = cuda.local.array(2, float32)

        seqlen_q, seqlen_k = uint32(seqlen_q), uint32(seqlen_k)
        head, first_row = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x * TILE)
        lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        # Which row and chunk of a 16 x 16 piece the lane gives the address of.
        a_row, a_chunk = lane & uint32(15), lane >> uint32(4)
        b_row = (lane & uint32(7)) + ((lane >> uint32(4)) << uint32(3))
        b_chunk = (lane >> uint32(3)) & uint32(1)
        # The lane's first row, and the first of its columns in a tile.
        row = uint32(first_row + warp * uint32(16) + (lane >> uint32(2)))
        column = (lane & uint32(3)) << uint32(1)

        n_tiles = uint32((seqlen_k + uint32(TILE - 1)) // uint32(TILE))
        if CAUSAL:
            seen = uint32(first_row + uint32(TILE) + seqlen_k)
            seen = uint32(seen - seqlen_q) if seen > seqlen_q else uint32(0)
            n_tiles = min(n_tiles, uint32((seen + uint32(TILE - 1)) // uint32(TILE)))

        load_tile(sX, uint32(0), Q, head, first_row, seqlen_q)
        if n_tiles > 0:
            load_tile(sX, uint32(TILE_SIZE), K, head, uint32(0), seqlen_k)
            load_tile(sX, uint32(3 * TILE_SIZE), V, head, uint32(0), seqlen_k)
        cp_async_commit()
        for i in range(O_REGISTERS):
            acc_O[i] = float32(0)
        for half in range(2):
            row_max[half], row_sum[half] = NONE, float32(0)

        for tile in range(n_tiles):
            cp_async_wait(0)
            cuda.syncthreads()  # the tile is there, and nobody reads the one before any more
            sK = uint32(TILE_SIZE) * (uint32(1) + (uint32(tile) & uint32(1)))
            if tile + 1 < n_tiles:
                following = uint32(TILE_SIZE) * (uint32(2) - (uint32(tile) & uint32(1)))
                next_row = uint32((tile + 1) * TILE)
                load_tile(sX, following, K, head, next_row, seqlen_k)
                load_tile(sX, following + uint32(2 * TILE_SIZE), V, head, next_row, seqlen_k)
            cp_async_commit()
            if tile == 0:
                for k in range(K_STEPS):
                    at = place(warp * uint32(16) + a_row, uint32(2 * k) + a_chunk)
                    ldmatrix_x4(rQ, 4 * k, sX, at)

            # S = Q K^T  # [64, 64]
            for i in range(S_REGISTERS):
                acc_S[i] = float32(0)
            for k in range(K_STEPS):
                for n in range(TILE // 16):
                    at = sK + place(uint32(16 * n) + b_row, uint32(2 * k) + b_chunk)
                    ldmatrix_x4(rB, 0, sX, at)
                    mma(acc_S, 8 * n, rQ, 4 * k, rB, 0)
                    mma(acc_S, 8 * n + 4, rQ, 4 * k, rB, 2)

            hide(acc_S, row, uint32(tile * TILE) + column, seqlen_q, seqlen_k)
            update(acc_S, acc_O, row_max, row_sum, scale_log2)

            # O += P V: sums of S are laid out as the left operand wants them.
            for i in range(P_REGISTERS):
                rP[i] = pack(acc_S[2 * i], acc_S[2 * i + 1])
            for k in range(P_STEPS):
                for n in range(HEAD_DIM // 16):
                    at = sK + place(uint32(16 * k) + a_row, uint32(2 * n) + a_chunk)
                    ldmatrix_x4_trans(rB, 0, sX, at + uint32(2 * TILE_SIZE))
                    mma(acc_O, 8 * n, rP, 4 * k, rB, 0)
                    mma(acc_O, 8 * n + 4, rP, 4 * k, rB, 2)

        finish(acc_O, row_max, row_sum, O, LSE, row, column, head, seqlen_q, scale_log2)

    return forward
