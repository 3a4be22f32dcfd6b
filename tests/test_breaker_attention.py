"""Random problems against a formula that shares no line with the package: a row at a time.

The masks, the grouping and the gradients are spelled out here once more, so that an error in
``masks`` or ``reference`` cannot hide behind a test that uses them too.
"""

import ml_dtypes
import numpy as np
import pytest

import numba_flash as nf

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA GPU")

RUNGS = [rung.name for rung in nf.LADDER]
TOLERANCES = {  # a few roundings of the output's own precision
    np.dtype(np.float16): 2**-8,
    np.dtype(ml_dtypes.bfloat16): 2**-5,
    np.dtype(np.float32): 1e-5,
    np.dtype(np.float64): 1e-12,
}
CONFIGS = {
    "naive": [None, {"tile_m": 8, "tile_n": 4}],
    "minimal": [None, {"tile_m": 5, "tile_n": 9}, {"tile_m": 16, "tile_n": 8}],
    "fa2": [
        None,
        {"tile_m": 16, "tile_n": 32, "team": 4},
        {"tile_m": 32, "tile_n": 16, "team": 2},
        {"tile_m": 8, "tile_n": 16, "team": 8},
    ],
    "register_tiled": [
        None,
        {"tile_m": 32, "tile_n": 64, "rows": 8, "columns": 4},
        {"tile_m": 64, "tile_n": 32, "rows": 4, "columns": 16},
    ],
}


def sees(i, j, seqlen_q, seqlen_k, causal, align, window):
    """Whether query i may attend to key j, straight from the definition."""
    position = i + (seqlen_k - seqlen_q if align == "bottom-right" else 0)
    left, right = window or (None, None)
    return (
        (not causal or j <= position)
        and (left is None or position - j <= left)
        and (right is None or j - position <= right)
    )


def formula(q, k, v, do, scale, visible):
    """(o, lse, dq, dk, dv) in float64, one row at a time over the keys that it sees."""
    batch, heads, seqlen_q, _ = q.shape
    group = heads // k.shape[1]
    o, lse = np.zeros(do.shape), np.full(q.shape[:3], -np.inf)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, h, i in np.ndindex(batch, heads, seqlen_q):
        keys = (b, h // group, np.flatnonzero(visible[b, h, i]))
        scores = scale * (k[keys] @ q[b, h, i])
        if not scores.size:
            continue
        lse[b, h, i] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        p = np.exp(scores - lse[b, h, i])
        o[b, h, i] = p @ v[keys]
        ds = p * (v[keys] @ do[b, h, i] - do[b, h, i] @ o[b, h, i])
        dq[b, h, i] = scale * ds @ k[keys]
        dk[keys] += scale * np.outer(ds, q[b, h, i])
        dv[keys] += np.outer(p, do[b, h, i])
    return o, lse, dq, dk, dv


def random_problem(rng):
    """Arrays, keywords and the whole mask of a small problem of any kind."""
    batch, heads_kv, group = (int(n) for n in rng.integers(1, 3, 3))
    heads = heads_kv * group
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 40, 2))
    head_dim, head_dim_v = (int(n) for n in rng.choice([1, 2, 3, 7, 8, 16, 20], 2))
    dtype = list(TOLERANCES)[rng.integers(4)]
    options = {
        "causal": bool(rng.random() < 0.5),
        "align": str(rng.choice(["bottom-right", "top-left"])),
        "window": None,
        "softmax_scale": rng.choice([None, 0.0, -0.7, 0.3]),
    }
    if rng.random() < 0.6:
        options["window"] = tuple(
            None if rng.random() < 0.25 else int(rng.integers(0, 20)) for _ in range(2)
        )
    full = (batch, heads, seqlen_q, seqlen_k)
    visible = np.zeros(full, bool)
    names = ("causal", "align", "window")
    for i, j in np.ndindex(seqlen_q, seqlen_k):
        visible[..., i, j] = sees(i, j, seqlen_q, seqlen_k, *(options[name] for name in names))
    if rng.random() < 0.5:
        shape = [n if rng.random() < 0.6 else 1 for n in full][int(rng.integers(0, 4)) :]
        options["mask"] = rng.random(shape) < rng.choice([0.15, 0.6, 0.95])
        visible &= options["mask"]

    def normal(heads, seqlen, head_dim):
        return rng.standard_normal((batch, heads, seqlen, head_dim)).astype(dtype)

    arrays = (
        normal(heads, seqlen_q, head_dim),
        normal(heads_kv, seqlen_k, head_dim),
        normal(heads_kv, seqlen_k, head_dim_v),
        normal(heads, seqlen_q, head_dim_v),
    )
    return arrays, options, visible


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", RUNGS)
def test_any_combination_of_masks_groups_sizes_and_dtypes_follows_the_formula(kernel, seed):
    rng = np.random.default_rng([seed, RUNGS.index(kernel)])
    (q, k, v, do), options, visible = random_problem(rng)
    if q.dtype == np.float64 and kernel == "register_tiled":  # which does not take it
        q, k, v, do = (x.astype(np.float32) for x in (q, k, v, do))
    scale = options["softmax_scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = formula(*(x.astype(np.float64) for x in (q, k, v, do)), scale, visible)
    forward, backward = (rng.choice(CONFIGS[kernel]) for _ in range(2))
    with nf.emulation(limit=None) as reports:
        o, lse = nf.attention(q, k, v, kernel=kernel, config=forward, return_lse=True, **options)
        # The exact o and lse, rounded: the backward is judged by itself.
        given = exact[0].astype(q.dtype), exact[1].astype(lse.dtype)
        gradients = nf.attention_backward(
            do, q, k, v, *given, kernel=kernel, config=backward, **options
        )
    assert all(report.ok for report in reports)
    np.testing.assert_array_equal(np.isneginf(lse), ~visible.any(-1))
    tolerance = TOLERANCES[q.dtype]
    for x, x64 in zip((o, *gradients), (exact[0], *exact[2:]), strict=True):
        distance = np.linalg.norm(x.astype(np.float64) - x64)
        # The floor is for gradients that cancel: sums of about one term of size 1 an element.
        assert distance <= tolerance * max(np.linalg.norm(x64), 0.5 * np.sqrt(x64.size))
    seen = visible.any(-1)
    lse_tolerance = max(1e-12, 1e-5 if lse.dtype == np.float32 else 0)
    np.testing.assert_allclose(lse[seen], exact[1][seen], atol=lse_tolerance, rtol=lse_tolerance)


@pytest.mark.parametrize("kernel", RUNGS)
def test_junk_in_hidden_keys_changes_no_bit_of_the_rows_that_do_not_see_them(kernel):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 30, 8)).astype(np.float32) for _ in range(3))
    mask = rng.random((1, 1, 30, 30)) < 0.6
    junk = np.array([3, 17, 29])
    rows = ~mask[0, 0][:, junk].any(-1)
    with nf.emulation():
        clean = nf.attention(q, k, v, mask=mask, kernel=kernel, return_lse=True)
        for value in (np.nan, np.inf, -np.inf):
            k[:, :, junk] = value
            dirty = nf.attention(q, k, v, mask=mask, kernel=kernel, return_lse=True)
            for x, y in zip(clean, dirty, strict=True):
                np.testing.assert_array_equal(x[:, :, rows], y[:, :, rows])


@pytest.mark.parametrize("kernel", RUNGS)
def test_row_whose_scores_are_all_minus_infinity_is_zero_and_has_zero_gradient(kernel):
    """No mask excludes these keys: their scores overflow, and P must still be set to zero."""
    q, k = np.full((1, 1, 3, 4), -1e30, np.float32), np.full((1, 1, 5, 4), 1e30, np.float32)
    v, do = np.ones((1, 1, 5, 2), np.float32), np.ones((1, 1, 3, 2), np.float32)
    with nf.emulation():
        o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
        gradients = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel)
    assert np.isneginf(lse).all()
    for x in (o, *gradients):
        np.testing.assert_array_equal(x, 0)
