"""NumPy twins of what warps with different roles do: mbarriers, tensor copies, wgmma.

Everything asynchronous is as late as the rules allow. A copy lands when somebody waits for its
barrier, a product when its group is waited for; until then the destination holds poison, and what
they read is read again at the wait, so that a buffer which was given back too early is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import instructions as isa
from .. import layouts
from .arguments import TensorMapArgument
from .arithmetic import Value, strong
from .check import Checker
from .clocks import GroupRaces
from .groups import Group, Meeting
from .lanes import Lanes
from .memory import ATOMIC, READ, WRITE, Array
from .race import Place
from .report import Fault, show
from .spaces import LocalSpace, SharedSpace

WARP_SIZE = 32
WARPGROUP = 128
NAMED_BARRIERS = 16
GROUP_SIZES: dict[type, int] = {
    isa.NamedBarrierSync: WARP_SIZE,
    isa.NamedBarrierArrive: WARP_SIZE,
    isa.MbarrierInit: WARP_SIZE,
    isa.MbarrierArrive: WARP_SIZE,
    isa.MbarrierArriveExpectTx: WARP_SIZE,
    isa.MbarrierWait: WARP_SIZE,
    isa.FenceProxyAsync: WARP_SIZE,
    isa.TmaLoad: WARP_SIZE,
    isa.TmaStore: WARP_SIZE,
    isa.BulkCommit: WARP_SIZE,
    isa.BulkWait: WARP_SIZE,
    isa.Wgmma: WARPGROUP,
    isa.WgmmaFence: WARPGROUP,
    isa.WgmmaCommit: WARPGROUP,
    isa.WgmmaWait: WARPGROUP,
    isa.SetMaxNReg: WARPGROUP,
}
"""Instructions of groups that wait for each other, and how many threads such a group has."""


def nothing(instruction: Any, *values: Value) -> None:
    """An instruction that changes when something happens, and not what."""


PASSED_OVER: dict[type, Callable[..., Any]] = dict.fromkeys(
    (isa.FenceMbarrierInit, isa.PrefetchTensorMap, isa.SetMaxNReg, isa.Touch), nothing
)
"""Instructions without an effect here."""


@dataclass
class Flight:
    """A box on its way to shared memory; where the tensor has ended, zeros."""

    space: SharedSpace
    places: np.ndarray
    source: np.ndarray
    source_places: np.ndarray
    exists: np.ndarray
    clock: np.ndarray

    def land(self) -> None:
        values = self.source[self.source_places]
        self.space.land(self.places, np.where(self.exists, values, values.dtype.type(0)))

    @property
    def num_bytes(self) -> int:
        return self.places.size * self.space.dtype.itemsize


@dataclass
class Mbarrier:
    """The state of a barrier in shared memory.

    Attributes
    ----------
    count, pending : int
        Arrivals that end a phase, and those that are missing.
    expected : int
        Bytes that copies must bring before the phase ends.
    clocks : list
        What each ended phase orders.
    seen : dict of int to int
        By group, how many phases it knows to have ended.
    orders : set of int
        Groups of which all threads are in order once they have waited for the last phase: all of
        them arrived, or one of them started the copy that the others wait for.
    """

    name: str
    count: int
    maker: int
    made_at: int
    pending: int = 0
    expected: int = 0
    flights: list[Flight] = field(default_factory=list)
    next_clock: np.ndarray | None = None
    clocks: list[np.ndarray | None] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    orders_next: set[int] = field(default_factory=set)
    orders: set[int] = field(default_factory=set)

    def end_phase_if_complete(self) -> None:
        """End the phase when all have arrived and every byte is on its way; the copies land."""
        if self.pending > 0 or sum(flight.num_bytes for flight in self.flights) != self.expected:
            return
        for flight in self.flights:
            flight.land()
            self.next_clock = merged(self.next_clock, flight.clock)
        self.clocks.append(self.next_clock)
        self.next_clock = None
        self.orders, self.orders_next = self.orders_next, set()
        self.pending, self.expected, self.flights = self.count, 0, []

    @property
    def phases(self) -> int:
        """How many have ended."""
        return len(self.clocks)

    def next_phase(self, group: int, parity: int) -> int | None:
        """The first ended phase of this parity that a group has not waited for yet.

        A wait that passes proves no more than that, even when the barrier has gone on since.
        """
        first = self.seen.get(group, 0)
        first += (first + parity) & 1
        return first if first < self.phases else None

    def missing(self) -> str:
        """What the phase waits for, in words."""
        parts = [f"{self.pending} of {self.count} arrivals are missing"] if self.pending else []
        brought = sum(flight.num_bytes for flight in self.flights)
        if brought != self.expected:
            parts.append(f"{self.expected} bytes are expected and {brought} are on their way")
        return " and ".join(parts) or "nothing is missing"


@dataclass
class Product:
    """A wgmma that has been issued."""

    instruction: isa.Wgmma
    acc: Array
    accumulate: bool
    a: Array
    a_places: np.ndarray | None
    a_registers: np.ndarray | None
    b: Array
    b_places: np.ndarray
    place: Place


@dataclass
class BulkStore:
    """A tensor store that has been issued."""

    target: Array
    target_places: np.ndarray
    source: Array
    source_places: np.ndarray
    add: bool
    place: Place
    lane: int
    values: np.ndarray | None = None


def merged(clock: np.ndarray | None, other: np.ndarray) -> np.ndarray:
    return other if clock is None else np.maximum(clock, other)


class Hopper:
    """The twins for one group of a block."""

    def __init__(self, lanes: Lanes, checker: Checker):
        self.lanes = lanes
        self.checker = checker
        self.products: list[Product] = []
        self.product_groups: list[list[Product]] = []
        self.stores: list[BulkStore] = []
        self.store_groups: list[list[BulkStore]] = []
        self.sums: dict[LocalSpace, np.ndarray] = {}
        self.handlers: dict[type, Callable[..., Any]] = {
            isa.MbarrierInit: self.mbarrier_init,
            isa.MbarrierArrive: self.mbarrier_arrive,
            isa.MbarrierArriveExpectTx: self.mbarrier_arrive,
            isa.MbarrierWait: self.mbarrier_wait,
            isa.FenceProxyAsync: self.fence_proxy_async,
            isa.TmaLoad: self.tma_load,
            isa.TmaStore: self.tma_store,
            isa.BulkCommit: self.bulk_commit,
            isa.BulkWait: self.bulk_wait,
            isa.Wgmma: self.wgmma,
            isa.WgmmaFence: self.wgmma_fence,
            isa.WgmmaCommit: self.wgmma_commit,
            isa.WgmmaWait: self.wgmma_wait,
            isa.NamedBarrierSync: self.named_barrier_sync,
            isa.NamedBarrierArrive: self.named_barrier_arrive,
        }
        checker.at_end.append(self.finish)

    # Who and where

    @property
    def group(self) -> Group:
        assert self.checker.group is not None
        return self.checker.group

    @property
    def races(self) -> GroupRaces | None:
        races = self.checker.races
        assert races is None or isinstance(races, GroupRaces)
        return races

    def place(self) -> Place:
        frame = self.lanes.frame()
        return frame.f_code.co_filename, frame.f_lineno

    def each_lane(self, *values: Value) -> Iterator[tuple]:
        """The number of each active lane in the grid, and its values."""
        first_lane = self.races.first_lane if self.races else self.lanes.first_thread
        wide = [strong(value) for value in values]
        ranks, *parts = self.lanes.spread(self.lanes.mask, self.lanes.rank, *wide)
        for rank, *own in zip(ranks.tolist(), *(part.tolist() for part in parts), strict=True):
            yield first_lane + rank, *own

    def uniform(self, value: Value, what: str) -> int:
        """A value that all active lanes must agree on."""
        wide = self.lanes.spread(self.lanes.mask, strong(value))[0]
        if len(wide) and (wide != wide[0]).any():
            self.fault("barrier-divergence", f"{what} differs between the threads")
        return int(wide[0])

    def fault(
        self, kind: str, message: str, array: str | None = None, place: Place | None = None
    ) -> None:
        file, line = place or self.place()
        self.checker.report.add(
            Fault(
                kind=kind,
                message=f"{message}, {self.group.name} of block {show(self.lanes.blocks[0])}",
                line=line,
                array=array,
                threads=(self.lanes.thread(0),),
                block=self.lanes.blocks[0],
                file=file,
            )
        )

    # Barriers in shared memory

    def barrier(self, bars: Array, index: int) -> Mbarrier | None:
        """The barrier of an element; a fault where there is none, or none that one can see."""
        barrier = self.group.block.mbarriers.get(self.barrier_key(bars, index))
        if barrier is None:
            self.fault(
                "uninitialised-read",
                f"element {show((index,))} of {bars.name} is used as a barrier, and mbarrier_init "
                "has not been called for it",
                bars.name,
            )
        elif self.races and self.races.clocks.known[self.group.index, barrier.maker] < (
            barrier.made_at
        ):
            self.fault(
                "race",
                f"the barrier {barrier.name} is used with nothing that orders this after its "
                "mbarrier_init; call syncthreads between",
                bars.name,
            )
        return barrier

    def barrier_key(self, bars: Array, index: int) -> tuple[Any, int]:
        return bars.space.region, int(index) + int(bars.start)

    def mbarrier_init(
        self, instruction: isa.MbarrierInit, bars: Array, index: Value, count: Value
    ) -> None:
        for _, at, number in self.each_lane(index, count):
            if self.inside(bars, at, 1):
                me = self.group.index
                self.group.block.mbarriers[self.barrier_key(bars, at)] = Mbarrier(
                    name=f"{bars.name}[{at}]",
                    count=number,
                    maker=me,
                    made_at=int(self.group.clocks.known[me, me]),
                    pending=number,
                )

    def mbarrier_arrive(
        self,
        instruction: isa.MbarrierArrive | isa.MbarrierArriveExpectTx,
        bars: Array,
        index: Value,
        num_bytes: Value = 0,
    ) -> None:
        for _, at, expected in self.each_lane(index, num_bytes):
            barrier = self.barrier(bars, at) if self.inside(bars, at, 1) else None
            if barrier is None:
                continue
            if barrier.pending == 0:
                barrier.end_phase_if_complete()
            if barrier.pending == 0:
                self.fault(
                    "barrier-divergence",
                    f"more threads arrive at the barrier {barrier.name} than the "
                    f"{barrier.count} it was made for: {barrier.missing()}",
                    bars.name,
                )
                continue
            barrier.expected += expected
            barrier.pending -= 1
            if self.races:
                barrier.next_clock = self.races.release(barrier.next_clock)
            if self.lanes.mask is None:
                barrier.orders_next.add(self.group.index)
            if not barrier.flights and not barrier.expected:
                barrier.end_phase_if_complete()

    def mbarrier_wait(
        self, instruction: isa.MbarrierWait, bars: Array, index: Value, parity: Value
    ) -> None:
        at = self.uniform(index, "the barrier to wait for")
        wanted = self.uniform(parity, "the parity to wait for") & 1
        barrier = self.barrier(bars, at) if self.inside(bars, at, 1) else None
        if barrier is None:
            return

        def passed() -> bool:
            if barrier.phases & 1 != wanted:
                return True  # whatever else is on its way may come later
            barrier.end_phase_if_complete()
            return barrier.phases & 1 != wanted

        self.group.wait_until(
            passed,
            lambda: (
                f"phase {barrier.phases} of the barrier {barrier.name} (parity {wanted}), "
                f"where {barrier.missing()}"
            ),
        )
        phase = barrier.next_phase(self.group.index, wanted)
        if phase is not None:
            barrier.seen[self.group.index] = phase + 1
            if self.races:
                self.races.acquire(barrier.clocks[phase])
        if self.group.index in barrier.orders and self.lanes.mask is None:
            self.checker.end_interval(None)
        elif self.group.index in barrier.orders and self.races:
            self.races.meet_in_warps(self.lanes.full_mask())

    # Named barriers

    def named(self, barrier: Value, threads: Value) -> tuple[Meeting, int, int, int]:
        number = self.uniform(barrier, "the number of the barrier")
        needed = self.uniform(threads, "the number of threads")
        if not 0 <= number < NAMED_BARRIERS or needed % WARP_SIZE or needed <= 0:
            self.fault(
                "barrier-divergence",
                f"named barrier {number} is used with {needed} threads; barriers have the numbers "
                f"0 to {NAMED_BARRIERS - 1}, and whole warps of {WARP_SIZE} threads come to them",
            )
        block = self.group.block
        meeting = block.named.setdefault(number, Meeting())
        if meeting.arrived and meeting.needed != needed:
            self.fault(
                "barrier-divergence",
                f"named barrier {number} is used with {needed} threads while others use it with "
                f"{meeting.needed}",
            )
        here = self.lanes.count
        if meeting.arrived + here > needed:
            self.fault(
                "barrier-divergence",
                f"{meeting.arrived + here} threads come to named barrier {number}, which is for "
                f"{needed}",
            )
        return meeting, here, needed, number

    def named_barrier_sync(
        self, instruction: isa.NamedBarrierSync, barrier: Value, threads: Value
    ) -> None:
        meeting, here, needed, number = self.named(barrier, threads)
        self.checker.end_interval(None)
        self.group.meet(meeting, here, needed, f"named barrier {number}")

    def named_barrier_arrive(
        self, instruction: isa.NamedBarrierArrive, barrier: Value, threads: Value
    ) -> None:
        meeting, here, needed, _ = self.named(barrier, threads)
        self.group.arrive(meeting, here, needed)

    # Memory, as an asynchronous instruction sees it

    def inside(self, array: Array, offset: int, count: int) -> bool:
        """Whether ``count`` elements from ``offset`` on lie in an array; a fault if not."""
        size = int(np.prod(array.shape)) if array.shape else 1
        if offset >= 0 and offset + count <= size:
            return True
        self.fault(
            "out-of-bounds",
            f"elements {offset} to {offset + count - 1} of the {array.space.kind} array "
            f"{array.name} are used, which has {size}",
            array.name,
        )
        return False

    def tile(self, array: Array, offset: int, byte_places: np.ndarray) -> np.ndarray | None:
        """Places in ``flat`` of the elements at these bytes; None when some lie outside."""
        start = int(array.start) + offset
        places = byte_places.reshape(-1) // array.space.dtype.itemsize
        low, high = int(places.min()), int(places.max())
        if not self.inside(array, offset + low - start, high - low + 1):
            return None
        return places

    def aligned(self, array: Array, offset: int, alignment: int) -> int | None:
        """The byte where a tile begins; None with a fault when it is not aligned."""
        start = (int(array.start) + offset) * array.space.dtype.itemsize
        if start % alignment == 0:
            return start
        self.fault(
            "out-of-bounds",
            f"element {offset} of the shared array {array.name} is at byte {start}, and this "
            f"instruction takes multiples of {alignment}",
            array.name,
        )
        return None

    def check_source(self, array: Array, places: np.ndarray) -> None:
        """What an asynchronous instruction reads must be there, and visible to it."""
        space = shared(array)
        if not self.checker.active:
            return
        flying = space.flying[places] != 0
        unwritten = space.valid[places] != space.written
        for bad, kind, what in (
            (flying, "missing-wait", "a copy is still writing it; wait for its barrier first"),
            (unwritten & ~flying, "uninitialised-read", "nothing has been written to it"),
        ):
            if bad.any():
                at = array.index_of(int(places[np.argmax(bad)]))
                self.fault(
                    kind,
                    f"element {show(at)} of the shared array {array.name} is read by an "
                    f"asynchronous instruction, and {what}",
                    array.name,
                )
        if self.races:
            unfenced = self.races.unfenced(space, places)
            if unfenced.any():
                at = array.index_of(int(places[np.argmax(unfenced)]))
                self.fault(
                    "missing-wait",
                    f"element {show(at)} of the shared array {array.name} was stored by a thread "
                    "and is read by an asynchronous instruction, which may not see it yet; call "
                    "fence_proxy_async after the store",
                    array.name,
                )

    def check_target(self, array: Array, places: np.ndarray) -> None:
        """What a copy overwrites must not be in use by an asynchronous instruction."""
        space = shared(array)
        busy = (space.flying[places] != 0) | space.is_lent(places)
        if self.checker.active and busy.any():
            at = array.index_of(int(places[np.argmax(busy)]))
            self.fault(
                "missing-wait",
                f"element {show(at)} of the shared array {array.name} is overwritten while an "
                "asynchronous instruction is still using it; wait for it first",
                array.name,
            )

    def touch(self, array: Array, places: np.ndarray, how: str, lane: int, place: Place) -> None:
        """Tell the race check of an asynchronous access."""
        if self.races:
            self.races.bulk(array, places, how, (lane,), place)

    def fence_proxy_async(self, instruction: isa.FenceProxyAsync) -> None:
        if self.races:
            self.races.fence_proxy()

    # Tensor copies

    def box(
        self, tensor_map: TensorMapArgument, coordinates: tuple[int, ...], start: int, itemsize: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes in shared memory, places in global memory, and which elements of a box exist."""
        shape = tensor_map.box[::-1]
        array = tensor_map.array
        places = np.zeros(shape, np.int64)
        exists = np.ones(shape, bool)
        for axis, (low, extent, size, stride) in enumerate(
            zip(coordinates[::-1], shape, array.shape, array.strides, strict=True)
        ):
            index = low + np.arange(extent)
            index = index.reshape([-1 if a == axis else 1 for a in range(len(shape))])
            places += index * stride
            exists &= (index >= 0) & (index < size)
        in_tile = layouts.box_bytes(start, shape, itemsize, tensor_map.swizzled)
        places = np.where(exists, places + array.start, 0)
        return in_tile.reshape(-1), places.reshape(-1), exists.reshape(-1)

    def tma_load(
        self, instruction: isa.TmaLoad, target: Array, offset: Value, tensor_map: Any, *rest: Value
    ) -> None:
        *coordinates, bars, index = rest
        source, place = tensor_map.array, self.place()
        itemsize = target.space.dtype.itemsize
        for lane, off, at, *corner in self.each_lane(offset, index, *coordinates):
            start = self.aligned(target, off, tensor_map.alignment)
            barrier = self.barrier(bars, at) if self.inside(bars, at, 1) else None
            if start is None or barrier is None:
                continue
            in_tile, places, exists = self.box(tensor_map, tuple(corner), start, itemsize)
            targets = self.tile(target, off, in_tile)
            if targets is None:
                continue
            self.touch(source, places[exists], READ, lane, place)
            self.check_target(target, targets)
            self.touch(target, targets, WRITE, lane, place)
            self.checker.count_bulk(source, places[exists], READ, place)
            shared(target).depart(targets)
            clock = self.group.clocks.release(self.group.index)
            barrier.orders_next.add(self.group.index)
            barrier.flights.append(
                Flight(shared(target), targets, source.space.flat, places, exists, clock)
            )

    def tma_store(self, instruction: isa.TmaStore, tensor_map: Any, *rest: Value) -> None:
        *coordinates, source, offset = rest
        place = self.place()
        itemsize = source.space.dtype.itemsize
        for lane, off, *corner in self.each_lane(offset, *coordinates):
            start = self.aligned(source, off, tensor_map.alignment)
            if min(corner) < 0:
                self.fault(
                    "out-of-bounds",
                    f"a tensor store begins at {show(tuple(corner))}; a load may begin before the "
                    "array, a store may not (the hardware takes it for an illegal instruction)",
                    tensor_map.array.name,
                )
                continue
            if start is None:
                continue
            in_tile, places, exists = self.box(tensor_map, tuple(corner), start, itemsize)
            sources = self.tile(source, off, in_tile)
            if sources is None:
                continue
            self.check_source(source, sources[exists])
            self.touch(source, sources, READ, lane, place)
            shared(source).lend(sources[exists])
            self.stores.append(
                BulkStore(
                    tensor_map.array,
                    places[exists],
                    source,
                    sources[exists],
                    instruction.add,
                    place,
                    lane,
                )
            )

    def bulk_commit(self, instruction: isa.BulkCommit) -> None:
        self.store_groups.append(self.stores)
        self.stores = []

    def bulk_wait(self, instruction: isa.BulkWait, left: int) -> None:
        """Sources are read, and targets written, as late as this."""
        done = self.store_groups[: max(0, len(self.store_groups) - int(left))]
        for store in (store for group in done for store in group):
            self.read_source(store)
            if not instruction.read:
                self.write_target(store)
        if not instruction.read:
            self.store_groups = self.store_groups[len(done) :]

    def read_source(self, store: BulkStore) -> None:
        if store.values is None:
            shared(store.source).take_back(store.source_places)
            if not self.blamed(store.source):
                self.touch(store.source, store.source_places, READ, store.lane, store.place)
            store.values = store.source.space.flat[store.source_places]

    def write_target(self, store: BulkStore) -> None:
        space, places = store.target.space, store.target_places
        how = ATOMIC if store.add else WRITE
        self.touch(store.target, places, how, store.lane, store.place)
        self.checker.count_bulk(store.target, places, how, store.place)
        self.lanes.stores += 1
        assert store.values is not None
        if store.add:
            np.add.at(space.flat, places, store.values)
        else:
            space.flat[places] = store.values
        if space.valid is not None:
            space.valid[places] = True

    def finish(self) -> None:
        """The group ends: stores whose source was waited for still land."""
        for store in (store for group in self.store_groups for store in group):
            if store.values is not None:
                self.write_target(store)
                continue
            self.fault(
                "missing-wait",
                f"the block ends while a tensor store may still read the shared array "
                f"{store.source.name}; call bulk_wait_read first",
                store.source.name,
                store.place,
            )
        for store in self.stores:
            self.fault(
                "missing-wait",
                f"a tensor store of the shared array {store.source.name} is never committed",
                store.source.name,
                store.place,
            )

    # Products of a warpgroup

    def wgmma_fence(self, instruction: isa.WgmmaFence) -> None:
        self.lanes.fences += 1

    def wgmma(
        self,
        instruction: isa.Wgmma,
        acc: Array,
        a: Array,
        a_offset: Value,
        b: Array,
        b_offset: Value,
        accumulate: Value,
    ) -> None:
        if self.lanes.count != WARPGROUP:
            self.fault(
                "barrier-divergence",
                f"wgmma is reached by {self.lanes.count} threads of a warpgroup of {WARPGROUP}",
            )
            return
        place = self.place()
        adds = bool(self.uniform(accumulate, "whether to accumulate"))
        self.check_registers(acc, instruction.n // 2, "accumulators", adds)
        a_places = a_registers = None
        if instruction.a == "registers":
            first_register = self.uniform(a_offset, "the offset of A")
            count = 4 * instruction.steps
            self.check_registers(a, count, "registers of A", True, first_register)
            a_registers = registers(a).data[first_register : first_register + count].copy()
            registers(a).lend(first_register, count)
        else:
            a_places = self.operand(a, a_offset, instruction.a_bytes)
        b_places = self.operand(b, b_offset, instruction.b_bytes)
        if b_places is None or (a_places is None and a_registers is None):
            return
        self.remember_sums(acc, instruction.n // 2)
        self.products.append(
            Product(instruction, acc, adds, a, a_places, a_registers, b, b_places, place)
        )
        self.checker.multiply_adds(instruction.multiply_adds)

    def check_registers(
        self, array: Array, count: int, what: str, used: bool, start: int = 0
    ) -> None:
        """Registers that a product takes must have been written, and fenced since."""
        space = registers(array)
        if not self.inside(array, start, count) or not self.checker.active:
            return
        fresh = [e for e in range(start, start + count) if e not in space.flying]
        if used and fresh and not space.valid_rows[fresh].all():
            self.fault(
                "uninitialised-read",
                f"the {what} {array.name} are used by wgmma, and nothing was written to some",
                array.name,
            )
        if space.fences == self.lanes.fences or not self.lanes.fences:
            self.fault(
                "missing-wait",
                f"no wgmma_fence stands between the last access of the {what} {array.name} and "
                "wgmma, which may find old values in them",
                array.name,
            )

    def operand(
        self, array: Array, offset: Value, bytes_of: Callable[[int], np.ndarray]
    ) -> np.ndarray | None:
        """Places of an operand in shared memory, after the checks."""
        off = self.uniform(offset, f"the offset in {array.name}")
        start = self.aligned(array, off, layouts.ATOM_BYTES)
        places = None if start is None else self.tile(array, off, bytes_of(start))
        if places is not None:
            self.check_source(array, places)
            self.read_by_warps(array, places, self.place())
            shared(array).lend(places)
        return places

    def blamed(self, array: Array) -> bool:
        """Whether a missing wait has been reported; what it touches need not be a race too."""
        faults = self.checker.report.faults
        return any(f.kind == "missing-wait" and f.array == array.name for f in faults)

    def read_late(self, array: Array, places: np.ndarray, place: Place) -> None:
        """An operand is read at the wait, the last moment at which it may be."""
        shared(array).take_back(places)
        if not self.blamed(array):
            self.read_by_warps(array, places, place)

    def read_by_warps(self, array: Array, places: np.ndarray, place: Place) -> None:
        if self.races:
            first = self.races.first_lane
            lanes = tuple(range(first, first + WARPGROUP, WARP_SIZE))
            self.races.bulk(array, places, READ, lanes, place)

    def remember_sums(self, acc: Array, count: int) -> None:
        """Keep what the accumulators hold while they are in flight."""
        space = registers(acc)
        if not space.has_flights:
            self.sums[space] = space.data[:count].copy()
        space.depart(0, count)

    def wgmma_commit(self, instruction: isa.WgmmaCommit) -> None:
        self.product_groups.append(self.products)
        self.products = []

    def wgmma_wait(self, instruction: isa.WgmmaWait, left: int) -> None:
        """Operands are read, and sums written, as late as this."""
        while len(self.product_groups) > int(left):
            for product in self.product_groups.pop(0):
                self.compute(product)

    def compute(self, product: Product) -> None:
        instruction, space = product.instruction, registers(product.acc)
        if product.a_places is not None:
            self.read_late(product.a, product.a_places, product.place)
            a = product.a.space.flat[product.a_places].reshape(64, instruction.k)
        else:
            registers(product.a).take_back()
            a = self.gather_registers(instruction, product.a_registers)
        self.read_late(product.b, product.b_places, product.place)
        b = product.b.space.flat[product.b_places].reshape(instruction.k, instruction.n)
        # A product for each warp is so small that NumPy's library does not divide it among threads,
        # which would wait for each other more than they compute.
        rows = values_of(a, instruction.dtype).reshape(-1, 16, instruction.k)
        result = rows @ values_of(b, instruction.dtype)
        row, column = instruction.acc_layout
        by_register = result[:, row, column].transpose(1, 0, 2)
        by_register = by_register.reshape(-1, 1, WARPGROUP)
        sums = self.sums[space]
        sums[...] = sums + by_register if product.accumulate else by_register
        space.land(0, sums)

    @staticmethod
    def gather_registers(instruction: isa.Wgmma, words: np.ndarray | None) -> np.ndarray:
        """A, (64, k), from the registers that hold two elements each."""
        assert words is not None
        row, column = instruction.a_layout
        halves = np.stack([words & 0xFFFF, words >> 16], axis=1).astype(np.uint16)
        by_warp = halves.reshape(len(words), 2, -1, WARP_SIZE)
        a = np.empty((64, instruction.k), np.uint16)
        for warp in range(WARPGROUP // WARP_SIZE):
            a[16 * warp + row, column] = by_warp[:, :, warp]
        return a


def shared(array: Array) -> SharedSpace:
    if not isinstance(array.space, SharedSpace):
        raise TypeError(f"{array.name} is a {array.space.kind} array; this takes a shared one")
    return array.space


def registers(array: Array) -> LocalSpace:
    if not isinstance(array.space, LocalSpace):
        raise TypeError(f"{array.name} is a {array.space.kind} array; this takes a local one")
    return array.space


def values_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit floats as float32."""
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
