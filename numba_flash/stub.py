"""What stands for Numba where it is not installed: kernels can be written there and emulated.

``import numba_flash`` puts these modules in the place of the missing ones, so that a cell that
begins with ``from numba import cuda, float32`` runs on any machine. Whatever needs the real Numba
says so when it is used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, NoReturn

INSTALL = 'pip install "numba_flash[cu13]"'
MISSING = f"Numba is not installed (`{INSTALL}` brings it)"
ON_THE_CPU = "numba_flash.emulate(kernel)[grid, block](*arrays)"

SCALARS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
ALIASES = {"boolean": "bool", "bool_": "bool", "b1": "bool", "intp": "int64", "uintp": "uint64"}
ALIASES |= {"i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "f2": "float16"}
ALIASES |= {"u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64", "f4": "float32"}
ALIASES |= {"f8": "float64", "double": "float64", "void": "none"}


class NumbaWarning(Warning):
    """What Numba's warnings are, so that they can be silenced."""


class StubModule(ModuleType):
    """A module of Numba's, with the few things in it that a kernel is written with."""

    def __init__(self, name: str, **contents: Any):
        super().__init__(name, "Stands for the part of Numba that kernels are written with.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"  # older than what any other package asks for
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # An AttributeError would lose its sentence on the way through `from numba import ...`.
        raise ImportError(f"{self.__name__}.{name} is not there: {MISSING}")


class CudaModule(StubModule):
    """``numba.cuda``: every name can be imported, because kernels are full of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return InKernels(name)


class InKernels:
    """A name of ``cuda`` that the emulator knows inside of a kernel."""

    def __init__(self, name: str):
        self.__name__ = name
        self.__module__ = "numba.cuda"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self.refusal())

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise RuntimeError(self.refusal())

    def refusal(self) -> str:
        return (
            f"cuda.{self.__name__} is used outside of a kernel, and {MISSING}; on the CPU a kernel "
            f"runs with {ON_THE_CPU}, on NumPy arrays"
        )


class Dispatcher:
    """What ``@cuda.jit`` makes of a function.

    Attributes
    ----------
    py_func : function
        What the emulator runs.
    """

    def __init__(self, function: Callable, is_device: bool):
        functools.update_wrapper(self, function)
        self.py_func = function
        self.is_device = is_device

    def __getitem__(self, configuration: Any) -> NoReturn:
        name = self.py_func.__name__
        raise RuntimeError(
            f"{name} cannot be launched on a GPU: {MISSING}; on the CPU it runs with "
            f"{ON_THE_CPU.replace('kernel', name)}"
        )

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        name = self.py_func.__name__
        if self.is_device:
            raise RuntimeError(
                f"{name} is a device function, which kernels call; {name}.py_func is the Python "
                "function"
            )
        raise RuntimeError(
            f"the kernel {name} needs a launch configuration; on the CPU it runs with "
            f"{ON_THE_CPU.replace('kernel', name)}"
        )


def jit(function: Any = None, *, device: bool = False, **options: Any) -> Any:
    """``@cuda.jit``, ``@cuda.jit()`` and ``@cuda.jit(device=True)``; other options have no effect.

    Raises
    ------
    TypeError
        If it is given a signature.
    """
    if function is None:
        return functools.partial(Dispatcher, is_device=device)
    if not isinstance(function, FunctionType):
        raise TypeError(signature_refusal(function))
    return Dispatcher(function, device)


def signature_refusal(given: Any) -> str:
    return (
        f"the signature {given} asks Numba to compile at once, and {MISSING}; write `@cuda.jit` "
        "alone, so that the types are those of the arguments"
    )


class Scalar:
    """A type such as ``float32``: for ``cuda.shared.array``, and to convert numbers with."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *values: Any) -> Any:
        import numpy as np

        if len(values) != 1 or isinstance(values[0], Scalar):
            raise TypeError(signature_refusal(f"{self}({', '.join(map(str, values))})"))
        return np.dtype(self.name).type(values[0])

    def __getitem__(self, axes: Any) -> NoReturn:
        raise TypeError(signature_refusal(f"{self}[:]"))


class Intrinsic:
    """An instruction of a card; the emulator has a twin of those of `numba_flash.ptx`."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)
        self.name = function.__name__

    def __call__(self, *arguments: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.name} is an instruction, which kernels use; a kernel runs on the CPU with "
            f"{ON_THE_CPU}"
        )


def intrinsic(function: Callable | None = None, **options: Any) -> Any:
    """``@intrinsic``; without the compiler nothing of the function is used but its name."""
    return Intrinsic if function is None else Intrinsic(function)


def make_modules() -> dict[str, StubModule]:
    """The modules by name, with each in its package."""
    scalars = {name: Scalar(name) for name in (*SCALARS, "bool", "none")}
    kinds = {name: scalars[name] for name in SCALARS}
    kinds |= {alias: scalars[name] for alias, name in ALIASES.items()}
    types = StubModule("numba.types", **kinds)
    extending = StubModule("numba.extending", intrinsic=intrinsic)
    cuda_extending = StubModule("numba.cuda.extending", intrinsic=intrinsic)
    cuda = CudaModule(
        "numba.cuda",
        jit=jit,
        is_available=lambda: False,
        gpus=(),
        types=types,
        extending=cuda_extending,
        **kinds,
    )
    errors = StubModule("numba.core.errors", NumbaWarning=NumbaWarning)
    core = StubModule("numba.core", types=types, errors=errors)
    numba = StubModule("numba", cuda=cuda, types=types, extending=extending, core=core, **kinds)
    modules = (numba, types, extending, cuda, cuda_extending, core, errors)
    return {module.__name__: module for module in modules}


def is_missing(name: str) -> bool:
    """Whether a package can not be imported."""
    if sys.modules.get(name) is not None:
        return False
    try:
        return find_spec(name) is None
    except (ImportError, ValueError):
        return True


def install() -> None:
    """Put the stub in Numba's place, if nothing is there."""
    if is_missing("numba"):
        sys.modules.update(make_modules())
