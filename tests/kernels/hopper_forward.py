"""A forward pass with TMA and wgmma: the instructions of sm_90a in one small kernel.

Three warpgroups take two roles. One thread of the last one, the producer, fetches tiles of Q, K and
V; the other two, the consumers, own 64 rows of O each. A tile is guarded by two barriers, which say
that it is full, and that both consumers have done with it.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda, float32, uint16, uint32, uint64

from numba_flash.ptx import (
    fence_mbarrier_init,
    make_touch,
    make_wgmma,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    tma_load_3d,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_flash.tensor_map import TensorMap

from .softmax_rows import PACK, make_softmax_rows

TILE_M = 128
TILE_N = 128
PANEL = 64
STAGES = 2
CONSUMERS = 2
THREADS = 128 * (CONSUMERS + 1)
# Registers a thread: 168 at the launch, moved from the producer to the consumers.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


def shared_bytes(head_dim):
    """Q, and every stage of K and V."""
    return 2 * head_dim * (TILE_M + 2 * STAGES * TILE_N)


def tensor_maps(q, k, v):
    """Those of (heads, seqlen, head_dim) arrays of uint16."""
    return [TensorMap(x, (PANEL, rows, 1)) for x, rows in ((q, TILE_M), (k, TILE_N), (v, TILE_N))]


@functools.cache
def make_forward(head_dim, dtype="bf16", causal=False):
    """The kernel ``(q_map, k_map, v_map, O, LSE, seqlen_q, seqlen_k, scale_log2)``.

    O holds (heads, seqlen_q, head_dim) in uint32 words of two. The grid is (query tiles, heads).
    """
    pack = PACK[dtype]
    CAUSAL = causal
    PANELS = head_dim // PANEL
    Q_PANEL, K_PANEL = TILE_M * PANEL, TILE_N * PANEL
    TILE_SIZE = TILE_N * head_dim
    TILE_BYTES, Q_BYTES = 2 * TILE_SIZE, 2 * TILE_M * head_dim
    FIRST_K = TILE_M * head_dim
    FIRST_V = FIRST_K + STAGES * TILE_SIZE
    Q_FULL, K_FULL, V_FULL = 0, 1, 1 + STAGES
    K_EMPTY, V_EMPTY, BARRIERS = 1 + 2 * STAGES, 1 + 3 * STAGES, 1 + 4 * STAGES
    PRODUCER = 128 * CONSUMERS
    S_REGISTERS, O_REGISTERS, P_REGISTERS = TILE_N // 2, head_dim // 2, TILE_N // 4
    NONE = np.float32(-np.inf)
    # S = Q K^T: both operands contiguous along k. O += P V: V is contiguous along its columns.
    qk = make_wgmma(n=TILE_N, k=head_dim, dtype=dtype, a_rows=TILE_M)
    pv = make_wgmma(n=head_dim, k=TILE_N, dtype=dtype, a="registers", b_major="mn")
    touch_S, touch_O = make_touch(S_REGISTERS), make_touch(O_REGISTERS)
    touch_P = make_touch(P_REGISTERS, "uint32")
    hide, update, finish = make_softmax_rows(TILE_N, head_dim, dtype, causal)

    @cuda.jit(device=True)
    def load_tile(sX, tile, tensor_map, first_row, head, bars, full):
        """Begin to fetch a tile of K or V, panel by panel."""
        mbarrier_arrive_expect_tx(bars, full, TILE_BYTES)
        for panel in range(PANELS):
            at = tile + uint32(panel * K_PANEL)
            tma_load_3d(sX, at, tensor_map, PANEL * panel, first_row, head, bars, full)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def forward(q_map, k_map, v_map, O, LSE, seqlen_q, seqlen_k, scale_log2):
        sX = cuda.shared.array(0, uint16, alignment=1024)
        bars = cuda.shared.array(BARRIERS, uint64)
        seqlen_q, seqlen_k = uint32(seqlen_q), uint32(seqlen_k)
        head, first_row = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x * TILE_M)
        thread = uint32(cuda.threadIdx.x)
        n_tiles = uint32((seqlen_k + uint32(TILE_N - 1)) // uint32(TILE_N))
        if CAUSAL:
            seen = uint32(first_row + uint32(TILE_M) + seqlen_k)
            seen = uint32(seen - seqlen_q) if seen > seqlen_q else uint32(0)
            n_tiles = min(n_tiles, uint32((seen + uint32(TILE_N - 1)) // uint32(TILE_N)))

        if thread == 0:
            mbarrier_init(bars, Q_FULL, 1)
            for stage in range(STAGES):
                mbarrier_init(bars, K_FULL + stage, 1)
                mbarrier_init(bars, V_FULL + stage, 1)
                mbarrier_init(bars, K_EMPTY + stage, CONSUMERS)
                mbarrier_init(bars, V_EMPTY + stage, CONSUMERS)
            fence_mbarrier_init()
        cuda.syncthreads()

        # The same in all lanes of a warp, and the compiler can tell.
        warpgroup = cuda.shfl_sync(0xFFFFFFFF, cuda.threadIdx.x >> 7, 0)
        if warpgroup == CONSUMERS:
            setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == PRODUCER:
                prefetch_tensor_map(q_map)
                mbarrier_arrive_expect_tx(bars, Q_FULL, Q_BYTES)
                for panel in range(PANELS):
                    at = uint32(panel * Q_PANEL)
                    tma_load_3d(sX, at, q_map, PANEL * panel, first_row, head, bars, Q_FULL)
                for tile in range(n_tiles):
                    stage, phase = uint32(tile % STAGES), uint32(tile // STAGES) & uint32(1)
                    at, row = stage * uint32(TILE_SIZE), uint32(tile * TILE_N)
                    mbarrier_wait(bars, K_EMPTY + stage, phase ^ uint32(1))
                    load_tile(sX, FIRST_K + at, k_map, row, head, bars, K_FULL + stage)
                    mbarrier_wait(bars, V_EMPTY + stage, phase ^ uint32(1))
                    load_tile(sX, FIRST_V + at, v_map, row, head, bars, V_FULL + stage)
        else:
            setmaxnreg_inc(CONSUMER_REGISTERS)
            acc_S = cuda.local.array(S_REGISTERS, float32)
            acc_O = cuda.local.array(O_REGISTERS, float32)
            rP = cuda.local.array(P_REGISTERS, uint32)
            row_max = cuda.local.array(2, float32)
            row_sum = cuda.local.array(2, float32)
            for i in range(O_REGISTERS):
                acc_O[i] = float32(0)
            for half in range(2):
                row_max[half], row_sum[half] = NONE, float32(0)
            lane, warp = thread & uint32(31), thread >> uint32(5)
            row = uint32(first_row + warp * uint32(16) + (lane >> uint32(2)))
            column = (lane & uint32(3)) << uint32(1)
            sQ = uint32(warpgroup) * uint32(64 * PANEL)

            mbarrier_wait(bars, Q_FULL, 0)
            for tile in range(n_tiles):
                stage, phase = uint32(tile % STAGES), uint32(tile // STAGES) & uint32(1)
                at = stage * uint32(TILE_SIZE)

                # S = Q K^T  # [64, 128] a warpgroup
                mbarrier_wait(bars, K_FULL + stage, phase)
                wgmma_fence()
                qk(acc_S, sX, sQ, sX, FIRST_K + at, False)
                wgmma_commit()
                wgmma_wait(0)
                touch_S(acc_S)
                if thread & uint32(127) == 0:
                    mbarrier_arrive(bars, K_EMPTY + stage)

                hide(acc_S, row, uint32(tile * TILE_N) + column, seqlen_q, seqlen_k)
                update(acc_S, acc_O, row_max, row_sum, scale_log2)
                for i in range(P_REGISTERS):
                    rP[i] = pack(acc_S[2 * i], acc_S[2 * i + 1])

                # O += P V
                mbarrier_wait(bars, V_FULL + stage, phase)
                touch_P(rP)
                touch_O(acc_O)
                wgmma_fence()
                pv(acc_O, rP, 0, sX, FIRST_V + at, True)
                wgmma_commit()
                wgmma_wait(0)
                touch_O(acc_O)
                if thread & uint32(127) == 0:
                    mbarrier_arrive(bars, V_EMPTY + stage)

            finish(acc_O, row_max, row_sum, O, LSE, row, column, head, seqlen_q, scale_log2)

    return forward
