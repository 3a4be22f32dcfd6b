"""Every case on every rung, forward and backward, on a CUDA GPU, judged by the error rule."""

import pytest
import torch

import numba_flash as nf
from numba_flash.kernels import fa2, minimal, naive, register_tiled
from numba_flash.torch import LIBRARY
from tests.cases import CASES
from tests.judge import check

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
RUNGS = [rung.name for rung in nf.LADDER]
ELEMENTS_OF_GUARD = 96


@pytest.fixture(autouse=True)
def nan_in_everything_allocated(monkeypatch):
    """Outputs and workspaces start as NaN, so that whatever a kernel leaves out shows."""
    empty = LIBRARY.empty

    def poisoned(shape, dtype, like):
        return empty(shape, dtype, like).fill_(torch.nan)

    monkeypatch.setattr(LIBRARY, "empty", poisoned)
    torch.backends.cuda.matmul.allow_tf32 = False


def guarded(x, off=0):
    """A copy of x with NaN before and after it in memory, so many elements off its alignment."""
    first = ELEMENTS_OF_GUARD + off
    flat = x.new_full((x.numel() + 2 * first,), torch.nan)
    return flat[first : first + x.numel()].view(x.shape).copy_(x)


def run(case, dtype, kernel, forward_config=None, backward_config=None):
    q, k, v, do, options = case.inputs(dtype, "cuda")
    off = case.seqlen_k % 2  # on its alignment in some cases, off it in others
    gq, gk, gv, gdo = (guarded(x, off) for x in (q, k, v, do))
    o, lse = nf.attention(
        gq, gk, gv, kernel=kernel, config=forward_config, return_lse=True, **options
    )
    dq, dk, dv = nf.attention_backward(
        gdo, gq, gk, gv, o, lse, kernel=kernel, config=backward_config, **options
    )
    check({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, q, k, v, do, case.cancels, **options)
    return o, lse, dq, dk, dv


def dtypes_of(case, kernel):
    """float32 always, one 16-bit dtype, and float64 for every third case: compiling is what takes
    the time. Every dtype on every rung has a test of its own below."""
    n = CASES.index(case)
    dtypes = [torch.float32, (torch.bfloat16, torch.float16)[n % 2]]
    if n % 3 == 0 and not case.is_long and case.fits_float64(kernel):
        dtypes.append(torch.float64)
    return dtypes


def grouped(kernel, case):
    """With ``--dist loadgroup`` one worker compiles the kernels of a head_dim for all its cases."""
    group = pytest.mark.xdist_group(f"{kernel}-{case.head_dim}")
    return pytest.param(kernel, case, id=f"{case.name}-{kernel}", marks=group)


@pytest.mark.parametrize(
    ("kernel", "case"), [grouped(kernel, case) for kernel in RUNGS for case in CASES]
)
def test_rung_meets_the_error_rule(kernel, case):
    for dtype in dtypes_of(case, kernel):
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
    for dtype in (torch.float32, torch.bfloat16):
        run(case, dtype, kernel, config, config)


@pytest.mark.parametrize("kernel", RUNGS)
def test_sequence_of_65536_keys_for_one_query(kernel):
    q = torch.randn(1, 16, 1, 64, device="cuda")
    k, v = (torch.randn(1, 16, 65536, 64, device="cuda") for _ in range(2))
    do = torch.ones((), device="cuda").expand(1, 16, 1, 64)
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
    dq, dk, dv = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel)
    check({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, q, k, v, do)


@pytest.mark.parametrize("kernel", RUNGS)
def test_more_heads_than_the_y_axis_of_a_grid_holds(kernel):
    q, k, v, do = (torch.randn(80_000, 1, 16, 16, device="cuda") for _ in range(4))
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
    dq, dk, dv = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel)
    check({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, q, k, v, do)


def test_more_than_two_to_the_31_elements():
    """One test for all rungs, so that parallel workers do not share out the memory it needs."""
    batch = (2**31) // (16 * 128) + 3
    q, k, v, do = (
        torch.randn(batch, 1, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    for kernel in RUNGS:
        o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
        gradients = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel)
        for some in (slice(0, 8), slice(batch - 8, batch)):
            results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True))
            results = {name: x[some] for name, x in results.items()}
            check(results, q[some], k[some], v[some], do[some])
        assert not any(torch.isnan(x).any() for x in (o, lse, *gradients))


@pytest.mark.parametrize("kernel", RUNGS)
def test_transposed_views_need_no_copy(kernel):
    q = torch.randn(1, 62, 16, 128, device="cuda").transpose(1, 2)
    k = torch.randn(1, 16, 62, 128, device="cuda")
    v = torch.randn(1, 62, 16, 128, device="cuda").transpose(1, 2)
    do = torch.randn(1, 16, 128, 62, device="cuda").mT
    before = torch.cuda.memory_allocated()
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= o.nbytes + lse.nbytes + 1024
    dq, dk, dv = nf.attention_backward(do, q, k, v, o, lse, kernel=kernel)
    check({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, q, k, v, do)


@pytest.mark.parametrize(("batch", "repeats"), [(300, 12), (60, 250)])
def test_repeats_are_the_same_bits(batch, repeats):
    heads = 1 if batch == 300 else 4
    seqlen = 2048 if batch == 300 else 256
    q, k, v, do = (torch.randn(batch, heads, seqlen, 128, device="cuda").half() for _ in range(4))
    o, lse = nf.attention(q, k, v, return_lse=True)
    first = (o, lse, *nf.attention_backward(do, q, k, v, o, lse))
    for _ in range(repeats):
        again_o, again_lse = nf.attention(q, k, v, return_lse=True)
        again = (again_o, again_lse, *nf.attention_backward(do, q, k, v, o, lse))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_head_dim_128_with_large_tiles_is_refused_or_right_but_never_zero():
    """Tiles of 32 rows at head_dim 128 are over 48 KB: refused before launch, with what fits."""
    q = torch.randn(1, 1, 64, 128, device="cuda")
    with pytest.raises(ValueError, match=r"bytes of shared memory.*49,152.*would fit"):
        nf.attention(q, q, q, kernel="minimal", config={"tile_m": 32, "tile_n": 32})
    assert nf.attention(q, q, q, kernel="minimal").abs().sum() > 0
