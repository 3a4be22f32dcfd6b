"""Arrays as a kernel sees them: one indexing class over global, shared and local memory.

An `Array` is a view of a `spaces.Space`, with shape and strides in elements like NumPy's. It turns
indices into offsets and checks them on the way. A lane without a legal address reads poison, and
its store is dropped.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import INT64, Value, cast, select, strong
from .lanes import Mask, both, either, without
from .report import UnsupportedConstruct
from .spaces import Space

if TYPE_CHECKING:
    from .check import Checker

READ, WRITE, ATOMIC = "read", "write", "atomic"
"""How an access touches memory."""

VIEWS = {slice, type(...)}
"""Types of an index that make a view of an array and no element."""


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
            "kernel on the emulator; loop over the elements, or use it outside of the kernel"
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

    def index_of(self, position: int) -> tuple[int, ...]:
        """The index of an element from its place in the space's ``flat``."""
        position %= self.space.period
        if isinstance(self.start, np.ndarray) or any(type(n) is not int for n in self.shape):
            return (position,)
        rest, index = position - self.start, [0] * self.ndim
        for axis in sorted(range(self.ndim), key=lambda a: -abs(self.strides[a])):
            stride, extent = self.strides[axis], self.shape[axis]
            if stride and extent > 1:
                index[axis] = min(max(rest // stride, 0), extent - 1)
                rest -= index[axis] * stride
        return tuple(index)

    # Elements

    def __getitem__(self, index: Any) -> Value:
        if type(index) is not tuple:
            index = (index,)
        if self.is_view(index):
            return self.part(index)
        return self.read(index, *self.locate(index, self.shape, self.strides))

    def read(self, index: tuple, base: int, offset: Value, lost: Mask, how: str = READ) -> Value:
        """Load from a located place; the lanes that find nothing there read poison."""
        space = self.space
        values = space.load(base, offset)
        if space.watched:
            self.checker.access(self, base, offset, lost, how)
        if self.checker.active:
            if space.doubtful(base, offset, values):
                unwritten = both(self.lanes.mask, without(space.unwritten(base, offset), lost))
                if np.any(unwritten):
                    self.checker.read_too_early(self, index, base, offset, unwritten)
                    lost = either(lost, unwritten)
            if lost is not None:
                values = select(lost, space.poison, values)
        return values

    def __setitem__(self, index: Any, value: Value) -> None:
        if type(index) is not tuple:
            index = (index,)
        if not self.writeable:
            raise self.read_only()
        if self.is_view(index):
            self.part(index).assign(value)
            return
        base, offset, lost = self.locate(index, self.shape, self.strides)
        mask = self.lanes.mask
        if lost is not None:
            mask = without(mask, lost)
            if not mask.any():
                return
        if self.space.has_flights:
            self.checker.write_in_flight(self, index, base, offset, mask)
        self.lanes.stores += 1
        value = cast(value, self.space.dtype)
        if self.space.watched:
            self.checker.access(self, base, offset, lost, WRITE, value=value)
        self.space.store(base, offset, value, mask)

    def read_only(self) -> ValueError:
        """The refusal of a store to an array that is not ``writeable``."""
        return ValueError(f"{self.checker.place()}: the array {self.name} is read-only")

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

    def part(self, index: tuple) -> Array:
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

    def assign(self, value: Value) -> None:
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
    if callable(container):
        raise UnsupportedConstruct("a kernel cannot launch a kernel; call a device function")
    if not isinstance(index, np.ndarray):
        return container[operator.index(index)]
    chosen = container[0]
    for position in range(1, len(container)):
        chosen = select(index == position, container[position], chosen)
    return chosen


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
