"""What a caller hands to a kernel: NumPy arrays as global memory, scalars with Numba's types."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..tensor_map import TensorMap
from .arithmetic import Value
from .check import Checker
from .lanes import Lanes
from .memory import Array
from .spaces import GlobalSpace, Region, unwritten_memory

_WRITTEN: dict[int, np.ndarray] = {}
"""By id of an array that `empty` made: which of its elements have been written."""


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Global memory that nobody has written yet.

    An emulated kernel that reads an element before some kernel has written it gets poison and an
    "uninitialised-read" fault. Views of the array are watched too.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Returns
    -------
    ndarray
        Filled with poison: NaN, or 0x7ff9 in every two bytes of an integer.
    """
    dtype = np.dtype(dtype)
    array = unwritten_memory(shape if isinstance(shape, tuple) else (shape,), dtype)
    _WRITTEN[id(array)] = np.zeros(array.size, bool)
    weakref.finalize(array, _WRITTEN.pop, id(array), None)
    return array


def validity(flat: np.ndarray, array: np.ndarray) -> np.ndarray | None:
    """The part of the record of `empty` that belongs to ``flat``, the extent of ``array``."""
    owner: Any = array
    while owner is not None and id(owner) not in _WRITTEN:
        owner = getattr(owner, "base", None)
    if owner is None:
        return None
    first = (address(flat) - address(owner)) // owner.itemsize
    return _WRITTEN[id(owner)][first : first + flat.size]


class GlobalRegions:
    """The memory of a launch's arguments; arrays that overlap share a `Region`."""

    def __init__(self, arguments: tuple[Any, ...]):
        extents = sorted(set(map(byte_extent, arrays_among(arguments))))
        self.starts: list[int] = []
        self.regions: list[Region] = []
        while extents:
            first, end = extents.pop(0)
            while extents and extents[0][0] < end:
                end = max(end, extents.pop(0)[1])
            first -= first % 8
            self.starts.append(first)
            self.regions.append(Region(end - first, is_global=True))

    def find(self, flat: np.ndarray) -> tuple[Region, int]:
        """The region of an argument's memory, and the byte of it where that begins."""
        i = bisect.bisect_right(self.starts, address(flat)) - 1
        return self.regions[i], address(flat) - self.starts[i]


def arrays_among(values: tuple[Any, ...]) -> Iterator[np.ndarray]:
    for value in values:
        if isinstance(value, np.ndarray) and value.size:
            yield value
        elif isinstance(value, TensorMap):
            yield value.array
        elif isinstance(value, tuple):
            yield from arrays_among(value)


def byte_extent(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte behind its last."""
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    first = address(array) + sum(step for step in steps if step < 0)
    return first, address(array) + sum(step for step in steps if step > 0) + array.itemsize


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def allocation(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def global_array(
    array: np.ndarray, name: str, lanes: Lanes, checker: Checker, constant: bool = False
) -> Array:
    """A NumPy array, with whatever strides, as a kernel sees it."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"the array {name} is a masked array, and kernels know no masks; pass its data, or "
            f"{name}.filled(...)"
        )
    itemsize = array.dtype.itemsize
    if array.dtype.kind not in "biuf" or itemsize > 8 or not array.dtype.isnative:
        raise TypeError(
            f"the array {name} has dtype {array.dtype}; kernels take booleans, integers and "
            f"floats of up to 64 bits: pass {replacement(array.dtype, name)}"
        )
    steps = [0 if n == 1 else stride for n, stride in zip(array.shape, array.strides, strict=True)]
    if any(step % itemsize for step in steps):
        raise ValueError(
            f"the array {name} has strides {array.strides}, which are no multiples of its item "
            f"size {itemsize}; pass a copy"
        )
    strides = tuple(step // itemsize for step in steps)
    if array.size:
        reach = [(extent - 1) * s for extent, s in zip(array.shape, strides, strict=True)]
        lowest = array[tuple(slice(None, None, -1 if r < 0 else 1) for r in reach)]
        length = 1 + sum(map(abs, reach))
        flat = np.lib.stride_tricks.as_strided(lowest, (length,), (itemsize,))
        start = -sum(r for r in reach if r < 0)
    else:
        flat, start = unwritten_memory((1,), array.dtype), 0
    space = GlobalSpace(flat, validity(flat, array), lanes)
    space.misalignment = address(flat) - address(allocation(array)) if array.size else 0
    space.watched = not constant
    writeable = array.flags.writeable and not constant
    if writeable and array.size:
        space.region, space.origin = checker.regions.find(flat)
    return Array(space, name, array.shape, strides, checker, start, writeable)


def replacement(dtype: np.dtype, name: str) -> str:
    """What to pass instead of an array of a dtype that kernels do not take."""
    if dtype.names:
        return f"its fields one by one, {name}[{dtype.names[0]!r}] and so on"
    if dtype.name == "bfloat16":
        return f"{name}.view(numpy.uint16)"
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        return f"{name}.astype(numpy.{dtype.name}), which has this machine's byte order"
    if dtype.kind == "c":
        return f"{name}.real and {name}.imag"
    return f"{name}.astype(numpy.float32), if it holds numbers"


class TensorMapArgument(NamedTuple):
    """A tensor map inside a kernel; see `numba_flash.tensor_map.TensorMap`."""

    array: Array
    box: tuple[int, ...]
    swizzled: bool

    @property
    def alignment(self) -> int:
        """Bytes that a box in shared memory begins at a multiple of."""
        return 1024 if self.swizzled else 128


def argument(value: Any, name: str, lanes: Lanes, checker: Checker) -> Value:
    """A kernel argument: arrays by reference, scalars with the types Numba gives them."""
    if isinstance(value, np.ndarray):
        return global_array(value, name, lanes, checker)
    if isinstance(value, TensorMap):
        array = global_array(value.array, name, lanes, checker)
        return TensorMapArgument(array, value.box, value.swizzled)
    if isinstance(value, tuple):
        parts = [argument(part, name, lanes, checker) for part in value]
        return tuple(parts) if type(value) is tuple else type(value)(*parts)
    if isinstance(value, np.generic):
        return int(value) if type(value) is np.int64 else value
    if isinstance(value, float):
        return np.float64(value)
    if value is None or isinstance(value, int):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    fix = ""
    if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        fix = f"; pass a NumPy array of the same memory or a copy, such as {name}.cpu().numpy()"
    elif isinstance(value, list):
        fix = f"; pass numpy.array({name})"
    raise TypeError(
        f"the argument {name} is a {kind}; an emulated kernel takes NumPy arrays, numbers, tensor "
        f"maps and tuples of them{fix}"
    )
