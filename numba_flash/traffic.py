"""Bytes that the threads of each kernel ask of global memory, by closed formula, to the last byte.

What the emulator counts as ``report.traffic`` is derived here from the loops of the kernels: for
every array, how many of its elements how many threads load or store. Caches do not come into it.
`passes` has the other measure, how often an algorithm comes back to an array; a kernel asks for
much more than that where many threads load the same element.

In the formulas ``N_q``, ``N_k`` are the sequence lengths, ``d``, ``d_v`` the head dimensions of Q
and K and of V and O. All are per query head, except where a loop runs over key heads; `Kernel`
holds bytes of all heads. 16-bit arrays have 2 bytes an element and their sums 4.

Tails and masks are included. A band (causal, window) leaves each query a range of keys, and leaves
fa2 a range of tiles; a mask array is read for the pairs inside the band only:

- ``pairs``: (query, key) inside the band;
- ``visible``: those of them that the mask array allows too;
- ``seeing``: queries that see a key at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from .problem import DTYPES, Problem

Direction = Literal["forward", "backward"]


class Span(NamedTuple):
    """Loop bounds: first and one past the last."""

    begin: int
    end: int


@dataclass
class Kernel:
    """What the threads of one launch ask for: bytes by the names that its arrays have in it."""

    name: str
    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        return sum(self.reads.values())

    @property
    def write_bytes(self) -> int:
        return sum(self.writes.values())


class Sizes:
    """What the formulas are made of.

    Attributes
    ----------
    heads, heads_kv : int
        Query heads and key heads of the whole batch.
    item, acc : int
        Bytes of an element as it is stored, and of a sum.
    pairs, visible, seeing : int
        Of all heads together.
    mask_bytes : int
        One for each pair, or none without a mask array.
    """

    def __init__(self, problem: Problem, config: Any, mask: np.ndarray | None):
        self.problem = problem
        self.N_q, self.N_k = problem.seqlen_q, problem.seqlen_k
        self.d, self.d_v = problem.head_dim, problem.head_dim_v
        self.heads = problem.batch * problem.num_heads
        self.heads_kv = problem.batch * problem.num_heads_kv
        self.item, self.acc = DTYPES[problem.dtype], DTYPES[problem.acc_dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.config = config
        self.team = getattr(config, "team", 1)
        keys = [self.keys_of(Span(i, i + 1)) for i in range(self.N_q)]
        counts = np.array([max(0, end - begin) for begin, end in keys], np.int64)
        self.pairs = self.heads * int(counts.sum())
        self.visible, self.seeing = self.pairs, self.heads * int(np.count_nonzero(counts))
        self.mask_bytes = self.pairs if problem.has_mask else 0
        if mask is not None:
            scores = (problem.batch, problem.num_heads, self.N_q, self.N_k)
            seen = np.broadcast_to(mask, scores) & self.band()
            self.visible = int(np.count_nonzero(seen))
            self.seeing = int(np.count_nonzero(seen.any(axis=3)))

    def band(self) -> np.ndarray:
        """Which key is in the band of which query, (seqlen_q, seqlen_k)."""
        left, right = self.problem.band
        distance = np.arange(self.N_k) - np.arange(self.N_q)[:, None]
        return (left <= distance) & (distance <= right)

    def keys_of(self, rows: Span) -> Span:
        """The keys that are in the band of one of these queries."""
        left, right = self.problem.band
        last = min(rows.end, self.N_q) - 1
        return Span(max(0, rows.begin + left), min(self.N_k, last + right + 1))

    def queries_of(self, keys: Span) -> Span:
        """The queries in whose band one of these keys is."""
        left, right = self.problem.band
        last = min(keys.end, self.N_k) - 1
        return Span(max(0, keys.begin - right), min(self.N_q, last - left + 1))

    def keys_loaded(self) -> int:
        """Rows of K that a head's query tiles load: whole key tiles, cut at the sequence's end."""
        tiles = spans(self.N_q, self.tile_m)
        return sum(covered(self.keys_of(tile), self.tile_n, self.N_k) for tile in tiles)

    def queries_loaded(self) -> int:
        """Rows of Q that a head's key tiles load."""
        tiles = spans(self.N_k, self.tile_n)
        return sum(covered(self.queries_of(tile), self.tile_m, self.N_q) for tile in tiles)

    def query_rows_by_key_tile(self) -> int:
        """Rows of Q of a head, each counted for every key tile that its query tile visits."""
        tiles = spans(self.N_q, self.tile_m)
        return sum(
            (tile.end - tile.begin) * tiles_of(self.keys_of(tile), self.tile_n) for tile in tiles
        )

    def key_rows_by_query_tile(self) -> int:
        """Rows of K of a head, each counted for every query tile that its key tile visits."""
        tiles = spans(self.N_k, self.tile_n)
        return sum(
            (tile.end - tile.begin) * tiles_of(self.queries_of(tile), self.tile_m) for tile in tiles
        )

    def pairs_visited(self) -> int:
        """Pairs of a head in the tiles that the dK and dV pass visits, in the band or not."""
        return sum(
            (tile.end - tile.begin) * covered(self.queries_of(tile), self.tile_m, self.N_q)
            for tile in spans(self.N_k, self.tile_n)
        )


def spans(length: int, tile: int) -> list[Span]:
    """The tiles of a sequence; the last one may be shorter."""
    return [Span(first, min(first + tile, length)) for first in range(0, length, tile)]


def tiles_of(wanted: Span, tile: int) -> int:
    """Tiles that a loop over a range of rows visits."""
    return max(0, -(-wanted.end // tile) - wanted.begin // tile)


def covered(wanted: Span, tile: int, length: int) -> int:
    """Rows of the tiles that a loop over a range of rows visits."""
    first, end = wanted.begin // tile * tile, -(-wanted.end // tile) * tile
    return max(0, min(end, length) - first)


def requested_bytes(
    rung: str, direction: Direction, problem: Problem, config: Any, mask: np.ndarray | None = None
) -> tuple[Kernel, ...]:
    """What each kernel of a rung asks for.

    The forward is one that also writes the LSE (``return_lse=True``).

    Parameters
    ----------
    rung : str
        A name in `FORMULAS`.
    direction : {"forward", "backward"}
    problem : Problem
    config : Config of the rung
    mask : ndarray of bool, optional
        The mask array of the problem, which broadcasts to (batch, heads, seqlen_q, seqlen_k).

    Returns
    -------
    tuple of Kernel
        In the order of the launches.

    Raises
    ------
    KeyError
        If there is no formula for the rung.
    ValueError
        If the problem has a mask array and ``mask`` is missing: some loads depend on it.
    """
    if problem.has_mask and mask is None:
        raise ValueError("the problem has a mask; pass the array too, some loads depend on it")
    mask = mask if problem.has_mask else None
    return FORMULAS[rung, direction](Sizes(problem, config, mask))


def total_bytes(kernels: tuple[Kernel, ...]) -> int:
    """The sum of what kernels read and write."""
    return sum(kernel.read_bytes + kernel.write_bytes for kernel in kernels)


def paper_numbers(problem: Problem, fast_memory: int) -> float:
    """N_q N_k d^2 / M a head: the order of the numbers that FlashAttention moves.

    Standard attention moves of the order of N d + N^2. (arXiv 2205.14135, Theorem 2; d is the
    wider of the two head dimensions here.)

    Parameters
    ----------
    problem : Problem
    fast_memory : int
        M, the numbers that fit on chip.

    Returns
    -------
    float
        Of all heads together; the theorem leaves a constant factor open.
    """
    p = problem
    wide = max(p.head_dim, p.head_dim_v)
    return p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * wide**2 / fast_memory


def naive_scores(s: Sizes) -> Kernel:
    """A thread a score: N_q N_k threads read a row of Q and a row of K, 2 d numbers."""
    scores = s.heads * s.N_q * s.N_k
    row = scores * s.d * s.item
    return Kernel("scores", {"Q": row, "K": row, "Mask": s.mask_bytes}, {"S": scores * s.acc})


def naive_softmax(s: Sizes, with_lse: bool) -> Kernel:
    """A thread a row passes over S three times: maximum, sum, probabilities."""
    scores = s.heads * s.N_q * s.N_k * s.acc
    return Kernel("softmax", {"S": 3 * scores}, {"P": scores, "LSE": with_lse * rows_bytes(s)})


def rows_bytes(s: Sizes) -> int:
    """An array with one sum a query: LSE, delta, l, m."""
    return s.heads * s.N_q * s.acc


def naive_forward(s: Sizes) -> tuple[Kernel, ...]:
    """N_q N_k (2 d + 2 d_v + 5) + N_q (d_v + 1) numbers, and the mask.

    - scores: N_q N_k (2 d + 1)
    - softmax: 4 N_q N_k + N_q
    - output: a thread a number of O reads a row of P and a column of V: N_q d_v (2 N_k + 1)
    """
    terms = s.heads * s.N_q * s.d_v * s.N_k
    output = Kernel(
        "output",
        {"P": terms * s.acc, "V": terms * s.item},
        {"O": s.heads * s.N_q * s.d_v * s.item},
    )
    return naive_scores(s), naive_softmax(s, with_lse=True), output


def naive_backward(s: Sizes) -> tuple[Kernel, ...]:
    """N_q N_k (6 d + 4 d_v + 11) + N_q d + N_k (d + d_v) numbers, and the mask.

    - scores, softmax: N_q N_k (2 d + 1 + 4), without LSE
    - dP: a thread a number reads rows of dO and V: N_q N_k (2 d_v + 1)
    - dS: a thread a row reads P and dP twice: 5 N_q N_k
    - dQ: a thread a number reads a row of dS, a column of K: N_q d (2 N_k + 1)
    - dK, dV: a thread a number reads a column of dS and of Q, of P and of dO, in every head of the
      group: N_q N_k 2 (d + d_v), and N_k (d + d_v) a key head
    """
    scores = s.heads * s.N_q * s.N_k
    dp = Kernel(
        "probability_gradient",
        {"dO": scores * s.d_v * s.item, "V": scores * s.d_v * s.item},
        {"dP": scores * s.acc},
    )
    ds = Kernel(
        "softmax_backward",
        {"P": 2 * scores * s.acc, "dP": 2 * scores * s.acc},
        {"dS": scores * s.acc},
    )
    dq = Kernel(
        "query_gradient",
        {"dS": scores * s.d * s.acc, "K": scores * s.d * s.item},
        {"dQ": s.heads * s.N_q * s.d * s.item},
    )
    dk, dv = (
        Kernel(
            "key_gradient",
            {"Weights": scores * width * s.acc, "Rows": scores * width * s.item},
            {"Gradient": s.heads_kv * s.N_k * width * s.item},
        )
        for width in (s.d, s.d_v)
    )
    return naive_scores(s), naive_softmax(s, with_lse=False), dp, ds, dq, dk, dv


def minimal_forward(s: Sizes) -> tuple[Kernel, ...]:
    """Keys outside: T_c N_q (d + 2 d_v + 4) + N_q (d_v + 4) + seeing + N_k (d + d_v) numbers.

    For each of the T_c key tiles, Q is read, and O, l, m are read and written. Before the loop
    O, l, m are written (d_v + 2); after it l is read and LSE written (2), and m is read for the
    queries that saw something. K and V are read once. 16-bit outputs are summed in an array of
    their own, which one more kernel rounds.
    """
    T_c = -(-s.N_k // s.tile_n)
    rows, out = rows_bytes(s), s.heads * s.N_q * s.d_v
    kernel = Kernel(
        "forward_kernel",
        {
            "Q": T_c * s.heads * s.N_q * s.d * s.item,
            "K": s.heads * s.N_k * s.d * s.item,
            "V": s.heads * s.N_k * s.d_v * s.item,
            "Mask": s.mask_bytes,
            "O": T_c * out * s.acc,
            "l": (T_c + 1) * rows,
            "m": T_c * rows + s.seeing * s.acc,
        },
        {"O": (T_c + 1) * out * s.acc, "l": (T_c + 1) * rows, "m": (T_c + 1) * rows, "LSE": rows},
    )
    return kernel, *rounding(s, out)


def minimal_backward(s: Sizes) -> tuple[Kernel, ...]:
    """Keys outside: T_c N_q (3 d + 2 d_v + 1) + N_q d + 2 N_k (d + d_v) numbers.

    For each key tile Q, dO, O, LSE are read, and dQ is read and written; dQ is set to zero before
    the loop. A key head reads its K and V once, and writes dK and dV once.
    """
    T_c = -(-s.N_k // s.tile_n)
    queries, keys = s.heads * s.N_q, s.heads_kv * s.N_k
    kernel = Kernel(
        "backward_kernel",
        {
            "Q": T_c * queries * s.d * s.item,
            "K": keys * s.d * s.item,
            "V": keys * s.d_v * s.item,
            "Mask": s.mask_bytes,
            "dO": T_c * queries * s.d_v * s.item,
            "O": T_c * queries * s.d_v * s.item,
            "LSE": T_c * rows_bytes(s),
            "dQ": T_c * queries * s.d * s.acc,
        },
        {
            "dQ": (T_c + 1) * queries * s.d * s.acc,
            "dK": keys * s.d * s.item,
            "dV": keys * s.d_v * s.item,
        },
    )
    return kernel, *rounding(s, queries * s.d)


def rounding(s: Sizes, numbers: int) -> tuple[Kernel, ...]:
    """The kernel that rounds sums to 16 bits, where there is one."""
    if not s.problem.is_16_bit:
        return ()
    return (Kernel("round_kernel", {"Sums": numbers * s.acc}, {"Rounded": numbers * s.item}),)


def fa2_forward(s: Sizes) -> tuple[Kernel, ...]:
    """Queries outside: N_q (d + d_v + 1) + (d + d_v) sum over query tiles of their keys, numbers.

    Q is read, and O and LSE are written, once. K and V are read for each query tile, as far as the
    key tiles that its band touches; without a mask that is T_r N_k rows.
    """
    keys = s.heads * s.keys_loaded()
    kernel = Kernel(
        "forward_kernel",
        {
            "Q": s.heads * s.N_q * s.d * s.item,
            "K": keys * s.d * s.item,
            "V": keys * s.d_v * s.item,
            "Mask": s.mask_bytes,
        },
        {"O": s.heads * s.N_q * s.d_v * s.item, "LSE": rows_bytes(s)},
    )
    return (kernel,)


def fa2_backward(s: Sizes) -> tuple[Kernel, ...]:
    """Three passes.

    - delta: reads dO and O, writes delta: N_q (2 d_v + 1)
    - dK, dV, keys outside: Q and dO are read for each key tile, as far as the query tiles that its
      band touches, (d + d_v) numbers a row. A thread has a key and some queries of the tile, and
      reads the LSE for every such pair, delta for the visible ones. (A visible probability that
      underflows to zero needs no delta either; these formulas take none to do that.) K, V, dK, dV
      cross once a key head: 2 N_k (d + d_v)
    - dQ, queries outside: N_q (2 d + d_v), K and V as in `fa2_forward`, and each of the ``team``
      threads of a row reads its LSE and its delta
    """
    queries, keys = s.heads * s.N_q, s.heads_kv * s.N_k
    gradient = s.heads * s.N_q * s.d_v * s.item
    delta = Kernel("delta_kernel", {"dO": gradient, "O": gradient}, {"Delta": rows_bytes(s)})
    rows = s.heads * s.queries_loaded()
    key_gradients = Kernel(
        "key_gradients_kernel",
        {
            "Q": rows * s.d * s.item,
            "K": keys * s.d * s.item,
            "V": keys * s.d_v * s.item,
            "Mask": s.mask_bytes,
            "dO": rows * s.d_v * s.item,
            "LSE": s.heads * s.pairs_visited() * s.acc,
            "Delta": s.visible * s.acc,
        },
        {"dK": keys * s.d * s.item, "dV": keys * s.d_v * s.item},
    )
    loaded = s.heads * s.keys_loaded()
    query_gradient = Kernel(
        "query_gradient_kernel",
        {
            "Q": queries * s.d * s.item,
            "K": loaded * s.d * s.item,
            "V": loaded * s.d_v * s.item,
            "Mask": s.mask_bytes,
            "dO": gradient,
            "LSE": s.team * rows_bytes(s),
            "Delta": s.team * rows_bytes(s),
        },
        {"dQ": queries * s.d * s.item},
    )
    return delta, key_gradients, query_gradient


def register_tiled_forward(s: Sizes) -> tuple[Kernel, ...]:
    """As `fa2_forward`, but Q is read again for each key tile that a query tile visits."""
    keys = s.heads * s.keys_loaded()
    kernel = Kernel(
        "forward_kernel",
        {
            "Q": s.heads * s.query_rows_by_key_tile() * s.d * s.item,
            "K": keys * s.d * s.item,
            "V": keys * s.d_v * s.item,
            "Mask": s.mask_bytes,
        },
        {"O": s.heads * s.N_q * s.d_v * s.item, "LSE": rows_bytes(s)},
    )
    return (kernel,)


def register_tiled_backward(s: Sizes) -> tuple[Kernel, ...]:
    """Three passes, as `fa2_backward`; every product reads its operands for every tile.

    - dK, dV: each of Q and dO is read by two products for each key tile, K and V by one for each
      query tile; each of the tile_n / rows threads that have the same query reads its LSE and delta
    - dQ: K is read by two products for each query tile, V by one, Q and dO by one for each key tile
    """
    rows = s.heads * s.queries_loaded()
    keys = s.heads * s.key_rows_by_query_tile()
    sharing = s.tile_n // s.config.rows
    key_gradients = Kernel(
        "key_gradients_kernel",
        {
            "Q": 2 * rows * s.d * s.item,
            "K": keys * s.d * s.item,
            "V": keys * s.d_v * s.item,
            "Mask": s.mask_bytes,
            "dO": 2 * rows * s.d_v * s.item,
            "LSE": sharing * rows * s.acc,
            "Delta": sharing * rows * s.acc,
        },
        {"dK": s.heads_kv * s.N_k * s.d * s.item, "dV": s.heads_kv * s.N_k * s.d_v * s.item},
    )
    queries, loaded = s.heads * s.query_rows_by_key_tile(), s.heads * s.keys_loaded()
    team = s.config.team_for(s.d)
    query_gradient = Kernel(
        "query_gradient_kernel",
        {
            "Q": queries * s.d * s.item,
            "K": 2 * loaded * s.d * s.item,
            "V": loaded * s.d_v * s.item,
            "Mask": s.mask_bytes,
            "dO": queries * s.d_v * s.item,
            "LSE": team * rows_bytes(s),
            "Delta": team * rows_bytes(s),
        },
        {"dQ": s.heads * s.N_q * s.d * s.item},
    )
    return fa2_backward(s)[0], key_gradients, query_gradient


FORMULAS: dict[tuple[str, str], Callable[[Sizes], tuple[Kernel, ...]]] = {
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
