"""Attention in NumPy, forward and backward: whole matrices first, then tile by tile.

Everything else in the package is checked against this file. It runs in the precision of its
inputs (float64 is the judge of the kernels); float16 and bfloat16 are computed in float32.

Notation, for one head, as in the FlashAttention paper (Dao et al., 2022, arXiv 2205.14135)::

    S = scale * Q @ K.T       scores         (seqlen_q, seqlen_k)
    P = softmax(S) by rows    probabilities  (seqlen_q, seqlen_k)
    O = P @ V                 output         (seqlen_q, head_dim_v)

A pair that a mask excludes has the score -inf, so its probability is zero.

**The backward, derived.** Let ``dX`` be the derivative of some scalar loss by ``X``; we are given
``dO`` and want ``dQ``, ``dK``, ``dV`` (paper, appendix B.2).

1. ``O = P @ V`` is a matrix product, so ``dV = P.T @ dO`` and ``dP = dO @ V.T``.
2. One row of the softmax is ``P_j = exp(S_j) / sum_k exp(S_k)``. Its Jacobian is
   ``dP_j/dS_k = P_j * (1[j = k] - P_k)``, in matrix form ``diag(P) - P P^T``. Hence
   ``dS_k = sum_j dP_j * P_j * (1[j = k] - P_k) = P_k * (dP_k - delta)``, where
   ``delta = sum_j P_j * dP_j`` is one number a row.
3. That sum runs over all keys, but it need not: put in ``dP_j = sum_c dO_c * V_jc`` and swap the
   sums. ``delta = sum_c dO_c * (sum_j P_j * V_jc) = sum_c dO_c * O_c``: a sum over head_dim, from
   two arrays that are there before the backward starts.
4. ``S = scale * Q @ K.T`` gives ``dQ = scale * dS @ K`` and ``dK = scale * dS.T @ Q``.

**Why the backward needs no row maximum.** The forward keeps ``lse = log(sum_k exp(S_k))``, which
it has as ``m + log(l)``. Then ``P_j = exp(S_j) / exp(lse) = exp(S_j - lse)``. As ``lse`` is at
least the largest score, the exponent is never positive and nothing overflows: one number a row
replaces both the maximum ``m`` and the sum ``l`` (FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from numba_flash.masks import Band, in_band, make_band, visible

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = np.ndarray[Any, Any]


class AttentionOptions(TypedDict, total=False):
    """The keywords that every function here takes; each has the default of `naive_forward`."""

    softmax_scale: float | None
    causal: bool
    align: str
    window: tuple[int | None, int | None] | None
    mask: Array | None


def naive_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array]:
    """Attention with S and P stored whole.

    Parameters
    ----------
    q : ndarray, (batch, num_heads, seqlen_q, head_dim)
        Queries, of any float dtype.
    k : ndarray, (batch, num_heads_kv, seqlen_k, head_dim)
        Keys. Query head ``h`` uses key head ``h // (num_heads // num_heads_kv)``.
    v : ndarray, (batch, num_heads_kv, seqlen_k, head_dim_v)
        Values.
    softmax_scale : float, optional
        Factor of the scores; ``1 / sqrt(head_dim)`` if not given.
    causal, align, window
        As in `numba_flash.masks.make_band`.
    mask : ndarray of bool, optional
        True where a query may attend; broadcastable to (batch, num_heads, seqlen_q, seqlen_k).

    Returns
    -------
    o : ndarray, (batch, num_heads, seqlen_q, head_dim_v)
        In the dtype of ``q``. Zero in a row that sees nothing.
    lse : ndarray, (batch, num_heads, seqlen_q)
        Natural logarithm of the sum of the exponentials of the scores, float32 (float64 for
        float64 inputs). -inf in a row that sees nothing.

    Notes
    -----
    FlashAttention paper, Algorithm 0. A NaN in a key reaches only rows that see the key. A NaN in
    a value reaches every row, because 0 * NaN is NaN.
    """
    Q, K, V = _as_computed(q, k, v)
    group = q.shape[1] // k.shape[1]
    K, V = np.repeat(K, group, axis=1), np.repeat(V, group, axis=1)
    seen = visible(q.shape[2], k.shape[2], causal, align, window, mask)
    S = _scores(Q, K, _scale(softmax_scale, q), seen)
    m = _row_max(S)
    P = np.exp(S - _finite(m)[..., None])
    l = P.sum(axis=-1)
    return _divide(P @ V, l).astype(q.dtype), _lse(m, l)


def naive_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `naive_forward`, with S, P, dP and dS stored whole.

    Parameters
    ----------
    do : ndarray, shape of ``o``
        Derivative of the loss by the output.
    q, k, v, softmax_scale, causal, align, window, mask
        What the forward got.
    o, lse : ndarray
        What the forward returned.

    Returns
    -------
    dq, dk, dv : ndarray
        Shapes and dtypes of ``q``, ``k``, ``v``; dk and dv are summed over the query heads that
        share a key head. Zero wherever nothing was seen.

    Notes
    -----
    The module docstring derives each line (paper, appendix B.2).
    """
    dO, Q, K, V, O = _as_computed(do, q, k, v, o)
    group = q.shape[1] // k.shape[1]
    K, V = np.repeat(K, group, axis=1), np.repeat(V, group, axis=1)
    scale = _scale(softmax_scale, q)
    seen = visible(q.shape[2], k.shape[2], causal, align, window, mask)

    S = _scores(Q, K, scale, seen)
    P = np.exp(S - _finite(lse)[..., None])
    dV = P.swapaxes(-1, -2) @ dO
    dP = dO @ V.swapaxes(-1, -2)
    delta = (dO * O).sum(axis=-1)
    dS = P * (dP - delta[..., None])
    dQ = scale * dS @ K
    dK = scale * dS.swapaxes(-1, -2) @ Q
    return (
        dQ.astype(q.dtype),
        _sum_groups(dK, group).astype(k.dtype),
        _sum_groups(dV, group).astype(v.dtype),
    )


class Flash1Step(NamedTuple):
    """One tile of `flash1_forward_steps`: everything that line 9 to 13 of Algorithm 1 compute."""

    j: int  #: index of the key tile (outer loop)
    i: int  #: index of the query tile (inner loop)
    rows: slice  #: the queries of the tile
    cols: slice  #: the keys of the tile
    S: Array  #: scaled scores, -inf where masked  [tile_m, tile_n]
    m_tilde: Array  #: row maximum of this tile's S  [tile_m]
    P_tilde: Array  #: exp(S - m_tilde)  [tile_m, tile_n]
    l_tilde: Array  #: row sum of P_tilde  [tile_m]
    m_old: Array  #: row maximum over the tiles before  [tile_m]
    l_old: Array  #: row sum over the tiles before, relative to m_old  [tile_m]
    m_new: Array  #: max(m_old, m_tilde)  [tile_m]
    l_new: Array  #: alpha * l_old + beta * l_tilde  [tile_m]
    alpha: Array  #: exp(m_old - m_new): what the old sum and output are rescaled by  [tile_m]
    beta: Array  #: exp(m_tilde - m_new): what this tile is rescaled by  [tile_m]
    pv: Array  #: P_tilde @ V_j  [tile_m, head_dim_v]
    O_old: Array  #: softmax(S) @ V over the tiles before  [tile_m, head_dim_v]
    O_new: Array  #: the same with this tile  [tile_m, head_dim_v]

    @property
    def O(self) -> Array:  # noqa: E743
        """The output of these rows if this were the last key tile."""
        return self.O_new

    @property
    def lse(self) -> Array:
        """Log of the sum of exponentials over the keys so far."""
        return _lse(self.m_new, self.l_new)


class Flash2Step(NamedTuple):
    """One tile of `flash2_forward_steps`: lines 8 to 10 of Algorithm 1 of FlashAttention-2."""

    i: int  #: index of the query tile (outer loop)
    j: int  #: index of the key tile (inner loop)
    rows: slice  #: the queries of the tile
    cols: slice  #: the keys of the tile
    S: Array  #: scaled scores, -inf where masked  [tile_m, tile_n]
    m_old: Array  #: row maximum over the tiles before  [tile_m]
    m: Array  #: row maximum including this tile  [tile_m]
    alpha: Array  #: exp(m_old - m), the rescale factor  [tile_m]
    P: Array  #: exp(S - m), not yet divided by l  [tile_m, tile_n]
    l: Array  #: row sum so far, relative to m  [tile_m]
    pv: Array  #: P @ V_j  [tile_m, head_dim_v]
    acc: Array  #: output so far, not yet divided by l  [tile_m, head_dim_v]

    @property
    def O(self) -> Array:  # noqa: E743
        """``acc / l``: the output of these rows if this were the last key tile."""
        return _divide(self.acc, self.l)

    @property
    def lse(self) -> Array:
        """Log of the sum of exponentials over the keys so far."""
        return _lse(self.m, self.l)


class BackwardStep(NamedTuple):
    """One tile of the backward. ``dV``, ``dK`` and ``dQ`` are sums over the tiles so far.

    A pass that does not compute one of them leaves it None: `dkdv_steps` has no ``dQ``, `dq_steps`
    neither ``dV`` nor ``dK``.
    """

    j: int  #: index of the key tile
    i: int  #: index of the query tile
    rows: slice  #: the queries of the tile
    cols: slice  #: the keys of the tile
    S: Array  #: scaled scores, -inf where masked  [tile_m, tile_n]
    P: Array  #: exp(S - lse), the probabilities themselves  [tile_m, tile_n]
    dP: Array  #: dO_i @ V_j.T  [tile_m, tile_n]
    delta: Array  #: rowsum(dO_i * O_i)  [tile_m]
    dS: Array  #: P * (dP - delta)  [tile_m, tile_n]
    dV: Array | None  #: += P.T @ dO_i  [tile_n, head_dim_v]
    dK: Array | None  #: += scale * dS.T @ Q_i  [tile_n, head_dim]
    dQ: Array | None  #: += scale * dS @ K_j  [tile_m, head_dim]


def flash1_forward_steps(
    q: Array, k: Array, v: Array, tile_m: int, tile_n: int, **options: Unpack[AttentionOptions]
) -> Iterator[Flash1Step]:
    """FlashAttention-1 on one head: key tiles outside, query tiles inside.

    ``m``, ``l`` and ``O`` of every query wait in memory between two key tiles, and ``O`` is a
    finished softmax over the keys so far at any time. Every tile is visited, masked or not.

    Parameters
    ----------
    q, k, v : ndarray, (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
        One head.
    tile_m, tile_n : int
        Queries and keys a tile (the paper's B_r and B_c); the last tile of each may be smaller.
    **options
        Keywords of `naive_forward`; ``mask`` is broadcastable to (seqlen_q, seqlen_k).

    Yields
    ------
    Flash1Step

    Notes
    -----
    FlashAttention paper, Algorithm 1 (Algorithm 2 in the appendix, with mask). Two blocks of
    scores with maxima ``a`` and ``b`` and sums ``x`` and ``y`` (each relative to its own maximum)
    have together the maximum ``c = max(a, b)`` and the sum ``exp(a - c) * x + exp(b - c) * y``.
    """
    Q, K, V = _as_computed(q, k, v)
    scale, pairs = _scale_and_pairs(q, k, **options)
    O = np.zeros((len(Q), V.shape[1]), Q.dtype)
    m = np.full(len(Q), -np.inf, Q.dtype)
    l = np.zeros(len(Q), Q.dtype)
    for j, cols in _tiles(len(K), tile_n):
        for i, rows in _tiles(len(Q), tile_m):
            m_old, l_old, O_old = m[rows].copy(), l[rows].copy(), O[rows].copy()
            S = _scores(Q[rows], K[cols], scale, pairs.seen(rows, cols))
            m_tilde = _row_max(S)
            P_tilde = np.exp(S - _finite(m_tilde)[:, None])
            l_tilde = P_tilde.sum(axis=1)
            m_new = np.maximum(m_old, m_tilde)
            alpha = np.exp(m_old - _finite(m_new))
            beta = np.exp(m_tilde - _finite(m_new))
            l_new = alpha * l_old + beta * l_tilde
            pv = P_tilde @ V[cols]
            O_new = _divide((alpha * l_old)[:, None] * O_old + beta[:, None] * pv, l_new)
            m[rows], l[rows], O[rows] = m_new, l_new, O_new
            yield Flash1Step(
                j, i, rows, cols, S, m_tilde, P_tilde, l_tilde, m_old, l_old, m_new, l_new,
                alpha, beta, pv, O_old, O_new,
            )  # fmt: skip


def flash2_forward_steps(
    q: Array, k: Array, v: Array, tile_m: int, tile_n: int, **options: Unpack[AttentionOptions]
) -> Iterator[Flash2Step]:
    """FlashAttention-2 on one head: query tiles outside, key tiles inside.

    ``m``, ``l`` and the unnormalised output ``acc`` of a query tile live only as long as its inner
    loop, so they can stay on chip; the division by ``l`` happens once, at the end. Tiles in which
    no query sees a key are skipped.

    Parameters
    ----------
    q, k, v, tile_m, tile_n, **options
        As in `flash1_forward_steps`.

    Yields
    ------
    Flash2Step

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, Algorithm 1.
    """
    Q, K, V = _as_computed(q, k, v)
    scale, pairs = _scale_and_pairs(q, k, **options)
    for i, rows in _tiles(len(Q), tile_m):
        num_rows = rows.stop - rows.start
        m = np.full(num_rows, -np.inf, Q.dtype)
        l = np.zeros(num_rows, Q.dtype)
        acc = np.zeros((num_rows, V.shape[1]), Q.dtype)
        for j, cols in _tiles(len(K), tile_n):
            seen = pairs.seen(rows, cols)
            if not seen.any():
                continue
            S = _scores(Q[rows], K[cols], scale, seen)
            m_old, m = m, np.maximum(m, _row_max(S))
            alpha = np.exp(m_old - _finite(m))
            P = np.exp(S - _finite(m)[:, None])
            l = alpha * l + P.sum(axis=1)
            pv = P @ V[cols]
            acc = alpha[:, None] * acc + pv
            yield Flash2Step(i, j, rows, cols, S, m_old, m, alpha, P, l, pv, acc)


def flash_backward_steps(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    tile_m: int,
    tile_n: int,
    **options: Unpack[AttentionOptions],
) -> Iterator[BackwardStep]:
    """The backward of one head in one pass: key tiles outside, query tiles inside.

    ``dK`` and ``dV`` of a key tile are complete when its inner loop ends. ``dQ`` of a query tile
    grows by one term in each turn of the outer loop. Tiles in which no query sees a key are
    skipped.

    Parameters
    ----------
    do : ndarray, (seqlen_q, head_dim_v)
        Derivative of the loss by the output.
    q, k, v : ndarray, (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
        One head.
    o, lse : ndarray, (seqlen_q, head_dim_v), (seqlen_q,)
        What the forward gave.
    tile_m, tile_n, **options
        As in `flash1_forward_steps`.

    Yields
    ------
    BackwardStep

    Notes
    -----
    FlashAttention paper, Algorithm 4; FlashAttention-2, Algorithm 2, which this follows: P from
    the LSE, and delta before the loops. The formulas are derived in the module docstring.
    """
    head = _Backward.of(do, q, k, v, o, lse, options)
    dQ = np.zeros_like(head.Q)
    for j, cols in _tiles(len(head.K), tile_n):
        dK, dV = np.zeros_like(head.K[cols]), np.zeros_like(head.V[cols])
        for i, rows in _tiles(len(head.Q), tile_m):
            seen = head.pairs.seen(rows, cols)
            if not seen.any():
                continue
            S, P, dP, delta, dS = head.tile(rows, cols, seen)
            dV = dV + P.T @ head.dO[rows]
            dQ[rows] += head.scale * dS @ head.K[cols]
            dK = dK + head.scale * dS.T @ head.Q[rows]
            yield BackwardStep(
                j, i, rows, cols, S, P, dP, delta, dS, dV, dK, dQ[rows].copy()
            )  # fmt: skip


def dkdv_steps(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    tile_m: int,
    tile_n: int,
    **options: Unpack[AttentionOptions],
) -> Iterator[BackwardStep]:
    """The first of two backward passes: key tiles outside, dK and dV only.

    Nothing is added up in memory that several outer steps share, so outer steps may run in any
    order or at once and still give the same bits. Arguments as in `flash_backward_steps`.

    Yields
    ------
    BackwardStep
        With ``dQ`` None.
    """
    head = _Backward.of(do, q, k, v, o, lse, options)
    for j, cols in _tiles(len(head.K), tile_n):
        dK, dV = np.zeros_like(head.K[cols]), np.zeros_like(head.V[cols])
        for i, rows in _tiles(len(head.Q), tile_m):
            seen = head.pairs.seen(rows, cols)
            if not seen.any():
                continue
            S, P, dP, delta, dS = head.tile(rows, cols, seen)
            dV = dV + P.T @ head.dO[rows]
            dK = dK + head.scale * dS.T @ head.Q[rows]
            yield BackwardStep(j, i, rows, cols, S, P, dP, delta, dS, dV, dK, None)


def dq_steps(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    tile_m: int,
    tile_n: int,
    **options: Unpack[AttentionOptions],
) -> Iterator[BackwardStep]:
    """The second of two backward passes: query tiles outside, dQ only.

    It computes S, P, dP and dS again; that is the price of not sharing dQ between outer steps.
    Arguments as in `flash_backward_steps`.

    Yields
    ------
    BackwardStep
        With ``dV`` and ``dK`` None.
    """
    head = _Backward.of(do, q, k, v, o, lse, options)
    for i, rows in _tiles(len(head.Q), tile_m):
        dQ = np.zeros_like(head.Q[rows])
        for j, cols in _tiles(len(head.K), tile_n):
            seen = head.pairs.seen(rows, cols)
            if not seen.any():
                continue
            S, P, dP, delta, dS = head.tile(rows, cols, seen)
            dQ = dQ + head.scale * dS @ head.K[cols]
            yield BackwardStep(j, i, rows, cols, S, P, dP, delta, dS, None, None, dQ)


def tiled_forward(
    q: Array,
    k: Array,
    v: Array,
    tile_m: int,
    tile_n: int,
    *,
    steps: Callable[..., Iterator[Flash1Step | Flash2Step]] = flash2_forward_steps,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]:
    """`naive_forward`, computed by running ``steps`` to its end on every head.

    Parameters
    ----------
    q, k, v, **options
        As in `naive_forward`.
    tile_m, tile_n : int
        Queries and keys a tile.
    steps : `flash1_forward_steps` or `flash2_forward_steps`
        The algorithm.

    Returns
    -------
    o, lse : ndarray
        As in `naive_forward`.
    """
    O = np.zeros((*q.shape[:3], v.shape[3]), _compute_dtype(q))
    lse = np.full(q.shape[:3], -np.inf, O.dtype)
    for b, h, h_kv, of_head in _heads(q, k, options):
        for step in steps(q[b, h], k[b, h_kv], v[b, h_kv], tile_m, tile_n, **of_head):
            O[b, h, step.rows], lse[b, h, step.rows] = step.O, step.lse
    return O.astype(q.dtype), lse


def tiled_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    tile_m: int,
    tile_n: int,
    *,
    two_pass: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array, Array]:
    """`naive_backward`, computed tile by tile on every head.

    Parameters
    ----------
    do, q, k, v, o, lse, **options
        As in `naive_backward`.
    tile_m, tile_n : int
        Queries and keys a tile.
    two_pass : bool
        Run `dkdv_steps` and then `dq_steps`, in place of `flash_backward_steps`.

    Returns
    -------
    dq, dk, dv : ndarray
        As in `naive_backward`.
    """
    dtype = _compute_dtype(q)
    dQ, dK, dV = (np.zeros(x.shape, dtype) for x in (q, k, v))
    for b, h, h_kv, of_head in _heads(q, k, options):
        head = do[b, h], q[b, h], k[b, h_kv], v[b, h_kv], o[b, h], lse[b, h]
        dK_head, dV_head = np.zeros_like(dK[b, h_kv]), np.zeros_like(dV[b, h_kv])
        for steps in (dkdv_steps, dq_steps) if two_pass else (flash_backward_steps,):
            for step in steps(*head, tile_m, tile_n, **of_head):
                if step.dQ is not None:
                    dQ[b, h, step.rows] = step.dQ
                if step.dK is not None:
                    dK_head[step.cols], dV_head[step.cols] = step.dK, step.dV
        dK[b, h_kv] += dK_head
        dV[b, h_kv] += dV_head
    return dQ.astype(q.dtype), dK.astype(k.dtype), dV.astype(v.dtype)


class _Backward(NamedTuple):
    """What the three backward loops share: one head, and the middle of a tile step."""

    dO: Array
    Q: Array
    K: Array
    V: Array
    lse: Array
    delta: Array
    scale: float
    pairs: _Pairs

    @classmethod
    def of(
        cls, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, options: Any
    ) -> _Backward:
        dO, Q, K, V, O = _as_computed(do, q, k, v, o)
        return cls(dO, Q, K, V, lse, (dO * O).sum(axis=1), *_scale_and_pairs(q, k, **options))

    def tile(self, rows: slice, cols: slice, seen: Array) -> tuple[Array, ...]:
        """S, P, dP, delta and dS of one tile."""
        S = _scores(self.Q[rows], self.K[cols], self.scale, seen)
        P = np.exp(S - _finite(self.lse[rows])[:, None])
        dP = self.dO[rows] @ self.V[cols].T
        delta = self.delta[rows]
        return S, P, dP, delta, P * (dP - delta[:, None])


def _compute_dtype(x: Array) -> np.dtype[Any]:
    return np.promote_types(x.dtype, np.float32)


def _as_computed(*arrays: Array) -> list[Array]:
    """The arrays in the dtype that the arithmetic runs in, that of the first one."""
    return [x.astype(_compute_dtype(arrays[0]), copy=False) for x in arrays]


def _scale(softmax_scale: float | None, q: Array) -> float:
    # A Python float: a NumPy float64 scalar would drag float32 arrays into float64.
    return float(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


class _Pairs(NamedTuple):
    """Who sees whom in one head, answered for one tile at a time."""

    band: Band
    mask: Array | None

    def seen(self, rows: slice, cols: slice) -> Array:
        i, j = np.ogrid[rows, cols]
        band = in_band(i, j, *self.band)
        return band if self.mask is None else band & self.mask[rows, cols]


def _scale_and_pairs(
    q: Array,
    k: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
) -> tuple[float, _Pairs]:
    if mask is not None:
        mask = np.broadcast_to(np.asarray(mask, bool), (len(q), len(k)))
    band = make_band(len(q), len(k), causal, align, window)
    return _scale(softmax_scale, q), _Pairs(band, mask)


def _scores(Q: Array, K: Array, scale: float, seen: Array) -> Array:
    """S, with -inf put in place of what is not seen: adding -inf would let a NaN through."""
    return np.where(seen, scale * (Q @ K.swapaxes(-1, -2)), -np.inf)


def _row_max(S: Array) -> Array:
    return np.max(S, axis=-1, initial=-np.inf)


def _finite(m: Array) -> Array:
    """``m`` with 0 for -inf, to subtract: -inf - -inf is NaN, but exp(-inf - 0) is 0."""
    return np.where(np.isneginf(m), 0, m)


def _divide(acc: Array, l: Array) -> Array:
    """acc / l by rows; zero in a row that sees nothing, for which l is zero."""
    empty = (l == 0)[..., None]
    return np.where(empty, 0, acc / np.where(empty, 1, l[..., None]))


def _lse(m: Array, l: Array) -> Array:
    return np.where(l == 0, -np.inf, m + np.log(np.where(l == 0, 1, l)))


def _sum_groups(x: Array, group: int) -> Array:
    """Add up the query heads that share a key head: (batch, group * n, ...) to (batch, n, ...)."""
    batch, num_heads, *rest = x.shape
    return x.reshape(batch, num_heads // group, group, *rest).sum(axis=2)


def _tiles(length: int, tile: int) -> Iterator[tuple[int, slice]]:
    for index, start in enumerate(range(0, length, tile)):
        yield index, slice(start, min(start + tile, length))


def _heads(
    q: Array, k: Array, options: AttentionOptions
) -> Iterator[tuple[int, int, int, AttentionOptions]]:
    """Every batch and query head, the key head that it reads, and the options with its mask."""
    group = q.shape[1] // k.shape[1]
    mask = options.get("mask")
    if mask is not None:
        mask = np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    for b, h in np.ndindex(q.shape[:2]):
        of_head = options if mask is None else AttentionOptions(**{**options, "mask": mask[b, h]})
        yield b, h, h // group, of_head
