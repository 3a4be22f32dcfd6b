"""Rung 2, fa2: the loops of FlashAttention-2.

What changes from ``minimal``:

- Forward, the loops swap. A block owns one *query* tile and walks over the keys, so the accumulator
  of O, the maximum and the sum stay on chip: they are written once, divided once at the end,
  instead of travelling to global memory and back for every key tile. There is a block for every
  query tile, not one for a whole head, so the GPU fills up. (arXiv 2307.08691, Algorithm 1 and
  section 3.2.)
- A *team* of threads shares a row: each of them takes every TEAM-th key for the scores and every
  TEAM-th column of V for the accumulator, which therefore fits in registers. The probabilities
  change hands through shared memory; the row's maximum and sum by warp shuffles. The inner loops
  read four neighbouring columns at a time from tiles aligned to 16 bytes, which the compiler turns
  into one load, and indices are unsigned, or it would prepare every one for counting from the end.
- Backward, three passes: delta = rowsum(dO * O) once a row, then dK and dV with a block for every
  key tile, then dQ with a block for every query tile. The scores are computed twice, and in return
  nothing is added up between blocks: the same bits every run. (Algorithm 2, and section 3.1.2 of
  the first paper.)
- Tiles that the mask leaves empty are not visited.
- What a tile adds is summed up before it joins the accumulator: a running sum over 65,536 keys
  would round 65,536 times.

What it bought: forward 129 ms to 4.7, backward 308 ms to 19 (float32, 16 x 12 heads, 1024 tokens,
head_dim 64, H200; notebooks/data/ladder-h200.json).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba import cuda, uint32

from ..masks import make_may_attend
from ..plan import Plan, Step
from ..problem import DTYPES, Problem
from ..schedule import key_range, query_range, split_block
from ..softmax import make_probability, make_row_softmax, make_team_reduce
from ..tiles import NUMBERS, make_load_tile
from .rung import Rung, require_positive, scalar

WARP = 32
CHUNK = 4
"""Neighbouring columns that a thread takes together: four float32 are one 16-byte load."""


@dataclass(frozen=True)
class Config:
    """Tile sizes, and the number of threads that share a row.

    A block that owns ``tile_m`` query rows (or, in the dK and dV pass, ``tile_n`` key rows) has
    ``team`` threads for each of them.
    """

    tile_m: int = 64
    tile_n: int = 32
    team: int = 4

    def __post_init__(self):
        require_positive(self)
        if self.team not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"fa2.Config.team is {self.team}; it must be 1, 2, 4, 8, 16 or 32")
        for name, rows in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
            threads = rows * self.team
            if rows % self.team or threads % WARP or threads > 1024:
                raise ValueError(
                    f"fa2.Config.{name} is {rows} with team {self.team}: it must be a multiple of "
                    f"the team, and {name} * team = {threads} threads must fill whole warps of "
                    f"{WARP}, at most 1024"
                )


def _padded(head_dim: int, team: int) -> int:
    """Columns of a tile in shared memory: every member of a team owns the same number of chunks."""
    return -(-head_dim // (team * CHUNK)) * team * CHUNK


def _row(columns: int) -> int:
    """A row length that puts the same chunk of neighbouring rows into different banks."""
    return columns + CHUNK


def _odd(columns: int) -> int:
    """A row length that puts the same number of neighbouring rows into different banks."""
    return columns | 1


@functools.cache
def make_forward(config: Config, D: int, DV: int, dtype: str, HAS_MASK: bool):
    """The forward kernel for one set of tiles, head dimensions and dtype."""
    TILE_M, TILE_N, TEAM = config.tile_m, config.tile_n, config.team
    NUM_THREADS = TILE_M * TEAM
    KEYS = TILE_N // TEAM
    D_PADDED, DV_PADDED = _padded(D, TEAM), _padded(DV, TEAM)
    D_ROW, DV_ROW, N_ROW = _row(D_PADDED), _row(DV_PADDED), _odd(TILE_N)
    CHUNKS = DV_PADDED // (TEAM * CHUNK)
    COLUMNS = CHUNKS * CHUNK
    acc_t, _, store = NUMBERS[dtype]
    load_q = make_load_tile(NUM_THREADS, TILE_M, D, D_ROW, dtype)
    load_k = make_load_tile(NUM_THREADS, TILE_N, D, D_ROW, dtype)
    load_v = make_load_tile(NUM_THREADS, TILE_N, DV, DV_ROW, dtype)
    may_attend = make_may_attend(HAS_MASK)
    update, finish = make_row_softmax(acc_t)
    team_max, team_sum = make_team_reduce(TEAM)

    @cuda.jit
    def forward_kernel(Q, K, V, Mask, O, LSE, group, left, right, softmax_scale):
        seqlen_q = Q.shape[2]
        seqlen_k = K.shape[2]
        m_block, head, batch = split_block(
            cuda.blockIdx.x, (seqlen_q + TILE_M - 1) // TILE_M, Q.shape[1]
        )
        head_kv = head // group
        thread = uint32(cuda.threadIdx.x)
        r = thread // TEAM
        member = thread % TEAM
        first_row = m_block * TILE_M
        i = first_row + r

        sQ = cuda.shared.array((TILE_M, D_ROW), acc_t, alignment=16)
        sK = cuda.shared.array((TILE_N, D_ROW), acc_t, alignment=16)
        sV = cuda.shared.array((TILE_N, DV_ROW), acc_t, alignment=16)
        sS = cuda.shared.array((TILE_M, N_ROW), acc_t)
        acc_S = cuda.local.array(KEYS, acc_t)
        acc_PV = cuda.local.array(COLUMNS, acc_t)
        acc_O = cuda.local.array(COLUMNS, acc_t)

        load_q(sQ, Q, batch, head, first_row, seqlen_q, thread)
        for c in range(COLUMNS):
            acc_O[c] = acc_t(0)
        row_max = acc_t(-math.inf)
        row_sum = acc_t(0)

        begin, end = key_range(first_row, TILE_M, seqlen_q, seqlen_k, left, right)
        for n_block in range(begin // TILE_N, (end + TILE_N - 1) // TILE_N):
            first_key = n_block * TILE_N
            cuda.syncthreads()  # the last tile is no longer read
            load_k(sK, K, batch, head_kv, first_key, seqlen_k, thread)
            load_v(sV, V, batch, head_kv, first_key, seqlen_k, thread)
            cuda.syncthreads()

            # S = softmax_scale * Q K^T
            for c in range(KEYS):
                acc_S[c] = acc_t(0)
            for step in range(0, D_PADDED, CHUNK):
                x = uint32(step)
                for u in range(CHUNK):
                    q = sQ[r, x + u]
                    for c in range(KEYS):
                        acc_S[c] += q * sK[c * TEAM + member, x + u]

            # Mask; maximum of the row
            tile_max = acc_t(-math.inf)
            for c in range(KEYS):
                j = first_key + c * TEAM + member
                s = acc_t(-math.inf)
                inside = i < seqlen_q and j < seqlen_k
                if inside and may_attend(Mask, batch, head, i, j, left, right):
                    s = acc_S[c] * softmax_scale
                acc_S[c] = s
                tile_max = max(tile_max, s)
            row_max, base, row_scale = update(row_max, team_max(tile_max))

            # P = exp(S - m); l = row_scale * l + rowsum(P)
            tile_sum = acc_t(0)
            for c in range(KEYS):
                p = math.exp(acc_S[c] - base)
                tile_sum += p
                sS[r, c * TEAM + member] = p
            row_sum = row_scale * row_sum + tile_sum
            cuda.syncwarp()  # a team never leaves its warp

            # O = row_scale * O + P V
            for c in range(COLUMNS):
                acc_PV[c] = acc_t(0)
            for step in range(TILE_N):
                y = uint32(step)
                p = sS[r, y]
                for c in range(CHUNKS):
                    for u in range(CHUNK):
                        acc_PV[c * CHUNK + u] += p * sV[y, (c * TEAM + member) * CHUNK + u]
            for c in range(COLUMNS):
                acc_O[c] = row_scale * acc_O[c] + acc_PV[c]

        normalise, lse = finish(row_max, team_sum(row_sum))
        if i < seqlen_q:
            for c in range(CHUNKS):
                for u in range(CHUNK):
                    x = (c * TEAM + member) * CHUNK + u
                    if x < DV:
                        O[batch, head, i, x] = store(acc_O[c * CHUNK + u] * normalise)
            if member == 0 and i < LSE.shape[2]:
                LSE[batch, head, i] = lse

    return forward_kernel


@functools.cache
def make_delta(DV: int, dtype: str):
    """The kernel of the first backward pass: delta = rowsum(dO * O), a warp a row."""
    acc_t, load, _ = NUMBERS[dtype]
    _, team_sum = make_team_reduce(WARP)

    @cuda.jit
    def delta_kernel(dO, O, Delta):
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        i, head, batch = split_block(row, O.shape[2], O.shape[1])
        if row < O.shape[0] * O.shape[1] * O.shape[2]:
            delta = acc_t(0)
            for x in range(cuda.threadIdx.x, DV, WARP):
                delta += load(dO[batch, head, i, x]) * load(O[batch, head, i, x])
            delta = team_sum(delta)
            if cuda.threadIdx.x == 0:
                Delta[batch, head, i] = delta

    return delta_kernel


@functools.cache
def make_key_gradients(config: Config, D: int, DV: int, dtype: str, HAS_MASK: bool):
    """The kernel of the second backward pass: dK and dV, a block a key tile."""
    TILE_M, TILE_N, TEAM = config.tile_m, config.tile_n, config.team
    NUM_THREADS = TILE_N * TEAM
    ROWS = TILE_M // TEAM
    D_PADDED, DV_PADDED = _padded(D, TEAM), _padded(DV, TEAM)
    D_ROW, DV_ROW, M_ROW = _row(D_PADDED), _row(DV_PADDED), _odd(TILE_M)
    CHUNKS, CHUNKS_V = D_PADDED // (TEAM * CHUNK), DV_PADDED // (TEAM * CHUNK)
    COLUMNS, COLUMNS_V = CHUNKS * CHUNK, CHUNKS_V * CHUNK
    WIDER = max(COLUMNS, COLUMNS_V)
    acc_t, _, store = NUMBERS[dtype]
    load_q = make_load_tile(NUM_THREADS, TILE_M, D, D_ROW, dtype)
    load_do = make_load_tile(NUM_THREADS, TILE_M, DV, DV_ROW, dtype)
    load_k = make_load_tile(NUM_THREADS, TILE_N, D, D_ROW, dtype)
    load_v = make_load_tile(NUM_THREADS, TILE_N, DV, DV_ROW, dtype)
    may_attend = make_may_attend(HAS_MASK)
    probability = make_probability(acc_t)

    @cuda.jit
    def key_gradients_kernel(
        Q, K, V, Mask, dO, LSE, Delta, dK, dV, group, left, right, softmax_scale
    ):
        seqlen_q = Q.shape[2]
        seqlen_k = K.shape[2]
        n_block, head_kv, batch = split_block(
            cuda.blockIdx.x, (seqlen_k + TILE_N - 1) // TILE_N, K.shape[1]
        )
        thread = uint32(cuda.threadIdx.x)
        r = thread // TEAM
        member = thread % TEAM
        first_key = n_block * TILE_N
        j = first_key + r

        sK = cuda.shared.array((TILE_N, D_ROW), acc_t, alignment=16)
        sV = cuda.shared.array((TILE_N, DV_ROW), acc_t, alignment=16)
        sQ = cuda.shared.array((TILE_M, D_ROW), acc_t, alignment=16)
        sdO = cuda.shared.array((TILE_M, DV_ROW), acc_t, alignment=16)
        sP = cuda.shared.array((TILE_N, M_ROW), acc_t)  # P^T
        sdS = cuda.shared.array((TILE_N, M_ROW), acc_t)  # dS^T
        acc_S = cuda.local.array(ROWS, acc_t)
        acc_dP = cuda.local.array(ROWS, acc_t)
        acc_tile = cuda.local.array(WIDER, acc_t)
        acc_dK = cuda.local.array(COLUMNS, acc_t)
        acc_dV = cuda.local.array(COLUMNS_V, acc_t)

        load_k(sK, K, batch, head_kv, first_key, seqlen_k, thread)
        load_v(sV, V, batch, head_kv, first_key, seqlen_k, thread)
        for c in range(COLUMNS):
            acc_dK[c] = acc_t(0)
        for c in range(COLUMNS_V):
            acc_dV[c] = acc_t(0)

        begin, end = query_range(first_key, TILE_N, seqlen_q, seqlen_k, left, right)
        for head in range(head_kv * group, (head_kv + 1) * group):
            for m_block in range(begin // TILE_M, (end + TILE_M - 1) // TILE_M):
                first_row = m_block * TILE_M
                cuda.syncthreads()  # the last tile is no longer read
                load_q(sQ, Q, batch, head, first_row, seqlen_q, thread)
                load_do(sdO, dO, batch, head, first_row, seqlen_q, thread)
                cuda.syncthreads()

                # S^T = K Q^T, dP^T = V dO^T
                for c in range(ROWS):
                    acc_S[c] = acc_t(0)
                    acc_dP[c] = acc_t(0)
                for step in range(0, D_PADDED, CHUNK):
                    x = uint32(step)
                    for u in range(CHUNK):
                        k = sK[r, x + u]
                        for c in range(ROWS):
                            acc_S[c] += k * sQ[c * TEAM + member, x + u]
                for step in range(0, DV_PADDED, CHUNK):
                    x = uint32(step)
                    for u in range(CHUNK):
                        v = sV[r, x + u]
                        for c in range(ROWS):
                            acc_dP[c] += v * sdO[c * TEAM + member, x + u]

                # P = exp(softmax_scale * S - LSE), dS = P * (dP - delta)
                for c in range(ROWS):
                    i = first_row + c * TEAM + member
                    p = acc_t(0)
                    ds = acc_t(0)
                    if i < seqlen_q and j < seqlen_k:
                        allowed = may_attend(Mask, batch, head, i, j, left, right)
                        p = probability(acc_S[c] * softmax_scale, LSE[batch, head, i], allowed)
                        if p != acc_t(0):
                            ds = p * (acc_dP[c] - Delta[batch, head, i])
                    sP[r, c * TEAM + member] = p
                    sdS[r, c * TEAM + member] = ds
                cuda.syncwarp()  # a team never leaves its warp

                # dV += P^T dO
                for c in range(COLUMNS_V):
                    acc_tile[c] = acc_t(0)
                for step in range(TILE_M):
                    y = uint32(step)
                    p = sP[r, y]
                    for c in range(CHUNKS_V):
                        for u in range(CHUNK):
                            acc_tile[c * CHUNK + u] += p * sdO[y, (c * TEAM + member) * CHUNK + u]
                for c in range(COLUMNS_V):
                    acc_dV[c] += acc_tile[c]

                # dK += dS^T Q
                for c in range(COLUMNS):
                    acc_tile[c] = acc_t(0)
                for step in range(TILE_M):
                    y = uint32(step)
                    ds = sdS[r, y]
                    for c in range(CHUNKS):
                        for u in range(CHUNK):
                            acc_tile[c * CHUNK + u] += ds * sQ[y, (c * TEAM + member) * CHUNK + u]
                for c in range(COLUMNS):
                    acc_dK[c] += acc_tile[c]

        if j < seqlen_k:
            for c in range(CHUNKS):
                for u in range(CHUNK):
                    x = (c * TEAM + member) * CHUNK + u
                    if x < D:
                        dK[batch, head_kv, j, x] = store(acc_dK[c * CHUNK + u] * softmax_scale)
            for c in range(CHUNKS_V):
                for u in range(CHUNK):
                    x = (c * TEAM + member) * CHUNK + u
                    if x < DV:
                        dV[batch, head_kv, j, x] = store(acc_dV[c * CHUNK + u])

    return key_gradients_kernel


@functools.cache
def make_query_gradient(config: Config, D: int, DV: int, dtype: str, HAS_MASK: bool):
    """The kernel of the third backward pass: dQ, a block a query tile."""
    TILE_M, TILE_N, TEAM = config.tile_m, config.tile_n, config.team
    NUM_THREADS = TILE_M * TEAM
    KEYS = TILE_N // TEAM
    D_PADDED, DV_PADDED = _padded(D, TEAM), _padded(DV, TEAM)
    D_ROW, DV_ROW, N_ROW = _row(D_PADDED), _row(DV_PADDED), _odd(TILE_N)
    CHUNKS = D_PADDED // (TEAM * CHUNK)
    COLUMNS = CHUNKS * CHUNK
    acc_t, _, store = NUMBERS[dtype]
    load_q = make_load_tile(NUM_THREADS, TILE_M, D, D_ROW, dtype)
    load_do = make_load_tile(NUM_THREADS, TILE_M, DV, DV_ROW, dtype)
    load_k = make_load_tile(NUM_THREADS, TILE_N, D, D_ROW, dtype)
    load_v = make_load_tile(NUM_THREADS, TILE_N, DV, DV_ROW, dtype)
    may_attend = make_may_attend(HAS_MASK)
    probability = make_probability(acc_t)

    @cuda.jit
    def query_gradient_kernel(Q, K, V, Mask, dO, LSE, Delta, dQ, group, left, right, softmax_scale):
        seqlen_q = Q.shape[2]
        seqlen_k = K.shape[2]
        m_block, head, batch = split_block(
            cuda.blockIdx.x, (seqlen_q + TILE_M - 1) // TILE_M, Q.shape[1]
        )
        head_kv = head // group
        thread = uint32(cuda.threadIdx.x)
        r = thread // TEAM
        member = thread % TEAM
        first_row = m_block * TILE_M
        i = first_row + r

        sQ = cuda.shared.array((TILE_M, D_ROW), acc_t, alignment=16)
        sdO = cuda.shared.array((TILE_M, DV_ROW), acc_t, alignment=16)
        sK = cuda.shared.array((TILE_N, D_ROW), acc_t, alignment=16)
        sV = cuda.shared.array((TILE_N, DV_ROW), acc_t, alignment=16)
        sdS = cuda.shared.array((TILE_M, N_ROW), acc_t)
        acc_S = cuda.local.array(KEYS, acc_t)
        acc_dP = cuda.local.array(KEYS, acc_t)
        acc_tile = cuda.local.array(COLUMNS, acc_t)
        acc_dQ = cuda.local.array(COLUMNS, acc_t)

        load_q(sQ, Q, batch, head, first_row, seqlen_q, thread)
        load_do(sdO, dO, batch, head, first_row, seqlen_q, thread)
        for c in range(COLUMNS):
            acc_dQ[c] = acc_t(0)
        lse = acc_t(-math.inf)
        delta = acc_t(0)
        if i < seqlen_q:
            lse = LSE[batch, head, i]
            delta = Delta[batch, head, i]

        begin, end = key_range(first_row, TILE_M, seqlen_q, seqlen_k, left, right)
        for n_block in range(begin // TILE_N, (end + TILE_N - 1) // TILE_N):
            first_key = n_block * TILE_N
            cuda.syncthreads()  # the last tile is no longer read
            load_k(sK, K, batch, head_kv, first_key, seqlen_k, thread)
            load_v(sV, V, batch, head_kv, first_key, seqlen_k, thread)
            cuda.syncthreads()

            # S = Q K^T, dP = dO V^T
            for c in range(KEYS):
                acc_S[c] = acc_t(0)
                acc_dP[c] = acc_t(0)
            for step in range(0, D_PADDED, CHUNK):
                x = uint32(step)
                for u in range(CHUNK):
                    q = sQ[r, x + u]
                    for c in range(KEYS):
                        acc_S[c] += q * sK[c * TEAM + member, x + u]
            for step in range(0, DV_PADDED, CHUNK):
                x = uint32(step)
                for u in range(CHUNK):
                    do = sdO[r, x + u]
                    for c in range(KEYS):
                        acc_dP[c] += do * sV[c * TEAM + member, x + u]

            # dS = P * (dP - delta)
            for c in range(KEYS):
                j = first_key + c * TEAM + member
                ds = acc_t(0)
                if i < seqlen_q and j < seqlen_k:
                    allowed = may_attend(Mask, batch, head, i, j, left, right)
                    p = probability(acc_S[c] * softmax_scale, lse, allowed)
                    if p != acc_t(0):
                        ds = p * (acc_dP[c] - delta)
                sdS[r, c * TEAM + member] = ds
            cuda.syncwarp()  # a team never leaves its warp

            # dQ += dS K
            for c in range(COLUMNS):
                acc_tile[c] = acc_t(0)
            for step in range(TILE_N):
                y = uint32(step)
                ds = sdS[r, y]
                for c in range(CHUNKS):
                    for u in range(CHUNK):
                        acc_tile[c * CHUNK + u] += ds * sK[y, (c * TEAM + member) * CHUNK + u]
            for c in range(COLUMNS):
                acc_dQ[c] += acc_tile[c]

        if i < seqlen_q:
            for c in range(CHUNKS):
                for u in range(CHUNK):
                    x = (c * TEAM + member) * CHUNK + u
                    if x < D:
                        dQ[batch, head, i, x] = store(acc_dQ[c * CHUNK + u] * softmax_scale)

    return query_gradient_kernel


def forward(problem: Problem, config: Config) -> Plan:
    p = problem
    step = Step(
        make_forward(config, p.head_dim, p.head_dim_v, p.dtype, p.has_mask),
        grid=p.batch * p.num_heads * -(-p.seqlen_q // config.tile_m),
        block=(config.tile_m * config.team,),
        args=("q", "k", "v", "mask", "o", "lse", *_scalars(p)),
        statements=p.seqlen_k * (p.head_dim + p.head_dim_v) // config.team,
    )
    return Plan((step,))


def backward(problem: Problem, config: Config) -> Plan:
    p = problem
    key = (config, p.head_dim, p.head_dim_v, p.dtype, p.has_mask)
    rows = p.batch * p.num_heads * p.seqlen_q
    inputs = ("q", "k", "v", "mask", "do", "lse", "delta")
    products = 2 * p.head_dim + p.head_dim_v
    return Plan(
        steps=(
            Step(
                make_delta(p.head_dim_v, p.dtype),
                grid=-(-rows // DELTA_ROWS),
                block=(WARP, DELTA_ROWS),
                args=("do", "o", "delta"),
                statements=-(-p.head_dim_v // WARP),
            ),
            Step(
                make_key_gradients(*key),
                grid=p.batch * p.num_heads_kv * -(-p.seqlen_k // config.tile_n),
                block=(config.tile_n * config.team,),
                args=(*inputs, "dk", "dv", *_scalars(p)),
                statements=p.group * p.seqlen_q * (products + p.head_dim_v) // config.team,
            ),
            Step(
                make_query_gradient(*key),
                grid=p.batch * p.num_heads * -(-p.seqlen_q // config.tile_m),
                block=(config.tile_m * config.team,),
                args=(*inputs, "dq", *_scalars(p)),
                statements=p.seqlen_k * products // config.team,
            ),
        ),
        workspaces={"delta": (p.lse_shape, p.acc_dtype)},
    )


DELTA_ROWS = 4
"""Rows, a warp each, that a block of the delta pass takes."""


def _scalars(problem: Problem) -> tuple:
    return problem.group, *problem.band, scalar(problem, problem.softmax_scale)


def shared_bytes(problem: Problem, config: Config, backward: bool) -> int:
    """sQ, sK, sV, sS forward; the larger of the two tile passes backward."""
    tile_m, tile_n, team = config.tile_m, config.tile_n, config.team
    d, d_v = problem.head_dim, problem.head_dim_v
    row, row_v = _row(_padded(d, team)), _row(_padded(d_v, team))
    elements = (tile_m + tile_n) * row + tile_n * row_v + tile_m * _odd(tile_n)
    if backward:
        rows = (tile_m + tile_n) * (row + row_v)
        keys = rows + 2 * tile_n * _odd(tile_m)
        queries = rows + tile_m * _odd(tile_n)
        elements = max(keys, queries)
    return elements * DTYPES[problem.acc_dtype]


RUNG = Rung(
    name="fa2",
    Config=Config,
    candidates=(
        Config(64, 32, 4),
        Config(32, 32, 4),
        Config(16, 16, 8),
        Config(8, 8, 8),
        Config(8, 8, 4),
    ),
    shared_bytes=shared_bytes,
    refuses=lambda problem, device: None,
    forward=forward,
    backward=backward,
)
