"""What a kernel costs: bytes and sectors, bank conflicts, barriers, multiply-adds.

A *request* is one instruction of one warp. The engine runs an instruction of all warps at once, so
one executed access is one request of every warp that has an active lane. (Threads that run on their
own, because they wait for each other in loops, make one each.) Global memory moves in sectors of 32
bytes; a request costs the sectors that its lanes touch. Shared memory has 32 banks of 4 bytes and
serves one word of each in a *wavefront*, to any number of lanes; a request costs as many wavefronts
as the busiest bank holds different words. Lanes that ask for 8 bytes are served in two halves of
the warp, for 16 bytes in four quarters. (CUDA C++ Programming Guide, device memory accesses; Nsight
Compute, the l1tex metrics.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arithmetic import Value
from .lanes import Lanes, Mask

if TYPE_CHECKING:
    from .memory import Array

WARP_SIZE = 32
SECTOR_BYTES = 32
NUM_BANKS = 32
BANK_BYTES = 4
NOWHERE = -(1 << 62)
"""The sector or word of a lane that asks for nothing; addresses count from any place."""
ZERO = np.zeros((1, 1), np.int64)
MOST_PATTERNS = 4096

Place = tuple[str, int]
"""File and line."""


@dataclass
class Traffic:
    """Global memory.

    Bytes are those that the active lanes ask for, and the sectors of a request are counted anew in
    each: neither knows of caches. An atomic operation both reads and writes, in one request.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_sectors: int = 0
    write_sectors: int = 0
    requests: int = 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def sectors(self) -> int:
        return self.read_sectors + self.write_sectors

    @property
    def efficiency(self) -> float:
        """Bytes asked for, per byte of the sectors that move; above 1 where lanes share them."""
        return self.bytes / (SECTOR_BYTES * self.sectors) if self.sectors else float("nan")


@dataclass
class Shared:
    """Shared memory.

    Bytes as in `Traffic`. An atomic operation is a read in what it costs; that lanes which meet at
    one element take turns is not counted.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_wavefronts: int = 0
    write_wavefronts: int = 0
    requests: int = 0
    bank_conflicts: int = 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def wavefronts(self) -> int:
        return self.read_wavefronts + self.write_wavefronts


@dataclass
class Costs:
    """What a launch costs, or one of its lines or arrays.

    Attributes
    ----------
    traffic : Traffic
        Global memory.
    shared : Shared
        Shared memory.
    barriers : int
        Arrivals of a block at ``syncthreads`` and its kin.
    multiply_adds : int
        ``a * b + c`` of floats, each lane counted, and those inside matrix instructions.
    """

    traffic: Traffic = field(default_factory=Traffic)
    shared: Shared = field(default_factory=Shared)
    barriers: int = 0
    multiply_adds: int = 0

    @property
    def bank_conflicts(self) -> int:
        """Cycles of shared memory beyond the least that accesses of their width need."""
        return self.shared.bank_conflicts

    def add(self, other: Costs) -> None:
        for mine, theirs in ((self.traffic, other.traffic), (self.shared, other.shared)):
            for part in fields(mine):
                setattr(mine, part.name, getattr(mine, part.name) + getattr(theirs, part.name))
        self.barriers += other.barriers
        self.multiply_adds += other.multiply_adds


class Table(dict[Any, Costs]):
    """Costs by line or by array; what is not in it costs nothing."""

    def __missing__(self, key: Any) -> Costs:
        return Costs()


class Cost(NamedTuple):
    """What an access costs: lanes, requests, sectors or wavefronts, and the least of the latter."""

    lanes: int
    requests: int
    units: int
    least: int


class Site(NamedTuple):
    """The accesses of one line to one array, as far as they are alike."""

    place: Place
    array: str
    kind: str
    how: str
    size: int
    """Bytes a lane."""

    def costs(self, cost: Cost) -> Costs:
        moved = cost.lanes * self.size
        reads, writes = self.how != "write", self.how != "read"
        if self.kind == "global":
            units = cost.units * reads, cost.units * writes
            return Costs(Traffic(moved * reads, moved * writes, *units, cost.requests))
        units = cost.units * reads, cost.units * (not reads)
        conflicts = cost.units - cost.least
        return Costs(shared=Shared(moved * reads, moved * writes, *units, cost.requests, conflicts))


class Request(NamedTuple):
    """A request of one warp: the byte address of each lane, and which lanes are active."""

    addresses: np.ndarray
    active: np.ndarray


class Counts:
    """The counts of one launch.

    Attributes
    ----------
    file : str
        The kernel's file.
    requests : dict of Site to Request
        The first request of each site, for pictures.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.accesses: dict[Site, Cost] = {}
        self.requests: dict[Site, Request] = {}
        self.arrivals: dict[Place, int] = {}
        self.products: dict[Place, int] = {}
        self.patterns: dict[Hashable, Cost] = {}

    # What happens in the kernel

    def access(
        self,
        array: Array,
        base: int,
        offset: Value,
        mask: Mask,
        how: str,
        width: int,
        place: Place,
    ) -> None:
        """Count one access of the lanes of ``mask``.

        Parameters
        ----------
        array : Array
        base, offset : int, lane vector or None
            Where, in elements of ``array.space``.
        mask : mask or None
        how : {"read", "write", "atomic"}
        width : int
            Elements in a row that each lane touches.
        place : (str, int)
        """
        space = array.space
        itemsize, shape = space.dtype.itemsize, space.lanes.shape
        site = Site(place, array.name, space.kind, how, width * itemsize)
        start = base * itemsize + space.misalignment
        places = ZERO if offset is None else offset * itemsize
        cost = self.cost(site, start, places, mask, shape)
        known = self.accesses.get(site)
        if cost.lanes and site not in self.requests:
            self.requests[site] = first_request(start + places, mask, shape)
        if known is not None:
            cost = Cost(*map(sum, zip(known, cost, strict=True)))
        self.accesses[site] = cost

    def bulk(self, array: Array, places: np.ndarray, how: str, place: Place) -> None:
        """Count what one tensor copy moves: elements of ``array.space.flat``, one request."""
        space = array.space
        itemsize = space.dtype.itemsize
        site = Site(place, array.name, space.kind, how, itemsize)
        numbers = np.unique((places * itemsize + space.misalignment) // SECTOR_BYTES)
        cost = Cost(len(places), 1, len(numbers), 1)
        known = self.accesses.get(site, Cost(0, 0, 0, 0))
        self.accesses[site] = Cost(*map(sum, zip(known, cost, strict=True)))

    def cost(
        self, site: Site, start: int, places: np.ndarray, mask: Mask, shape: tuple[int, int]
    ) -> Cost:
        """The cost of an access at the byte addresses ``start + places``.

        One block is enough where all have the same pattern: the distances of their lanes from the
        first one, where that one is in a sector or bank, and who is active.
        """
        first = places[:, :1]
        pattern = places - first
        first = (start + first) % (SECTOR_BYTES if site.kind == "global" else BANK_BYTES)
        whole_blocks = mask is None or mask.shape[1] == 1
        alike = same_rows(pattern) and same_rows(first) and (whole_blocks or same_rows(mask))
        if not alike:
            return measure(site, start + places, mask, shape)
        row = b"" if whole_blocks else mask[0].tobytes()
        key = site.kind, site.size, shape[1], int(first[0, 0]), pattern[0].tobytes(), row
        cost = self.patterns.get(key)
        if cost is None:
            if len(self.patterns) >= MOST_PATTERNS:
                self.patterns.clear()
            lanes = None if whole_blocks else mask[:1]
            cost = measure(site, first[:1] + pattern[:1], lanes, (1, shape[1]))
            self.patterns[key] = cost
        blocks = shape[0]
        if mask is not None and whole_blocks:
            blocks = int(np.count_nonzero(mask)) * (blocks // len(mask))
        return Cost(*(blocks * number for number in cost))

    def barrier(self, lanes: Lanes, place: Place) -> None:
        """Count the arrival of every block that has an active lane."""
        blocks = int(np.count_nonzero(lanes.full_mask().any(axis=1)))
        self.arrivals[place] = self.arrivals.get(place, 0) + blocks

    def multiply_adds(self, number: int, place: Place) -> None:
        self.products[place] = self.products.get(place, 0) + number

    # What it comes to

    def total(self) -> Costs:
        return self.table(lambda place, array: "")[""]

    def by_file(self) -> dict[str, Table]:
        """File, then line."""
        files: dict[str, Table] = {}
        for place, costs in self.table(lambda place, array: place).items():
            files.setdefault(place[0], Table())[place[1]] = costs
        return files

    def by_line(self) -> Table:
        """Lines of the kernel's file."""
        return self.by_file().get(self.file, Table())

    def by_array(self) -> Table:
        """What the accesses to each array cost, by its name."""
        table = self.table(lambda place, array: array)
        table.pop(None, None)
        return table

    def table(self, key: Callable[[Place, str | None], Hashable]) -> Table:
        """The sums of the costs with the same ``key(place, array)``."""
        parts: list[tuple[Place, str | None, Costs]] = [
            *((site.place, site.array, site.costs(cost)) for site, cost in self.accesses.items()),
            *((place, None, Costs(barriers=n)) for place, n in self.arrivals.items()),
            *((place, None, Costs(multiply_adds=n)) for place, n in self.products.items()),
        ]
        table = Table()
        for place, array, costs in parts:
            table.setdefault(key(place, array), Costs()).add(costs)
        return table


def same_rows(values: np.ndarray) -> bool:
    return len(values) == 1 or bool((values == values[0]).all())


def by_warp(values: Value, shape: tuple[int, int]) -> np.ndarray:
    """A lane vector as (warps, 32); the lanes that a last warp lacks are zero."""
    wide = np.broadcast_to(values, shape)
    missing = -shape[1] % WARP_SIZE
    if missing:
        wide = np.pad(wide, ((0, 0), (0, missing)))
    return wide.reshape(-1, WARP_SIZE)


def first_request(places: np.ndarray, mask: Mask, shape: tuple[int, int]) -> Request:
    active = by_warp(True if mask is None else mask, shape)
    warp = int(active.any(axis=1).argmax())
    return Request(by_warp(places, shape)[warp].copy(), active[warp].copy())


def measure(site: Site, places: np.ndarray, mask: Mask, shape: tuple[int, int]) -> Cost:
    """The cost of an access of many blocks at these byte addresses."""
    active = by_warp(True if mask is None else mask, shape)
    addresses = by_warp(places, shape)
    lanes = int(np.count_nonzero(active))
    requests = int(np.count_nonzero(active.any(axis=1)))
    if site.kind == "global":
        return Cost(lanes, requests, sectors(addresses, active, site.size), requests)
    return Cost(lanes, requests, *wavefronts(addresses, active, site.size))


def sectors(addresses: np.ndarray, active: np.ndarray, size: int) -> int:
    """The sectors that requests touch, those of each counted once."""
    numbers = granules(addresses, active, size, SECTOR_BYTES)
    return int(np.count_nonzero(distinct(numbers)))


def wavefronts(addresses: np.ndarray, active: np.ndarray, size: int) -> tuple[int, int]:
    """The wavefronts of requests to shared memory, and how few would do without conflicts.

    As many lanes as ask for 128 bytes are served together; twice as many where neighbours ask for
    the same (`in_pairs`).
    """
    together = lanes_together(size)
    if together == WARP_SIZE:
        return served(addresses, active, size, together)
    paired = in_pairs(addresses, active)
    parts = [
        served(addresses[rows], active[rows], size, lanes)
        for rows, lanes in ((paired, 2 * together), (~paired, together))
        if rows.any()
    ]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def served(addresses: np.ndarray, active: np.ndarray, size: int, together: int) -> tuple[int, int]:
    """`wavefronts`, where so many lanes are served together.

    They take as many as the busiest bank has different words for them.
    """
    addresses, active = addresses.reshape(-1, together), active.reshape(-1, together)
    words = granules(addresses, active, size, BANK_BYTES)
    row, column = np.nonzero(distinct(words))
    bank = words[row, column] % NUM_BANKS
    load = np.bincount(row * NUM_BANKS + bank, minlength=len(words) * NUM_BANKS)
    least = int(np.count_nonzero(active.any(axis=1))) * max(1, size // (NUM_BANKS * BANK_BYTES))
    return int(load.reshape(-1, NUM_BANKS).max(axis=1).sum()), least


def in_pairs(addresses: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Which warps' lanes ask for the same in pairs: all (i, i ^ 1), or all (i, i ^ 2).

    Measured with ncu on an H200, for 8 and for 16 bytes a lane; lanes that are alike in another
    way, such as both halves of a warp, gain nothing. An idle lane is like any other.
    """
    lane = np.arange(WARP_SIZE)
    alike = [
        ((addresses == addresses[:, lane ^ bit]) | ~active | ~active[:, lane ^ bit]).all(axis=1)
        for bit in (1, 2)
    ]
    return alike[0] | alike[1]


def lanes_together(size: int) -> int:
    """How many lanes that ask for ``size`` bytes each are served together: 128 bytes' worth."""
    return min(WARP_SIZE, max(1, NUM_BANKS * BANK_BYTES // size))


def granules(addresses: np.ndarray, active: np.ndarray, size: int, granule: int) -> np.ndarray:
    """The numbers of the sectors or words that each row of lanes touches, in ascending order."""
    first, last = addresses // granule, (addresses + size - 1) // granule
    most = int((last - first).max()) + 1
    numbers = np.where(active, first, NOWHERE)
    if most > 1:
        every = first[..., None] + np.arange(most)
        touched = active[..., None] & (every <= last[..., None])
        numbers = np.where(touched, every, NOWHERE).reshape(len(addresses), -1)
    return np.sort(numbers, axis=1)


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Where a row of ascending numbers has a new one."""
    new = numbers != NOWHERE
    new[:, 1:] &= numbers[:, 1:] != numbers[:, :-1]
    return new
