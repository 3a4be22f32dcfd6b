"""What the names in a kernel mean: globals, captured values, modules, device functions.

Numba's objects are recognised by their names and attributes, so that Numba itself is not needed.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import numpy as np

from .arguments import global_array
from .arithmetic import UNASSIGNED
from .check import Checker
from .facade import Cuda
from .functions import (
    ADVICE,
    BUILTINS,
    CALLABLE,
    CASTS,
    LIBDEVICE,
    MATH,
    NUMPY,
    Cast,
    Namespace,
    cast_of,
    contains,
)
from .hopper import PASSED_OVER, Hopper
from .lanes import Lanes
from .memory import item
from .report import FUNCTION, KERNEL_MARK, NAMESPACE, PRECISION, UnsupportedConstruct
from .tensor import Tensor
from .trace import nothing
from .transform import OPERATORS, transform

HELD = "numbers that a kernel takes along are a tuple or a NumPy array"


class BoundModule:
    """A Python module inside a kernel: its functions and constants are bound when they are used."""

    def __init__(self, module: ModuleType, binder: Binder):
        self._module = module
        self._binder = binder

    def __getattr__(self, attribute: str) -> Any:
        return self._binder.bind(getattr(self._module, attribute))


class Refused:
    """What a kernel may name but not use: it is refused in the line that uses it."""

    def __init__(self, title: str, advice: str, checker: Checker):
        self._refusal = f"{title} is not supported in a kernel on the emulator; {advice}"
        self._checker = checker

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedConstruct(f"{self._checker.place()}: {self._refusal}")

    __getitem__ = __setitem__ = __len__ = __iter__ = __contains__ = __call__

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        self()


class Binder:
    """Gives the names that a kernel uses their meaning for one batch of blocks."""

    def __init__(self, cuda: Cuda, lanes: Lanes, checker: Checker, precision: Any = None):
        self.cuda = cuda
        self.lanes = lanes
        self.checker = checker
        self.instructions = known_instructions()
        self.handlers = {**PASSED_OVER, **Tensor(lanes, checker).handlers}
        if checker.group is not None:
            self.handlers |= Hopper(lanes, checker).handlers
        self.numba = Namespace(title="numba", **CASTS, cuda=cuda, types=cuda)
        self.numba.literal_unroll = lambda values: values
        self.namespaces = 0
        self.bound: dict[int, tuple[Any, Any]] = {}
        self.common = {
            KERNEL_MARK: lanes,
            PRECISION: precision,
            f"{KERNEL_MARK}_UNASSIGNED": UNASSIGNED,
            f"{KERNEL_MARK}_item": item,
            f"{KERNEL_MARK}_contains": contains,
            f"{KERNEL_MARK}_fused": checker.fused,
            f"{KERNEL_MARK}_turn": nothing if checker.trace is None else checker.trace.turn,
            **OPERATORS,
        }

    def bind(self, thing: Any, name: str = "") -> Any:
        """The meaning of an object that a kernel refers to."""
        known = self.bound.get(id(thing))
        if known is None:
            known = self.bound[id(thing)] = (thing, self.meaning(thing, name))
        return known[1]

    def meaning(self, thing: Any, name: str) -> Any:
        if isinstance(thing, (int, str, type(None), Cast)):
            return thing
        if isinstance(thing, float):
            return np.float64(thing)
        if isinstance(thing, np.generic):
            return int(thing) if type(thing) is np.int64 else thing
        if isinstance(thing, tuple):
            parts = [self.bind(part, name) for part in thing]
            return tuple(parts) if type(thing) is tuple else type(thing)(*parts)
        if isinstance(thing, np.ndarray):
            return global_array(thing, name, self.lanes, self.checker, constant=True)
        if isinstance(thing, ModuleType):
            return self.module(thing)
        twin = self.twin(thing)
        if twin is not None:
            return twin
        return self.callable(thing, name)

    def twin(self, thing: Any) -> Callable | None:
        """The NumPy twin of an instruction; None for anything else."""
        try:
            instruction = self.instructions.get(thing)
        except TypeError:
            return None
        if instruction is None:
            return None
        handler = self.handlers.get(type(instruction))
        if handler is None:
            return self.refused(getattr(thing, "__name__", repr(instruction)))
        return functools.partial(handler, instruction)

    def module(self, module: ModuleType) -> Any:
        title = module.__name__
        if title == "math":
            return MATH
        if title == "numpy":
            return NUMPY
        if title.split(".")[0] != "numba":
            return BoundModule(module, self)
        if title == "numba":
            return self.numba
        return LIBDEVICE if title.endswith("libdevice") else self.cuda

    def callable(self, thing: Any, name: str) -> Any:
        title, origin = getattr(thing, "__name__", ""), getattr(thing, "__module__", "") or ""
        function = python_function(thing)
        if isinstance(function, FunctionType):
            if origin.startswith("numba.") and title in dir(self.cuda):
                return getattr(self.cuda, title)
            return self.function(function, thing)
        if getattr(builtins, title, None) is thing and title in BUILTINS:
            return BUILTINS[title]
        if isinstance(thing, type) and issubclass(thing, np.generic):
            return cast_of(np.dtype(thing))
        if isinstance(thing, np.dtype):
            return cast_of(thing)
        if isinstance(thing, np.ufunc):
            return vars(NUMPY).get(title) or self.refused(f"numpy.{title}", ADVICE["numpy"])
        if origin == "math":
            return getattr(MATH, title)
        kind = type(thing).__module__ or ""
        if kind.startswith("numba") and str(thing) in CASTS:
            return CASTS[str(thing)]
        if origin.startswith("numba.cuda") and title in dir(self.cuda):
            return getattr(self.cuda, title)
        if callable(thing):
            return self.refused(title or repr(thing))
        if isinstance(thing, (list, dict, set)) or hasattr(thing, "__array__"):
            return Refused(f"the {type(thing).__name__} {name}", HELD, self.checker)
        return thing

    def refused(self, title: str, advice: str = CALLABLE) -> Refused:
        return Refused(title, advice, self.checker)

    def function(self, function: FunctionType, thing: Any) -> Callable:
        """A kernel or device function, rewritten, with its own names bound."""
        code = transform(function, self.checker.traced(function))
        made: list[Callable] = []
        self.bound[id(thing)] = (thing, lambda *args, **kwargs: made[0](*args, **kwargs))
        self.namespaces += 1
        namespace = {**self.common, **code.constants, NAMESPACE: self.namespaces}
        namespace[FUNCTION] = function
        for name in code.names.intersection(function.__code__.co_names):
            if name in function.__globals__:
                namespace[name] = self.bind(function.__globals__[name], name)
            elif name in BUILTINS:
                namespace[name] = BUILTINS[name]
            elif hasattr(builtins, name):
                namespace[name] = self.refused(name)
        exec(code.code, namespace)
        cells = [
            self.bind(cell.cell_contents, name)
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            )
        ]
        new = namespace[f"{KERNEL_MARK}_outer"](*cells)
        new.__defaults__ = tuple(map(self.bind, function.__defaults__ or ())) or None
        keywords = function.__kwdefaults__ or {}
        new.__kwdefaults__ = {name: self.bind(value) for name, value in keywords.items()} or None
        made.append(new)
        return new


def python_function(thing: Any) -> Any:
    """The Python function inside a dispatcher of Numba's compiler or of its simulator."""
    return getattr(thing, "py_func", getattr(thing, "fn", thing))


def known_instructions() -> dict[Any, Any]:
    """Descriptions of the special instructions; a kernel that uses one has imported its module."""
    module = sys.modules.get("numba_flash.lowering")
    return getattr(module, "INSTRUCTIONS", {})
