"""Arrays of every library and layout go in; the same kind comes out."""

import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

import numba_flash as nf
from numba_flash import interface, launch
from numba_flash.reference import naive_backward, naive_forward
from numba_flash.torch import LIBRARY

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA GPU")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def numpy_inputs(rng, dtype, seqlen=10, head_dim=8):
    return [rng.standard_normal((1, 2, seqlen, head_dim)).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_numpy_arrays_come_back_as_numpy_arrays_of_their_dtype(rng, dtype):
    q, k, v = numpy_inputs(rng, dtype)
    o, lse = nf.attention(q, k, v, return_lse=True)
    gradients = nf.attention_backward(o, q, k, v, o, lse)
    exact, exact_lse = naive_forward(*(x.astype(np.float64) for x in (q, k, v)))
    assert isinstance(o, np.ndarray)
    assert o.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert all(g.dtype == dtype and isinstance(g, np.ndarray) for g in gradients)
    np.testing.assert_allclose(o.astype(np.float64), exact, atol=0.02, rtol=0.02)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_tensors_come_back_as_torch_tensors_of_their_dtype(dtype):
    q, k, v = (torch.randn(1, 2, 10, 8, dtype=torch.float64).to(dtype) for _ in range(3))
    o, lse = nf.attention(q, k, v, return_lse=True)
    assert o.dtype == dtype
    assert o.device == q.device
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(o.double(), exact, atol=0.02, rtol=0.02)


def test_objects_with_dlpack_in_host_memory_come_back_as_numpy_arrays(rng):
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    q, k, v = numpy_inputs(rng, np.float32)
    o = nf.attention(Foreign(q), Foreign(k), Foreign(v))
    np.testing.assert_array_equal(o, nf.attention(q, k, v))


def strided_views():
    def transposed(x):
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    def every_other(x):
        return np.repeat(x, 2, axis=2)[:, :, ::2]

    def offset_base(x):
        flat = np.empty(x.size + 1, x.dtype)
        flat[1:] = x.ravel()
        return flat[1:].reshape(x.shape)

    def columns_first(x):
        return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)

    def reversed_rows(x):
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]

    def odd_stride_in_a_dimension_of_one(x):
        return np.lib.stride_tricks.as_strided(x, x.shape, (7, *x.strides[1:]))

    return [
        transposed,
        every_other,
        offset_base,
        columns_first,
        reversed_rows,
        odd_stride_in_a_dimension_of_one,
    ]


@pytest.mark.parametrize("view", strided_views(), ids=lambda f: f.__name__)
def test_strides_are_honoured(rng, view):
    q, k, v = numpy_inputs(rng, np.float32)
    o, lse = nf.attention(q, k, v, return_lse=True, causal=True)
    gradients = nf.attention_backward(o, q, k, v, o, lse, causal=True)
    strided = [view(x) for x in (q, k, v, o)]
    np.testing.assert_array_equal(nf.attention(*strided[:3], causal=True), o)
    again = nf.attention_backward(strided[3], *strided[:3], o, lse, causal=True)
    for gradient, other in zip(gradients, again, strict=True):
        np.testing.assert_array_equal(gradient, other)


def test_a_field_of_a_structured_array_is_an_array_like_another(rng):
    plain = numpy_inputs(rng, np.float32)
    fields = []
    for x in plain:
        structured = np.zeros(x.shape, [("value", "f4"), ("flag", "i1")])
        structured["value"] = x
        fields.append(structured["value"])
    np.testing.assert_array_equal(nf.attention(*fields), nf.attention(*plain))


@pytest.mark.parametrize("side", [2**63, 10**30])
def test_a_window_wider_than_any_sequence_is_no_window(rng, side):
    q, k, v = numpy_inputs(rng, np.float32)
    np.testing.assert_array_equal(nf.attention(q, k, v, window=(side, side)), nf.attention(q, k, v))


def test_inputs_are_left_as_they_were(rng):
    q, k, v = numpy_inputs(rng, np.float32)
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    o, lse = nf.attention(q, k, v, return_lse=True)
    nf.attention_backward(o, q, k, v, o, lse)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize(
    "shape", [(6,), (5, 6), (1, 5, 6), (2, 1, 1, 6), (1, 3, 5, 6), (2, 3, 5, 1), (1, 1, 1, 1)]
)
def test_a_mask_broadcasts_as_numpy_does(rng, shape):
    q = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 3, 6, 8)).astype(np.float32) for _ in range(2))
    mask = rng.random(shape) < 0.6
    o, lse = nf.attention(q, k, v, mask=mask, return_lse=True)
    exact, exact_lse = naive_forward(*(x.astype(float) for x in (q, k, v)), mask=mask)
    np.testing.assert_allclose(o, exact, atol=1e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


def test_what_is_remembered_of_a_call_does_not_include_its_data(rng):
    q, k, v = numpy_inputs(rng, np.float32)
    mask = np.ones((10, 10), bool)
    everything = nf.attention(q, k, v, mask=mask)
    mask[:, 5:] = False
    half = nf.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(half, nf.attention(q, k[:, :, :5], v[:, :, :5]), atol=1e-6)
    assert not np.array_equal(everything, half)


def test_a_remembered_call_of_one_library_does_not_serve_another(rng, monkeypatch):
    """Arrays of two libraries can look the same in shape, strides and dtype."""
    monkeypatch.setattr(interface, "_calls", {})
    monkeypatch.setattr(interface.ArrayLibrary, "key", lambda self, arrays: "the same")
    monkeypatch.setattr(type(LIBRARY), "key", lambda self, arrays: "the same")
    q, k, v = numpy_inputs(rng, np.float32)
    assert isinstance(nf.attention(q, k, v), np.ndarray)
    assert isinstance(nf.attention(*map(torch.from_numpy, (q, k, v))), torch.Tensor)


def test_remembered_calls_are_bounded(rng, monkeypatch):
    monkeypatch.setattr(interface, "MAX_REMEMBERED_CALLS", 2)
    monkeypatch.setattr(interface, "_calls", {})
    for seqlen in (1, 2, 3, 4):
        nf.attention(*numpy_inputs(rng, np.float32, seqlen))
    assert len(interface._calls) == 2


def test_no_gpu_is_said_once(rng, monkeypatch):
    monkeypatch.setattr(interface, "gpu_count", lambda: 0)
    monkeypatch.setattr(interface, "_calls", {})
    monkeypatch.setattr(interface, "_said_emulated", False)
    with pytest.warns(UserWarning, match="no CUDA GPU here: numba_flash runs"):
        nf.attention(*numpy_inputs(rng, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nf.attention(*numpy_inputs(rng, np.float32))


def test_a_call_that_would_take_the_emulator_minutes_is_refused_with_the_estimate():
    q = np.ones((1, 8, 8192, 64), np.float32)
    with nf.emulation(), pytest.raises(RuntimeError, match=r"about [\d,]+ seconds.*limit=None"):
        nf.attention(q, q, q)


def test_the_limit_of_the_emulator_is_adjustable(rng):
    q, k, v = numpy_inputs(rng, np.float32)
    with nf.emulation(limit=1e-9), pytest.raises(RuntimeError, match="more than the limit"):
        nf.attention(q, k, v)
    with nf.emulation(limit=None):
        nf.attention(q, k, v)


def test_emulation_reports_every_launch(rng):
    q, k, v = numpy_inputs(rng, np.float32)
    with nf.emulation() as reports:
        o, lse = nf.attention(q, k, v, kernel="fa2", return_lse=True)
        assert len(reports) == 1
        nf.attention_backward(o, q, k, v, o, lse, kernel="fa2")
    assert len(reports) == 4
    assert all(report.ok for report in reports)


def test_an_output_that_no_kernel_writes_comes_back_as_nan(rng, monkeypatch):
    """So that a rung which leaves part of its output unset fails every comparison."""
    monkeypatch.setattr(interface, "run_emulated", lambda *args: None)
    with nf.emulation():
        assert np.isnan(nf.attention(*numpy_inputs(rng, np.float32))).all()


def test_a_gradient_runs_where_its_forward_ran():
    q = torch.randn(1, 1, 6, 8, requires_grad=True)
    with nf.emulation() as reports:
        o = nf.attention(q, q, q)
    before = len(reports)
    o.sum().backward()
    assert len(reports) > before


def test_the_sample_attends_as_the_model_did():
    sample = nf.load_sample()
    with nf.emulation(limit=None):
        o = nf.attention(sample.q, sample.k, sample.v)
    error = np.linalg.norm(o - sample.o) / np.linalg.norm(sample.o)
    assert error < 2e-6  # both are float32


class TestAutograd:
    def test_gradients_flow_to_q_k_and_v(self):
        inputs = [torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3)]
        do = torch.randn(1, 2, 7, 8)
        nf.attention(*inputs, causal=True).backward(do)
        arrays = [x.detach().double().numpy() for x in (*inputs, do)]
        o, lse = naive_forward(*arrays[:3], causal=True)
        exact = naive_backward(arrays[3], *arrays[:3], o, lse, causal=True)
        for x, gradient in zip(inputs, exact, strict=True):
            np.testing.assert_allclose(x.grad.numpy(), gradient, atol=1e-5)

    def test_gradcheck_in_float64_on_every_rung_that_takes_it(self):
        inputs = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
        mask = torch.rand(5, 5) < 0.7
        for rung in ("naive", "minimal", "fa2"):
            for x in inputs:
                x.requires_grad_()
            assert torch.autograd.gradcheck(
                lambda *x, name=rung: nf.attention(*x, mask=mask, kernel=name), inputs
            )

    def test_expanded_gradient_of_a_sum(self):
        inputs = [torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3)]
        nf.attention(*inputs).sum().backward()  # dO has stride 0 everywhere
        grads = [x.grad.clone() for x in inputs]
        for x in inputs:
            x.grad = None
        nf.attention(*inputs).backward(torch.ones(1, 2, 7, 8))
        assert all(torch.equal(g, x.grad) for g, x in zip(grads, inputs, strict=True))

    def test_double_backward_is_refused(self):
        q = torch.randn(1, 1, 3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(nf.attention(q, q, q).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="not differentiable themselves"):
            gradient.sum().backward()

    def test_no_graph_without_need(self):
        q = torch.randn(1, 1, 3, 4, requires_grad=True)
        with torch.no_grad():
            assert not nf.attention(q, q, q).requires_grad
        assert not nf.attention(q.detach(), q.detach(), q.detach()).requires_grad


def test_program_describes_arrays_as_numba_kernels_receive_them():
    layout = launch.contiguous_layout((2, 3, 4), "bfloat16")
    assert layout.strides == (24, 8, 2)
    assert launch._array_words(layout) == [0, 0, 24, 2, 0, 2, 3, 4, 24, 8, 2]


def test_the_modules_of_the_public_names_are_found_without_importing_them_first():
    code = "import numba_flash as nf; nf.emulator.empty(3); nf.reference.naive_forward"
    subprocess.run([sys.executable, "-c", code], check=True)
