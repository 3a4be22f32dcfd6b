"""The reference against its own definition: tiled = naive, and naive = finite differences."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_flash.masks import visible
from numba_flash.reference import (
    dkdv_steps,
    dq_steps,
    flash1_forward_steps,
    flash2_forward_steps,
    flash_backward_steps,
    naive_backward,
    naive_forward,
    tiled_backward,
    tiled_forward,
)

# Both sides add the same float64 terms in another order: about 1e-15 a term, under 200 terms.
ROUNDING = 1e-12
# Central differences with step h: h^2 from the third derivative and 1e-16 / h from rounding.
STEP = 1e-5
DIFFERENCES = 1e-6

MASKINGS = {
    "full": {},
    "causal": {"causal": True},
    "causal top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (3, None)},
}


def inputs(seed, batch=1, heads=1, heads_kv=1, seqlen_q=5, seqlen_k=5, head_dim=3, head_dim_v=3):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, seqlen_q, head_dim))
    k = rng.standard_normal((batch, heads_kv, seqlen_k, head_dim))
    v = rng.standard_normal((batch, heads_kv, seqlen_k, head_dim_v))
    do = rng.standard_normal((batch, heads, seqlen_q, head_dim_v))
    return q, k, v, do


def assert_close(actual, expected, tolerance):
    """Largest error, relative to the largest expected number; -inf must meet -inf."""
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    scale = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    assert np.abs(actual[finite] - expected[finite]).max(initial=0.0) <= tolerance * scale


def differences(loss, x):
    """The derivative of loss() by every element of x, which loss reads, by central differences."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        x[index] = kept + STEP
        above = loss()
        x[index] = kept - STEP
        below = loss()
        x[index] = kept
        gradient[index] = (above - below) / (2 * STEP)
    return gradient


def whole(steps, name, like):
    """One field of every tile step, put together; what no step wrote stays zero."""
    out = np.zeros(like)
    for step in steps:
        out[step.rows, step.cols] = getattr(step, name)
    return out


@pytest.mark.parametrize("options", MASKINGS.values(), ids=MASKINGS)
def test_naive_forward_is_the_definition_written_out_in_loops(options):
    q, k, v, _ = inputs(0, batch=2, heads=4, heads_kv=2, seqlen_q=6, seqlen_k=4, head_dim_v=2)
    o, lse = naive_forward(q, k, v, **options)
    seen = visible(6, 4, **options)
    for b, h, i in np.ndindex(2, 4, 6):
        weights = [
            np.exp(q[b, h, i] @ k[b, h // 2, j] / np.sqrt(3)) if seen[i, j] else 0.0
            for j in range(4)
        ]
        if sum(weights) == 0:
            assert lse[b, h, i] == -np.inf
            assert not o[b, h, i].any()
            continue
        expected = sum(w * v[b, h // 2, j] for j, w in enumerate(weights)) / sum(weights)
        assert_close(o[b, h, i], expected, ROUNDING)
        assert_close(lse[b, h, i], np.log(sum(weights)), ROUNDING)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_tiled_equals_naive_forward_and_backward(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    heads_kv, group = draw(1, 2), draw(1, 3)
    seqlen_q, seqlen_k = draw(0, 19), draw(0, 19)
    q, k, v, do = inputs(
        draw(0, 99),
        draw(1, 2),
        heads_kv * group,
        heads_kv,
        seqlen_q,
        seqlen_k,
        draw(1, 6),
        draw(1, 6),
    )
    options = dict(data.draw(st.sampled_from(list(MASKINGS.values()))))
    if data.draw(st.booleans()):
        rng = np.random.default_rng(draw(0, 99))
        shape = (q.shape[0], data.draw(st.sampled_from([1, q.shape[1]])), seqlen_q, seqlen_k)
        options["mask"] = rng.random(shape) < data.draw(st.sampled_from([0.1, 0.7]))
    if data.draw(st.booleans()):
        options["softmax_scale"] = 0.3
    tile_m, tile_n = draw(1, 20), draw(1, 20)

    o, lse = naive_forward(q, k, v, **options)
    for steps in (flash1_forward_steps, flash2_forward_steps):
        tiled = tiled_forward(q, k, v, tile_m, tile_n, steps=steps, **options)
        assert_close(tiled[0], o, ROUNDING)
        assert_close(tiled[1], lse, ROUNDING)
    gradients = naive_backward(do, q, k, v, o, lse, **options)
    for two_pass in (False, True):
        tiled = tiled_backward(do, q, k, v, o, lse, tile_m, tile_n, two_pass=two_pass, **options)
        for actual, expected in zip(tiled, gradients, strict=True):
            assert_close(actual, expected, ROUNDING)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (6, 3), (3, 6)])
@pytest.mark.parametrize("options", MASKINGS.values(), ids=MASKINGS)
def test_gradients_equal_finite_differences(options, seqlen_q, seqlen_k):
    q, k, v, do = inputs(1, heads=2, heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=2)
    mask = np.random.default_rng(2).random((2, seqlen_q, seqlen_k)) < 0.8
    options = {**options, "mask": mask}

    def loss():
        return (do * naive_forward(q, k, v, **options)[0]).sum()

    gradients = naive_backward(do, q, k, v, *naive_forward(q, k, v, **options), **options)
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert_close(gradient, differences(loss, x), DIFFERENCES)


@pytest.fixture(params=["flash_backward_steps", "dkdv_steps and dq_steps"])
def head(request):
    """One masked head, its forward, and the steps of its backward on tiles of 2 by 3."""
    q, k, v, do = (x[0, 0] for x in inputs(3, seqlen_q=5, seqlen_k=7, head_dim=3, head_dim_v=2))
    options = {"causal": True, "mask": np.random.default_rng(4).random((5, 7)) < 0.8}
    o, lse = (
        x[0, 0] for x in naive_forward(q[None, None], k[None, None], v[None, None], **options)
    )
    arguments = (do, q, k, v, o, lse, 2, 3)
    if request.param == "flash_backward_steps":
        by_key = by_query = list(flash_backward_steps(*arguments, **options))
    else:
        by_key, by_query = (
            list(dkdv_steps(*arguments, **options)),
            list(dq_steps(*arguments, **options)),
        )
    return {
        "q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "seen": visible(5, 7, **options),
        "by_key": by_key, "by_query": by_query,
    }  # fmt: skip


def softmax(S):
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True)


def test_dP_of_every_tile_equals_finite_differences(head):
    P = whole(head["by_query"], "P", (5, 7))
    expected = differences(lambda: (head["do"] * (P @ head["v"])).sum(), P)
    for step in head["by_key"] + head["by_query"]:
        assert_close(step.dP, expected[step.rows, step.cols], DIFFERENCES)


def test_dS_of_every_tile_equals_finite_differences(head):
    # A score far below the others stands for a masked one: -inf cannot be varied.
    S = np.where(head["seen"], head["q"] @ head["k"].T / np.sqrt(3), -1e3)
    expected = differences(lambda: (head["do"] * (softmax(S) @ head["v"])).sum(), S)
    for step in head["by_key"] + head["by_query"]:
        assert_close(step.dS, expected[step.rows, step.cols], DIFFERENCES)


def term_by_differences(name, head, step):
    """What a tile adds to dQ, dK or dV: the gradient of a product with its dS or P held fixed."""
    x = {"dQ": head["q"][step.rows], "dK": head["k"][step.cols], "dV": head["v"][step.cols]}[name]

    def loss():
        if name == "dV":
            return (head["do"][step.rows] * (step.P @ head["v"][step.cols])).sum()
        return (step.dS * (head["q"][step.rows] @ head["k"][step.cols].T)).sum() / np.sqrt(3)

    return differences(loss, x)


@pytest.mark.parametrize("name", ["dQ", "dK", "dV"])
def test_what_a_tile_adds_to_dQ_dK_dV_equals_finite_differences(head, name):
    sums: dict[int, np.ndarray] = {}
    for step in head["by_query"] if name == "dQ" else head["by_key"]:
        tile = step.i if name == "dQ" else step.j
        added = getattr(step, name) - sums.get(tile, 0.0)
        assert_close(added, term_by_differences(name, head, step), DIFFERENCES)
        sums[tile] = getattr(step, name)
    assert len(sums) == 3


def test_lse_has_the_probabilities_as_its_derivative(head):
    S = np.where(head["seen"], head["q"] @ head["k"].T / np.sqrt(3), -1e3)

    def lse():
        return np.log(np.exp(S).sum(axis=1)).sum()

    P = whole(head["by_key"], "P", (5, 7))
    assert_close(P, differences(lse, S), DIFFERENCES)


def test_delta_is_the_row_sum_of_P_times_dP(head):
    total = np.zeros(5)
    for step in head["by_query"]:
        total[step.rows] += (step.P * step.dP).sum(axis=1)
    for step in head["by_query"] + head["by_key"]:
        assert_close(step.delta, total[step.rows], ROUNDING)


def test_probabilities_of_the_backward_sum_to_one_and_dS_to_zero(head):
    P, dS = (whole(head["by_query"], name, (5, 7)) for name in ("P", "dS"))
    some = head["seen"].any(axis=1)
    assert_close(P.sum(axis=1), some.astype(float), ROUNDING)
    assert_close(dS.sum(axis=1), np.zeros(5), ROUNDING)


@pytest.mark.parametrize("steps", [flash1_forward_steps, flash2_forward_steps])
@pytest.mark.parametrize("options", MASKINGS.values(), ids=MASKINGS)
def test_every_forward_step_is_attention_over_the_keys_so_far(steps, options):
    q, k, v, _ = inputs(5, seqlen_q=7, seqlen_k=10, head_dim_v=2)
    seen = visible(7, 10, **options)
    for step in steps(q[0, 0], k[0, 0], v[0, 0], 3, 4, **options):
        so_far = seen & (np.arange(10) < step.cols.stop)
        o, lse = naive_forward(q, k, v, mask=so_far)
        assert_close(step.O, o[0, 0, step.rows], ROUNDING)
        assert_close(step.lse, lse[0, 0, step.rows], ROUNDING)


def test_forward_intermediates_satisfy_the_lines_of_the_algorithm():
    q, k, v, _ = inputs(6, seqlen_q=7, seqlen_k=10)
    Q, K, V = q[0, 0], k[0, 0], v[0, 0]
    S = Q @ K.T / np.sqrt(3)
    for step in flash1_forward_steps(Q, K, V, 3, 4):
        assert_close(step.S, S[step.rows, step.cols], ROUNDING)
        np.testing.assert_array_equal(step.m_tilde, step.S.max(axis=1))
        assert_close(step.P_tilde, np.exp(step.S - step.S.max(axis=1)[:, None]), ROUNDING)
        assert_close(step.l_tilde, step.P_tilde.sum(axis=1), ROUNDING)
        assert_close(step.m_new, S[step.rows, : step.cols.stop].max(axis=1), ROUNDING)
        assert_close(
            step.l_new,
            np.exp(S[step.rows, : step.cols.stop] - step.m_new[:, None]).sum(axis=1),
            ROUNDING,
        )
        assert_close(step.pv, step.P_tilde @ V[step.cols], ROUNDING)
        assert_close(step.alpha, np.exp(step.m_old - step.m_new), ROUNDING)
        assert_close(step.beta, np.exp(step.m_tilde - step.m_new), ROUNDING)
    for step in flash2_forward_steps(Q, K, V, 3, 4):
        assert_close(step.m, S[step.rows, : step.cols.stop].max(axis=1), ROUNDING)
        assert_close(step.P, np.exp(step.S - step.m[:, None]), ROUNDING)
        assert_close(step.alpha, np.exp(step.m_old - step.m), ROUNDING)
        assert_close(step.acc, step.l[:, None] * step.O, ROUNDING)


def test_steps_come_in_the_order_of_their_loops():
    q, k, v, do = (x[0, 0] for x in inputs(7, seqlen_q=5, seqlen_k=7))
    keys_outside = list(product(range(3), range(3)))
    queries_outside = [(j, i) for i, j in product(range(3), range(3))]
    backward = (do, q, k, v, do, np.zeros(5), 2, 3)
    for steps, order in [
        (flash1_forward_steps(q, k, v, 2, 3), keys_outside),
        (flash2_forward_steps(q, k, v, 2, 3), queries_outside),
        (flash_backward_steps(*backward), keys_outside),
        (dkdv_steps(*backward), keys_outside),
        (dq_steps(*backward), queries_outside),
    ]:
        assert [(step.j, step.i) for step in steps] == order


def test_steps_keep_their_values_after_the_loop_moves_on():
    q, k, v, do = (x[0, 0] for x in inputs(8, seqlen_q=5, seqlen_k=7))
    o, lse = (x[0, 0] for x in naive_forward(q[None, None], k[None, None], v[None, None]))
    for make in (
        lambda: flash1_forward_steps(q, k, v, 2, 3),
        lambda: flash2_forward_steps(q, k, v, 2, 3),
        lambda: flash_backward_steps(do, q, k, v, o, lse, 2, 3),
    ):
        for kept, fresh in zip(list(make()), make(), strict=True):
            for name, value in fresh._asdict().items():
                np.testing.assert_array_equal(getattr(kept, name), value, err_msg=name)


def test_tiles_that_the_mask_empties_are_skipped_but_flash1_visits_all():
    q, k, v, do = (x[0, 0] for x in inputs(9, seqlen_q=6, seqlen_k=6))
    below = [(j, i) for j, i in product(range(3), range(3)) if j <= i]
    assert len(list(flash1_forward_steps(q, k, v, 2, 2, causal=True))) == 9
    arguments = (do, q, k, v, do, np.zeros(6), 2, 2)
    for steps in (
        flash2_forward_steps(q, k, v, 2, 2, causal=True),
        flash_backward_steps(*arguments, causal=True),
        dkdv_steps(*arguments, causal=True),
        dq_steps(*arguments, causal=True),
    ):
        assert sorted((step.j, step.i) for step in steps) == below


def every_way(q, k, v, do, **options):
    """(o, lse, dq, dk, dv) of the naive functions and of each tiled one, tiles of 2 by 3."""
    o, lse = naive_forward(q, k, v, **options)
    yield (o, lse, *naive_backward(do, q, k, v, o, lse, **options))
    for steps, two_pass in [(flash1_forward_steps, False), (flash2_forward_steps, True)]:
        o, lse = tiled_forward(q, k, v, 2, 3, steps=steps, **options)
        yield (
            o,
            lse,
            *tiled_backward(do, q, k, v, o, lse, 2, 3, two_pass=two_pass, **options),
        )


def test_adding_a_constant_to_the_scores_of_a_row_moves_only_the_lse():
    """A constant c added to one component of all keys adds c * q to the scores of a row."""
    q, k, v, do = inputs(10, seqlen_q=5, seqlen_k=7)
    shifted = k.copy()
    shifted[..., 0] += 40.0
    shift = 40.0 * q[..., 0] / np.sqrt(3)
    for plain, moved in zip(every_way(q, k, v, do), every_way(q, shifted, v, do), strict=True):
        assert_close(moved[0], plain[0], ROUNDING)
        assert_close(moved[1], plain[1] + shift, ROUNDING)
        assert_close(moved[4], plain[4], ROUNDING)


def test_scores_of_a_thousand_do_not_overflow():
    q, k, v, do = inputs(11, seqlen_q=5, seqlen_k=7)
    for results in every_way(100.0 * q, 100.0 * k, v, do):
        assert all(np.isfinite(x).all() for x in results)


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": np.arange(6)[:, None] >= 3}])
@pytest.mark.filterwarnings("error")
def test_row_that_sees_nothing_is_zero_and_has_zero_gradient(options):
    q, k, v, do = inputs(12, seqlen_q=6, seqlen_k=3)
    for o, lse, dq, dk, dv in every_way(q, k, v, do, **options):
        assert not o[:, :, :3].any()
        assert (lse[:, :, :3] == -np.inf).all()
        assert not dq[:, :, :3].any()
        alone = {} if "mask" in options else options
        seeing = next(every_way(q[:, :, 3:], k, v, do[:, :, 3:], **alone))
        expected = (seeing[0], *seeing[2:])
        for actual, wanted in zip((o[:, :, 3:], dq[:, :, 3:], dk, dv), expected, strict=True):
            assert_close(actual, wanted, ROUNDING)


def test_nan_in_a_key_reaches_only_the_rows_that_see_it():
    q, k, v, _ = inputs(13, seqlen_q=7, seqlen_k=7)
    k[0, 0, 4] = np.nan
    clean = naive_forward(q, np.nan_to_num(k), v, causal=True)
    for o, lse in [
        naive_forward(q, k, v, causal=True),
        tiled_forward(q, k, v, 2, 3, steps=flash1_forward_steps, causal=True),
        tiled_forward(q, k, v, 2, 3, steps=flash2_forward_steps, causal=True),
    ]:
        assert_close(o[:, :, :4], clean[0][:, :, :4], ROUNDING)
        assert_close(lse[:, :, :4], clean[1][:, :, :4], ROUNDING)
        assert np.isnan(o[:, :, 4:]).all()
        assert np.isnan(lse[:, :, 4:]).all()


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 0, 0)]
)
@pytest.mark.filterwarnings("error")
def test_nothing_to_attend_to_or_nobody_attending_gives_zeros(batch, seqlen_q, seqlen_k):
    q, k, v, do = inputs(14, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=2)
    for results in every_way(q, k, v, do, causal=True):
        if seqlen_k == 0:
            assert (results[1] == -np.inf).all()
        for x, like in zip((results[0], *results[2:]), (do, q, k, v), strict=True):
            assert x.shape == like.shape
            if not (seqlen_q and seqlen_k):
                assert not x.any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_come_in_the_dtype_of_the_input_computed_in_float32_or_more(dtype):
    arrays = [x.astype(dtype) for x in inputs(15, heads=4, heads_kv=2, seqlen_q=33, seqlen_k=33)]
    judged = next(every_way(*(x.astype(np.float64) for x in arrays), softmax_scale=np.float64(0.5)))
    # The result is off by its own rounding, the backward by that of O as well; bfloat16 keeps 8
    # bits, and a few rounded terms add up in delta.
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
    for results in every_way(*arrays, softmax_scale=np.float64(0.5)):
        wide = np.float64 if dtype is np.float64 else np.float32
        assert [x.dtype for x in results] == [dtype, wide, dtype, dtype, dtype]
        for actual, expected in zip(results, judged, strict=True):
            assert_close(actual.astype(np.float64), expected, tolerance)


def test_16_bit_inputs_give_the_float32_result_rounded_once():
    q, k, v, do = (x.astype(np.float16) for x in inputs(16, seqlen_q=9, seqlen_k=9))
    wide = next(every_way(*(x.astype(np.float32) for x in (q, k, v, do))))
    narrow = next(every_way(q, k, v, do))
    np.testing.assert_array_equal(narrow[0], wide[0].astype(np.float16))
    np.testing.assert_array_equal(narrow[1], wide[1])


def test_key_heads_are_shared_by_neighbouring_query_heads():
    q, k, v, do = inputs(17, batch=2, heads=6, heads_kv=3)
    repeated = next(every_way(q, np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1), do))
    for o, lse, dq, dk, dv in every_way(q, k, v, do):
        for actual, expected in zip((o, lse, dq), repeated[:3], strict=True):
            assert_close(actual, expected, ROUNDING)
        assert_close(dk, repeated[3][:, 0::2] + repeated[3][:, 1::2], ROUNDING)
        assert_close(dv, repeated[4][:, 0::2] + repeated[4][:, 1::2], ROUNDING)
