"""What was wrong in the two CUDA sources that ``minimal`` follows, and is right in it.

Each test restates one deviation that the head of ``kernels/minimal.py`` lists.
"""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.reference import naive_backward, naive_forward

SEED_TILES = {"tile_m": 32, "tile_n": 32}


def run(q, k, v, do, config=None, **options):
    """O, dQ, dK, dV of minimal on the emulator, and of the float64 formula."""
    with nf.emulation(limit=None):
        o, lse = nf.attention(q, k, v, kernel="minimal", config=config, return_lse=True, **options)
        gradients = nf.attention_backward(do, q, k, v, o, lse, kernel="minimal", **options)
    exact = [x.astype(np.float64) for x in (q, k, v, do)]
    o64, lse64 = naive_forward(*exact[:3], **options)
    gradients64 = naive_backward(exact[3], *exact[:3], o64, lse64, **options)
    return (o, *gradients), (o64, *gradients64)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def assert_close(found, exact):
    for x, x64 in zip(found, exact, strict=True):
        assert np.linalg.norm(x - x64) <= 2e-6 * np.linalg.norm(x64)


def test_the_sources_own_tiles_and_shape():
    assert_close(*run(*normal(*[(2, 2, 64, 16)] * 4), config=SEED_TILES))


@pytest.mark.parametrize("seqlen", [33, 63, 70])
def test_a_sequence_may_end_inside_a_tile(seqlen):
    assert_close(*run(*normal(*[(1, 2, seqlen, 8)] * 4), config=SEED_TILES))


def test_a_head_dim_beyond_117_is_computed_not_left_zero():
    found, exact = run(*normal(*[(1, 1, 40, 118)] * 4))
    assert_close(found, exact)


@pytest.mark.parametrize("tiles", [(8, 32), (32, 8), (24, 16)])
def test_query_and_key_tiles_may_differ(tiles):
    config = {"tile_m": tiles[0], "tile_n": tiles[1]}
    assert_close(*run(*normal(*[(1, 2, 50, 8)] * 4), config=config))


def test_the_mask_works_in_both_directions():
    q, k, v, do = normal(*[(1, 1, 20, 8)] * 4)
    mask = np.ones((20, 20), bool)
    mask[:, 7] = False
    found, exact = run(q, k, v, do, mask=mask)
    assert_close(found, exact)
    _, _, dk, dv = found
    assert (dk[0, 0, 7] == 0).all()
    assert (dv[0, 0, 7] == 0).all()
    assert (dk[0, 0, 6] != 0).any()


def test_gradients_of_q_and_k_carry_the_scale():
    q, k, v, do = normal(*[(1, 1, 20, 8)] * 4)
    found, exact = run(q, k, v, do, softmax_scale=0.9)
    assert_close(found, exact)
