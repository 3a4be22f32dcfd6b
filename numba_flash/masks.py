"""Who may attend to whom: predicates that NumPy, the emulator and the GPU share.

Causal masking and a sliding window are one thing, a *band*: query ``i`` may attend to key ``j``
exactly when ``i + left <= j <= i + right``. Two integers say it all; the kernels take them as
arguments and never ask which keywords they came from.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda

UNBOUNDED = 1 << 40
"""A distance no sequence reaches: ``i - UNBOUNDED`` and ``i + UNBOUNDED`` stay inside int64."""


class Band(NamedTuple):
    """The keys a query sees: ``i + left <= j <= i + right``, both ends inclusive."""

    left: int
    right: int


def make_band(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
) -> Band:
    """The band of a causal flag and a window.

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        Number of queries and keys.
    causal : bool
        A query sees no key after its own position.
    align : {"bottom-right", "top-left"}
        Where the diagonal lies when the lengths differ. "bottom-right" puts the last query on
        the last key (FlashAttention 2.1 and later); "top-left" the first query on the first key
        (torch's ``is_causal``).
    window : (left, right), optional
        How many keys before and after its own position a query sees; ``None`` is unbounded.

    Returns
    -------
    Band
    """
    diagonal = seqlen_k - seqlen_q if align == "bottom-right" else 0
    before, after = window if window is not None else (None, None)
    left = -UNBOUNDED if before is None else diagonal - before
    right = UNBOUNDED if after is None else diagonal + after
    if causal:
        right = min(right, diagonal)
    return Band(left, right)


def in_band(i, j, left, right):
    """Whether key ``j`` lies in the band of query ``i`` (numbers, NumPy arrays, device code)."""
    return (i + left <= j) & (j <= i + right)


in_band_device = cuda.jit(device=True)(in_band)


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The whole mask as booleans, True where a query may attend.

    Returns
    -------
    ndarray of bool, (seqlen_q, seqlen_k), or the shape of ``mask`` broadcast with it.
    """
    left, right = make_band(seqlen_q, seqlen_k, causal, align, window)
    band = in_band(np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :], left, right)
    return band if mask is None else band & np.asarray(mask, bool)


@functools.cache
def make_may_attend(HAS_MASK: bool):
    """The device function that decides one score; without a mask array it never reads one."""

    @cuda.jit(device=True)
    def may_attend(mask, batch, head, i, j, left, right):
        allowed = in_band_device(i, j, left, right)
        if HAS_MASK and allowed:
            allowed = mask[batch, head, i, j] != 0
        return allowed

    return may_attend
