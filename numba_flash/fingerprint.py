"""What shapes a compiled kernel, as one number: its name in the cache of compiled kernels.

Numba compiles the bytecode of a kernel and of what it calls, with the values that their names have
in their module and in the factory around them. All of that is described here, value by value. A
value that cannot be described leaves the kernel without a number: better to compile again than to
run an old kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

LOWERING = ("instructions", "layouts", "lowering", "ptx", "wgmma")
"""Modules of this package that write code of their own into kernels."""
WITH_A_VERSION = {"numba", "numba_cuda", "numpy", "llvmlite", "cuda"}
"""Packages whose code is known by their version."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
CODE_FIELDS = (
    *("co_code", "co_exceptiontable", "co_flags", "co_argcount", "co_posonlyargcount"),
    *("co_kwonlyargcount", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
)


class Undescribed(Exception):
    """A value that may shape a kernel, and nobody knows how."""


def fingerprint(kernel: Any, argument_types: tuple[Any, ...], capability: Any) -> str | None:
    """The number of a kernel compiled for these arguments and this compute capability.

    Parameters
    ----------
    kernel : numba CUDA dispatcher
    argument_types : tuple of numba types
    capability : (int, int)

    Returns
    -------
    str or None
        In hexadecimal; None where something that may shape the kernel cannot be described.
    """
    description = Description()
    try:
        description.add((repr(argument_types), tuple(capability), LOWERING_SOURCE))
        description.add((toolchain(), settings()))
        description.add(kernel)
    except (Undescribed, ImportError, OSError, RuntimeError):  # the compiler may be incomplete
        return None
    return description.hash.hexdigest()


@functools.cache
def toolchain() -> tuple[Any, ...]:
    """Versions of everything between the bytecode and the machine code."""
    import llvmlite
    import numba
    import numba_cuda
    from cuda import pathfinder
    from numba.cuda.cudadrv import nvvm

    driver: Any = importlib.import_module("numba.cuda.cudadrv.driver")
    libraries = ["nvvm"]
    versions = [sys.version_info[:3], numba.__version__, numba_cuda.__version__]
    versions += [llvmlite.__version__, np.__version__, nvvm.NVVM().get_version()]
    if driver._have_nvjitlink():
        libraries.append("nvJitLink")
    else:  # the driver assembles
        versions.append(driver.driver.get_version())
    files = [Path(str(pathfinder.load_nvidia_dynamic_lib(name).abs_path)) for name in libraries]
    sizes = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return (*map(str, versions), *sizes)


def settings() -> dict[str, str]:
    """Numba's, from the environment or set since."""
    config: Any = importlib.import_module("numba.cuda.core.config")
    return {name: repr(getattr(config, name)) for name in dir(config) if name.isupper()}


def _source_of_lowering() -> str | None:
    """The hash of the source of ``LOWERING``, or None where it is not at hand."""
    source = hashlib.sha256()
    try:
        for name in LOWERING:
            source.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    except OSError:
        return None
    return source.hexdigest()


LOWERING_SOURCE = _source_of_lowering()
"""Read at import: later the files may differ from the code that runs."""


class Description:
    """Adds values to a hash, each so that no two different ones look the same.

    Attributes
    ----------
    seen : dict
        The functions described so far, by identity, and the order in which they came.
    in_intrinsic : bool
        What is described writes code; a kernel is not made of it.
    """

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[Any, int] = {}
        self.in_intrinsic = False

    def token(self, *parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            self.hash.update(b"%d:" % len(data))
            self.hash.update(data)

    def add(self, value: Any) -> None:
        """Describe a value that a kernel, or the code that compiles it, has a name for."""
        kind = type(value)
        if kind in PLAIN:
            self.token("value", repr(value))
        elif isinstance(value, np.generic) or kind is np.ndarray:
            self.add_array(np.asarray(value), kind.__name__)
        elif isinstance(value, (tuple, list)):
            self.token(name_of(kind), len(value), getattr(kind, "_fields", ""))
            self.add_all(value)
        elif isinstance(value, (set, frozenset)):
            self.token(kind.__name__, len(value))
            self.add_all(sorted(value, key=repr))
        elif isinstance(value, Mapping):
            self.token("mapping", len(value))
            self.add_all(value.items())
        elif kind is FunctionType and self.in_intrinsic:
            self.add_once(value, self.add_function)
        elif hasattr(value, "py_func") and is_known(kind.__module__):
            self.add_once(value, self.add_dispatcher)
        elif hasattr(value, "_defn") and is_known(kind.__module__):
            self.add_once(value, self.add_intrinsic)
        else:
            self.add_known(value)

    def add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def add_once(self, value: Any, add: Any) -> None:
        """Describe a function when it is met first: it may be used often, or by itself."""
        if id(value) in self.seen:
            self.token("again", self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            add(value)

    def add_array(self, array: np.ndarray, kind: str) -> None:
        if array.dtype.hasobject:
            raise Undescribed(f"an array of {array.dtype}")
        fields = array.dtype.descr if array.dtype.fields else array.dtype.str
        self.token(kind, fields, array.shape, array.strides, array.tobytes())

    def add_known(self, value: Any) -> None:
        """A type, function, module or description whose code has a version.

        A plain Python function is none: a kernel can call it only where an overload, which is in
        nobody's closure, says what to compile.
        """
        kind = type(value)
        if kind is FunctionType and not is_known(value.__globals__.get("__name__")):
            raise Undescribed(f"the plain function {name_of(value)}")
        if isinstance(value, ModuleType) and is_known(value.__name__):
            self.token("module", value.__name__)
        elif isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            self.token("named tuple", value.__name__, value._fields)
        elif hasattr(value, "__name__") and is_known(getattr(value, "__module__", None)):
            self.token("name", name_of(value))
        elif not is_known(kind.__module__):
            raise Undescribed(f"a {name_of(kind)}")
        elif dataclasses.is_dataclass(value):
            self.token("dataclass", name_of(kind))
            self.add_all((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        elif any(name_of(base) == "numba.core.types.abstract.Type" for base in kind.__mro__):
            self.token("type", repr(value))
        else:
            raise Undescribed(f"a {name_of(kind)}")

    def add_dispatcher(self, dispatcher: Any) -> None:
        options = dict(dispatcher.targetoptions)
        if options.get("debug") or options.get("lineinfo") or options.get("link"):
            raise Undescribed("places in source files, or files to link with")
        self.token("dispatcher")
        self.add({name: options[name] for name in sorted(options)})
        self.add_function(dispatcher.py_func)

    def add_intrinsic(self, intrinsic: Any) -> None:
        self.token("intrinsic", intrinsic._prefer_literal)
        outside, self.in_intrinsic = self.in_intrinsic, True
        self.add_function(intrinsic._defn)
        self.in_intrinsic = outside

    def add_function(self, function: FunctionType) -> None:
        self.token("function", name_of(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: content(cell) for name, cell in cells}
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        if is_known(function.__globals__.get("__name__")):  # __module__ can be anything
            self.add(closure)
        else:
            refuse_change(function, closure)
            self.add_code(function.__code__, closure, function.__globals__)

    def add_code(
        self, code: CodeType, closure: Mapping[str, Any], namespace: Mapping[str, Any]
    ) -> None:
        self.token("code", *(getattr(code, field, None) for field in CODE_FIELDS))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add_code(constant, {}, namespace)
            else:
                self.add(constant)
        self.add_names(code, closure, closure)
        self.add_names(code, code.co_names, namespace)

    def add_names(self, code: CodeType, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """What names of a code mean; attributes of a module are among ``code.co_names``."""
        for name in names:
            if name not in namespace:
                continue
            value = namespace[name]
            self.token("name", name)
            if not isinstance(value, ModuleType) or is_known(value.__name__):
                self.add(value)
            elif (code, id(value)) not in self.seen:
                self.seen[code, id(value)] = len(self.seen)
                self.add_names(code, code.co_names, vars(value))


_first_seen: WeakKeyDictionary[FunctionType, str] = WeakKeyDictionary()
_first_seen_lock = threading.Lock()


def refuse_change(function: FunctionType, closure: dict[str, Any]) -> None:
    """Refuse a function whose names mean something else than when this process first saw it.

    Numba may still use what it compiled then.
    """
    now, names = Description(), function.__code__.co_names
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, value in (found | closure).items():
        now.token(name)
        if isinstance(value, (*PLAIN, np.ndarray, np.generic)):
            now.add(value)
        else:
            now.token(id(value))
    with _first_seen_lock:
        if _first_seen.setdefault(function, now.hash.hexdigest()) != now.hash.hexdigest():
            raise Undescribed(f"{name_of(function)}, in which a name has changed its value")


def content(cell: Any) -> Any:
    """The value in a cell of a closure."""
    try:
        return cell.cell_contents
    except ValueError:
        raise Undescribed("a name without a value") from None


def name_of(thing: Any) -> str:
    return f"{thing.__module__}.{getattr(thing, '__qualname__', thing.__name__)}"


def is_known(module: str | None) -> bool:
    """Whether the code of a module is already in the fingerprint, by version or by source."""
    package, _, name = (module or "").partition(".")
    if package == __package__:
        return name in LOWERING
    return package in WITH_A_VERSION or package in sys.stdlib_module_names
