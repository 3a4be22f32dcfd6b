"""The band and the tile ranges, by hand and against the definition."""

import itertools

import numpy as np
import pytest

from numba_flash.masks import Band, make_band, visible
from numba_flash.schedule import _key_range, _query_range, _split_block


def test_causal_worked_by_hand_when_lengths_differ():
    assert visible(2, 3, causal=True).astype(int).tolist() == [[1, 1, 0], [1, 1, 1]]
    assert visible(2, 3, causal=True, align="top-left").astype(int).tolist() == [
        [1, 0, 0],
        [1, 1, 0],
    ]
    assert visible(3, 2, causal=True).astype(int).tolist() == [[0, 0], [1, 0], [1, 1]]


def test_window_worked_by_hand():
    assert visible(4, 4, window=(1, 0)).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert visible(2, 4, window=(0, 1)).astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_causal_narrows_a_window_and_never_widens_it():
    assert make_band(5, 5, causal=True, window=(2, 3)) == Band(-2, 0)
    assert make_band(5, 8, causal=True) == make_band(5, 8, window=(None, 0))


BANDS = [
    {"causal": causal, "align": align, "window": window}
    for causal, align, window in itertools.product(
        (False, True),
        ("bottom-right", "top-left"),
        (None, (2, 1), (0, 0), (None, 3), (4, None)),
    )
]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 12), (12, 5), (1, 9), (9, 1)])
def test_tile_ranges_hold_every_visible_key_and_little_else(seqlen_q, seqlen_k):
    for options in BANDS:
        seen = visible(seqlen_q, seqlen_k, **options)
        left, right = make_band(seqlen_q, seqlen_k, **options)
        for tile in (1, 3, 8):
            for first in range(0, seqlen_q, tile):
                begin, end = _key_range(first, tile, seqlen_q, seqlen_k, left, right)
                keys = np.flatnonzero(seen[first : first + tile].any(0))
                _assert_covers(begin, end, keys)
            for first in range(0, seqlen_k, tile):
                begin, end = _query_range(first, tile, seqlen_q, seqlen_k, left, right)
                queries = np.flatnonzero(seen[:, first : first + tile].any(1))
                _assert_covers(begin, end, queries)


def _assert_covers(begin, end, indices):
    if indices.size:
        assert (begin, end) == (indices[0], indices[-1] + 1)
    else:
        assert end <= begin


def test_every_block_gets_a_tile_of_its_own():
    tiles = {_split_block(block, 3, 4) for block in range(3 * 4 * 5)}
    assert tiles == set(itertools.product(range(3), range(4), range(5)))
