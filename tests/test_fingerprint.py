"""Everything that shapes a kernel is in its fingerprint; nothing else is."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import llvmlite
import numba
import numpy as np
import pytest
from numba import cuda, float32, int32, types

import numba_flash as nf
from numba_flash import fingerprint as module
from numba_flash import instructions, launch
from numba_flash.fingerprint import LOWERING, Description, Undescribed, fingerprint
from numba_flash.lowering import INSTRUCTIONS, define, vector_load
from tests.test_compile_gate import make_plan

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler runs on macOS")

VECTOR = (types.Array(types.float32, 1, "A"),)
DEFAULTS = {
    "constant": 2,
    "scale": np.float32(0.5),
    "table": np.arange(3),
    "pair": (1, 2.0, frozenset("abcdef")),
    "kind": float32,
    "device_body": "x + 1",
    "device_constant": 3,
    "device_options": "device=True",
    "kernel_body": "helpers.twice(device(X[i])) * CONSTANT",
    "kernel_options": "",
    "module_constant": 4,
    "instruction": define(instructions.Mma(16, "bf16")),
}
SOURCE = """
@cuda.jit({device_options})
def inner(x):
    return x + INNER

@cuda.jit({device_options})
def device(x):
    return inner({device_body})

@cuda.jit({kernel_options})
def kernel(X):
    i = cuda.threadIdx.x
    instruction
    X[i] = {kernel_body} + SCALE + TABLE[0] + PAIR[1] + helpers.CONSTANT + KIND(1)
"""


def twice_in(constant):
    helpers = ModuleType("helpers")
    helpers.CONSTANT = constant

    @cuda.jit(device=True)
    def twice(x):
        return x * 2

    helpers.twice = twice
    return helpers


def make_kernel(**changes):
    """A kernel that reaches a value of every sort."""
    values = {**DEFAULTS, **changes}
    namespace = {
        "__name__": "somewhere",
        "cuda": cuda,
        "CONSTANT": values["constant"],
        "SCALE": values["scale"],
        "TABLE": values["table"],
        "PAIR": values["pair"],
        "KIND": values["kind"],
        "INNER": values["device_constant"],
        "helpers": twice_in(values["module_constant"]),
        "instruction": values["instruction"],
    }
    exec(SOURCE.format(**values), namespace)
    return namespace["kernel"]


def key(kernel=None, arguments=VECTOR, capability=(9, 0), **changes):
    return fingerprint(kernel or make_kernel(**changes), arguments, capability)


def test_same_kernel_has_the_same_fingerprint():
    assert key() is not None
    assert key() == key()


def test_fingerprint_is_the_same_in_another_process():
    code = "from tests.test_fingerprint import key; print(key())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {key()}


@pytest.mark.parametrize(
    "change",
    [
        {"constant": 3},
        {"constant": 2.0},
        {"constant": True},
        {"scale": np.float32(0.25)},
        {"scale": np.float64(0.5)},
        {"scale": 0.5},
        {"table": np.arange(3) + 1},
        {"table": np.arange(3, dtype=np.int32)},
        {"table": np.arange(3).view(np.uint64)},
        {"pair": (1, 3.0)},
        {"kind": int32},
        {"device_body": "x + 2"},
        {"device_body": "x - 1"},
        {"device_constant": 5},
        {"device_options": "device=True, fastmath=True"},
        {"device_options": "device=True, inline='always'"},
        {"kernel_body": "device(helpers.twice(X[i])) * CONSTANT"},
        {"kernel_options": "fastmath=True"},
        {"kernel_options": "launch_bounds=(128, 1)"},
        {"kernel_options": "max_registers=64"},
        {"module_constant": 5},
        {"instruction": define(instructions.Mma(16, "f16"))},
        {"instruction": define(instructions.Mma(8, "tf32"))},
    ],
    ids=str,
)
def test_whatever_shapes_a_kernel_changes_its_fingerprint(change):
    assert key(**change) is not None
    assert key(**change) != key()


def test_constants_of_a_factory_change_the_fingerprint():
    def make(N):
        @cuda.jit(device=True)
        def device(x):
            return x + N

        @cuda.jit
        def kernel(X):
            X[0] = device(X[1])

        return kernel

    assert key(make(1)) == key(make(1)) != key(make(2))


def test_defaults_of_a_device_function_change_the_fingerprint():
    def make(N):
        @cuda.jit(device=True)
        def device(x, by=N):
            return x + by

        @cuda.jit
        def kernel(X):
            X[0] = device(X[1])

        return kernel

    assert key(make(1)) == key(make(1)) != key(make(2))


def test_function_that_says_it_comes_from_elsewhere_is_described_all_the_same():
    def make(body):
        kernel = make_kernel(kernel_body=body)
        kernel.py_func.__module__ = "math"
        return kernel

    assert key(make("X[1]")) != key(make("X[2]"))


@pytest.mark.parametrize(
    "arguments",
    [
        (types.Array(types.float64, 1, "A"),),
        (types.Array(types.float32, 2, "A"),),
        (types.Array(types.float32, 1, "C"),),
        (types.Array(types.float32, 1, "A", readonly=True),),
        (*VECTOR, types.int64),
    ],
    ids=str,
)
def test_argument_types_change_the_fingerprint(arguments):
    assert key(arguments=arguments) != key()


def test_compute_capability_changes_the_fingerprint():
    assert len({key(capability=capability) for capability in ((8, 0), (9, 0), (8, 9))}) == 3


def numba_cuda():
    return pytest.importorskip("numba_cuda")


def nvvm():
    return pytest.importorskip("numba.cuda.cudadrv.nvvm").NVVM


def pathfinder():
    return pytest.importorskip("cuda.pathfinder")


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (lambda: sys, "version_info", (3, 99, 0)),
        (lambda: numba, "__version__", "0.0"),
        (numba_cuda, "__version__", "0.0"),
        (lambda: llvmlite, "__version__", "0.0"),
        (lambda: np, "__version__", "0.0"),
        (nvvm, "get_version", lambda self: (0, 0)),
        (pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=__file__)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_version_changes_the_fingerprint(monkeypatch, owner, name, other):
    before = key()
    monkeypatch.setattr(owner(), name, other)
    module.toolchain.cache_clear()
    try:
        assert key() != before
    finally:
        monkeypatch.undo()
        module.toolchain.cache_clear()
    assert key() == before


@pytest.mark.parametrize("path", ["/nowhere/libnvvm.so", None])
def test_compiler_that_cannot_be_found_leaves_kernels_without_a_fingerprint(monkeypatch, path):
    found = SimpleNamespace(abs_path=path)
    monkeypatch.setattr(pathfinder(), "load_nvidia_dynamic_lib", lambda name: found)
    module.toolchain.cache_clear()
    assert key() is None
    module.toolchain.cache_clear()


def test_settings_of_numba_change_the_fingerprint(monkeypatch):
    config = pytest.importorskip("numba.cuda.core.config")
    before = key()
    monkeypatch.setattr(config, "CUDA_ENABLE_NRT", True)
    assert key() != before


def test_source_of_the_lowering_changes_the_fingerprint(monkeypatch, tmp_path):
    before = key()
    assert module._source_of_lowering() == module.LOWERING_SOURCE
    for name in LOWERING:
        source = Path(module.__file__).with_name(f"{name}.py").read_bytes()
        (tmp_path / f"{name}.py").write_bytes(source)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "fingerprint.py"))
    for name in LOWERING:
        file = tmp_path / f"{name}.py"
        source = file.read_bytes()
        file.write_bytes(source + b"\n")
        assert module._source_of_lowering() != module.LOWERING_SOURCE
        file.write_bytes(source)
    monkeypatch.setattr(module, "LOWERING_SOURCE", "another")
    assert key() != before


def test_lowering_is_complete():
    """The modules whose source is hashed import no other module of the package."""
    for name in LOWERING:
        tree = ast.parse(Path(module.__file__).with_name(f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                imported = [node.module] if node.module else [a.name for a in node.names]
                assert set(imported) <= set(LOWERING), f"{name} imports {imported}"


@pytest.mark.parametrize("rung", nf.LADDER, ids=lambda rung: rung.name)
def test_every_kernel_of_the_ladder_has_a_fingerprint(rung):
    forward = set()
    variants = [(d, dtype) for d in (32, 64) for dtype in ("bfloat16", "float16", "float32")]
    for variant in variants:
        for backward in (False, True):
            plan, layouts, _ = make_plan(rung, *variant, False, (9, 0), backward)
            for n, step in enumerate(plan.steps):
                arguments = tuple([launch._numba_type(arg, layouts) for arg in step.args])
                number = fingerprint(step.kernel, arguments, (9, 0))
                assert number is not None
                if n == 0 and not backward:
                    forward.add(number)
    assert len(forward) == len(variants)


def test_every_instruction_has_a_description_of_its_own():
    def describe(intrinsic):
        description = Description()
        description.add(intrinsic)
        return description.hash.hexdigest()

    # What the makers of instructions return in this process counts too: no two are the same.
    made = {(type(d), repr(d)): intrinsic for intrinsic, d in INSTRUCTIONS.items()}
    assert len({describe(intrinsic) for intrinsic in made.values()}) == len(made)


def test_emitter_of_an_instruction_changes_the_fingerprint():
    load = instructions.VectorLoad(2)
    operands = instructions.Ptx("", {"dst": instructions.Registers(2, "", "write")})
    two, four = (define(load, vector_load(words), operands) for words in (2, 4))
    assert key(instruction=two) != key(instruction=four)


class Opaque:
    pass


@dataclasses.dataclass
class OwnDescription:
    n: int = 1


def plain(x):
    return x


def in_disguise(x):
    return x + 1


in_disguise.__module__ = "math"


@pytest.mark.parametrize(
    "value",
    [Opaque(), Opaque, OwnDescription(), plain, in_disguise, np.array([None]), [1].append],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_kernel_that_holds_something_unknown_has_no_fingerprint(value):
    assert key(constant=value) is None


@pytest.mark.parametrize("options", ["lineinfo=True", "debug=True, opt=False", "link=['a.cu']"])
def test_kernel_that_depends_on_files_has_no_fingerprint(options):
    assert key(kernel_options=options) is None


def test_kernel_whose_constant_changes_has_no_fingerprint_any_more():
    """Numba keeps what it compiled of a device function, with the old value."""
    kernel = make_kernel()
    before = key(kernel)
    kernel.py_func.__globals__["device"].py_func.__globals__["INNER"] = 77
    assert before is not None
    assert key(kernel) is None


def test_recursion_ends():
    namespace = {"__name__": "somewhere", "cuda": cuda}
    exec("@cuda.jit(device=True)\ndef f(x):\n    return f(x - 1) if x else x", namespace)
    exec("@cuda.jit\ndef kernel(X):\n    X[0] = f(X[1])", namespace)
    assert key(namespace["kernel"]) is not None


def test_signed_zeros_and_nan_are_told_apart():
    numbers = [0.0, -0.0, math.nan, math.inf]
    assert len({key(constant=number) for number in numbers}) == len(numbers)


def test_undescribed_says_what_it_met():
    with pytest.raises(Undescribed, match=r"test_fingerprint\.Opaque"):
        Description().add(Opaque())
