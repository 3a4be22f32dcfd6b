"""Every rung, forward and backward, on the emulator with every check on."""

from pathlib import Path

import pytest
import torch

import numba_flash as nf
from numba_flash.kernels import fa2, minimal, naive, register_tiled
from tests.cases import CASES
from tests.judge import check

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SMALL = [case for case in CASES if case.scores * case.head_dim <= 350_000]
RUNGS = [rung.name for rung in nf.LADDER]


def run(case, dtype, kernel, forward_config=None, backward_config=None):
    """Outputs and gradients of one rung; the emulator raises at the first fault."""
    q, k, v, do, options = case.inputs(dtype, "cpu")
    with nf.emulation(limit=None):
        o, lse = nf.attention(
            q, k, v, kernel=kernel, config=forward_config, return_lse=True, **options
        )
        dq, dk, dv = nf.attention_backward(
            do, q, k, v, o, lse, kernel=kernel, config=backward_config, **options
        )
    check({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, q, k, v, do, case.cancels, **options)
    return o, lse, dq, dk, dv


@pytest.mark.parametrize("kernel", RUNGS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_rung_meets_the_error_rule(kernel, case):
    dtype = DTYPES[(SMALL.index(case) + RUNGS.index(kernel)) % 4]
    if dtype == torch.float64 and not case.fits_float64(kernel):
        dtype = torch.float32
    run(case, dtype, kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", RUNGS)
def test_every_dtype_on_every_rung(kernel, dtype):
    case = next(c for c in CASES if c.name == "bool-mask-causal")
    if dtype == torch.float64 and not case.fits_float64(kernel):
        with pytest.raises(ValueError, match=f"{kernel}: it sums in float32"):
            run(case, dtype, kernel)
    else:
        run(case, dtype, kernel)


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16), (64, 32)])
@pytest.mark.parametrize("kernel", RUNGS)
def test_tiles_of_any_shape_give_the_same_answer(kernel, tiles):
    case = next(c for c in CASES if c.name == "tail-of-head-100")
    if kernel == "naive":
        config = naive.Config(tiles[0] // 4, tiles[1])
    elif kernel == "minimal":
        config = minimal.Config(*tiles)
    elif kernel == "register_tiled":
        config = register_tiled.Config(*(min(2 * n, 64) for n in tiles), 8, 4)
    else:
        config = fa2.Config(*tiles, team=4)
    run(case, torch.float32, kernel, config, config)


def test_backward_tiles_may_differ_from_forward_tiles():
    case = next(c for c in CASES if c.name == "tail-of-head-65")
    run(case, torch.float32, "fa2", {"tile_m": 32, "tile_n": 16}, {"tile_m": 16, "tile_n": 32})
    run(case, torch.float32, "minimal", {"tile_m": 8, "tile_n": 16}, {"tile_m": 32, "tile_n": 8})


@pytest.mark.parametrize("kernel", RUNGS)
def test_row_that_sees_nothing_is_zero_and_has_zero_gradient(kernel):
    case = next(c for c in CASES if c.name == "causal-5-2-bottom-right")
    o, lse, dq, _, _ = run(case, torch.float32, kernel)
    assert (o[0, 0, :3] == 0).all()
    assert (dq[0, 0, :3] == 0).all()
    assert torch.isneginf(lse[0, 0, :3]).all()
    assert (o[0, 0, 3:] != 0).any()


@pytest.mark.parametrize("kernel", RUNGS)
def test_nan_in_a_key_that_a_row_may_not_see_does_not_touch_the_row(kernel):
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    with nf.emulation():
        clean = nf.attention(q, k, v, causal=True, kernel=kernel)
        k[:, :, 15:] = torch.nan
        dirty = nf.attention(q, k, v, causal=True, kernel=kernel)
    assert torch.equal(clean[:, :, :15], dirty[:, :, :15])
    assert dirty[:, :, 15:].isnan().all()


@pytest.mark.parametrize("kernel", RUNGS)
def test_row_that_sees_nothing_has_zero_gradient_even_where_its_dO_is_nan(kernel):
    case = next(c for c in CASES if c.name == "causal-5-2-bottom-right")
    q, k, v, do, options = case.inputs(torch.float32, "cpu")
    with nf.emulation():
        o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True, **options)
        do[0, 0, :3] = torch.nan
        dq, _, _ = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel, **options)
    assert (dq[0, 0, :3] == 0).all()
    assert torch.isfinite(dq[0, 0, 3:]).all()


@pytest.mark.parametrize("kernel", RUNGS)
def test_window_over_everything_equals_causal_bit_for_bit(kernel):
    q, k, v = (torch.randn(1, 2, 37, 8) for _ in range(3))
    with nf.emulation():
        causal = nf.attention(q, k, v, causal=True, kernel=kernel)
        window = nf.attention(q, k, v, window=(36, 0), kernel=kernel)
        full = nf.attention(q, k, v, kernel=kernel)
        unbounded = nf.attention(q, k, v, window=(None, None), kernel=kernel)
    assert torch.equal(causal, window)
    assert torch.equal(full, unbounded)
    assert not torch.equal(causal, full)


@pytest.mark.parametrize("kernel", RUNGS)
def test_a_query_head_reads_key_head_floor_h_over_group(kernel):
    q = torch.randn(1, 4, 9, 8)
    k, v = torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8)
    v[:, 0], v[:, 1] = 1.0, 2.0
    with nf.emulation():
        o = nf.attention(q, k, v, kernel=kernel)
    assert o.mean((0, 2, 3)).tolist() == pytest.approx([1, 1, 2, 2])


@pytest.mark.parametrize("kernel", RUNGS)
def test_repeats_are_the_same_bits(kernel):
    case = next(c for c in CASES if c.name == "groups-8-2")
    first, second = (run(case, torch.float32, kernel) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_tiles_that_the_mask_leaves_empty_are_not_read():
    """With a window of 4 keys a row, keys far from the diagonal of fa2's tiles are never loaded."""
    q, k, v = (torch.randn(1, 1, 256, 8) for _ in range(3))
    with nf.emulation():
        o = nf.attention(q, k, v, window=(4, 0), kernel="fa2")
        v[:, :, :32] = torch.nan  # a loaded tile would spread it: 0 * NaN
        far = nf.attention(q, k, v, window=(4, 0), kernel="fa2")
    assert torch.equal(o[:, :, 128:], far[:, :, 128:])


def test_float64_at_the_largest_head_dim_falls_to_a_lower_rung():
    q = torch.randn(1, 1, 4, 256, dtype=torch.float64)
    with nf.emulation(), pytest.raises(ValueError, match="shared memory"):
        nf.attention(q, q, q, kernel="fa2")
    with nf.emulation():
        o = nf.attention(q, q, q)
        assert torch.equal(o, nf.attention(q, q, q, kernel="minimal"))


def product_costs(reports):
    """What the loads of register_tiled's products cost in each kernel, by source line."""
    source = Path(register_tiled.__file__).read_text().splitlines()
    loads = [n for n, line in enumerate(source, 1) if "load_x4(r" in line]
    return [[report.by_line[line] for line in loads] for report in reports]


def run_register_tiled(head_dim, seqlen=70):
    q, k, v, do = (torch.randn(1, 1, seqlen, head_dim) for _ in range(4))
    with nf.emulation() as reports:
        o, lse = nf.attention(q, k, v, kernel="register_tiled", return_lse=True)
        nf.attention_backward(do, q, k, v, o, lse, kernel="register_tiled")
    return [report for report in reports if report.kernel != "delta_kernel"]


@pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
def test_threads_of_register_tiled_never_wait_for_a_bank_in_a_product(head_dim):
    for costs in product_costs(run_register_tiled(head_dim)):
        assert sum(cost.shared.read_wavefronts for cost in costs) > 1000
        assert sum(cost.bank_conflicts for cost in costs) == 0


@pytest.mark.parametrize(("head_dim", "most"), [(64, 0.75), (128, 0.95)])
def test_shared_memory_keeps_up_with_the_multiply_adds_of_register_tiled(head_dim, most):
    """It gives one wavefront a cycle, while the four schedulers issue four multiply-adds."""
    reports = run_register_tiled(head_dim, seqlen=64)
    for report, costs in zip(reports, product_costs(reports), strict=True):
        cycles = report.multiply_adds / 32 / 4
        assert sum(cost.shared.read_wavefronts for cost in costs) <= most * cycles


@pytest.mark.parametrize("kernel", RUNGS)
def test_rows_off_the_alignment_of_vectors_give_the_same_answer(kernel):
    spacious = [torch.randn(1, 2, 40, 20) for _ in range(4)]
    for first in (0, 1):  # rows that begin at multiples of 16 bytes, and rows that do not
        q, k, v, do = (x[..., first : first + 16] for x in spacious)
        with nf.emulation():
            o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
            gradients = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel)
            copies = [x.contiguous() for x in (q, k, v)]
            same = nf.attention(*copies, kernel=kernel)
            as_good = nf.attention_backward(do.contiguous(), *copies, o, lse, kernel=kernel)
        assert torch.equal(o, same)
        assert all(torch.equal(a, b) for a, b in zip(gradients, as_good, strict=True))
