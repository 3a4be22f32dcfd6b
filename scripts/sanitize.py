"""Launch every kernel once, on small odd shapes, for NVIDIA's compute-sanitizer to watch.

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python scripts/sanitize.py
    done

NumPy arrays only, so that nothing but numba_flash's own launches are watched.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import numba_flash as nf
from numba_flash.launch import gpu_count


def launch_all(dtype: object, head_dim: int, **options: object) -> int:
    """Both directions of every rung; returns how many calls were made."""
    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal((2, 4, 75, head_dim)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, 83, head_dim)).astype(dtype) for _ in range(2))
    rungs = [r for r in nf.LADDER if dtype != np.float64 or r.name != "register_tiled"]
    for rung in rungs:
        o, lse = nf.attention(q, k, v, kernel=rung.name, return_lse=True, **options)
        gradients = nf.attention_backward(do, q, k, v, o, lse, kernel=rung.name, **options)
        assert all(np.isfinite(x.astype(np.float32)).all() for x in (o, *gradients))
    return 2 * len(rungs)


def main() -> None:
    """Cover dtypes, tails, groups, masks and a padded head_dim."""
    if not gpu_count():
        raise SystemExit("there is no CUDA GPU to watch")
    mask = np.random.default_rng(1).random((75, 83)) < 0.7
    calls = launch_all(np.float32, 32, causal=True)
    calls += launch_all(ml_dtypes.bfloat16, 40, window=(20, 11))
    calls += launch_all(np.float16, 59, mask=mask)
    calls += launch_all(np.float64, 16)
    print(f"{calls} calls, each kernel in both directions: finished")


if __name__ == "__main__":
    main()
