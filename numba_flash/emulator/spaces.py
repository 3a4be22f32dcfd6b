"""Global, shared and local memory of a batch of blocks, and which elements have been written.

A `Space` knows how lanes address it. A load computes for all lanes, active or not; a store writes
the lanes of a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import Value
from .lanes import Lanes, Mask

PATTERN = np.array([0x7FF9], np.uint16)
"""What unwritten memory is filled with: NaN as float64, float32, float16 and bfloat16."""


def poison(dtype: np.dtype) -> np.generic:
    """What a kernel reads where nothing was written, or out of bounds."""
    if dtype.kind == "b":
        return np.True_
    return np.repeat(PATTERN, 4).view(np.uint8)[: dtype.itemsize].view(dtype)[0]


def unwritten_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, poison(dtype), dtype)


NOBODY = -1
HALFWORD = 2
"""Bytes: the smallest element that an asynchronous instruction reads."""


class Region:
    """Memory in which lanes can meet: a global allocation, or a shared array of every block.

    It is looked at in cells of ``granule`` bytes, the smallest element that anybody uses.
    """

    def __init__(self, num_bytes: int, is_global: bool = False):
        self.num_bytes = num_bytes
        self.is_global = is_global
        self.granule = 8
        self.shadow: Shadow | None = None
        self._owners: np.ndarray | None = None

    def refine(self, granule: int) -> int:
        """Use cells of at most ``granule`` bytes; the size they have now."""
        if granule < self.granule:
            if self.shadow is not None:
                self.shadow.refine(self.granule // granule)
            self.granule, self._owners = granule, None
        return self.granule

    def owners(self) -> np.ndarray:
        """A number for each cell, NOBODY when it is not in use."""
        if self._owners is None:
            self._owners = np.full(-(-self.num_bytes // self.granule), NOBODY)
        return self._owners


class Shadow:
    """Who touched each cell of a region last: its writer in row 0, its readers in row 1.

    Lanes are numbered through the grid. Of the readers the last one is known, and one of another
    block.
    """

    def __init__(self, region: Region):
        cells = -(-region.num_bytes // region.granule)
        self.writer = np.full(cells, NOBODY)
        self.reader = np.full(cells, NOBODY)
        self.other_reader = np.full(cells, NOBODY)
        self.atomic = np.zeros(cells, bool)
        self.interval = np.zeros((2, cells), np.int32)
        self.epoch = np.zeros((2, cells), np.int32)
        self.place = np.zeros((2, cells), np.int32)
        self.places: list[Any] = []
        self.used = False

    def number(self, place: Any) -> int:
        """The number of a place in ``places``."""
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place)

    def refine(self, factor: int) -> None:
        """Split every cell."""
        for name, table in vars(self).items():
            if isinstance(table, np.ndarray):
                setattr(self, name, np.repeat(table, factor, axis=-1))


class Space:
    """Memory of one kind for all blocks of a batch.

    Parameters
    ----------
    data : ndarray
        The elements; ``flat`` is the same as one dimension.
    valid : ndarray or None
        Which elements have been written: those where it equals ``written``. None: all of them.

    Attributes
    ----------
    watched : bool
        Whether accesses are told to the `check.Checker`; registers are not memory to anybody else.
    region, origin : Region or None, int
        Where lanes can meet, and the byte of it where ``flat`` begins.
    misalignment : int
        The byte of its allocation where ``flat`` begins; allocations are aligned.
    period : int
        Elements after which ``flat`` repeats itself for the next block.
    """

    kind = ""
    watched = True
    region: Region | None = None
    origin = 0
    misalignment = 0
    written: Any = True

    def __init__(self, data: np.ndarray, valid: np.ndarray | None, lanes: Lanes):
        self.data = data
        self.flat = data.reshape(-1)
        self.valid = None if valid is None else valid.reshape(-1)
        self.lanes = lanes
        self.dtype = data.dtype
        self.poison = poison(data.dtype)
        self.period = data.size

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
        """Whether a load may have met unwritten elements; cheap, and sure when it says no.

        An element is written as a whole, so an unwritten one still holds the poison.
        """
        if self.dtype.kind == "f":
            return bool(np.isnan(values.max()))
        return self.dtype.itemsize == 1 or bool(np.any(values == self.poison))

    def unwritten(self, base: int, offset: Value) -> Value:
        """Which lanes of a load meet an unwritten element."""
        assert self.valid is not None
        return self.valid.take(self.address(base, offset), mode="clip") != self.written

    # Asynchronous writes: an element is in flight from the instruction to the wait for it

    def in_flight(self, base: int, offset: Value) -> Value:
        """Which lanes of an access meet an element that is in flight."""
        return False

    def busy(self, base: int, offset: Value) -> Value:
        """Which lanes of a store meet an element that an asynchronous instruction is using."""
        return self.in_flight(base, offset)

    @property
    def has_flights(self) -> bool:
        """Whether any element is in use."""
        return False


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
        self.region = Region(self.data.size)
        self.flying = np.zeros_like(self.valid)
        self.flights = 0
        self.lent = np.zeros(self.data.size // HALFWORD, np.uint16)
        self.loans = 0
        self.itemsizes: set[int] = set()
        self.settled = False

    def settle(self) -> None:
        """Notice when every byte has been written; loads need not look any more then."""
        self.settled = self.settled or bool(self.valid.all())


class SharedSpace(Space):
    """A shared array: row ``b`` of ``data`` is the copy of block ``b``."""

    kind = "shared"
    valid: np.ndarray
    region: Region

    def __init__(self, memory: SharedMemory, dtype: np.dtype, lanes: Lanes):
        bits = np.dtype(f"u{dtype.itemsize}")
        super().__init__(memory.data.view(dtype), memory.valid.view(bits), lanes)
        self.memory = memory
        self.region = memory.region
        self.period = self.data.shape[1]
        memory.itemsizes.add(dtype.itemsize)
        self.valid_rows = memory.valid.view(bits)
        self.written = bits.type(~bits.type(0))
        self.rows = np.arange(self.data.shape[0])[:, None] * self.data.shape[1]
        self.flying = memory.flying.view(bits).reshape(-1)

    def depart(self, places: np.ndarray) -> None:
        """Elements of ``flat`` go in flight: until they land, nobody knows what they hold."""
        self.flat[places] = self.poison
        self.valid[places] = 0
        self.flying[places] = self.written
        self.memory.settled = False
        self.memory.flights += 1

    def land(self, places: np.ndarray, values: np.ndarray) -> None:
        """The elements of one `depart` have arrived."""
        self.flat[places] = values
        self.valid[places] = self.written
        self.flying[places] = 0
        self.memory.flights -= 1

    def lend(self, places: np.ndarray) -> None:
        """An asynchronous instruction reads these elements, which must stay as they are."""
        self.memory.lent[self.halfwords(places)] += 1  # no place comes twice
        self.memory.loans += 1

    def take_back(self, places: np.ndarray) -> None:
        """The instruction that borrowed these elements has finished."""
        self.memory.lent[self.halfwords(places)] -= 1
        self.memory.loans -= 1

    def halfwords(self, places: Value) -> Value:
        """Where in ``memory.lent`` elements are; of a larger one, its first part."""
        return places * self.dtype.itemsize // HALFWORD

    def is_lent(self, places: Value) -> Value:
        return self.memory.lent.take(self.halfwords(places), mode="clip") != 0

    def in_flight(self, base: int, offset: Value) -> Value:
        return self.flying.take(self.address(base, offset), mode="clip") != 0

    def busy(self, base: int, offset: Value) -> Value:
        lent = self.memory.loans and self.is_lent(self.address(base, offset))
        return self.in_flight(base, offset) | lent

    @property
    def has_flights(self) -> bool:
        return self.memory.flights + self.memory.loans > 0

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
        if self.memory.settled:
            return False
        # A store through a type of another size writes a part of an element.
        return len(self.memory.itemsizes) > 1 or super().doubtful(base, offset, values)


class LocalSpace(Space):
    """A thread's own array: element first, so that one element of all lanes is contiguous."""

    kind = "local"
    watched = False

    def __init__(self, size: int, dtype: np.dtype, lanes: Lanes):
        """``fences`` is what ``lanes.fences`` was when a register was stored last."""
        shape = (max(1, size), *lanes.shape)
        self.valid_rows = np.zeros(shape, bool)
        super().__init__(unwritten_memory(shape, dtype), self.valid_rows, lanes)
        self.unsettled = set(range(size))
        self.flying: dict[int, int] = {}
        self.lent: list[range] = []
        self.fences = -1

    def depart(self, first: int, count: int) -> None:
        """Registers of all lanes go in flight; several instructions may have them there."""
        for element in range(first, first + count):
            self.flying[element] = self.flying.get(element, 0) + 1
        self.data[first : first + count] = self.poison
        self.valid_rows[first : first + count] = False
        self.unsettled.update(range(first, first + count))

    def lend(self, first: int, count: int) -> None:
        """An asynchronous instruction reads registers of all lanes, which must stay as they are."""
        self.lent.append(range(first, first + count))

    def take_back(self) -> None:
        """The instruction that borrowed registers first has finished."""
        del self.lent[0]

    def land(self, first: int, values: np.ndarray) -> bool:
        """An instruction has finished; whether it was the last one, so that values are there."""
        elements = range(first, first + len(values))
        for element in elements:
            self.flying[element] -= 1
        if any(self.flying[element] for element in elements):
            return False
        for element in elements:
            del self.flying[element]
        self.data[first : first + len(values)] = values
        self.valid_rows[first : first + len(values)] = True
        self.unsettled.difference_update(elements)
        return True

    def in_flight(self, base: int, offset: Value) -> Value:
        if offset is None:
            return base in self.flying
        return np.isin(offset + base, list(self.flying))

    def busy(self, base: int, offset: Value) -> Value:
        elements = set(self.flying).union(*self.lent)
        return base in elements if offset is None else np.isin(offset + base, list(elements))

    @property
    def has_flights(self) -> bool:
        return bool(self.flying or self.lent)

    def address(self, base: int, offset: Value) -> Value:
        if offset is None:
            return self.lanes.rank + base * self.lanes.size
        return (offset + base) * self.lanes.size + self.lanes.rank

    def load(self, base: int, offset: Value) -> Value:
        return self.data[base].copy() if offset is None else super().load(base, offset)

    def store(self, base: int, offset: Value, value: Value, mask: Mask) -> None:
        self.fences = self.lanes.fences
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
