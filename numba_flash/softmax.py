"""The online softmax: one row's running maximum and sum, tile after tile.

After every tile a row holds its maximum m, its sum l = sum_j exp(s_j - m) and its accumulator
sum_j exp(s_j - m) v_j over the keys seen so far. A new tile with maximum m' shrinks what was
summed by exp(m - max(m, m')). (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention,
arXiv 2205.14135, section 3.1.)

Maxima start at -inf, and nothing here is compiled with fast maths, which would let the compiler
assume that infinities do not occur.
"""

from __future__ import annotations

import functools
import math

from numba import cuda

FULL_WARP = 0xFFFFFFFF


@functools.cache
def make_row_softmax(acc_t):
    """Device functions ``update`` and ``finish`` for rows in precision ``acc_t``."""

    @cuda.jit(device=True)
    def update(row_max, tile_max):
        """The maximum so far, the base of the exponentials, the factor for the old sums."""
        new_max = max(row_max, tile_max)
        # A row that has seen nothing has no maximum; with base 0, exp(-inf - base) is 0, not NaN.
        base = acc_t(0) if new_max == acc_t(-math.inf) else new_max
        return new_max, base, math.exp(row_max - base)

    @cuda.jit(device=True)
    def finish(row_max, row_sum):
        """The factor that normalises the accumulator, and the log-sum-exp."""
        if row_sum == acc_t(0):
            return acc_t(0), acc_t(-math.inf)
        return acc_t(1) / row_sum, row_max + math.log(row_sum)

    return update, finish


@functools.cache
def make_team_reduce(TEAM: int, APART: int = 1):
    """Device functions ``team_max`` and ``team_sum`` over TEAM lanes of a warp, so far APART."""

    @cuda.jit(device=True)
    def team_max(value):
        distance = TEAM // 2 * APART
        while distance >= APART:
            value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, distance))
            distance //= 2
        return value

    @cuda.jit(device=True)
    def team_sum(value):
        distance = TEAM // 2 * APART
        while distance >= APART:
            value += cuda.shfl_xor_sync(FULL_WARP, value, distance)
            distance //= 2
        return value

    return team_max, team_sum


@functools.cache
def make_probability(acc_t):
    """Device function ``probability``: P = exp(S - lse) in the backward pass."""

    @cuda.jit(device=True)
    def probability(score, lse, allowed):
        # Zero is chosen after the exponential: a row that sees nothing has lse = -inf, and the
        # exponential of inf or NaN must not get into the sums.
        p = math.exp(score - lse)
        return p if allowed and lse > acc_t(-math.inf) else acc_t(0)

    return probability
