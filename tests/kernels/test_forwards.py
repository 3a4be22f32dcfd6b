"""The two small forward kernels of special instructions: right, clean, and in registers."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from numba import types

from numba_flash.emulator import emulate
from tests.compiling import assemble
from tests.judge import check

from . import hopper_forward, mma_forward

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
LOG2_E = math.log2(math.e)

CASES = [
    pytest.param(64, 64, 64, "bf16", False, id="one-tile"),
    pytest.param(130, 200, 64, "f16", False, id="tails"),
    pytest.param(300, 300, 64, "bf16", True, id="causal"),
    pytest.param(170, 100, 64, "bf16", True, id="rows-that-see-nothing"),
    pytest.param(70, 260, 128, "bf16", True, id="more-keys"),
    pytest.param(129, 257, 128, "f16", False, id="head-dim-128"),
    pytest.param(1, 1, 64, "f16", False, id="one-key"),
]


def inputs(seqlen_q, seqlen_k, head_dim, dtype, heads=2):
    torch.manual_seed(0)
    lengths = (seqlen_q, seqlen_k, seqlen_k)
    return [torch.randn(1, heads, n, head_dim).to(DTYPES[dtype]) for n in lengths]


def patterns(x):
    """A tensor as the bit patterns of (heads, seqlen, head_dim)."""
    return x[0].contiguous().view(torch.uint16).numpy()


def on_emulator(kernel, grid, block, shared_bytes, *arguments):
    return emulate(kernel)[grid, block, 0, shared_bytes](*arguments)


def forward(module, q, k, v, dtype, causal, launch=on_emulator):
    """O, LSE, and what ``launch(kernel, grid, block, shared_bytes, *arguments)`` gives back."""
    heads, seqlen_q, head_dim = q.shape[1:]
    o = np.zeros((heads, seqlen_q, head_dim), np.uint16)
    lse = np.zeros((1, heads, seqlen_q), np.float32)
    arrays = [patterns(x) for x in (q, k, v)]
    if module is hopper_forward:
        operands, tile_m = hopper_forward.tensor_maps(*arrays), hopper_forward.TILE_M
    else:
        operands, tile_m = [x.reshape(-1) for x in arrays], mma_forward.TILE
    report = launch(
        module.make_forward(head_dim, dtype, causal),
        (-(-seqlen_q // tile_m), heads),
        module.THREADS,
        module.shared_bytes(head_dim),
        *operands,
        o.view(np.uint32).reshape(-1),
        lse.reshape(-1),
        np.int32(seqlen_q),
        np.int32(k.shape[2]),
        np.float32(LOG2_E / math.sqrt(head_dim)),
    )
    return torch.from_numpy(o[None]).view(DTYPES[dtype]), torch.from_numpy(lse), report


@pytest.mark.parametrize("module", [mma_forward, hopper_forward], ids=["mma", "hopper"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim", "dtype", "causal"), CASES)
def test_forward_meets_the_error_rule_without_a_finding(
    module, seqlen_q, seqlen_k, head_dim, dtype, causal
):
    q, k, v = inputs(seqlen_q, seqlen_k, head_dim, dtype)
    o, lse, report = forward(module, q, k, v, dtype, causal)
    assert report.ok, report
    check({"o": o, "lse": lse}, q, k, v, torch.zeros_like(q), causal=causal)


def test_every_multiply_add_of_the_matrix_products_is_counted():
    q, k, v = inputs(128, 192, 64, "bf16")
    _, _, report = forward(mma_forward, q, k, v, "bf16", causal=False)
    products = sum(
        costs.multiply_adds
        for line, costs in report.by_line.items()
        if "mma(" in mma_lines()[line - 1]
    )
    assert products == 2 * (2 * 128 * 192 * 64)


def mma_lines():
    with open(mma_forward.__file__) as source:
        return source.read().splitlines()


WORDS, MAP, HALVES = types.uint32[::1], types.uint64[::1], types.uint16[::1]
SCALARS = (types.float32[::1], types.int32, types.int32, types.float32)


@pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler runs on macOS")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("module", [mma_forward, hopper_forward], ids=["mma", "hopper"])
def test_forward_stays_in_registers_and_its_products_overlap(module, head_dim, causal, tmp_path):
    is_hopper = module is hopper_forward
    operand, architecture = (MAP, (9, 0, "a")) if is_hopper else (HALVES, (8, 0))
    signature = types.void(operand, operand, operand, WORDS, *SCALARS)
    kernel = module.make_forward(head_dim, "bf16", causal).py_func
    bounds = (module.THREADS, 1)
    assembled = assemble(kernel, signature, architecture, tmp_path, bounds)
    assert assembled.spill_bytes == assembled.stack_bytes == 0
    assert assembled.registers * module.THREADS <= 65_536
    assert ".f64" not in assembled.ptx
    assert not re.search(r"C75\d\d", assembled.log), "ptxas serialises wgmma:\n" + assembled.log
    if is_hopper:
        steps = head_dim // 16 + module.TILE_N // 16
        assert assembled.ptx.count("wgmma.mma_async") == steps
    else:
        tile = module.TILE
        assert assembled.ptx.count("mma.sync") == 2 * (tile // 8) * (head_dim // 16)
