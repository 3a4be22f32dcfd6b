"""Without Numba kernels are written and emulated all the same, and what needs Numba says so."""

import sys

import numpy as np
import pytest

from numba_flash import stub
from numba_flash.emulator.functions import CASTS

from .without import lend_packages, run_with_packages

EVERYTHING_WITHOUT_A_GPU = """
import warnings
import numpy as np
from tests import learner
import numba_flash as nf

learner.run()
sample = nf.load_sample()
q, k, v = (x[:, :1, :40].astype(np.float32) for x in (sample.q, sample.k, sample.v))
want, lse = nf.reference.naive_forward(q, k, v)
gradients = nf.reference.naive_backward(q, q, k, v, want, lse)
for rung in nf.LADDER:
    with nf.emulation():
        o, lse = nf.attention(q, k, v, kernel=rung.name, return_lse=True)
        got = nf.attention_backward(q, q, k, v, o, lse, kernel=rung.name)
    for x, y in zip((o, *got), (want, *gradients)):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())  # float32 rounds at 6e-8
import tests.kernels.hopper_forward, tests.kernels.mma_forward
import numba
"""


def packages_without(tmp_path_factory, *missing):
    try:
        return lend_packages(tmp_path_factory.mktemp("packages"), *missing)
    except OSError:
        pytest.skip("this system makes no links")


@pytest.fixture(scope="module")
def without_numba(tmp_path_factory):
    return packages_without(tmp_path_factory, "numba", "llvmlite")


@pytest.fixture(scope="module")
def with_plain_numba(tmp_path_factory):
    return packages_without(tmp_path_factory, "numba_cuda", "cuda")


def check(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_everything_that_needs_no_gpu_works_without_numba(without_numba):
    lines = "assert isinstance(numba, nf.stub.StubModule)"
    check(run_with_packages(without_numba, "-c", EVERYTHING_WITHOUT_A_GPU + lines))


def test_everything_that_needs_no_gpu_works_with_plain_numba(with_plain_numba):
    lines = (
        "assert numba.__file__; import importlib.util as u; assert not u.find_spec('numba_cuda')"
    )
    check(run_with_packages(with_plain_numba, "-c", EVERYTHING_WITHOUT_A_GPU + lines))


CLI = "from numba_flash.cli import app; app()"


def test_doctor_says_that_numba_is_missing_and_the_fix(without_numba):
    said = " ".join(check(run_with_packages(without_numba, "-c", CLI, "doctor")).split())
    assert "Numba is not installed" in said
    assert "pip install" in said
    assert "fa2" in said


def test_demo_runs_without_numba(without_numba, tmp_path):
    picture = str(tmp_path / "demo.png")
    run = run_with_packages(without_numba, "-c", CLI, "demo", "--kernel", "fa2", "--out", picture)
    assert "All within bounds" in check(run)


def test_numba_is_left_alone_where_it_is_installed():
    before = sys.modules.get("numba")
    stub.install()
    assert sys.modules.get("numba") is before
    assert not isinstance(before, stub.StubModule)


@pytest.fixture
def modules():
    return stub.make_modules()


def test_types_are_those_of_the_emulator(modules):
    types = modules["numba.types"]
    kinds = {name: kind for name, kind in vars(types).items() if isinstance(kind, stub.Scalar)}
    assert {n: str(k) for n, k in kinds.items() if n != "void"} == {
        name: cast.name for name, cast in CASTS.items() if name != "bool"
    }
    assert modules["numba"].float32 is types.f4
    converted = types.float32(0.1)
    assert (type(converted), converted) == (np.float32, np.float32(0.1))


def scale(x):
    """Double."""
    x[0] *= 2


def test_every_form_of_the_decorator_keeps_the_function(modules):
    cuda = modules["numba.cuda"]
    for made in (cuda.jit(scale), cuda.jit()(scale), cuda.jit(device=True)(scale)):
        assert made.py_func is scale
        assert (made.__name__, made.__doc__) == ("scale", "Double.")
    assert not cuda.is_available()
    assert len(cuda.gpus) == 0


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda m: m["numba.cuda"].jit(scale)[1, 32], RuntimeError, r"emulate\(scale\)\[grid, b"),
        (lambda m: m["numba.cuda"].jit(scale)(1), RuntimeError, "needs a launch configuration"),
        (lambda m: m["numba.cuda"].jit(device=True)(scale)(1), RuntimeError, "device function"),
        (lambda m: m["numba.cuda"].threadIdx.x, AttributeError, r"cuda\.threadIdx is used outside"),
        (lambda m: m["numba.cuda"].to_device([1]), RuntimeError, "Numba is not installed .*pip"),
        (lambda m: m["numba"].njit, ImportError, r"numba\.njit is not there: Numba is not inst"),
        (lambda m: m["numba.cuda"].jit("void(f4)"), TypeError, r"void\(f4\) .* `@cuda.jit` alone"),
        (lambda m: m["numba"].float32[:], TypeError, r"signature float32\[:\]"),
        (lambda m: m["numba"].void(m["numba"].f4), TypeError, r"signature none\(float32\)"),
        (lambda m: m["numba.extending"].intrinsic(scale)(), RuntimeError, "scale is an instr"),
    ],
)
def test_what_needs_numba_says_what_to_do(modules, use, error, message):
    with pytest.raises(error, match=message):
        use(modules)


def test_modules_answer_questions_about_their_inside_like_modules(modules):
    for module in modules.values():
        assert not hasattr(module, "__file__")
        assert not hasattr(module, "_private")
