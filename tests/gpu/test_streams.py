"""The array's device, the caller's stream, and nothing that waits."""

import time

import numpy as np
import pytest
import torch
from numba import cuda

import numba_flash as nf

pytestmark = pytest.mark.gpu

RUNGS = [rung.name for rung in nf.LADDER]


def inputs(device="cuda", dtype=torch.float32):
    return [torch.randn(2, 4, 96, 64, device=device, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("kernel", RUNGS)
def test_a_side_stream_behind_a_slow_producer_is_waited_for(kernel):
    q, k, v = inputs()
    expected = nf.attention(q, k, v, kernel=kernel)
    source = q.clone()
    q.fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.copy_(source)
        o = nf.attention(q, k, v, kernel=kernel)
    side.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("kernel", RUNGS)
def test_the_host_does_not_wait(kernel):
    q, k, v = inputs()
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
    nf.attention_backward(o, q, k, v, o, lse, kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    start = time.perf_counter()
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
    nf.attention_backward(o, q, k, v, o, lse, kernel=kernel)
    assert time.perf_counter() - start < 0.1
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("kernel", RUNGS)
def test_a_cuda_graph_captures_forward_and_backward_and_replays_on_new_data(kernel):
    q, k, v = inputs()
    do = torch.randn_like(q)

    def step():
        o, lse = nf.attention(q, k, v, causal=True, kernel=kernel, return_lse=True)
        return o, *nf.attention_backward(do, q, k, v, o, lse, causal=True, kernel=kernel)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in (q, k, v, do):
        x.copy_(torch.randn_like(x))
    expected = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("kernel", RUNGS)
def test_arrays_on_the_second_gpu_while_the_first_is_current(kernel):
    q, k, v = inputs("cuda:1")
    torch.cuda.set_device(0)
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
    dq, _, _ = nf.attention_backward(o, q, k, v, o, lse, kernel=kernel)
    assert o.device == dq.device == q.device
    assert torch.cuda.current_device() == 0
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(o.double(), exact, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="k is on CUDA device 0 and q is on CUDA device 1"):
        nf.attention(q, k.to("cuda:0"), v)


def test_numpy_arrays_are_computed_on_the_gpu_and_come_back():
    q, k, v = (x.cpu().numpy() for x in inputs())
    mask = np.random.default_rng(0).random((96, 96)) < 0.7
    on_gpu, lse = nf.attention(q, k, v, mask=mask, return_lse=True)
    gradients = nf.attention_backward(on_gpu, q, k, v, on_gpu, lse, mask=mask)
    with nf.emulation(limit=None) as reports:
        emulated = nf.attention(q, k, v, mask=mask)
        emulated_gradients = nf.attention_backward(on_gpu, q, k, v, on_gpu, lse, mask=mask)
    assert reports
    np.testing.assert_allclose(on_gpu, emulated, atol=1e-5)
    for a, b in zip(gradients, emulated_gradients, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_emulator_and_gpu_agree_on_the_sample():
    sample = nf.load_sample()
    for rung in nf.LADDER:
        on_gpu = nf.attention(sample.q, sample.k, sample.v, kernel=rung.name)
        with nf.emulation(limit=None):
            emulated = nf.attention(sample.q, sample.k, sample.v, kernel=rung.name)
        np.testing.assert_allclose(on_gpu, emulated, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cpu_tensors_are_computed_on_the_gpu_and_come_back(dtype):
    q, k, v = inputs("cpu", dtype)
    o = nf.attention(q, k, v)
    assert o.device.type == "cpu"
    assert torch.equal(o, nf.attention(q.cuda(), k.cuda(), v.cuda()).cpu())


def test_cupy_arrays_follow_cupys_stream():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.asarray(x) for x in inputs())
    expected = nf.attention(*(torch.as_tensor(x, device="cuda") for x in (q, k, v)))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o, lse = nf.attention(q, k, v, return_lse=True)
        dq, _, _ = nf.attention_backward(o, q, k, v, o, lse)
        stream.synchronize()
    assert isinstance(o, cupy.ndarray)
    assert isinstance(dq, cupy.ndarray)
    assert torch.equal(torch.as_tensor(o, device="cuda"), expected)


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnlyCudaArrayInterface:
    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


@pytest.mark.parametrize("wrap", [OnlyDlpack, OnlyCudaArrayInterface, cuda.as_cuda_array])
def test_other_objects_come_back_as_numba_device_arrays(wrap):
    tensors = inputs()
    expected = nf.attention(*tensors)
    torch.cuda.synchronize()
    o, lse = nf.attention(*(wrap(x) for x in tensors), return_lse=True)
    assert cuda.is_cuda_array(o)
    assert type(o).__module__.startswith("numba")
    np.testing.assert_array_equal(o.copy_to_host(), expected.cpu().numpy())
    dq, _, _ = nf.attention_backward(o, *(wrap(x) for x in tensors), o, lse)
    assert np.isfinite(dq.copy_to_host()).all()


def test_a_kernel_that_fails_is_named_in_debug_mode(monkeypatch):
    """A pointer to nowhere makes the first kernel fail; run apart, because it ends the context."""
    import subprocess
    import sys

    script = (
        "import torch, numba_flash as nf\n"
        "from numba_flash.torch import LIBRARY\n"
        "q = torch.randn(1, 1, 64, 64, device='cuda')\n"
        "LIBRARY.pointers = lambda arrays: [8] * 99\n"
        "nf.attention(q, q, q, kernel='fa2')\n"
    )
    import os

    environment = {**os.environ, "NUMBA_FLASH_DEBUG": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "numba_flash.kernels.fa2.forward_kernel failed on the GPU" in result.stderr


def test_gradients_of_cuda_tensors_flow_on_a_side_stream():
    tensors = [x.requires_grad_() for x in inputs()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        nf.attention(*tensors, causal=True).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).sum(), tensors
    )
    for x, gradient in zip(tensors, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, atol=1e-4, rtol=1e-4)
