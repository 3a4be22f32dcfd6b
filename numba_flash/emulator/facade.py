"""What names mean inside an emulated kernel: ``cuda``, Numba's types, modules, functions.

`Cuda` is the module ``numba.cuda`` for one batch of blocks. `Binder` gives every global and
captured variable of a kernel its meaning. Numba's objects are recognised by their names and
attributes, so that Numba itself is not needed here.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from .arguments import global_array
from .arithmetic import UNASSIGNED, Value, select, strong, truth
from .atomics import Atomics
from .check import Checker
from .functions import (
    BUILTINS,
    CASTS,
    FUNCTIONS,
    LIBDEVICE,
    MATH,
    NUMPY,
    Cast,
    Namespace,
    brev,
    cast_of,
    clz,
    contains,
    dtype_of,
    ffs,
    fma,
    popc,
)
from .lanes import KERNEL_MARK, Lanes
from .memory import Array, LocalSpace, SharedMemory, SharedSpace, item, row_major
from .report import Coordinates, UnsupportedConstruct
from .transform import OPERATORS, transform
from .warp import WARP_SIZE, Warp


class Cuda(Namespace):
    """``numba.cuda`` as a batch of blocks sees it."""

    def __init__(
        self,
        lanes: Lanes,
        checker: Checker,
        grid_dim: Coordinates,
        dynamic_bytes: int,
    ):
        warp = Warp(lanes, checker)
        super().__init__(
            title="cuda",
            **{name: kind for name, kind in CASTS.items() if name != "bool"},
            **{f: getattr(warp, f) for f in dir(warp) if f.endswith("_sync")},
            activemask=warp.activemask,
            lanemask_lt=warp.lanemask_lt,
            syncwarp=warp.syncwarp,
            laneid=warp.laneid,
            warpsize=WARP_SIZE,
            atomic=Atomics(lanes),
            shared=SimpleNamespace(array=self.shared_array),
            local=SimpleNamespace(array=self.local_array),
            const=SimpleNamespace(array_like=lambda array: array),
            libdevice=LIBDEVICE,
            threadIdx=thread_index(lanes),
            blockIdx=block_index(lanes, grid_dim),
            blockDim=SimpleNamespace(**dict(zip("xyz", lanes.block_dim, strict=True))),
            gridDim=SimpleNamespace(**dict(zip("xyz", grid_dim, strict=True))),
            popc=popc,
            clz=clz,
            ffs=ffs,
            brev=brev,
            fma=fma,
            cbrt=FUNCTIONS["cbrt"],
            selp=select,
        )
        self.lanes = lanes
        self.checker = checker
        self.dynamic_bytes = dynamic_bytes
        self.static_arrays: dict[tuple, Array] = {}
        self.dynamic_memory: SharedMemory | None = None

    # Positions

    def grid(self, ndim: int) -> Value:
        """The thread's position in the whole grid."""
        positions = tuple(
            getattr(self.blockIdx, axis) * np.int64(getattr(self.blockDim, axis))
            + getattr(self.threadIdx, axis)
            for axis in "xyz"[:ndim]
        )
        return positions[0] if ndim == 1 else positions

    def gridsize(self, ndim: int) -> Value:
        sizes = tuple(
            getattr(self.blockDim, axis) * getattr(self.gridDim, axis) for axis in "xyz"[:ndim]
        )
        return sizes[0] if ndim == 1 else sizes

    # Memory

    def shared_array(
        self,
        shape: Any,
        dtype: Any,
        alignment: int | None = None,
        *,
        name: str = "array",
        site: tuple[int, int] = (0, 0),
    ) -> Array:
        """``cuda.shared.array``: one array a place in the source; shape 0 is the dynamic memory."""
        key = (self.checker.place(), site)
        if key not in self.static_arrays:
            extents, kind = shape_of(shape), dtype_of(dtype)
            if extents == (0,):
                memory = self.dynamic()
                extents = (self.dynamic_bytes // kind.itemsize,)
            else:
                size = int(np.prod(extents)) * kind.itemsize
                memory = SharedMemory(self.lanes.shape[0], size, kind)
                self.checker.shared.append(memory)
            space = SharedSpace(memory, kind, self.lanes)
            array = Array(space, name, extents, row_major(extents), self.checker)
            self.static_arrays[key] = array
        return self.static_arrays[key]

    def dynamic(self) -> SharedMemory:
        if self.dynamic_memory is None:
            byte = np.dtype(np.uint16)
            self.dynamic_memory = SharedMemory(self.lanes.shape[0], self.dynamic_bytes, byte)
            self.checker.shared.append(self.dynamic_memory)
        return self.dynamic_memory

    def local_array(
        self,
        shape: Any,
        dtype: Any,
        alignment: int | None = None,
        *,
        name: str = "array",
        site: tuple[int, int] = (0, 0),
    ) -> Array:
        """``cuda.local.array``: unwritten each time it is reached."""
        extents = shape_of(shape)
        space = LocalSpace(int(np.prod(extents)), dtype_of(dtype), self.lanes)
        return Array(space, name, extents, row_major(extents), self.checker)

    # Barriers

    def syncthreads(self) -> None:
        self.checker.barrier("syncthreads")

    def syncthreads_count(self, predicate: Value) -> Value:
        return self.vote(predicate, "syncthreads_count")[0]

    def syncthreads_and(self, predicate: Value) -> Value:
        count, arrived = self.vote(predicate, "syncthreads_and")
        return (count == arrived).astype(np.int32)

    def syncthreads_or(self, predicate: Value) -> Value:
        return (self.vote(predicate, "syncthreads_or")[0] > 0).astype(np.int32)

    def vote(self, predicate: Value, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Per block, the threads for which the predicate holds, and the threads that arrived."""
        self.checker.barrier(name)
        here = self.lanes.full_mask()
        ayes = np.broadcast_to(truth(predicate), self.lanes.shape) & here
        return per_block(ayes), per_block(here)

    def threadfence(self) -> None:
        """Memory is always up to date here."""

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, nanoseconds: Value) -> None:
        """Time does not pass here."""


def per_block(mask: np.ndarray) -> np.ndarray:
    return np.asarray(np.count_nonzero(mask, axis=1, keepdims=True), np.int32)


def shape_of(shape: Any) -> tuple[int, ...]:
    return tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)


def thread_index(lanes: Lanes) -> SimpleNamespace:
    rank = np.arange(lanes.num_threads, dtype=np.int32)[None, :]
    x, y, z = lanes.block_dim
    parts = {"x": rank % np.int32(x), "y": rank // np.int32(x) % np.int32(y)}
    parts["z"] = rank // np.int32(x * y)
    sizes = {"x": x, "y": y, "z": z}
    return SimpleNamespace(**{a: part if sizes[a] > 1 else 0 for a, part in parts.items()})


def block_index(lanes: Lanes, grid_dim: Coordinates) -> SimpleNamespace:
    columns = np.array(lanes.blocks, np.int32).T[:, :, None]
    values = {}
    for axis, column in zip("xyz", columns, strict=True):
        same = bool((column == column[0]).all())
        values[axis] = int(column[0, 0]) if same else column
    return SimpleNamespace(**values)


class BoundModule:
    """A Python module inside a kernel: its functions and constants are bound when they are used."""

    def __init__(self, module: ModuleType, binder: Binder):
        self._module = module
        self._binder = binder

    def __getattr__(self, attribute: str) -> Any:
        return self._binder.bind(getattr(self._module, attribute))


class Binder:
    """Gives the names that a kernel uses their meaning for one batch of blocks."""

    def __init__(self, cuda: Cuda, lanes: Lanes, checker: Checker):
        self.cuda = cuda
        self.lanes = lanes
        self.checker = checker
        self.twins = instruction_twins()
        self.numba = Namespace(title="numba", **CASTS, cuda=cuda, types=cuda)
        self.numba.literal_unroll = lambda values: values
        self.bound: dict[int, tuple[Any, Any]] = {}
        self.common = {
            KERNEL_MARK: lanes,
            f"{KERNEL_MARK}_UNASSIGNED": UNASSIGNED,
            f"{KERNEL_MARK}_item": item,
            f"{KERNEL_MARK}_contains": contains,
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
        return self.callable(thing)

    def twin(self, thing: Any) -> Callable | None:
        try:
            twin = self.twins.get(thing)
        except TypeError:
            return None
        return twin and (lambda *values: np.asarray(twin(*map(strong, values)))[()])

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

    def callable(self, thing: Any) -> Any:
        title, origin = getattr(thing, "__name__", ""), getattr(thing, "__module__", "") or ""
        function = getattr(thing, "py_func", thing)
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
            return getattr(NUMPY, title)
        if origin == "math":
            return getattr(MATH, title)
        kind = type(thing).__module__ or ""
        if kind.startswith("numba") and str(thing) in CASTS:
            return CASTS[str(thing)]
        if origin.startswith("numba.cuda") and title in dir(self.cuda):
            return getattr(self.cuda, title)
        return self.refused(title or repr(thing)) if callable(thing) else thing

    def refused(self, title: str) -> Callable:
        def refuse(*_: Any, **__: Any) -> None:
            raise UnsupportedConstruct(
                f"{self.checker.place()}: {title} is not supported in a kernel on the emulator"
            )

        return refuse

    def function(self, function: FunctionType, thing: Any) -> Callable:
        """A kernel or device function, rewritten, with its own names bound."""
        code = transform(function)
        made: list[Callable] = []
        self.bound[id(thing)] = (thing, lambda *args, **kwargs: made[0](*args, **kwargs))
        namespace = {**self.common, **code.constants}
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
        new.__kwdefaults__ = function.__kwdefaults__
        made.append(new)
        return new


def instruction_twins() -> dict[Any, Callable]:
    """The NumPy twins of single instructions, if that module is there and imported by a kernel."""
    module = sys.modules.get("numba_flash.ptx")
    return getattr(module, "TWINS", {})
