"""The stand-in for torch's scaled_dot_product_attention, compared with torch's own on the CPU."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import numba_flash as nf
from numba_flash import kernels
from numba_flash.torch import scaled_dot_product_attention

from .judge import check

# The error rule's bounds in float64, for the output and for gradients.
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
FLOAT64_GRADIENT = {"rtol": 1e-11, "atol": 1e-11}

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA GPU")


def normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(*shapes):
    return [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def mask_of(*shape):
    """Every third entry hidden, and the first query sees nothing."""
    mask = torch.arange(math.prod(shape)).reshape(shape) % 3 > 0
    mask[..., :1, :] = False
    return mask


def assert_same_as_torch(shapes, **options):
    """Outputs and gradients, of inputs that all get the same upstream gradient."""
    ours, theirs = inputs(*shapes), inputs(*shapes)
    o = scaled_dot_product_attention(*ours, **options)
    expected = torch_sdpa(*theirs, **options)
    assert o.dtype is expected.dtype
    torch.testing.assert_close(o, expected, **FLOAT64)
    do = normal(*expected.shape, seed=9)
    o.backward(do)
    expected.backward(do)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, **FLOAT64_GRADIENT)


def test_the_signature_is_torchs():
    documented = (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, "
        "enable_gqa=False)"
    )
    ours = inspect.signature(scaled_dot_product_attention)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in ours.parameters.values()]
    assert str(inspect.Signature(bare)) == documented
    names = torch_sdpa.__doc__.partition("(")[2].partition(")")[0].replace("\n", " ").split(",")
    assert [name.split("=")[0].strip() for name in names] == list(ours.parameters)


SHAPES = {
    "batch and heads": [(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "more queries than keys": [(1, 2, 7, 8), (1, 2, 3, 8), (1, 2, 3, 8)],
    "another head_dim for value": [(1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 3)],
    "one sequence": [(4, 8), (5, 8), (5, 6)],
    "three dimensions": [(3, 4, 8), (3, 5, 8), (3, 5, 8)],
    "five dimensions": [(2, 2, 3, 4, 8), (2, 2, 3, 5, 8), (2, 2, 3, 5, 8)],
    "six dimensions, broadcast": [(2, 1, 2, 3, 4, 8), (1, 2, 2, 1, 5, 8), (2, 3, 5, 8)],
    "a batch of queries for one of keys": [(2, 3, 4, 8), (1, 3, 5, 8), (1, 3, 5, 8)],
    "a batch of keys for one of queries": [(1, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "one key head": [(2, 3, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8)],
    "one key head, three dimensions": [(3, 4, 8), (1, 5, 8), (1, 5, 8)],
    "one key head, one value head less": [(1, 3, 4, 8), (1, 1, 5, 8), (1, 3, 5, 8)],
    "one query head": [(2, 1, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "one head": [(2, 1, 4, 8), (2, 1, 5, 8), (1, 5, 8)],
    "a different rank each": [(4, 8), (2, 3, 5, 8), (3, 5, 8)],
    "no keys": [(1, 2, 4, 8), (1, 2, 0, 8), (1, 2, 0, 8)],
    "no queries": [(1, 2, 0, 8), (1, 2, 5, 8), (1, 2, 5, 8)],
    "no queries, five dimensions": [(2, 2, 2, 0, 8), (2, 2, 2, 5, 8), (2, 2, 2, 5, 8)],
    "no batch": [(0, 2, 4, 8), (0, 2, 5, 8), (0, 2, 5, 8)],
    "no batch, five dimensions": [(2, 0, 2, 4, 8), (2, 1, 2, 5, 8), (1, 2, 5, 8)],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_what_torch_gives(name, is_causal):
    assert_same_as_torch(SHAPES[name], is_causal=is_causal)


MASKS = {
    "one for all": ("batch and heads", (4, 5)),
    "of one row": ("batch and heads", (1, 5)),
    "of heads": ("batch and heads", (3, 4, 5)),
    "of batches": ("batch and heads", (2, 1, 4, 5)),
    "of everything": ("batch and heads", (2, 3, 4, 5)),
    "of one sequence": ("one sequence", (4, 5)),
    "of heads, three dimensions": ("three dimensions", (3, 4, 5)),
    "of heads, five dimensions": ("five dimensions", (3, 4, 5)),
    "of the inner batch": ("five dimensions", (2, 1, 4, 5)),
    "of the outer batch": ("five dimensions", (2, 1, 3, 1, 5)),
    "of a batch that only keys have": ("a batch of keys for one of queries", (2, 1, 4, 5)),
    "of an empty batch": ("no batch, five dimensions", (2, 1, 2, 4, 5)),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_shape_of_mask_gives_what_torch_gives(name):
    shapes, mask = MASKS[name]
    assert_same_as_torch(SHAPES[shapes], attn_mask=mask_of(*mask))


GROUPED = {
    "two key heads": [(2, 4, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8)],
    "one key head": [(1, 4, 4, 8), (1, 1, 5, 8), (1, 1, 5, 8)],
    "as many": [(1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)],
    "three dimensions": [(4, 4, 8), (2, 5, 8), (2, 5, 8)],
    "five dimensions": [(2, 1, 4, 4, 8), (2, 1, 2, 5, 8), (2, 1, 2, 5, 8)],
    "a batch of queries for one of keys": [(2, 4, 4, 8), (2, 5, 8), (1, 2, 5, 8)],
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads_give_what_torch_gives(name):
    assert_same_as_torch(GROUPED[name], enable_gqa=True)
    heads = GROUPED[name][0][-3]
    assert_same_as_torch(GROUPED[name], enable_gqa=True, attn_mask=mask_of(heads, 4, 5))


@pytest.mark.parametrize("scale", [0.5, 0, -1.0, 2])
def test_scale_is_torchs(scale):
    assert_same_as_torch(SHAPES["batch and heads"], scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_is_as_exact_as_the_error_rule_asks(dtype):
    shapes = [(2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 8)]
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(*shapes))
    do = normal(2, 4, 6, 8, dtype=dtype)
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    results = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True))
    assert {x.dtype for x in results.values()} == {dtype}
    check(results, q.detach(), k.detach(), v.detach(), do, causal=True, align="top-left")


@st.composite
def calls(draw):
    """Shapes whose leading dimensions broadcast, a mask that fits, and flags."""
    leading = draw(st.lists(st.integers(1, 2), max_size=3))
    seqlen_q, seqlen_k, head_dim, head_dim_v = (draw(st.integers(1, 9)) for _ in range(4))

    def part(dimensions):
        kept = dimensions[draw(st.integers(0, len(dimensions))) :]
        return [draw(st.sampled_from((1, n))) for n in kept]

    tails = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))
    shapes = [(*part(leading), *tail) for tail in tails]
    scores = (*torch.broadcast_shapes(*(shape[:-2] for shape in shapes)), seqlen_q, seqlen_k)
    options = {"scale": draw(st.none() | st.floats(-2, 2))}
    hides = draw(st.sampled_from(("nothing", "the future", "a mask")))
    if hides == "the future":
        options["is_causal"] = True
    if hides == "a mask":
        options["attn_mask"] = mask_of(*part(scores[:-2]), seqlen_q, seqlen_k)
    return shapes, options


@settings(max_examples=12, deadline=None, derandomize=True)
@given(calls())
def test_any_shapes_that_broadcast_give_what_torch_gives(call):
    shapes, options = call
    assert_same_as_torch(shapes, **options)


def test_strided_views_give_what_torch_gives():
    views = [normal(2, 5, 3, 8).transpose(1, 2), *normal(5, 2, 3, 8, 2).permute(4, 1, 2, 0, 3)]
    o = scaled_dot_product_attention(*views)
    torch.testing.assert_close(o, torch_sdpa(*views), **FLOAT64)


@pytest.mark.parametrize(
    "name", ["batch and heads", "one key head", "a batch of queries for one of keys"]
)
def test_batches_and_heads_are_broadcast_without_a_copy(name, monkeypatch):
    seen = []

    def attention(*tensors, **options):
        seen.extend(tensors)
        return nf.attention(*tensors, **options)

    monkeypatch.setattr("numba_flash.torch.attention", attention)
    qkv = [x.detach() for x in inputs(*SHAPES[name])]
    scaled_dot_product_attention(*qkv)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in qkv]
    assert [x.shape[1] for x in seen] == [x.shape[1] for x in qkv]


def test_row_that_sees_nothing_is_zero_and_has_zero_gradient():
    q, k, v = inputs((4, 8), (5, 8), (5, 8))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    o = scaled_dot_product_attention(q, k, v, mask)
    o.sum().backward()
    assert torch.equal(o[2], torch.zeros(8, dtype=o.dtype))
    assert torch.equal(q.grad[2], torch.zeros(8, dtype=o.dtype))
    assert k.grad.isfinite().all()
    assert v.grad.isfinite().all()


SCALAR_RUNGS = ("naive", "minimal", "fa2")


@pytest.mark.parametrize("kernel", SCALAR_RUNGS)
def test_gradcheck_in_float64_on_every_scalar_rung(kernel, monkeypatch):
    """With broadcast batches, grouped heads, and both ways of hiding keys."""
    chosen = []

    def choose(names, problem, device):
        chosen.append(kernel)
        return kernels.choose([kernel], problem, device)

    monkeypatch.setattr("numba_flash.interface.choose", choose)
    monkeypatch.setattr("numba_flash.interface._calls", {})
    qkv = inputs((2, 1, 2, 3, 2), (2, 1, 3, 2), (1, 3, 1))
    for options in ({"is_causal": True}, {"attn_mask": mask_of(2, 3, 3)}):
        assert torch.autograd.gradcheck(
            lambda *x, options=options: scaled_dot_product_attention(
                *x, enable_gqa=True, **options
            ),
            qkv,
        )
    assert chosen == [kernel] * 4  # a forward and a backward for each


def test_double_backward_is_refused():
    q = normal(1, 2, 3, 4).requires_grad_()
    o = scaled_dot_product_attention(q, q, q)
    (gradient,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable themselves"):
        gradient.sum().backward()


def test_no_graph_without_need():
    q = normal(1, 2, 3, 4).requires_grad_()
    with torch.no_grad():
        assert not scaled_dot_product_attention(q, q, q).requires_grad


def test_deterministic_mode_changes_no_bit():
    def results():
        q, k, v = inputs((1, 2, 9, 8), (1, 1, 40, 8), (1, 1, 40, 8))
        o = scaled_dot_product_attention(q, k, v)
        return o, *torch.autograd.grad(o.sum(), (q, k, v))

    first = results()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(itertools.starmap(torch.equal, zip(first, results(), strict=True)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_lowers_the_inputs_as_torchs_does():
    q, k, v = (normal(1, 2, 5, 8, seed=n) for n in range(3))
    mixed = q.float(), k.bfloat16(), v.half()
    with torch.autocast("cpu", torch.bfloat16):
        o = scaled_dot_product_attention(*mixed)
        assert o.dtype is torch_sdpa(*mixed).dtype is torch.bfloat16
        assert scaled_dot_product_attention(q, k, v).dtype is torch_sdpa(q, k, v).dtype is q.dtype
    assert torch.equal(o, scaled_dot_product_attention(*(x.bfloat16() for x in mixed)))


Q = normal(1, 4, 3, 8)
K = normal(1, 2, 5, 8)
MASK = torch.ones(3, 5, dtype=torch.bool)
GQA = {"enable_gqa": True}
# What torch refuses too, on some backend or by its documentation.
MISTAKES = {
    "list": (([1.0], Q, Q), {}, TypeError, "query is a list; it must be a torch tensor"),
    "NumPy": ((Q, Q.numpy(), Q), {}, TypeError, "key is a ndarray; it must be a torch tensor"),
    "vector": ((Q[0, 0, 0], Q, Q), {}, ValueError, "each must have at least 2 dimensions"),
    "no heads": ((Q[0, 0], Q, Q), GQA, ValueError, "at least 3 dimensions, (..., heads, seqlen"),
    "heads": ((Q, K, K), {}, ValueError, "enable_gqa=True key and value may have fewer heads"),
    "group": ((Q[:, :3], K, K), GQA, ValueError, "must be a multiple of the heads of k"),
    "value heads": ((Q, K, K[:, :1]), GQA, ValueError, "k has 2 heads and v has 1"),
    "batches": ((Q.expand(2, 4, 3, 8), Q.expand(3, 4, 3, 8), Q), {}, ValueError, "equal or 1"),
    "keys": ((Q, Q, Q[:, :, 1:]), {}, ValueError, "k has seqlen 3 and v has 2"),
    "head_dim": ((Q[0], Q[0, :, :, 1:], Q[0]), {}, ValueError, "q has head_dim 8 and k has 7"),
    "dtypes": ((Q, Q.float(), Q), {}, TypeError, "dtypes float64, float32 and float64"),
    "integers": ((Q.long(),) * 3, {}, TypeError, "q has dtype torch.int64; attention takes"),
    "both masks": (
        (Q, Q, Q, MASK[:, :3]),
        {"is_causal": True},
        ValueError,
        "attn_mask and is_causal=True exclude each other",
    ),
    "float mask": (
        (Q, Q, Q, torch.zeros(3, 3)),
        {},
        NotImplementedError,
        "torch.nn.functional.scaled_dot_product_attention, which adds it",
    ),
    "dropout": (
        (Q, Q, Q, None, 0.1),
        {},
        NotImplementedError,
        "dropout_p is 0.1; numba_flash has no dropout: pass 0.0, or call torch.nn.functional",
    ),
    "integer mask": ((Q, Q, Q, MASK[:, :3].int()), {}, TypeError, "int32; it must be bool"),
    "list as mask": ((Q, Q, Q, [[True]]), {}, TypeError, "attn_mask is a list; it must be a torch"),
    "mask": ((Q, Q, Q, MASK), {}, ValueError, "mask has shape (3, 5); it must be broadcastable"),
    "mask of more batches": (
        (Q[None], Q[None], Q[None], torch.ones(2, 1, 1, 3, 3, dtype=torch.bool)),
        {},
        ValueError,
        "(..., heads, seqlen_q, seqlen_k) = (1, 1, 4, 3, 3)",
    ),
    "integer as is_causal": ((Q, Q, Q), {"is_causal": 1}, TypeError, "is_causal is 1"),
    "integer as enable_gqa": ((Q, Q, Q), {"enable_gqa": 1}, TypeError, "enable_gqa is 1"),
    "scale": ((Q, Q, Q), {"scale": "x"}, TypeError, "scale is 'x'; it must be a number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_a_sentence_that_says_what_would_do(name):
    arguments, options, kind, sentence = MISTAKES[name]
    with pytest.raises(kind) as error:
        scaled_dot_product_attention(*arguments, **options)
    assert sentence in str(error.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 8), torch.ones(2, 4, 8)])
    with pytest.raises(TypeError, match="nested"):
        scaled_dot_product_attention(nested, nested, nested)


def test_it_runs_the_kernels_of_this_package():
    q = normal(1, 2, 3, 4).requires_grad_()
    with nf.emulation() as reports:
        o = scaled_dot_product_attention(q, q, q)
    before = len(reports)
    assert before
    o.sum().backward()
    assert len(reports) > before
    assert all(report.ok for report in reports)
