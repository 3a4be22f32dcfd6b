"""Rung 1, minimal: FlashAttention-1 as the shortest CUDA sources of it have it.

What changes from ``naive``: S and P never reach global memory. Keys and values come in tiles of
Bc rows, queries in tiles of Br; a tile of scores lives in shared memory for a moment and the
online softmax makes the moments add up. (FlashAttention, arXiv 2205.14135, Algorithms 1 and 4.)

What it bought: memory. S and P are gone. Time it costs: 129 ms forward where naive takes 61 and
flash.cu 192 (float32, 16 x 12 heads, 1024 tokens, head_dim 64, H200; notebooks/data/
ladder-h200.json), because a head keeps only 32 threads busy and O travels at every step. That is
what the next rung changes.

The kernels keep the shape, the loop order and the names of two public CUDA sources, ``flash.cu``
(forward) and ``flash-backward.cu`` (an unfinished backward): one block a (batch, head), one thread
a query row, key tiles j outside, query tiles i inside, so that O, l and m (forward) and dQ
(backward) go back to global memory at every step. Where these kernels deviate, and why:

Forward
 1. The sequence may end inside a tile: rows past it are loaded as zeros, their scores are -inf,
    and nothing is written for them. The source reads and writes past the end.
 2. Br and Bc may differ. The source sizes every buffer by Bc, and one thread loads one row of Kj;
    here the Br threads share the Bc rows.
 3. Any head_dim: the tiles shrink until they fit in 48 KB. The source asks for more than a block
    may have from head_dim 118 on, and the failed launch goes unnoticed: O stays zero.
 4. l, m and O are set up by the kernel, not by the caller, so stale memory cannot get in.
 5. A row that has seen no key yet keeps m = -inf without computing inf - inf.
 6. The mask, causal limits, grouped heads, a head_dim of V of its own, 16-bit and 64-bit floats.
    16-bit outputs are summed in a float32 array and rounded once.
 7. The log-sum-exp m + log(l) is written out where the caller wants it: the backward needs it.
 8. O is divided by the new sum; the source multiplies by a rounded reciprocal, and after thousands
    of key tiles the roundings show.
Backward
 9. Names the source uses but never defines are what the algorithm says they are: Oi (used for
    Di = rowsum(dO * O)), Li (the LSE), P, dPi and dSi (shared tiles), Qj (Qi).
10. dOi is declared once and every buffer has a size.
11. ``dOi[(tx + d) + x]`` is a product, row times width: dOi[tx, x].
12. dV and dK are summed over the rows of a tile by the thread that owns a *key*, and so read P and
    dS by columns; the source reads them by rows, which is the transpose of what is wanted.
13. dK and dV are written from dKj and dVj. The source writes Kj and a name it never defined.
14. The outer loop runs over key tiles (Tc) and the inner over query tiles (Tr); the source has
    them swapped.
15. Barriers after a query tile is loaded, after P and dS are complete and before the next tile
    replaces them: one thread's dV needs every thread's row. The source has none.
16. dQ and dK carry softmax_scale, which the source forgets.
17. The Mask, which the source takes and never reads, is honoured in both directions: nonzero
    means "may attend".
18. With grouped heads a block owns a key head and visits the query heads of its group in turn,
    so dK and dV need no atomics and are the same bits every time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba import cuda

from ..masks import make_may_attend
from ..plan import Plan, Step
from ..problem import DTYPES, Problem
from ..softmax import make_probability
from ..tiles import NUMBERS
from .rung import Rung, require_positive, scalar


@dataclass(frozen=True)
class Config:
    """Rows of a query tile (Br: tile_m) and of a key tile (Bc: tile_n)."""

    tile_m: int = 32
    tile_n: int = 32

    def __post_init__(self):
        require_positive(self)
        if self.tile_m > 1024:
            raise ValueError(
                f"minimal.Config.tile_m is {self.tile_m}; every row of a query tile is a thread, "
                f"and a block has at most 1024"
            )


@functools.cache
def make_forward(config: Config, d: int, d_v: int, dtype: str, HAS_MASK: bool):
    """The forward kernel for one set of tiles, head dimensions and dtype."""
    Br, Bc = config.tile_m, config.tile_n
    acc_t, load, _ = NUMBERS[dtype]
    may_attend = make_may_attend(HAS_MASK)

    @cuda.jit
    def forward_kernel(Q, K, V, Mask, O, l, m, LSE, nh, group, left, right, softmax_scale):
        tx = cuda.threadIdx.x
        batch = cuda.blockIdx.x // nh
        head = cuda.blockIdx.x % nh
        head_kv = head // group
        N_q = Q.shape[2]
        N_k = K.shape[2]
        Tr = (N_q + Br - 1) // Br
        Tc = (N_k + Bc - 1) // Bc

        Qi = cuda.shared.array((Br, d), acc_t)
        Kj = cuda.shared.array((Bc, d), acc_t)
        Vj = cuda.shared.array((Bc, d_v), acc_t)
        S = cuda.shared.array((Br, Bc), acc_t)

        for row in range(tx, N_q, Br):
            for x in range(d_v):
                O[batch, head, row, x] = acc_t(0)
            l[batch, head, row] = acc_t(0)
            m[batch, head, row] = acc_t(-math.inf)

        for j in range(Tc):
            # Load Kj, Vj
            for y in range(tx, Bc, Br):
                col = Bc * j + y
                for x in range(d):
                    Kj[y, x] = load(K[batch, head_kv, col, x]) if col < N_k else acc_t(0)
                for x in range(d_v):
                    Vj[y, x] = load(V[batch, head_kv, col, x]) if col < N_k else acc_t(0)
            cuda.syncthreads()

            for i in range(Tr):
                row = Br * i + tx
                if row < N_q:
                    # Load Qi, l and m
                    for x in range(d):
                        Qi[tx, x] = load(Q[batch, head, row, x])
                    row_m_prev = m[batch, head, row]
                    row_l_prev = l[batch, head, row]

                    # S = Q K^T, row_m = rowmax(S)
                    row_m = acc_t(-math.inf)
                    for y in range(Bc):
                        col = Bc * j + y
                        sum = acc_t(0)
                        for x in range(d):
                            sum += Qi[tx, x] * Kj[y, x]
                        sum *= softmax_scale
                        if col >= N_k or not may_attend(Mask, batch, head, row, col, left, right):
                            sum = acc_t(-math.inf)
                        S[tx, y] = sum
                        row_m = max(row_m, sum)

                    # P = exp(S - row_m), row_l = rowsum(P)
                    base = acc_t(0) if row_m == acc_t(-math.inf) else row_m
                    row_l = acc_t(0)
                    for y in range(Bc):
                        S[tx, y] = math.exp(S[tx, y] - base)
                        row_l += S[tx, y]

                    # New m and l
                    row_m_new = max(row_m_prev, row_m)
                    base_new = acc_t(0) if row_m_new == acc_t(-math.inf) else row_m_new
                    old_scale = math.exp(row_m_prev - base_new)
                    tile_scale = math.exp(row_m - base_new)
                    row_l_new = old_scale * row_l_prev + tile_scale * row_l

                    # Write O, l, m
                    divisor = acc_t(1) if row_l_new == acc_t(0) else row_l_new
                    for x in range(d_v):
                        pv = acc_t(0)
                        for y in range(Bc):
                            pv += S[tx, y] * Vj[y, x]
                        O[batch, head, row, x] = (
                            row_l_prev * old_scale * O[batch, head, row, x] + tile_scale * pv
                        ) / divisor
                    m[batch, head, row] = row_m_new
                    l[batch, head, row] = row_l_new
            cuda.syncthreads()  # before the next Kj, Vj replace these

        for row in range(tx, N_q, Br):
            row_l = l[batch, head, row]
            if row < LSE.shape[2]:
                LSE[batch, head, row] = (
                    acc_t(-math.inf) if row_l == acc_t(0) else m[batch, head, row] + math.log(row_l)
                )

    return forward_kernel


@functools.cache
def make_backward(config: Config, d: int, d_v: int, dtype: str, HAS_MASK: bool):
    """The backward kernel for one set of tiles, head dimensions and dtype."""
    Br, Bc = config.tile_m, config.tile_n
    acc_t, load, store = NUMBERS[dtype]
    may_attend = make_may_attend(HAS_MASK)
    probability = make_probability(acc_t)

    @cuda.jit
    def backward_kernel(
        Q, K, V, Mask, dO, O, LSE, dQ, dK, dV, nh_kv, group, left, right, softmax_scale
    ):
        tx = cuda.threadIdx.x
        batch = cuda.blockIdx.x // nh_kv
        head_kv = cuda.blockIdx.x % nh_kv
        N_q = Q.shape[2]
        N_k = K.shape[2]
        Tr = (N_q + Br - 1) // Br
        Tc = (N_k + Bc - 1) // Bc

        Qi = cuda.shared.array((Br, d), acc_t)
        dOi = cuda.shared.array((Br, d_v), acc_t)
        Kj = cuda.shared.array((Bc, d), acc_t)
        Vj = cuda.shared.array((Bc, d_v), acc_t)
        dKj = cuda.shared.array((Bc, d), acc_t)
        dVj = cuda.shared.array((Bc, d_v), acc_t)
        P = cuda.shared.array((Br, Bc), acc_t)
        dS = cuda.shared.array((Br, Bc), acc_t)

        for head in range(head_kv * group, (head_kv + 1) * group):
            for row in range(tx, N_q, Br):
                for x in range(d):
                    dQ[batch, head, row, x] = acc_t(0)

        for j in range(Tc):
            # Load Kj, Vj
            for y in range(tx, Bc, Br):
                col = Bc * j + y
                for x in range(d):
                    Kj[y, x] = load(K[batch, head_kv, col, x]) if col < N_k else acc_t(0)
                    dKj[y, x] = acc_t(0)
                for x in range(d_v):
                    Vj[y, x] = load(V[batch, head_kv, col, x]) if col < N_k else acc_t(0)
                    dVj[y, x] = acc_t(0)

            for head in range(head_kv * group, (head_kv + 1) * group):
                for i in range(Tr):
                    # Load Qi, dOi, Li and Di = rowsum(dOi * Oi)
                    row = Br * i + tx
                    Li = acc_t(-math.inf)
                    Di = acc_t(0)
                    if row < N_q:
                        Li = LSE[batch, head, row]
                        for x in range(d):
                            Qi[tx, x] = load(Q[batch, head, row, x])
                        for x in range(d_v):
                            dOi[tx, x] = load(dO[batch, head, row, x])
                            Di += dOi[tx, x] * load(O[batch, head, row, x])
                    else:
                        for x in range(d):
                            Qi[tx, x] = acc_t(0)
                        for x in range(d_v):
                            dOi[tx, x] = acc_t(0)
                    cuda.syncthreads()

                    # P = exp(S - Li), dP = dO V^T, dS = P * (dP - Di)
                    for y in range(Bc):
                        col = Bc * j + y
                        allowed = False
                        if row < N_q and col < N_k:
                            allowed = may_attend(Mask, batch, head, row, col, left, right)
                        sum = acc_t(0)
                        for x in range(d):
                            sum += Qi[tx, x] * Kj[y, x]
                        P[tx, y] = probability(sum * softmax_scale, Li, allowed)
                        sum = acc_t(0)
                        for x in range(d_v):
                            sum += dOi[tx, x] * Vj[y, x]
                        ds = P[tx, y] * (sum - Di)
                        dS[tx, y] = acc_t(0) if P[tx, y] == acc_t(0) else ds

                    # dQi += softmax_scale * dS K
                    if row < N_q:
                        for x in range(d):
                            sum = acc_t(0)
                            for y in range(Bc):
                                sum += dS[tx, y] * Kj[y, x]
                            dQ[batch, head, row, x] += softmax_scale * sum
                    cuda.syncthreads()

                    # dVj += P^T dO, dKj += softmax_scale * dS^T Q
                    for y in range(tx, Bc, Br):
                        for x in range(d_v):
                            sum = acc_t(0)
                            for r in range(Br):
                                sum += P[r, y] * dOi[r, x]
                            dVj[y, x] += sum
                        for x in range(d):
                            sum = acc_t(0)
                            for r in range(Br):
                                sum += dS[r, y] * Qi[r, x]
                            dKj[y, x] += softmax_scale * sum
                    cuda.syncthreads()  # before the next Qi, dOi, P and dS replace these

            # Write dKj, dVj
            for y in range(tx, Bc, Br):
                col = Bc * j + y
                if col < N_k:
                    for x in range(d):
                        dK[batch, head_kv, col, x] = store(dKj[y, x])
                    for x in range(d_v):
                        dV[batch, head_kv, col, x] = store(dVj[y, x])

    return backward_kernel


@functools.cache
def make_round(dtype: str):
    """The kernel that rounds float32 sums to a 16-bit dtype, a thread a number."""
    _, _, store = NUMBERS[dtype]

    @cuda.jit
    def round_kernel(Sums, Rounded):
        element = cuda.grid(1)
        x = element % Sums.shape[3]
        row = element // Sums.shape[3] % Sums.shape[2]
        head = element // Sums.shape[3] // Sums.shape[2] % Sums.shape[1]
        batch = element // Sums.shape[3] // Sums.shape[2] // Sums.shape[1]
        if batch < Sums.shape[0]:
            Rounded[batch, head, row, x] = store(Sums[batch, head, row, x])

    return round_kernel


def forward(problem: Problem, config: Config) -> Plan:
    p = problem
    o = "o_sum" if p.is_16_bit else "o"
    step = Step(
        make_forward(config, p.head_dim, p.head_dim_v, p.dtype, p.has_mask),
        grid=p.batch * p.num_heads,
        block=(config.tile_m,),
        args=("q", "k", "v", "mask", o, "l", "m", "lse", p.num_heads, *_scalars(p)),
        statements=_tile_rows(p, config) * p.seqlen_k * (p.head_dim + p.head_dim_v),
    )
    plan = Plan((step,), {"l": (p.lse_shape, p.acc_dtype), "m": (p.lse_shape, p.acc_dtype)})
    return _round_at_end(plan, p, "o", p.o_shape) if p.is_16_bit else plan


def backward(problem: Problem, config: Config) -> Plan:
    p = problem
    dq = "dq_sum" if p.is_16_bit else "dq"
    inputs = ("q", "k", "v", "mask", "do", "o", "lse")
    step = Step(
        make_backward(config, p.head_dim, p.head_dim_v, p.dtype, p.has_mask),
        grid=p.batch * p.num_heads_kv,
        block=(config.tile_m,),
        args=(*inputs, dq, "dk", "dv", p.num_heads_kv, *_scalars(p)),
        statements=p.group
        * _tile_rows(p, config)
        * p.seqlen_k
        * (3 * p.head_dim + 2 * p.head_dim_v),
    )
    plan = Plan((step,))
    return _round_at_end(plan, p, "dq", p.q_shape) if p.is_16_bit else plan


def _round_at_end(plan: Plan, problem: Problem, name: str, shape: tuple[int, ...]) -> Plan:
    """The plan with sums kept in a float32 workspace and rounded into the output at the end."""
    threads = 256
    step = Step(
        make_round(problem.dtype),
        grid=-(-math.prod(shape) // threads),
        block=(threads,),
        args=(f"{name}_sum", name),
        statements=1,
    )
    workspaces = {**plan.workspaces, f"{name}_sum": (shape, problem.acc_dtype)}
    return Plan((*plan.steps, step), workspaces)


def _scalars(problem: Problem) -> tuple:
    return problem.group, *problem.band, scalar(problem, problem.softmax_scale)


def shared_bytes(problem: Problem, config: Config, backward: bool) -> int:
    """Qi, Kj, Vj, S forward; Qi, dOi, Kj, Vj, dKj, dVj, P, dS backward."""
    Br, Bc, d, d_v = config.tile_m, config.tile_n, problem.head_dim, problem.head_dim_v
    elements = Br * d + Bc * (d + d_v) + Br * Bc
    if backward:
        elements = (Br + 2 * Bc) * (d + d_v) + 2 * Br * Bc
    return elements * DTYPES[problem.acc_dtype]


def _tile_rows(problem: Problem, config: Config) -> int:
    return -(-problem.seqlen_q // config.tile_m)


RUNG = Rung(
    name="minimal",
    Config=Config,
    candidates=tuple(
        Config(tile_m, tile_n)
        for tile_m, tile_n in [
            (32, 32),
            (32, 16),
            (32, 8),
            (16, 16),
            (16, 8),
            (16, 4),
            (8, 8),
            (8, 4),
            (4, 4),
            (4, 2),
        ]
    ),
    shared_bytes=shared_bytes,
    refuses=lambda problem, device: None,
    forward=forward,
    backward=backward,
)
