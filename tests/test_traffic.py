"""The formulas of traffic are what the emulator counts, array by array, to the last byte."""

import ml_dtypes
import numpy as np
import pytest

import numba_flash as nf
from numba_flash.kernels import fa2, minimal, naive, register_tiled
from numba_flash.launch import contiguous_layout
from numba_flash.problem import make_problem
from numba_flash.traffic import paper_numbers, requested_bytes, total_bytes

TILES = {"naive": naive.Config(8, 16), "minimal": minimal.Config(8, 12), "fa2": None}
FA2_TILES = [fa2.Config(16, 8, 4), fa2.Config(32, 16, 2)]
RUNGS = [("naive", TILES["naive"]), ("minimal", TILES["minimal"])]
RUNGS += [("fa2", config) for config in FA2_TILES]
REGISTER_TILES = [register_tiled.Config(32, 32, 4, 4), register_tiled.Config(32, 64, 8, 4)]
RUNGS += [("register_tiled", config) for config in REGISTER_TILES]

# (heads, key heads, queries, keys, head_dim, head_dim_v), dtype, options
PROBLEMS = {
    "whole tiles": ((2, 2, 32, 48, 16, 16), "float32", {}),
    "tails": ((2, 2, 29, 43, 13, 7), "float32", {}),
    "one query": ((1, 1, 1, 50, 8, 8), "float32", {}),
    "grouped heads": ((6, 2, 20, 33, 8, 8), "float32", {}),
    "16 bits": ((2, 1, 21, 30, 10, 6), "float16", {}),
    "bfloat16, grouped, causal": ((4, 2, 40, 40, 8, 8), "bfloat16", {"causal": True}),
    "64 bits": ((1, 1, 17, 19, 5, 5), "float64", {}),
    "causal": ((1, 1, 53, 53, 8, 8), "float32", {"causal": True}),
    "causal, bottom-right, more keys": ((1, 1, 30, 61, 8, 8), "float32", {"causal": True}),
    "causal, bottom-right, more queries": ((1, 1, 61, 30, 8, 8), "float32", {"causal": True}),
    "causal, top-left, more keys": (
        (1, 1, 30, 61, 8, 8),
        "float32",
        {"causal": True, "align": "top-left"},
    ),
    "causal, top-left, more queries": (
        (1, 1, 61, 30, 8, 8),
        "float32",
        {"causal": True, "align": "top-left"},
    ),
    "window": ((1, 1, 64, 64, 8, 8), "float32", {"window": (9, 5)}),
    "window to the left, causal": ((1, 1, 64, 50, 8, 8), "float32", {"window": (7, None)}),
    "window that some queries are beyond": (
        (1, 1, 70, 20, 8, 8),
        "float32",
        {"window": (3, 2), "align": "top-left"},
    ),
    "mask array": ((2, 2, 25, 37, 8, 8), "float32", {"mask": (2, 25, 37)}),
    "mask array of one row for all": ((3, 1, 25, 37, 8, 8), "float32", {"mask": (37,)}),
    "mask array and window": (
        (2, 1, 40, 40, 8, 8),
        "float16",
        {"mask": (1, 2, 40, 40), "window": (10, 3)},
    ),
}


def make(name, rng):
    """The arrays q, k, v, do, and the options of a problem."""
    (heads, heads_kv, seqlen_q, seqlen_k, d, d_v), dtype, options = PROBLEMS[name]
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shapes = [(2, heads, seqlen_q, d), (2, heads_kv, seqlen_k, d), (2, heads_kv, seqlen_k, d_v)]
    shapes.append((2, heads, seqlen_q, d_v))
    arrays = [(rng.standard_normal(shape) / 2).astype(dtype) for shape in shapes]
    if "mask" in options:
        mask = rng.random(options["mask"]) < 0.6
        if mask.ndim > 1:
            mask[..., :3, :] = False  # queries that see nothing
        options = {**options, "mask": mask}
    return arrays, options


def problem_of(arrays, options):
    layouts = [contiguous_layout(x.shape, str(x.dtype)) for x in arrays]
    mask = options.get("mask")
    if mask is not None:
        options = {**options, "mask": contiguous_layout(mask.shape, "bool")}
    return make_problem(*layouts, **options)


def counted(report):
    """Bytes read and written of global memory, by array."""
    costs = {name: costs.traffic for name, costs in report.by_array.items()}
    reads = {name: traffic.read_bytes for name, traffic in costs.items() if traffic.read_bytes}
    writes = {name: traffic.write_bytes for name, traffic in costs.items() if traffic.write_bytes}
    return report.kernel, reads, writes


def by_formula(kernel):
    reads = {name: number for name, number in kernel.reads.items() if number}
    writes = {name: number for name, number in kernel.writes.items() if number}
    return kernel.name, reads, writes


CASES = [
    (rung, config, name)
    for rung, config in RUNGS
    for name, (_, dtype, _) in PROBLEMS.items()
    if dtype != "float64" or rung != "register_tiled"
]


@pytest.mark.parametrize(("rung", "config", "name"), CASES, ids=str)
def test_every_kernel_asks_for_the_bytes_of_its_formula(rung, config, name):
    (q, k, v, do), options = make(name, np.random.default_rng(3))
    problem, mask = problem_of((q, k, v), options), options.get("mask")
    with nf.emulation() as reports:
        o, lse = nf.attention(q, k, v, kernel=rung, config=config, return_lse=True, **options)
    expected = requested_bytes(rung, "forward", problem, config, mask)
    assert list(map(counted, reports)) == list(map(by_formula, expected))
    with nf.emulation() as reports:
        nf.attention_backward(do, q, k, v, o, lse, kernel=rung, config=config, **options)
    expected = requested_bytes(rung, "backward", problem, config, mask)
    assert list(map(counted, reports)) == list(map(by_formula, expected))
    total = sum(report.traffic.bytes for report in reports)
    assert total_bytes(expected) == total > 0


@pytest.mark.parametrize("module", [minimal, fa2])
def test_bytes_of_tiled_kernels_shrink_as_the_paper_says_when_more_fits_on_chip(module):
    ratios = []
    for seqlen in (512, 4096, 65536):
        layout = contiguous_layout((1, 1, seqlen, 64), "float32")
        problem = make_problem(layout, layout, layout)
        for config in module.RUNG.candidates:
            kernels = requested_bytes(module.RUNG.name, "forward", problem, config)
            fast_memory = module.shared_bytes(problem, config, backward=False) // 4
            ratios.append(total_bytes(kernels) / 4 / paper_numbers(problem, fast_memory))
    # Tiles of 4 x 2 to 64 x 32: on-chip memory and bytes each change more than tenfold.
    assert max(ratios) < 3 * min(ratios)


def test_a_problem_with_a_mask_needs_the_mask():
    problem = problem_of(make("mask array", np.random.default_rng(0))[0][:3], {"mask": np.ones(37)})
    with pytest.raises(ValueError, match="pass the array too"):
        requested_bytes("fa2", "forward", problem, FA2_TILES[0])
