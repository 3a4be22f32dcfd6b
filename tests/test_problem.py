"""A wrong argument of each kind is refused, before any kernel, with a sentence that helps."""

import ml_dtypes
import numpy as np
import pytest

import numba_flash as nf
from numba_flash import launch
from numba_flash.kernels import fa2, minimal, register_tiled
from numba_flash.launch import EMULATOR, contiguous_layout
from numba_flash.problem import make_problem


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


Q = array(2, 4, 8, 16)
K = array(2, 2, 6, 16)
MASK = np.ones((8, 6), bool)

WRONG = {
    "q list": ({"q": [[1.0]]}, TypeError, "q is a builtins.list; it must be a NumPy, torch"),
    "q none": ({"q": None}, TypeError, "q is a builtins.NoneType"),
    "k int": ({"k": K.astype(np.int32)}, TypeError, "k has dtype int32; attention takes float16"),
    "v mixed": ({"v": K.astype(np.float64)}, TypeError, "float32, float32 and float64"),
    "big-endian": ({"q": Q.astype(">f4")}, TypeError, "q has dtype >f4"),
    "3-D": ({"q": Q[0]}, ValueError, r"q has shape \(4, 8, 16\); it must have 4 dimensions"),
    "no heads": ({"q": Q[:, :0]}, ValueError, "q has no heads"),
    "head_dim 0": ({"q": Q[..., :0]}, ValueError, "q has head_dim 0"),
    "head_dim 257": ({"v": array(2, 2, 6, 257)}, ValueError, "v has head_dim 257.*1 and 256"),
    "batch": ({"k": K[:1]}, ValueError, "batch sizes 2, 1 and 2"),
    "heads of v": ({"v": array(2, 1, 6, 16)}, ValueError, "k has 2 heads and v has 1"),
    "group": ({"q": array(2, 3, 8, 16)}, ValueError, "3 heads and k has 2.*multiple"),
    "seqlen": ({"v": K[:, :, :5]}, ValueError, "k has seqlen 6 and v has 5"),
    "head_dim": ({"q": Q[..., :8]}, ValueError, "q has head_dim 8 and k has 16"),
    "causal 1": ({"causal": 1}, TypeError, "causal is 1; it must be True or False"),
    "align": ({"align": "left"}, ValueError, "align is 'left'; it must be 'bottom-right' or"),
    "window int": ({"window": 3}, TypeError, r"window is 3; it must be \(left, right\)"),
    "window of 3": ({"window": (1, 2, 3)}, TypeError, "window is"),
    "window float": ({"window": (1.5, 0)}, TypeError, "left side must be an integer or None"),
    "window nested": ({"window": [[1], 0]}, TypeError, "left side must be an integer"),
    "window negative": ({"window": (-1, -3)}, ValueError, "left side is negative.*None is"),
    "scale str": ({"softmax_scale": "1"}, TypeError, "softmax_scale is '1'; it must be a number"),
    "scale bool": ({"softmax_scale": True}, TypeError, "softmax_scale is True"),
    "scale beyond float32": ({"softmax_scale": 1e39}, ValueError, r"1e\+39.*at most 3.4e\+38"),
    "scale huge int": ({"softmax_scale": 10**400}, ValueError, "must be finite"),
    "scale nan": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    "mask int": ({"mask": MASK.astype(int)}, TypeError, "mask has dtype int64; it must be bool"),
    "mask shape": ({"mask": MASK[:7]}, ValueError, r"mask has shape \(7, 6\).*\(2, 4, 8, 6\)"),
    "mask 5-D": ({"mask": MASK[None, None, None]}, ValueError, "mask has shape"),
    "mask list": ({"mask": [[True]]}, TypeError, "mask is a builtins.list"),
    "kernel": ({"kernel": "fa3"}, ValueError, "kernel is 'fa3'; it must be 'auto' or one of"),
    "align array": ({"align": np.array(["top-left"])}, ValueError, "align is array"),
    "kernel array": ({"kernel": np.array(["fa2"])}, ValueError, "kernel is array"),
    "return_lse": ({"return_lse": "no"}, TypeError, "return_lse is 'no'; it must be True or False"),
    "masked array": ({"k": np.ma.masked_array(K, K > 0)}, TypeError, "k is a masked array"),
    "generator": ({"q": np.random.default_rng()}, TypeError, "q is a numpy.random"),
    "numpy dtype": ({"v": np.dtype("f4")}, TypeError, "v is a numpy"),
    "kernel none": ({"kernel": None}, ValueError, "kernel is None"),
    "config": ({"config": 32}, TypeError, "config is a builtins.int"),
    "other config": (
        {"kernel": "fa2", "config": minimal.Config()},
        TypeError,
        "numba_flash.kernels.minimal.Config, but kernel 'fa2'",
    ),
    "config field": ({"config": {"tile_k": 3}}, TypeError, "no field 'tile_k' for kernel 'fa2'"),
    "config value": (
        {"config": {"tile_m": 0}},
        ValueError,
        r"fa2\.Config\.tile_m is 0; it must be a positive",
    ),
    "config str": ({"config": {"tile_m": "64"}}, ValueError, "tile_m is '64'"),
    "tile too large": (
        {"kernel": "minimal", "config": {"tile_m": 512, "tile_n": 512}},
        ValueError,
        r"needs 1,146,880 bytes of shared memory.*has 49,152 on.*would fit",
    ),
}


@pytest.fixture(autouse=True)
def no_kernel_may_run(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a wrong argument reached a kernel")

    monkeypatch.setattr(launch, "emulate", refuse)
    monkeypatch.setattr(launch.Program, "launch", refuse)


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_argument_is_refused_with_a_sentence(arguments, error, message):
    good = {"q": Q, "k": K, "v": K}
    with pytest.raises(error, match=message), nf.emulation():
        nf.attention(**(good | arguments))


BACKWARD = {
    "do shape": ({"do": Q[:, :, :7]}, ValueError, r"do has shape \(2, 4, 7, 16\).*must be"),
    "o shape": ({"o": Q[..., :8]}, ValueError, "o has shape"),
    "o dtype": ({"o": Q.astype(np.float64)}, TypeError, "o has dtype float64; for q, k and v"),
    "do dtype": ({"do": Q.astype(ml_dtypes.bfloat16)}, TypeError, "do has dtype bfloat16"),
    "lse shape": ({"lse": array(2, 4, 9)}, ValueError, "lse has shape"),
    "lse dtype": ({"lse": array(2, 4, 8, dtype=np.float64)}, TypeError, "return_lse=True"),
    "lse none": ({"lse": None}, TypeError, "lse is a builtins.NoneType"),
    "window": ({"window": (0, -1)}, ValueError, "right side is negative"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BACKWARD.values(), ids=BACKWARD.keys())
def test_wrong_argument_of_the_backward_is_refused(arguments, error, message):
    good = {"do": Q, "q": Q, "k": K, "v": K, "o": Q, "lse": array(2, 4, 8)}
    with pytest.raises(error, match=message), nf.emulation():
        nf.attention_backward(**(good | arguments))


def test_true_and_one_are_told_apart_even_after_a_good_call():
    with pytest.raises(AssertionError, match="reached a kernel"), nf.emulation():
        nf.attention(Q, K, K, causal=True)
    with pytest.raises(TypeError, match="causal is 1"), nf.emulation():
        nf.attention(Q, K, K, causal=1)


def test_windows_of_other_types_are_told_apart_even_after_a_good_call():
    with pytest.raises(AssertionError, match="reached a kernel"), nf.emulation():
        nf.attention(Q, K, K, window=(2, 1))
    with pytest.raises(TypeError, match="left side must be an integer"), nf.emulation():
        nf.attention(Q, K, K, window=(2.0, 1))


@pytest.mark.parametrize("limit", ["x", float("nan"), 0, -1.0])
def test_wrong_limit_of_the_emulator_is_refused(limit):
    with pytest.raises(ValueError, match="positive number of seconds"), nf.emulation(limit=limit):
        pass


def test_numpy_integers_are_tile_sizes_too():
    assert fa2.Config(tile_m=np.int64(32)) == fa2.Config(tile_m=32)


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.ones(2, 2, 6, 16).to_sparse(),
        lambda torch: torch.nested.nested_tensor([torch.ones(2, 6, 16), torch.ones(2, 5, 16)]),
        lambda torch: torch.ones(2, 2, 6, 16, dtype=torch.complex64).conj().imag,
    ],
    ids=["sparse", "nested", "negated"],
)
def test_tensors_that_are_not_dense_are_refused(make):
    torch = pytest.importorskip("torch")
    k = make(torch)
    with pytest.raises(TypeError, match="numba_flash takes dense tensors"), nf.emulation():
        nf.attention(torch.from_numpy(Q), k, k)


def test_a_tangent_is_not_lost_without_a_word():
    torch = pytest.importorskip("torch")
    forward_ad = torch.autograd.forward_ad
    q, k = torch.from_numpy(Q), torch.from_numpy(K)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        nf.attention(forward_ad.make_dual(q, q), k, k)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_m": 48, "team": 32}, "must be a multiple of the team"),
        ({"tile_m": 4, "team": 4}, "fill whole warps"),
        ({"tile_m": 512, "team": 4}, "at most 1024"),
        ({"team": 3}, "must be 1, 2, 4, 8, 16 or 32"),
    ],
)
def test_fa2_tiles_that_no_block_can_have_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        fa2.Config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_m": 48}, "tile_m is 48 with 8 rows a thread; it must be a multiple of 32"),
        ({"tile_n": 32, "rows": 16}, "tile_n is 32 with 16 rows a thread"),
        ({"rows": 6}, "rows is 6; it must be 4, 8 or 16"),
        ({"columns": 32}, "columns is 32; it must be 4, 8 or 16"),
        ({"tile_m": 128}, "micro-tiles of 128 scores; at most 64"),
    ],
)
def test_register_tiles_that_no_block_can_have_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        register_tiled.Config(**fields)


def test_tiles_of_a_direction_leave_registers_for_its_sums():
    """The backward sums dK and dV at the same time, and takes fewer rows a thread for it."""
    layout = contiguous_layout((1, 1, 64, 64), "float32")
    problem = make_problem(layout, layout, layout)
    rung = register_tiled.RUNG
    assert rung.default_config(problem, EMULATOR).rows == 8
    assert rung.default_config(problem, EMULATOR, backward=True).rows == 4


def test_libraries_are_not_mixed():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"k is a torch\.Tensor and q is a numpy\.ndarray"):
        nf.attention(Q, torch.from_numpy(K), K)
