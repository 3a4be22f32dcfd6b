"""Races: two threads at one place of memory, one of them writing, and nothing that orders them.

Accesses are collected until a barrier ends the interval they belong to, and are then looked at
together: every write leaves its thread's number in an ``owner`` table, and whoever meets another
number there was in a race. Whether the threads really collided does not matter, so no luck is
needed. Inside a warp ``syncwarp`` orders as well; it starts a new epoch of the interval.

Blocks are never ordered by barriers. What they did to global memory is kept for the whole launch
in a `Shadow`: the last writer and the last readers of every cell. The one way to order blocks is
``threadfence`` and an atomic operation, as in a reduction that the last block finishes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .arithmetic import Value, strong
from .lanes import Lanes, Mask, both, without
from .report import Coordinates, Fault, Report, show
from .spaces import NOBODY, Region, Shadow

if TYPE_CHECKING:
    from .memory import Array

WARP_SIZE = 32
MOST_LANES = 1 << 22
"""Lanes that a log may hold before it is looked at in the middle of an interval."""
MOST_CELLS = 256
"""Suspicious cells that are explained one by one."""
KINDS = ("write", "atomic", "read")

Place = tuple[str, int]
"""File and line."""


class Access(NamedTuple):
    """One instruction of the lanes of ``mask``."""

    array: Array
    base: int
    offset: Value
    mask: Mask
    how: str
    width: int
    place: Place
    epoch: int
    value: Value
    lanes: np.ndarray | None = None
    """Of an asynchronous access, the lane at each place; ``offset`` then has one dimension."""


class Touch(NamedTuple):
    """One thread at one cell; lanes are numbered through the grid.

    ``constant`` is what a write stores when all its threads store the same, ``access`` the
    instruction, if it is still in the log, and ``time`` its place there.
    """

    lane: int
    how: str
    place: Place
    interval: int
    epoch: int
    constant: Value = None
    access: Access | None = None
    time: int = NOBODY


class Chunk:
    """The accesses of a log, cell by cell: first the writes, then atomics, then reads."""

    def __init__(self, races: Races, region: Region, log: list[Access]):
        self.granule = region.refine(min(a.array.space.dtype.itemsize for a in log))
        order = sorted(range(len(log)), key=lambda i: KINDS.index(log[i].how))
        self.log = log
        parts = [races.cells(log[i], self.granule) for i in order]
        lengths = [len(cell) for cell, _ in parts]
        self.cell = np.concatenate([cell for cell, _ in parts])
        self.lane = np.concatenate([lane for _, lane in parts])
        self.time = np.repeat(order, lengths)
        ends = np.cumsum([0, *lengths])
        bounds = np.cumsum([0, *(sum(a.how == how for a in log) for how in KINDS)])
        self.parts = [slice(ends[a], ends[b]) for a, b in itertools.pairwise(bounds)]
        self.epochs = {access.epoch for access in log}

    def epoch(self, part: slice) -> np.ndarray:
        return np.array([access.epoch for access in self.log], np.int32)[self.time[part]]


class Past(NamedTuple):
    """What of a block's past another one may rely on.

    Its accesses before the interval ``end``, because a barrier stands between them and the
    release, and those of the lanes that released something themselves.
    """

    end: int = 0
    lanes: frozenset[int] = frozenset()

    def merged(self, other: Past) -> Past:
        return Past(max(self.end, other.end), self.lanes | other.lanes)


Pasts = dict[int, Past]
"""By block."""


def learn(pasts: Pasts, others: Pasts) -> None:
    """Add what ``others`` hold."""
    for block, past in others.items():
        pasts[block] = pasts.get(block, Past()).merged(past)


class BlockOrder:
    """Which blocks come after which, by ``threadfence`` and atomic operations."""

    def __init__(self) -> None:
        self.fenced: set[int] = set()
        self.knows: dict[int, Pasts] = {}
        self.released: dict[tuple[int, int], Pasts] = {}

    def fence(self, blocks: Iterable[int]) -> None:
        """What these blocks wrote is visible to whoever sees what they do next."""
        self.fenced.update(blocks)

    def wrote(self, blocks: Iterable[int]) -> None:
        """These blocks have written since their fence."""
        self.fenced.difference_update(blocks)

    def atomic(self, block: int, past: Past, cell: tuple[int, int]) -> None:
        """A block takes what the cell's earlier visitors released, and releases its past."""
        known = self.knows.setdefault(block, {})
        released = self.released.setdefault(cell, {})
        learn(known, released)
        if block in self.fenced:
            learn(released, known)
            learn(released, {block: past})

    def ordered(self, block: int, earlier: Touch, later: int) -> bool:
        """Whether the block ``later`` comes after a touch of another ``block``."""
        past = self.knows.get(later, {}).get(block, Past())
        return earlier.interval < past.end or earlier.lane in past.lanes


class Races:
    """Finds races in one batch of blocks.

    Parameters
    ----------
    lanes : Lanes
    report : Report
    first_block : int
        Number of the batch's first block in the grid.
    order : BlockOrder
        Shared by the batches of a launch.
    coordinates : callable
        Where in the grid the block of a number is.
    """

    def __init__(
        self,
        lanes: Lanes,
        report: Report,
        first_block: int,
        order: BlockOrder,
        coordinates: Callable[[int], Coordinates],
    ):
        self.lanes = lanes
        self.report = report
        self.order = order
        self.coordinates = coordinates
        self.threads = lanes.block_threads
        self.first_lane = first_block * self.threads + lanes.first_thread
        self.logs: dict[Region, list[Access]] = {}
        self.sizes: dict[Region, int] = {}
        self.epoch = 0
        self.syncs: list[np.ndarray | None] = []
        self.interval = np.zeros(lanes.shape[0], np.int32)

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
        value: Value,
    ) -> None:
        """Log an access of the lanes of ``mask``."""
        region = array.space.region
        if region is None:
            return
        if region.is_global and self.order.fenced:
            self.follow_fences(array, base, offset, mask, how)
        access = Access(array, base, offset, mask, how, width, place, self.epoch, value)
        self.log(region, access, self.lanes.size * width)

    def log(self, region: Region, access: Access, size: int) -> None:
        """Keep an access of so many lanes and elements for the end of the interval."""
        self.logs.setdefault(region, []).append(access)
        size += self.sizes.get(region, 0)
        self.sizes[region] = size
        if size > MOST_LANES:
            self.close(region, keep=True)

    def barrier(self, arrived: Mask) -> None:
        """End the interval of the blocks of ``arrived``, a (blocks, 1) mask or None for all."""
        for region, log in list(self.logs.items()):
            if arrived is not None:
                outside = [a._replace(mask=without(a.mask, arrived)) for a in log]
                inside = [a._replace(mask=both(a.mask, arrived)) for a in log]
                self.logs[region] = [a for a in inside if a.mask.any()]
            self.close(region)
            if arrived is not None and any(a.mask.any() for a in outside):
                self.logs[region] = [a for a in outside if a.mask.any()]
        if arrived is None:
            self.interval += 1
            self.epoch, self.syncs = 0, []
        else:
            self.interval += arrived[:, 0]

    def syncwarp(self, members: np.ndarray | None) -> None:
        """Start a new epoch: the lanes of ``members``, None for all, have met in their warps."""
        self.syncs.append(members)
        self.epoch += 1

    def fence(self, mask: Mask) -> None:
        """``threadfence`` by the lanes of ``mask``."""
        self.close_global()
        self.order.fence(self.blocks_of(mask))

    def follow_fences(self, array: Array, base: int, offset: Value, mask: Mask, how: str) -> None:
        """Follow the order that fences and atomic operations give to blocks."""
        if how == "write":
            self.order.wrote(self.blocks_of(mask))
        if how != "atomic":
            return
        self.close_global()
        space = array.space
        places, ranks = self.lanes.spread(mask, space.address(base, offset), self.lanes.rank)
        for place, rank in zip(places.tolist(), ranks.tolist(), strict=True):
            lane = rank + self.first_lane
            past = Past(self.end_of_past(rank), frozenset([lane]))
            self.order.atomic(self.block_of(lane), past, (id(space.region), place))

    def end_of_past(self, rank: int) -> int:
        """The interval of a lane, before which its block's accesses are ordered before it."""
        return int(self.interval[rank // self.lanes.num_threads])

    def fence_block(self, mask: Mask) -> None:
        """``threadfence_block``; inside a batch that runs in step there is nothing to order."""

    def finish(self) -> None:
        """The batch has ended: look at what no barrier followed."""
        for region in list(self.logs):
            self.close(region)

    def close_global(self) -> None:
        for region in list(self.logs):
            if region.is_global:
                self.close(region)

    def block_of(self, lane: int) -> int:
        return lane // self.threads

    def blocks_of(self, mask: Mask) -> list[int]:
        here = np.broadcast_to(True if mask is None else mask, self.lanes.shape).any(axis=1)
        return [self.block_of(self.first_lane) + int(b) for b in np.flatnonzero(here)]

    # Looking at a log

    def close(self, region: Region, keep: bool = False) -> None:
        """Look at the log of a region and empty it; ``keep``: its interval goes on."""
        log = self.logs.pop(region, [])
        self.sizes.pop(region, None)
        keep = keep or region.is_global or region.shadow is not None
        changed = any(a.how != "read" for a in log)
        if not changed and not (log and keep):
            return
        chunk = Chunk(self, region, log if keep else near_writes(log))
        if changed:
            cells = self.suspicious(region.owners(), chunk)
            for cell, numbers in histories(chunk, cells):
                self.explain(cell, chunk.granule, [self.touch(chunk, i) for i in numbers])
        if keep:
            shadow = region.shadow or Shadow(region)
            region.shadow = shadow
            self.meet_past(shadow, chunk)
            self.remember(shadow, chunk)

    def cells(self, access: Access, granule: int) -> tuple[np.ndarray, np.ndarray]:
        """The cells that an access touches, and the lane at each."""
        space = access.array.space
        size = space.dtype.itemsize
        if access.lanes is None:
            places, ranks = self.lanes.spread(
                access.mask, space.address(access.base, access.offset), self.lanes.rank
            )
        else:
            places, ranks = access.offset, access.lanes - self.first_lane
        cells = places if granule == size else places * (size // granule)
        if space.origin:
            cells = cells + space.origin // granule
        lanes = ranks + self.first_lane if self.first_lane else ranks
        many = access.width * size // granule
        if many > 1:
            cells = (cells[:, None] + np.arange(many)).reshape(-1)
            lanes = np.repeat(lanes, many)
        return cells, lanes

    def touch(self, chunk: Chunk, i: int) -> Touch:
        """The touch of a chunk's number ``i``."""
        time = int(chunk.time[i])
        access, lane = chunk.log[time], int(chunk.lane[i])
        interval = self.interval[(lane - self.first_lane) // self.lanes.num_threads]
        constant = constant_of(access)
        return Touch(
            lane, access.how, access.place, int(interval), access.epoch, constant, access, time
        )

    def suspicious(self, owner: np.ndarray, chunk: Chunk) -> np.ndarray:
        """Cells where threads met that nothing ordered; some may prove harmless."""
        if len(chunk.epochs) == 1 or any(members is not None for members in self.syncs):
            return meetings(owner, [(chunk.cell[p], chunk.lane[p]) for p in chunk.parts])
        threads = self.threads
        warp = chunk.lane // threads * threads + chunk.lane % threads // WARP_SIZE
        found = [meetings(owner, [(chunk.cell[p], warp[p]) for p in chunk.parts])]
        for epoch in chunk.epochs:
            now = [(p, chunk.epoch(p) == epoch) for p in chunk.parts]
            found.append(meetings(owner, [(chunk.cell[p][e], chunk.lane[p][e]) for p, e in now]))
        return np.unique(np.concatenate(found))

    def explain(self, cell: int, granule: int, touches: list[Touch]) -> None:
        """Report the pairs of accesses at one cell that nothing orders."""
        recent: list[Touch] = []
        for touch in touches:
            for earlier in recent:
                if self.clash(earlier, touch):
                    self.fault(earlier, touch, cell, granule)
            recent = [touch, *(t for t in recent if t.lane != touch.lane or t.how != touch.how)]
            recent = [
                t for i, t in enumerate(recent) if sum(r.how == t.how for r in recent[:i]) < 2
            ]

    def clash(self, a: Touch, b: Touch) -> bool:
        """Whether two touches of a cell, ``a`` before ``b``, make a race."""
        if a.lane == b.lane or (a.how == b.how and a.how != "write"):
            return False
        (block_a, thread_a), (block_b, thread_b) = (divmod(t.lane, self.threads) for t in (a, b))
        if block_a != block_b:
            if self.order.ordered(block_a, a, block_b):
                return False
        elif thread_a // WARP_SIZE == thread_b // WARP_SIZE and self.synchronised(a, b):
            return False
        if not self.same_value(a, b):
            return True
        access = b.access or a.access
        assert access is not None
        self.report.note(
            f"{b.place[0]}:{b.place[1]}: several threads write the same value to one element of "
            f"{access.array.name}; that is harmless, but one of them would do"
        )
        return False

    def synchronised(self, a: Touch, b: Touch) -> bool:
        """Whether a ``syncwarp`` between two touches had both lanes of a warp."""
        lanes = [t.lane - self.first_lane for t in (a, b)]
        return any(
            members is None or members.reshape(-1)[lanes].all()
            for members in self.syncs[a.epoch : b.epoch]
        )

    def same_value(self, a: Touch, b: Touch) -> bool:
        """Whether two threads write the same bits by one line."""
        if a.how != "write" or b.how != "write" or a.place != b.place:
            return False
        if a.access is None or a.access is not b.access:
            return a.constant is not None and bool(a.constant == b.constant)
        value = strong(a.access.value)
        if not isinstance(value, np.ndarray):
            return a.access.lanes is None
        wide = np.broadcast_to(value, self.lanes.shape).reshape(-1)
        one, other = (wide[t.lane - self.first_lane] for t in (a, b))
        return bool(one.tobytes() == other.tobytes())

    def fault(self, a: Touch, b: Touch, cell: int, granule: int) -> None:
        access = b.access or a.access
        assert access is not None
        array, space = access.array, access.array.space
        index = array.index_of((cell * granule - space.origin) // space.dtype.itemsize)
        threads = self.threads
        block_a, block_b = a.lane // threads, b.lane // threads
        thread_a, thread_b = (
            self.lanes.thread(t.lane % threads - self.lanes.first_thread) for t in (a, b)
        )
        who_a, who_b = f"thread {show(thread_a)}", f"thread {show(thread_b)}"
        if block_a != block_b:
            who_a += f" of block {show(self.coordinates(block_a))}"
            who_b += f" of block {show(self.coordinates(block_b))}"
            why = "blocks run in any order, and no threadfence and atomic operation order these"
        elif a.lane % threads // WARP_SIZE == b.lane % threads // WARP_SIZE:
            why = "they are of one warp, and no syncwarp or barrier stands between"
        else:
            why = "no barrier stands between"
        line = "the same line" if a.place == b.place else f"line {a.place[1]}"
        self.report.add(
            Fault(
                kind="race",
                message=f"{who_b} {VERBS[b.how]} element {show(index)} of the {space.kind} array "
                f"{array.name}, which {who_a} {VERBS[a.how]} at {line}; {why}",
                line=b.place[1],
                array=array.name,
                index=index,
                threads=(thread_b, thread_a),
                block=self.coordinates(block_b),
                file=b.place[0],
            )
        )

    # The past of global memory, and of intervals that were looked at in parts

    def meet_past(self, shadow: Shadow, chunk: Chunk) -> None:
        """Report what clashes with an earlier block, or an earlier part of the interval."""
        if not shadow.used:
            return
        writes, atomics, _ = chunk.parts
        everything = slice(0, len(chunk.cell))
        changes = slice(writes.start, atomics.stop)
        self.meet_row(shadow, chunk, everything, shadow.writer, 0)
        self.meet_row(shadow, chunk, changes, shadow.reader, 1)
        self.meet_row(shadow, chunk, changes, shadow.other_reader, 1)

    def meet_row(
        self, shadow: Shadow, chunk: Chunk, part: slice, before: np.ndarray, row: int
    ) -> None:
        """`meet_past` for a part of the chunk and those who touched the cells ``before``."""
        threads = self.threads
        cells, lanes = chunk.cell[part], chunk.lane[part]
        known = before[cells]
        elsewhere = known // threads != lanes // threads
        interval = self.interval[(lanes - self.first_lane) // self.lanes.num_threads]
        mine = (known >= self.first_lane) & (known < self.first_lane + self.lanes.size)
        now = mine & (known != lanes) & (shadow.interval[row][cells] == interval)
        bad = np.flatnonzero((known != NOBODY) & (elsewhere | now))
        for i in bad[:MOST_CELLS].tolist():
            cell, touch = int(cells[i]), self.touch(chunk, part.start + i)
            how = "read" if row else "atomic" if shadow.atomic[cell] else "write"
            place, constant = shadow.places[shadow.place[row][cell]]
            when = int(shadow.interval[row][cell]), int(shadow.epoch[row][cell])
            earlier = Touch(int(known[i]), how, place, *when, constant)
            if self.clash(earlier, touch):
                self.fault(earlier, touch, cell, chunk.granule)

    def remember(self, shadow: Shadow, chunk: Chunk) -> None:
        """Keep who touched each cell last."""
        threads = self.threads
        writes, atomics, reads = chunk.parts
        for part, atomic in ((writes, False), (atomics, True)):
            cell = chunk.cell[part]
            if len(cell):
                shadow.writer[cell] = chunk.lane[part]
                shadow.atomic[cell] = atomic
                self.keep_when(shadow, chunk, part, 0)
        cell, lane = chunk.cell[reads], chunk.lane[reads]
        if len(cell):
            before = shadow.reader[cell]
            elsewhere = (before != NOBODY) & (before // threads != lane // threads)
            shadow.other_reader[cell[elsewhere]] = before[elsewhere]
            shadow.reader[cell] = lane
            beaten = shadow.reader[cell] // threads != lane // threads
            shadow.other_reader[cell[beaten]] = lane[beaten]
            self.keep_when(shadow, chunk, reads, 1)
        shadow.used = True

    def keep_when(self, shadow: Shadow, chunk: Chunk, part: slice, row: int) -> None:
        cell = chunk.cell[part]
        number = [shadow.number((a.place, constant_of(a))) for a in chunk.log]
        shadow.place[row][cell] = np.array(number, np.int32)[chunk.time[part]]
        shadow.epoch[row][cell] = chunk.epoch(part)
        block = (chunk.lane[part] - self.first_lane) // self.lanes.num_threads
        shadow.interval[row][cell] = self.interval[block]


def constant_of(access: Access) -> Value:
    """What a write stores when all its threads store the same; None if they do not."""
    value = access.value if access.how == "write" and access.lanes is None else None
    return None if isinstance(value, np.ndarray) else value


VERBS = {"read": "reads", "write": "writes", "atomic": "changes atomically"}


def near_writes(log: list[Access]) -> list[Access]:
    """The accesses that come near what is written: an interval may only read most of an array."""
    if len(log) < 8:
        return log
    extents = [extent(access) for access in log]
    changed = [e for a, e in zip(log, extents, strict=True) if a.how != "read"]
    low, high = min(e[0] for e in changed), max(e[1] for e in changed)
    return [a for a, e in zip(log, extents, strict=True) if e[0] <= high and e[1] >= low]


def extent(access: Access) -> tuple[int, int]:
    """First and last byte that an access may touch, in its block's copy of the memory."""
    low = high = access.base
    if isinstance(access.offset, np.ndarray):
        low, high = low + int(access.offset.min()), high + int(access.offset.max())
    size = access.array.space.dtype.itemsize
    return low * size, (high + access.width) * size - 1


def meetings(owner: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Cells that one number wrote and another touched; ``parts`` as in `Chunk`.

    The table ``owner`` is all NOBODY, and is left so.
    """
    (written, writer), (changed, changer), (read, reader) = parts
    found = []
    if len(written):
        owner[written] = writer
        for cell, number in parts:
            other = owner[cell]
            found.append(cell[(other != number) & (other != NOBODY)])
        owner[written] = NOBODY
    if len(changed) and len(read):
        for step in (1, -1):
            owner[changed[::step]] = changer[::step]
            other = owner[read]
            found.append(read[(other != reader) & (other != NOBODY)])
        owner[changed] = NOBODY
    found = [cells for cells in found if len(cells)]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def histories(chunk: Chunk, cells: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Some of the cells, each with the numbers of its touches in the order of time."""
    if not len(cells):
        return
    some = cells[np.linspace(0, len(cells) - 1, min(len(cells), MOST_CELLS)).astype(int)]
    here = np.flatnonzero(np.isin(chunk.cell, some))
    here = here[np.lexsort((chunk.time[here], chunk.cell[here]))]
    for part in np.split(here, np.flatnonzero(np.diff(chunk.cell[here])) + 1):
        yield int(chunk.cell[part[0]]), part.tolist()
