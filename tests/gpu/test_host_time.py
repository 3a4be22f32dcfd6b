"""What a call costs the host."""

import statistics
import time

import pytest
import torch

import numba_flash as nf

pytestmark = pytest.mark.gpu


def host_microseconds(*functions):
    """Median host time of warm calls, one of each in turn, while the GPU has nothing else to do."""
    times = [[] for _ in functions]
    for _ in range(1000):
        for function, taken in zip(functions, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken[100:]) * 1e6 for taken in times]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_warm_forward_costs_the_host_at_most_one_and_a_half_of_torchs(dtype):
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=dtype) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours, torchs = host_microseconds(lambda: nf.attention(q, k, v), lambda: sdpa(q, k, v))
    print(f"host microseconds: numba_flash {ours:.1f}, torch {torchs:.1f}")
    assert ours <= 1.5 * torchs
