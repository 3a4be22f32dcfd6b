"""The bundled real input is what it says it is."""

import numpy as np

from numba_flash.data import load_sample


def test_sample_is_one_layer_of_twelve_heads_in_float32():
    sample = load_sample()
    for x in (sample.q, sample.k, sample.v, sample.o):
        assert x.shape == (1, 12, len(sample.tokens), 32)
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
    assert sample.tokens[0] == "[CLS]"
    assert sample.tokens[-1] == "[SEP]"


def test_models_output_is_softmax_attention_of_q_k_v():
    sample = load_sample()
    q, k, v = (x.astype(np.float64) for x in (sample.q, sample.k, sample.v))
    S = q @ k.swapaxes(-1, -2) / np.sqrt(32)
    P = np.exp(S - S.max(-1, keepdims=True))
    o = P / P.sum(-1, keepdims=True) @ v
    # The model ran in float32: a few roundings of 6e-8 on every path to an output.
    assert np.linalg.norm(sample.o - o) / np.linalg.norm(o) < 1e-6


def test_heads_look_where_the_readme_says():
    sample = load_sample()
    S = sample.q[0] @ sample.k[0].swapaxes(-1, -2) / np.sqrt(32)

    def favourite(head, word):
        scores = S[head, sample.tokens.index(word)].copy()
        scores[sample.tokens.index(word)] = scores[0] = -np.inf  # not itself, not [CLS]
        return sample.tokens[scores.argmax()]

    assert favourite(8, "patient") == "machine"
    assert favourite(1, "card") in ("card", "cards")
    assert favourite(7, "brings") == "question"
    assert favourite(9, "of") == "card"


def test_every_call_gives_fresh_arrays():
    load_sample().q[:] = 0
    assert load_sample().q.any()
