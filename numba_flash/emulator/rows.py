"""Accesses to several elements in a row: vector loads and stores, and rows of small matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import Value, add
from .check import Checker, first
from .lanes import Lanes, Mask, both, either, without
from .memory import READ, WRITE, Array
from .spaces import Space


class Row(NamedTuple):
    """Elements in a row that each lane addresses, and the lanes that may not have them."""

    array: Array
    index: Value
    base: int
    offset: Value
    lost: Mask
    width: int

    @property
    def space(self) -> Space:
        return self.array.space

    def positions(self) -> np.ndarray:
        """Of each element in the space's ``flat``: (blocks, threads, width), or what broadcasts."""
        start = np.asarray(self.space.address(self.base, self.offset))
        return start[..., None] + np.arange(self.width)


def flat(array: Array) -> Array:
    """The array as one dimension, in the order of its addresses."""
    if array.ndim == 1 and array.strides == (1,):
        return array
    reach = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True) if s > 0)
    return array.view_as((reach + 1 if array.size else 0,), (1,), array.start)


@contextlib.contextmanager
def only(lanes: Lanes, mask: Mask) -> Iterator[None]:
    """Let just the lanes of ``mask`` be active."""
    before = lanes.mask, lanes.count
    lanes.narrow(both(lanes.mask, mask))
    try:
        yield
    finally:
        lanes.mask, lanes.count = before


class Rows:
    """Loads and stores of rows, with the checks of single elements."""

    def __init__(self, lanes: Lanes, checker: Checker):
        self.lanes = lanes
        self.checker = checker

    def locate(self, array: Array, offset: Value, num_bytes: int, name: str, *kinds: str) -> Row:
        """The row of ``num_bytes`` at an element offset; it must begin at a multiple of that.

        Raises
        ------
        TypeError
            If the array is not in memory of one of ``kinds``.
        """
        if array.space.kind not in kinds:
            raise TypeError(
                f"{self.checker.place()}: {name} takes {' or '.join(kinds)} memory here; "
                f"{array.name} is a {array.space.kind} array"
            )
        line, width = flat(array), num_bytes // array.space.dtype.itemsize
        base, start, lost = line.locate((offset,), line.shape, line.strides)
        if width > 1:
            lost = either(lost, self.beyond(line, add(offset, width - 1), lost))
        if self.checker.active:
            lost = either(lost, self.misaligned(line, offset, base, start, lost, num_bytes, name))
        return Row(line, offset, base, start, lost, width)

    def beyond(self, line: Array, last: Value, lost: Mask) -> Mask:
        """Report the lanes whose last element is out of bounds."""
        with only(self.lanes, without(None, lost)):
            return line.locate((last,), line.shape, line.strides)[2]

    def misaligned(
        self,
        line: Array,
        offset: Value,
        base: int,
        start: Value,
        lost: Mask,
        num_bytes: int,
        name: str,
    ) -> Mask:
        """Report the lanes whose address the hardware does not take."""
        place = base if start is None else start + base
        byte = place * line.space.dtype.itemsize + line.space.misalignment
        odd = np.atleast_2d(byte % num_bytes != 0)
        if not odd.any():
            return None
        odd = both(self.lanes.mask, without(odd, lost))
        if not odd.any():
            return None
        lane = first(np.broadcast_to(odd, self.lanes.shape))
        at = self.checker.entry(offset, lane)
        self.checker.fault(
            "out-of-bounds",
            f"{name} of {num_bytes} bytes begins at element ({at}) of the {line.space.kind} array "
            f"{line.name}, whose address is not aligned to {num_bytes} bytes, "
            f"{self.checker.who(*lane)}",
            odd,
            line.name,
            (at,),
        )
        return odd

    def load(self, row: Row) -> np.ndarray:
        """The elements, (blocks, threads, width); poison where a lane may not have them."""
        space, width = row.space, row.width
        values = space.flat.take(row.positions(), mode="clip")
        self.announce(row, READ)
        if self.checker.active:
            if space.doubtful(row.base, row.offset, values):
                self.check_written(row)
            if row.lost is not None:
                values = np.where(row.lost[..., None], space.poison, values)
        return np.ascontiguousarray(np.broadcast_to(values, (*self.lanes.shape, width)))

    def check_written(self, row: Row) -> None:
        """Report the first element of the rows that nobody has written."""
        for i in range(row.width):
            base = row.base + i
            unwritten = without(row.space.unwritten(base, row.offset), row.lost)
            unwritten = np.atleast_2d(both(self.lanes.mask, unwritten))
            if unwritten.any():
                index = (add(row.index, i),)
                self.checker.read_too_early(row.array, index, base, row.offset, unwritten)
                return

    def store(self, row: Row, values: np.ndarray) -> None:
        """Write the elements, (blocks, threads, width)."""
        if not row.array.writeable:
            raise row.array.read_only()
        space = row.space
        mask = without(self.lanes.mask, row.lost)
        self.announce(row, WRITE, whole(values))
        self.lanes.stores += 1
        places = self.spread(row.positions(), mask)
        space.flat[places] = self.spread(values, mask)
        if space.valid is not None:
            space.valid[places] = space.written

    def announce(self, row: Row, how: str, value: Value = None) -> None:
        """Tell the checker of an access."""
        if how == WRITE and row.space.has_flights:
            mask = without(self.lanes.mask, row.lost)
            self.checker.write_in_flight(row.array, (row.index,), row.base, row.offset, mask)
        self.checker.access(row.array, row.base, row.offset, row.lost, how, row.width, value)

    def spread(self, values: Any, mask: Mask) -> np.ndarray:
        """Rows of elements of the lanes of ``mask``, (lanes, width)."""
        values = np.asarray(values)
        wide = np.broadcast_to(values, (*self.lanes.shape, values.shape[-1]))
        if mask is None:
            return wide.reshape(-1, wide.shape[-1])
        return wide[np.broadcast_to(mask, self.lanes.shape)]


def whole(values: np.ndarray) -> np.ndarray:
    """A row of elements as one, by which lanes can be compared."""
    values = np.ascontiguousarray(values)
    return values.view(f"V{values.shape[-1] * values.itemsize}")[..., 0]
