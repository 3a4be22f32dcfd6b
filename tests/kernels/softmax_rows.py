"""The online softmax of a lane's two rows, as mma.sync and wgmma lay out their sums."""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import cuda, float32, int32, uint32

from numba_flash.ptx import ex2, lg2, pack_bf16, pack_f16

PACK = {"bf16": pack_bf16, "f16": pack_f16}


@functools.cache
def make_softmax_rows(tile_n, head_dim, dtype, causal):
    """Device functions ``hide``, ``update`` and ``finish``.

    A lane holds two rows, 8 apart, and of every 8 columns two: register 4 n + 2 half + e is row
    ``half`` of column 8 n + e, counted from the lane's own first row and column.
    """
    pack = PACK[dtype]
    TILE_N, HEAD_DIM, CAUSAL = tile_n, head_dim, causal
    NONE, LN_2 = np.float32(-np.inf), np.float32(math.log(2))

    @cuda.jit(device=True)
    def hide(acc_S, row, key, seqlen_q, seqlen_k):
        """Scores that a row may not see become -inf; row and key are those of register 0."""
        for half in range(2):
            end = int32(seqlen_k)
            if CAUSAL:
                end = min(end, int32(row + uint32(8 * half + 1) + seqlen_k - seqlen_q))
            end = int32(end - int32(key))
            for n in range(TILE_N // 8):
                for e in range(2):
                    if 8 * n + e >= end:
                        acc_S[4 * n + 2 * half + e] = NONE

    @cuda.jit(device=True)
    def update(acc_S, acc_O, row_max, row_sum, scale_log2):
        """P = exp(S - m) in place of S, where m is the largest score so far; O and l follow m."""
        for half in range(2):
            new_max = row_max[half]
            for n in range(TILE_N // 8):
                new_max = max(new_max, acc_S[4 * n + 2 * half])
                new_max = max(new_max, acc_S[4 * n + 2 * half + 1])
            new_max = max(new_max, cuda.shfl_xor_sync(0xFFFFFFFF, new_max, 1))
            new_max = max(new_max, cuda.shfl_xor_sync(0xFFFFFFFF, new_max, 2))
            shift = new_max * scale_log2 if new_max > NONE else float32(0)
            alpha = ex2(row_max[half] * scale_log2 - shift)
            row_max[half] = new_max
            total = float32(0)
            for n in range(TILE_N // 8):
                for e in range(2):
                    p = ex2(acc_S[4 * n + 2 * half + e] * scale_log2 - shift)
                    acc_S[4 * n + 2 * half + e] = p
                    total += p
            row_sum[half] = row_sum[half] * alpha + total
            for n in range(HEAD_DIM // 8):
                acc_O[4 * n + 2 * half] *= alpha
                acc_O[4 * n + 2 * half + 1] *= alpha

    @cuda.jit(device=True)
    def finish(acc_O, row_max, row_sum, O, LSE, row, column, head, seqlen_q, scale_log2):
        """O = acc / l, in words of two columns, and LSE = m + ln l; of nothing, 0 and -inf."""
        for half in range(2):
            total = row_sum[half]
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1)
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 2)
            weight = float32(1) / total if total > float32(0) else float32(0)
            i = uint32(row + uint32(8 * half))
            if i < seqlen_q:
                for n in range(HEAD_DIM // 8):
                    low, high = acc_O[4 * n + 2 * half], acc_O[4 * n + 2 * half + 1]
                    at = (head * seqlen_q + i) * uint32(HEAD_DIM) + uint32(8 * n) + column
                    O[at >> uint32(1)] = pack(low * weight, high * weight)
                if column == 0:
                    log_sum = (row_max[half] * scale_log2 + lg2(total)) * LN_2
                    LSE[head * seqlen_q + i] = log_sum if total > float32(0) else NONE

    return hide, update, finish
