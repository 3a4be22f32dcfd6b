"""What a call costs the host."""

import statistics
import time

import pytest
import torch

import numba_flash as nf

pytestmark = pytest.mark.gpu


def host_microseconds(function):
    """Median host time of a warm call while the GPU has nothing else to do."""
    times = []
    for _ in range(400):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_warm_forward_costs_the_host_at_most_one_and_a_half_of_torchs(dtype):
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=dtype) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours, torchs = (lambda: nf.attention(q, k, v)), (lambda: sdpa(q, k, v))
    host_microseconds(ours), host_microseconds(torchs)
    pairs = [(host_microseconds(ours), host_microseconds(torchs)) for _ in range(5)]
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    print(f"host microseconds (numba_flash, torch): {pairs}")
    assert ratio <= 1.5
