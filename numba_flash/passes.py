"""How often each rung comes back to global memory, by closed formula: passes over whole arrays.

A formula counts an array once where a kernel passes over it once, once a tile where a loop over
tiles passes over it again. What a thread reads twice within one tile, or many threads read at the
same time, is not counted: this is the traffic of the algorithm, in the way of FlashAttention's
section 3.2, and what a perfect cache would leave of `traffic`, which has what the threads really
ask for. Masks, which skip tiles, are not counted either, and inputs are taken to be as wide as the
sums (float32 or float64).

Every function gives *numbers a head*, as two counts: those that a query head moves and those that
a key head moves (the same where each query head has a key head of its own). In the formulas
``N_q``, ``N_k`` are the sequence lengths, ``d`` and ``d_v`` the head dimensions of Q and K and of V
and O, ``T_r`` and ``T_c`` the numbers of query tiles and of key tiles. Sizes: Q and dQ are N_q d;
O and dO are N_q d_v; LSE, l, m and delta are N_q; K and dK are N_k d; V and dV are N_k d_v; S, P,
dP and dS are N_q N_k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from .problem import DTYPES, Problem

Direction = Literal["forward", "backward"]


class Sizes(NamedTuple):
    """What the formulas are made of."""

    N_q: int
    N_k: int
    d: int
    d_v: int
    T_r: int
    T_c: int


def pass_bytes(rung: str, direction: Direction, problem: Problem, tile_m: int, tile_n: int) -> int:
    """Bytes of global memory that a rung passes over.

    Parameters
    ----------
    rung : str
        A name in `FORMULAS`.
    direction : {"forward", "backward"}
    problem : Problem
    tile_m, tile_n : int
        Rows of a query tile and of a key tile.

    Returns
    -------
    int

    Raises
    ------
    KeyError
        If there is no formula for the rung.
    """
    p = problem
    T_r, T_c = -(-p.seqlen_q // tile_m), -(-p.seqlen_k // tile_n)
    sizes = Sizes(p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v, T_r, T_c)
    per_head, per_head_kv = FORMULAS[rung, direction](sizes)
    numbers = p.batch * (p.num_heads * per_head + p.num_heads_kv * per_head_kv)
    return numbers * DTYPES[p.dtype]


def naive_forward(s: Sizes) -> tuple[int, int]:
    """Three kernels, S and P whole: 4 N_q N_k + N_q (d + d_v + 1) + N_k (d + d_v).

    Scores read Q, K and write S; the softmax reads S and writes P and LSE; the output reads P, V
    and writes O.
    """
    return 4 * s.N_q * s.N_k + s.N_q * (s.d + s.d_v + 1) + s.N_k * (s.d + s.d_v), 0


def naive_backward(s: Sizes) -> tuple[int, int]:
    """Seven kernels, S, P, dP, dS whole: 10 N_q N_k + N_q (3 d + 2 d_v) + N_k (3 d + 2 d_v).

    Scores read Q, K and write S; the softmax reads S and writes P; dP is written
    from dO, V; dS from P, dP; dQ comes from dS, K; dK from dS, Q; dV from P, dO. That is
    1 + 2 + 1 + 3 + 1 + 1 + 1 passes over N_q N_k numbers.
    """
    queries = s.N_q * (3 * s.d + 2 * s.d_v)
    return 10 * s.N_q * s.N_k + queries + s.N_k * (2 * s.d + s.d_v), s.N_k * (s.d + s.d_v)


def minimal_forward(s: Sizes) -> tuple[int, int]:
    """Keys outside: T_c N_q (d + 2 d_v + 4) + N_q (d_v + 5) + N_k (d + d_v).

    For each key tile Q is read, and O, l, m are read and written. They are set up before the loop
    (d_v + 2), and LSE is written from l, m after it (3). K and V are read once.
    """
    step = s.N_q * (s.d + 2 * s.d_v + 4)
    return s.T_c * step + s.N_q * (s.d_v + 5) + s.N_k * (s.d + s.d_v), 0


def minimal_backward(s: Sizes) -> tuple[int, int]:
    """Keys outside: T_c N_q (3 d + 2 d_v + 1) + N_q d + 2 N_k (d + d_v).

    For each key tile Q, dO, O, LSE are read, and dQ is read and written; dQ is set to zero before
    the loop. K and V are read once, dK and dV written once.
    """
    step = s.N_q * (3 * s.d + 2 * s.d_v + 1)
    return s.T_c * step + s.N_q * s.d, 2 * s.N_k * (s.d + s.d_v)


def fa2_forward(s: Sizes) -> tuple[int, int]:
    """Queries outside: N_q (d + d_v + 1) + T_r N_k (d + d_v).

    Q is read, and O, LSE are written, once: between key tiles they stay on chip. K and V are read
    for each query tile.
    """
    return s.N_q * (s.d + s.d_v + 1) + s.T_r * s.N_k * (s.d + s.d_v), 0


def fa2_backward(s: Sizes) -> tuple[int, int]:
    """Three passes, each written once.

    - delta: reads dO, O, writes delta: N_q (2 d_v + 1)
    - dK, dV, keys outside: T_c N_q (d + d_v + 2) + 2 N_k (d + d_v); Q, dO, LSE, delta are read for
      each key tile
    - dQ, queries outside: N_q (2 d + d_v + 2) + T_r N_k (d + d_v); K and V are read for each query
      tile
    """
    delta = s.N_q * (2 * s.d_v + 1)
    dkdv = s.T_c * s.N_q * (s.d + s.d_v + 2)
    dq = s.N_q * (2 * s.d + s.d_v + 2) + s.T_r * s.N_k * (s.d + s.d_v)
    return delta + dkdv + dq, 2 * s.N_k * (s.d + s.d_v)


def register_tiled_forward(s: Sizes) -> tuple[int, int]:
    """N_q (T_c d + d_v + 1) + T_r N_k (d + d_v): as `fa2_forward`, Q read for each key tile."""
    return s.N_q * (s.T_c * s.d + s.d_v + 1) + s.T_r * s.N_k * (s.d + s.d_v), 0


def register_tiled_backward(s: Sizes) -> tuple[int, int]:
    """Three passes; every product reads its operands for every tile.

    - delta: N_q (2 d_v + 1)
    - dK, dV: T_c N_q (2 d + 2 d_v + 2) + T_r N_k (d + d_v); Q and dO are in two products each
    - dQ: T_c N_q (d + d_v) + N_q (d + 2) + T_r N_k (2 d + d_v); K is in two
    - dK and dV are written once: N_k (d + d_v)
    """
    delta = s.N_q * (2 * s.d_v + 1)
    dkdv = s.T_c * s.N_q * (2 * s.d + 2 * s.d_v + 2) + s.T_r * s.N_k * (s.d + s.d_v)
    dq = s.N_q * (s.T_c * (s.d + s.d_v) + s.d + 2) + s.T_r * s.N_k * (2 * s.d + s.d_v)
    return delta + dkdv + dq, s.N_k * (s.d + s.d_v)


FORMULAS: dict[tuple[str, str], Callable[[Sizes], tuple[int, int]]] = {
    ("naive", "forward"): naive_forward,
    ("naive", "backward"): naive_backward,
    ("minimal", "forward"): minimal_forward,
    ("minimal", "backward"): minimal_backward,
    ("fa2", "forward"): fa2_forward,
    ("fa2", "backward"): fa2_backward,
    ("register_tiled", "forward"): register_tiled_forward,
    ("register_tiled", "backward"): register_tiled_backward,
}
"""(rung, direction): the formula."""
