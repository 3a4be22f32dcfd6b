"""Rung 0, naive: the formula as it is written, with S and P stored whole in global memory.

    S = softmax_scale * Q K^T          P = softmax(S)                O = P V
    dV = P^T dO    dP = dO V^T    dS = P * (dP - rowsum(P * dP))    dQ = dS K    dK = dS^T Q

One kernel a product, one thread a number: everything a learner would write first. The backward
computes S and P again, as the forward did. Every score crosses the memory bus several times, and
there are seqlen_q * seqlen_k of them. The other rungs are this one with the traffic taken out.
(FlashAttention, arXiv 2205.14135, Algorithms 0 and 3.)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba import cuda

from ..masks import make_may_attend
from ..plan import Plan, Step
from ..problem import Device, Problem
from ..tiles import NUMBERS
from .rung import Rung, require_positive, scalar


@dataclass(frozen=True)
class Config:
    """Threads of a block: tile_m rows of tile_n numbers each."""

    tile_m: int = 16
    tile_n: int = 16

    def __post_init__(self):
        require_positive(self)
        if self.tile_m * self.tile_n > 1024:
            raise ValueError(
                f"naive.Config asks for {self.tile_m} x {self.tile_n} = "
                f"{self.tile_m * self.tile_n} threads; a block has at most 1024"
            )


ONE_THREAD_A_ROW = Config(tile_m=64, tile_n=1)
PARTIAL = 64
"""Terms of a long sum that are added up before they join it: one running sum would round as many
times as there are keys. The tiles of the other rungs do this by themselves."""


@cuda.jit(device=True)
def my_element(num_rows, num_columns, num_heads):
    """Where this thread works: (batch, head, row, column) of a (..., rows, columns) array."""
    column_tiles = (num_columns + cuda.blockDim.x - 1) // cuda.blockDim.x
    row_tiles = (num_rows + cuda.blockDim.y - 1) // cuda.blockDim.y
    column_tile = cuda.blockIdx.x % column_tiles
    row_tile = cuda.blockIdx.x // column_tiles % row_tiles
    plane = cuda.blockIdx.x // column_tiles // row_tiles
    row = row_tile * cuda.blockDim.y + cuda.threadIdx.y
    column = column_tile * cuda.blockDim.x + cuda.threadIdx.x
    return plane // num_heads, plane % num_heads, row, column


@functools.cache
def make_forward(D: int, dtype: str, HAS_MASK: bool):
    """The kernels of the three steps: scores, softmax, output."""
    acc_t, load, store = NUMBERS[dtype]
    may_attend = make_may_attend(HAS_MASK)

    @cuda.jit
    def scores(Q, K, Mask, S, group, left, right, softmax_scale):
        batch, head, i, j = my_element(S.shape[2], S.shape[3], S.shape[1])
        if i < S.shape[2] and j < S.shape[3]:
            s = acc_t(0)
            for x in range(D):
                s += load(Q[batch, head, i, x]) * load(K[batch, head // group, j, x])
            s *= softmax_scale
            if not may_attend(Mask, batch, head, i, j, left, right):
                s = acc_t(-math.inf)
            S[batch, head, i, j] = s

    @cuda.jit
    def softmax(S, P, LSE):
        batch, head, i, _ = my_element(S.shape[2], 1, S.shape[1])
        if i < S.shape[2]:
            m = acc_t(-math.inf)
            for j in range(S.shape[3]):
                m = max(m, S[batch, head, i, j])
            base = acc_t(0) if m == acc_t(-math.inf) else m
            l = acc_t(0)
            for first in range(0, S.shape[3], PARTIAL):
                partial = acc_t(0)
                for j in range(first, min(first + PARTIAL, S.shape[3])):
                    partial += math.exp(S[batch, head, i, j] - base)
                l += partial
            scale = acc_t(0) if l == acc_t(0) else acc_t(1) / l
            for j in range(S.shape[3]):
                P[batch, head, i, j] = math.exp(S[batch, head, i, j] - base) * scale
            if i < LSE.shape[2]:
                LSE[batch, head, i] = acc_t(-math.inf) if l == acc_t(0) else m + math.log(l)

    @cuda.jit
    def output(P, V, O, group):
        batch, head, i, x = my_element(O.shape[2], O.shape[3], O.shape[1])
        if i < O.shape[2] and x < O.shape[3]:
            o = acc_t(0)
            for first in range(0, P.shape[3], PARTIAL):
                partial = acc_t(0)
                for j in range(first, min(first + PARTIAL, P.shape[3])):
                    partial += P[batch, head, i, j] * load(V[batch, head // group, j, x])
                o += partial
            O[batch, head, i, x] = store(o)

    return scores, softmax, output


@functools.cache
def make_backward(DV: int, dtype: str):
    """The kernels that the backward adds: dP, dS, dQ, and one that serves dK and dV."""
    acc_t, load, store = NUMBERS[dtype]

    @cuda.jit
    def probability_gradient(dO, V, dP, group):
        batch, head, i, j = my_element(dP.shape[2], dP.shape[3], dP.shape[1])
        if i < dP.shape[2] and j < dP.shape[3]:
            dp = acc_t(0)
            for x in range(DV):
                dp += load(dO[batch, head, i, x]) * load(V[batch, head // group, j, x])
            dP[batch, head, i, j] = dp

    @cuda.jit
    def softmax_backward(P, dP, dS):
        batch, head, i, _ = my_element(P.shape[2], 1, P.shape[1])
        if i < P.shape[2]:
            delta = acc_t(0)
            for first in range(0, P.shape[3], PARTIAL):
                partial = acc_t(0)
                for j in range(first, min(first + PARTIAL, P.shape[3])):
                    partial += P[batch, head, i, j] * dP[batch, head, i, j]
                delta += partial
            for j in range(P.shape[3]):
                p = P[batch, head, i, j]
                ds = p * (dP[batch, head, i, j] - delta)
                dS[batch, head, i, j] = acc_t(0) if p == acc_t(0) else ds

    @cuda.jit
    def query_gradient(dS, K, dQ, group, softmax_scale):
        batch, head, i, x = my_element(dQ.shape[2], dQ.shape[3], dQ.shape[1])
        if i < dQ.shape[2] and x < dQ.shape[3]:
            dq = acc_t(0)
            for first in range(0, dS.shape[3], PARTIAL):
                partial = acc_t(0)
                for j in range(first, min(first + PARTIAL, dS.shape[3])):
                    partial += dS[batch, head, i, j] * load(K[batch, head // group, j, x])
                dq += partial
            dQ[batch, head, i, x] = store(dq * softmax_scale)

    @cuda.jit
    def key_gradient(Weights, Rows, Gradient, group, scale):
        """Weights^T Rows, summed over the heads of a group: dS and Q give dK, P and dO give dV."""
        batch, head_kv, j, x = my_element(Gradient.shape[2], Gradient.shape[3], Gradient.shape[1])
        if j < Gradient.shape[2] and x < Gradient.shape[3]:
            gradient = acc_t(0)
            for head in range(head_kv * group, (head_kv + 1) * group):
                for first in range(0, Weights.shape[2], PARTIAL):
                    partial = acc_t(0)
                    for i in range(first, min(first + PARTIAL, Weights.shape[2])):
                        partial += Weights[batch, head, i, j] * load(Rows[batch, head, i, x])
                    gradient += partial
            Gradient[batch, head_kv, j, x] = store(gradient * scale)

    return probability_gradient, softmax_backward, query_gradient, key_gradient


def forward(problem: Problem, config: Config) -> Plan:
    p = problem
    _, _, output = make_forward(p.head_dim, p.dtype, p.has_mask)
    step = Step(
        output,
        *_launch(config, p.batch * p.num_heads, p.seqlen_q, p.head_dim_v),
        ("p", "v", "o", p.group),
        statements=p.seqlen_k,
    )
    return Plan(
        steps=(*_probabilities(p, config, "lse"), step),
        workspaces={name: (_scores_shape(p), p.acc_dtype) for name in ("s", "p")},
    )


def backward(problem: Problem, config: Config) -> Plan:
    p, group = problem, problem.group
    dp, softmax_backward, query_gradient, key_gradient = make_backward(p.head_dim_v, p.dtype)
    planes, planes_kv = p.batch * p.num_heads, p.batch * p.num_heads_kv
    scale, one = scalar(p, p.softmax_scale), scalar(p, 1.0)
    rows = group * p.seqlen_q
    steps = (
        Step(
            dp,
            *_launch(config, planes, p.seqlen_q, p.seqlen_k),
            ("do", "v", "dp", group),
            statements=p.head_dim_v,
        ),
        Step(
            softmax_backward,
            *_launch(ONE_THREAD_A_ROW, planes, p.seqlen_q, 1),
            ("p", "dp", "ds"),
            statements=2 * p.seqlen_k,
        ),
        Step(
            query_gradient,
            *_launch(config, planes, p.seqlen_q, p.head_dim),
            ("ds", "k", "dq", group, scale),
            statements=p.seqlen_k,
        ),
        Step(
            key_gradient,
            *_launch(config, planes_kv, p.seqlen_k, p.head_dim),
            ("ds", "q", "dk", group, scale),
            statements=rows,
        ),
        Step(
            key_gradient,
            *_launch(config, planes_kv, p.seqlen_k, p.head_dim_v),
            ("p", "do", "dv", group, one),
            statements=rows,
        ),
    )
    shapes = {name: _scores_shape(p) for name in ("s", "p", "dp", "ds")} | {"no_lse": (0, 0, 0)}
    workspaces = {name: (shape, p.acc_dtype) for name, shape in shapes.items()}
    return Plan((*_probabilities(p, config, "no_lse"), *steps), workspaces)


def _probabilities(problem: Problem, config: Config, lse: str) -> tuple[Step, Step]:
    """The steps from q and k to P: both directions begin with them."""
    p = problem
    scores, softmax, _ = make_forward(p.head_dim, p.dtype, p.has_mask)
    planes = p.batch * p.num_heads
    return (
        Step(
            scores,
            *_launch(config, planes, p.seqlen_q, p.seqlen_k),
            ("q", "k", "mask", "s", p.group, *p.band, scalar(p, p.softmax_scale)),
            statements=p.head_dim,
        ),
        Step(
            softmax,
            *_launch(ONE_THREAD_A_ROW, planes, p.seqlen_q, 1),
            ("s", "p", lse),
            statements=3 * p.seqlen_k,
        ),
    )


def refuses(problem: Problem, device: Device) -> str | None:
    """Everything whose scores fit in memory."""
    elements = math.prod(_scores_shape(problem))
    wanted = 4 * elements * (8 if problem.dtype == "float64" else 4)
    if wanted > device.memory_bytes:
        return (
            f"it stores S and P whole, and {wanted:,} bytes of them do not fit in the "
            f"{device.memory_bytes:,} bytes of {device.name}"
        )
    return None


def _scores_shape(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k


def _launch(config: Config, planes: int, rows: int, columns: int) -> tuple[int, tuple[int, int]]:
    """Grid and block that give every element of (planes, rows, columns) a thread."""
    tiles = -(-rows // config.tile_m) * -(-columns // config.tile_n)
    return planes * tiles, (config.tile_n, config.tile_m)


RUNG = Rung(
    name="naive",
    Config=Config,
    candidates=(Config(),),
    shared_bytes=lambda problem, config, backward: 0,
    refuses=refuses,
    forward=forward,
    backward=backward,
)
