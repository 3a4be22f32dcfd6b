"""Arrays as a kernel sees them: global, shared and local memory behind one indexing class.

A `Space` is a piece of memory for a whole batch of blocks and knows how lanes address it. An
`Array` is a view of a space (shape and strides in elements, like NumPy's) and turns indices into
offsets, checking bounds on the way. A load computes for all lanes, active or not, and a lane
without a legal address reads poison; a store writes the active lanes only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import INT64, Value, cast, select, strong
from .lanes import Lanes, Mask, both, either, without
from .report import UnsupportedConstruct

if TYPE_CHECKING:
    from .check import Checker

VIEWS = {slice, type(...)}
PATTERN = np.array([0x7FC1], np.uint16)
"""What unwritten memory is filled with: NaN as float32, float16 and bfloat16."""


def poison(dtype: np.dtype) -> np.generic:
    """What a kernel reads where nothing was written, or out of bounds."""
    if dtype == np.float64:
        return np.float64(np.nan)
    if dtype.kind == "b":
        return np.True_
    return np.repeat(PATTERN, 4).view(np.uint8)[: dtype.itemsize].view(dtype)[0]


def unwritten_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, poison(dtype), dtype)


class Span:
    """An index vector as int64 with its smallest and largest entry, kept while it is in use."""

    __slots__ = ("high", "low", "products", "source", "value")

    def __init__(self, source: np.ndarray, bounds: bool):
        if source.dtype.kind not in "iu":
            raise TypeError(f"an array index must be an integer, not {source.dtype}")
        self.source = source
        self.value = source if source.dtype is INT64 else source.astype(INT64)
        self.low, self.high = (int(self.value.min()), int(self.value.max())) if bounds else (0, -1)
        self.products: dict[int, np.ndarray] = {1: self.value}

    def times(self, stride: int) -> np.ndarray:
        if stride not in self.products:
            self.products[stride] = self.value * stride
        return self.products[stride]


class Space:
    """Memory of one kind for all blocks of a batch.

    Parameters
    ----------
    data : ndarray
        The elements; ``flat`` is the same as one dimension.
    valid : ndarray or None
        Which elements have been written: those where it equals ``written``. None: all of them.
    """

    kind = ""
    written: Any = True

    def __init__(self, data: np.ndarray, valid: np.ndarray | None, lanes: Lanes):
        self.data = data
        self.flat = data.reshape(-1)
        self.valid = None if valid is None else valid.reshape(-1)
        self.lanes = lanes
        self.dtype = data.dtype
        self.poison = poison(data.dtype)

    def address(self, base: int, offset: Value) -> Value:
        """Positions in ``flat``; ``offset`` is a lane vector, or None where ``base`` says all."""
        raise NotImplementedError

    def load(self, base: int, offset: Value) -> Value:
        return self.flat.take(self.address(base, offset), mode="clip")

    def store(self, base: int, offset: Value, value: Value, mask: Mask) -> None:
        place = self.address(base, offset)
        if mask is not None or np.shape(place) != np.shape(value):
            place, value = self.lanes.spread(mask, place, value)
        self.flat[place] = value
        if self.valid is not None:
            self.valid[place] = self.written

    def doubtful(self, base: int, offset: Value, values: Value) -> bool:
        """Whether a load may have met unwritten elements; cheap, and sure when it says no."""
        if self.dtype.kind == "f":
            largest = values.max()
            return bool(largest != largest or largest >= self.poison)
        return self.dtype.itemsize == 1 or bool(np.any(values == self.poison))

    def unwritten(self, base: int, offset: Value) -> Value:
        """Which lanes of a load meet an unwritten element."""
        assert self.valid is not None
        return self.valid.take(self.address(base, offset), mode="clip") != self.written


class GlobalSpace(Space):
    """The extent of one array argument in memory, the same for all blocks."""

    kind = "global"

    def address(self, base: int, offset: Value) -> Value:
        return base if offset is None else offset + base

    def doubtful(self, base: int, offset: Value, values: Value) -> bool:
        return self.valid is not None and super().doubtful(base, offset, values)


class SharedMemory:
    """Bytes of shared memory, one row a block, that arrays of several types may alias."""

    def __init__(self, num_blocks: int, num_bytes: int, dtype: np.dtype):
        whole = max(8, -(-num_bytes // 8) * 8)
        self.data = unwritten_memory((num_blocks, whole // dtype.itemsize), dtype).view(np.uint8)
        self.valid = np.zeros((num_blocks, whole), np.uint8)
        self.valid[:, num_bytes:] = 0xFF
        self.settled = False

    def settle(self) -> None:
        """Notice when every byte has been written; loads need not look any more then."""
        self.settled = self.settled or bool(self.valid.all())


class SharedSpace(Space):
    """A shared array: row ``b`` of ``data`` is the copy of block ``b``."""

    kind = "shared"

    def __init__(self, memory: SharedMemory, dtype: np.dtype, lanes: Lanes):
        bits = np.dtype(f"u{dtype.itemsize}")
        super().__init__(memory.data.view(dtype), memory.valid.view(bits), lanes)
        self.memory = memory
        self.valid_rows = memory.valid.view(bits)
        self.written = bits.type(~bits.type(0))
        self.rows = np.arange(self.data.shape[0])[:, None] * self.data.shape[1]

    def address(self, base: int, offset: Value) -> Value:
        return self.rows + base if offset is None else self.rows + base + offset

    def load(self, base: int, offset: Value) -> Value:
        if offset is None:
            return (
                self.data[0, base] if len(self.data) == 1 else self.data[:, base : base + 1].copy()
            )
        if len(offset) == 1:
            return self.data.take(offset[0] + base, axis=1, mode="clip")
        return super().load(base, offset)

    def store(self, base: int, offset: Value, value: Value, mask: Mask) -> None:
        if mask is None and offset is not None and len(offset) == 1:
            place = offset[0] + base
            self.data[:, place] = value
            self.valid_rows[:, place] = self.written
        else:
            super().store(base, offset, value, mask)

    def doubtful(self, base: int, offset: Value, values: Value) -> bool:
        return not self.memory.settled and super().doubtful(base, offset, values)


class LocalSpace(Space):
    """A thread's own array: element first, so that one element of all lanes is contiguous."""

    kind = "local"

    def __init__(self, size: int, dtype: np.dtype, lanes: Lanes):
        shape = (max(1, size), *lanes.shape)
        self.valid_rows = np.zeros(shape, bool)
        super().__init__(unwritten_memory(shape, dtype), self.valid_rows, lanes)
        self.unsettled = set(range(size))
        self.lane = np.arange(lanes.size).reshape(lanes.shape)

    def address(self, base: int, offset: Value) -> Value:
        if offset is None:
            return self.lane + base * self.lanes.size
        return (offset + base) * self.lanes.size + self.lane

    def load(self, base: int, offset: Value) -> Value:
        return self.data[base].copy() if offset is None else super().load(base, offset)

    def store(self, base: int, offset: Value, value: Value, mask: Mask) -> None:
        if offset is not None:
            super().store(base, offset, value, mask)
            return
        if mask is None:
            self.data[base] = value
        else:
            np.copyto(self.data[base], value, where=mask, casting="unsafe")
        if base in self.unsettled:
            if mask is None or (mask is self.lanes.mask and self.lanes.count == self.lanes.alive):
                self.unsettled.discard(base)
            self.valid_rows[base] |= True if mask is None else mask

    def doubtful(self, base: int, offset: Value, values: Value) -> bool:
        fresh = base in self.unsettled if offset is None else self.unsettled
        return bool(fresh) and super().doubtful(base, offset, values)


class Array:
    """A strided view of a `Space`, indexed like a NumPy array inside a kernel."""

    def __init__(
        self,
        space: Space,
        name: str,
        shape: tuple[Value, ...],
        strides: tuple[int, ...],
        checker: Checker,
        start: Value = 0,
        writeable: bool = True,
    ):
        self.space = space
        self.name = name
        self.shape = shape
        self.strides = strides
        self.ndim = len(shape)
        self.checker = checker
        self.lanes = space.lanes
        self.start = start
        self.writeable = writeable

    @property
    def size(self) -> Value:
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        return self.checker.dtype_facade(self.space.dtype)

    @property
    def T(self) -> Array:
        return self.view_as(self.shape[::-1], self.strides[::-1], self.start)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise UnsupportedConstruct(
            f"{self.checker.place()}: the array attribute .{attribute} is not supported in a "
            "kernel on the emulator"
        )

    def view_as(self, shape: tuple, strides: tuple[int, ...], start: Value) -> Array:
        return Array(self.space, self.name, shape, strides, self.checker, start, self.writeable)

    def merged(self, other: Value, condition: Value) -> Array:
        """The view that is this one where ``condition`` holds and ``other`` elsewhere."""
        if not isinstance(other, Array):
            return self
        if self.space is not other.space or self.strides != other.strides:
            raise UnsupportedConstruct(
                f"{self.checker.place()}: threads that run together choose between the arrays "
                f"{self.name} and {other.name}; index them in the branches instead"
            )
        shape = tuple(
            a if a is b else select(condition, a, b)
            for a, b in zip(self.shape, other.shape, strict=True)
        )
        return self.view_as(shape, self.strides, select(condition, self.start, other.start))

    # Elements

    def __getitem__(self, index: Any) -> Value:
        if type(index) is not tuple:
            index = (index,)
        if self.is_view(index):
            return self.view(index)
        return self.read(index, *self.locate(index, self.shape, self.strides))

    def read(self, index: tuple, base: int, offset: Value, lost: Mask) -> Value:
        """Load from a located place; the lanes that find nothing there read poison."""
        space = self.space
        values = space.load(base, offset)
        if self.checker.active:
            if space.doubtful(base, offset, values):
                unwritten = both(self.lanes.mask, without(space.unwritten(base, offset), lost))
                if np.any(unwritten):
                    self.checker.uninitialised_read(self, index, unwritten)
                    lost = either(lost, unwritten)
            if lost is not None:
                values = select(lost, space.poison, values)
        return values

    def __setitem__(self, index: Any, value: Value) -> None:
        if type(index) is not tuple:
            index = (index,)
        if not self.writeable:
            raise ValueError(f"{self.checker.place()}: the array {self.name} is read-only")
        if self.is_view(index):
            self.view(index).fill(value)
            return
        base, offset, lost = self.locate(index, self.shape, self.strides)
        mask = self.lanes.mask
        if lost is not None:
            mask = without(mask, lost)
            if not mask.any():
                return
        self.space.store(base, offset, cast(value, self.space.dtype), mask)

    def is_view(self, index: tuple) -> bool:
        """Whether an index selects a view and not one element."""
        if len(index) != self.ndim:
            if len(index) > self.ndim:
                raise IndexError(
                    f"{self.checker.place()}: {self.name} has {self.ndim} dimension(s) and is "
                    f"indexed with {len(index)}"
                )
            return True
        return not VIEWS.isdisjoint(map(type, index))

    def locate(
        self, index: tuple, shape: tuple[Value, ...], strides: tuple[int, ...]
    ) -> tuple[int, Value, Mask]:
        """Element offset (``base`` plus a lane vector or None) and the lanes out of bounds."""
        base, offset = (0, self.start) if isinstance(self.start, np.ndarray) else (self.start, None)
        lost: Mask = None
        checks = self.checker.active
        for x, extent, stride in zip(index, shape, strides, strict=True):
            if isinstance(x, np.ndarray):
                span = self.checker.span(x)
                if checks and (span.low < 0 or type(extent) is not int or span.high >= extent):
                    inside = (span.value >= 0) & (span.value < extent)
                    lost = self.outside(index, inside, lost)
                    term = np.where(inside, span.value, 0) * stride
                else:
                    term = span.times(stride)
                offset = term if offset is None else offset + term
                continue
            if type(x) is not int:
                x = operator.index(x)
            if checks and (x < 0 or type(extent) is not int or x >= extent):
                lost = self.outside(index, np.atleast_2d((extent > x) & (x >= 0)), lost)
                x = x if 0 <= x < np.max(extent) else 0
            base += x * stride
        return base, offset, lost

    def outside(self, index: tuple, inside: np.ndarray, lost: Mask) -> Mask:
        """Report the active lanes that are not ``inside``, and add them to the lost ones."""
        bad = without(both(self.lanes.mask, ~inside), lost)
        if not bad.any():
            return lost
        self.checker.out_of_bounds(self, index, bad)
        return either(lost, bad)

    # Views

    def view(self, index: tuple) -> Array:
        """The sub-array that slices and missing indices select."""
        if any(x is Ellipsis for x in index):
            at = next(i for i, x in enumerate(index) if x is Ellipsis)
            missing = self.ndim - len(index) + 1
            index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
        index = (*index, *[slice(None)] * (self.ndim - len(index)))
        kept = [axis for axis, x in enumerate(index) if type(x) is slice]
        fixed = [axis for axis, x in enumerate(index) if type(x) is not slice]
        base, start, _ = self.locate(
            tuple(index[axis] for axis in fixed),
            tuple(self.shape[axis] for axis in fixed),
            tuple(self.strides[axis] for axis in fixed),
        )
        start = base if start is None else start + base
        shape, strides = [], []
        for axis in kept:
            first, step, length = self.extent(index[axis], self.shape[axis])
            start = start + first * self.strides[axis]
            shape.append(length)
            strides.append(step * self.strides[axis])
        return self.view_as(tuple(shape), tuple(strides), start)

    def extent(self, part: slice, size: Value) -> tuple[Value, int, Value]:
        """First element, step and length of a slice of an axis; each lane may have its own."""
        step = 1 if part.step is None else int(part.step)
        ends = (part.start, part.stop, size)
        if not any(isinstance(end, np.ndarray) for end in ends):
            low, high = (None if end is None else int(end) for end in ends[:2])
            first, last, step = slice(low, high, step).indices(size)
            return first, step, len(range(first, last, step))
        if step < 0:
            raise UnsupportedConstruct(
                f"{self.checker.place()}: a slice with a negative step and bounds that differ "
                "between threads is not supported on the emulator"
            )
        first = 0 if part.start is None else within(part.start, size)
        last = size if part.stop is None else within(part.stop, size)
        length = np.maximum(0, (last - first + step - 1) // step)
        return first, step, int(length.flat[0]) if np.all(length == length.flat[0]) else length

    def fill(self, value: Value) -> None:
        """Assign a number, or an array or tuple of the same shape, to every element."""
        if not all(type(extent) is int for extent in self.shape):
            raise UnsupportedConstruct(
                f"{self.checker.place()}: an assignment to a slice whose length differs between "
                "threads is not supported on the emulator"
            )
        many = isinstance(value, (Array, tuple))
        if many and (value.shape if isinstance(value, Array) else (len(value),)) != self.shape:
            raise ValueError(
                f"{self.checker.place()}: an array of another shape is assigned to a slice of "
                f"{self.name} of shape {self.shape}"
            )
        elements = [
            (index, value[index if isinstance(value, Array) else index[0]] if many else value)
            for index in np.ndindex(*self.shape)
        ]
        for index, element in elements:
            self[index] = element


def within(bound: Value, size: Value) -> Value:
    """A slice bound as a position in the axis."""
    bound = strong(bound).astype(INT64)
    return np.clip(np.where(bound < 0, bound + size, bound), 0, size)


def item(container: Any, index: Any) -> Value:
    """``container[index]``, where a tuple may have an index that differs between lanes."""
    if type(container) is Array or isinstance(index, (int, slice)):
        return container[index]
    if not isinstance(index, np.ndarray):
        return container[operator.index(index)]
    chosen = container[0]
    for position in range(1, len(container)):
        chosen = select(index == position, container[position], chosen)
    return chosen


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
