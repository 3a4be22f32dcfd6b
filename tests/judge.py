"""The error rule: how far from the float64 formula a result may be.

``error(x) = ||x - x64|| / max(||x64||, floor)``, where the floor is the dtype's epsilon times the
norm of the sum of the absolute terms, so that a gradient which is exactly zero is judged sanely.

- 16 bits: at most 2 times (gradients 3 times) the error of the naive formula at that precision.
- float32: the same, or 1e-6, whichever is larger.
- float64: 1e-12, gradients 1e-11.

Two kinds of result are what is left when large terms cancel, and the naive formula may happen to
cancel exactly. They are held to one epsilon of the absolute terms instead: results whose norm is
below the floor (with one key, dq is exactly zero), and cases that say that they ``cancel`` (a
saturated softmax). And a gradient cannot know P = exp(S - lse) better than the LSE itself, a number
of the accumulator's precision: its limit is at least that epsilon times the largest LSE.
"""

from __future__ import annotations

import math

import torch

EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)}
EPSILON |= {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def scores(q, k, softmax_scale=None, **mask_options):
    """Masked scores of the naive formula in the precision of its inputs."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = (q @ k.mT) * scale
    return s.masked_fill(~allowed(q, k, **mask_options), -math.inf)


def allowed(q, k, mask=None, causal=False, align="bottom-right", window=None):
    """Where a query may attend, broadcastable to the scores; knows nothing of the package."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    shift = seqlen_k - seqlen_q if align == "bottom-right" else 0
    position = torch.arange(seqlen_q, device=q.device)[:, None] + shift
    key = torch.arange(seqlen_k, device=q.device)[None, :]
    some = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if causal:
        some &= key <= position
    left, right = window or (None, None)
    if left is not None:
        some &= position - key <= left
    if right is not None:
        some &= key - position <= right
    return some if mask is None else some & mask


def naive(q, k, v, **options):
    """``softmax(scale * q k^T) v`` with the whole matrix, 0 for a row that sees nothing."""
    some = allowed(q, k, **_mask_options(options)).any(-1, keepdim=True)
    s = torch.where(some, scores(q, k, **options), 0)  # else the softmax's gradient is NaN there
    p = torch.where(some, torch.softmax(s, dim=-1), 0)
    return p.to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def naive_gradients(q, k, v, do, **options):
    """The naive formula's gradients by autograd, in the precision of the inputs."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(naive(q, k, v, **options), (q, k, v), do)


def exact(q, k, v, do, softmax_scale=None, **mask_options):
    """Outputs and gradients in float64, and the sums of absolute terms behind each.

    Returns
    -------
    dict of str to (value, absolute terms), for o, lse, dq, dk, dv
    """
    q, k, v, do = (x.double() for x in (q, k, v, do))
    group = q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k_all, v_all = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = scores(q, k, scale, **mask_options)
    lse = torch.logsumexp(s, -1)
    p = torch.where(lse[..., None] > -math.inf, torch.exp(s - lse[..., None]), 0)
    o = p @ v_all
    delta = (do * o).sum(-1, keepdim=True)
    ds = p * (do @ v_all.mT - delta)
    abs_dp = do.abs() @ v_all.abs().mT
    abs_ds = p * (abs_dp + (p * abs_dp).sum(-1, keepdim=True))

    def over_group(x):
        return x.unflatten(1, (-1, group)).sum(2)

    return {
        "o": (o, p @ v_all.abs()),
        "lse": (lse, torch.ones_like(lse) + abs(scale) * _abs_score(q, k_all)),
        "dq": (scale * ds @ k_all, abs(scale) * abs_ds @ k_all.abs()),
        "dk": (over_group(scale * ds.mT @ q), over_group(abs(scale) * abs_ds.mT @ q.abs())),
        "dv": (over_group(p.mT @ do), over_group(p.mT @ do.abs())),
    }


def check(results, q, k, v, do, cancels=False, **options):
    """Hold results to the error rule.

    Parameters
    ----------
    results : dict of str to Tensor
        Any of o, lse, dq, dk, dv.
    cancels : bool
        Gradients are the remainder of terms that cancel.
    """
    truth = exact(q, k, v, do, **options)
    names = ("o", "dq", "dk", "dv")
    by_formula = (naive(q, k, v, **options), *naive_gradients(q, k, v, do, **options))
    peers = dict(zip(names, by_formula, strict=True))
    lse64 = truth["lse"][0]
    largest_lse = float(lse64[lse64.isfinite()].abs().max()) if lse64.isfinite().any() else 0.0
    lse_rounding = EPSILON[torch.promote_types(q.dtype, torch.float32)] * largest_lse
    for name, x in results.items():
        x64, terms = truth[name]
        assert x.shape == x64.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(x64.shape)}"
        if name == "lse":
            _check_lse(x, x64, terms)
            continue
        floor = EPSILON[q.dtype] * terms.norm()
        limit = _limit(name, q.dtype, error(peers[name], x64, floor))
        if x64.norm() < floor or (cancels and name in ("dq", "dk")):
            limit = max(limit, float(floor / torch.maximum(x64.norm(), floor)))
        if name != "o":
            limit = max(limit, lse_rounding)
        found = error(x, x64, floor)
        assert found <= limit, f"{name} is off by {found:.2e}; the rule allows {limit:.2e}"


def error(x, x64, floor):
    """The relative error of the rule; NaN counts as infinite."""
    distance = (x.double() - x64).norm()
    if not torch.isfinite(distance):
        return math.inf
    scale = torch.maximum(x64.norm(), floor)
    return float(distance / scale) if scale > 0 else float(distance)


def _limit(name, dtype, naive_error):
    is_gradient = name != "o"
    if dtype == torch.float64:
        return 1e-11 if is_gradient else 1e-12
    times = (3 if is_gradient else 2) * naive_error
    return max(times, 1e-6) if dtype == torch.float32 else times


def _check_lse(lse, lse64, terms):
    """-inf exactly where a row sees nothing; elsewhere close in units of the scores' rounding."""
    empty = torch.isneginf(lse64)
    assert torch.equal(torch.isneginf(lse), empty), "lse is -inf in the wrong rows"
    distance = (lse.double() - lse64).masked_fill(empty, 0).norm()
    limit = 4 * EPSILON[lse.dtype] * terms.masked_fill(empty, 0).norm()
    assert distance <= limit, f"lse is off by {float(distance):.2e}; allowed {float(limit):.2e}"


def _abs_score(q, k):
    """The largest absolute sum behind any score of a row."""
    if not k.shape[2]:
        return torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device)
    return (q.abs() @ k.abs().mT).amax(-1)


def _mask_options(options):
    return {name: value for name, value in options.items() if name != "softmax_scale"}
