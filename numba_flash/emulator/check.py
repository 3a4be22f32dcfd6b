"""What the emulator watches for: bounds, unwritten elements, barriers."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import INT64, Value
from .lanes import Lanes, Mask, both, without
from .memory import Span
from .report import Fault, Report, show
from .spaces import SharedMemory

if TYPE_CHECKING:
    from .arguments import GlobalRegions
    from .groups import Group
    from .memory import Array
    from .race import Races
    from .trace import Trace

MOST_SPANS = 256
MOST_THREADS = 8


class Checker:
    """Turns what goes wrong in a batch of blocks into faults of the report.

    Parameters
    ----------
    lanes : Lanes
    report : Report
    active : bool
        Whether to look at all; ``checks=False`` runs faster.
    races : Races
    regions : GlobalRegions
        The memory of the launch's arguments.
    """

    def __init__(
        self,
        lanes: Lanes,
        report: Report,
        active: bool,
        dtype_facade: Any,
        races: Races,
        regions: GlobalRegions,
    ):
        self.lanes = lanes
        self.report = report
        self.active = active
        self.dtype_facade = dtype_facade
        self.shared: list[SharedMemory] = []
        self.regions = regions
        self.counts = report.counts
        self.races = races if active else None
        self.group: Group | None = None
        self.trace: Trace | None = None
        self.at_end: list[Callable[[], None]] = []
        self._spans: dict[int, Span] = {}

    def traced(self, function: FunctionType) -> frozenset[str]:
        """The variables of a function that are traced."""
        if self.trace is None or function is not self.trace.kernel:
            return frozenset()
        return frozenset(self.trace.names)

    def span(self, index: np.ndarray) -> Span:
        """The bounds of an index vector, computed once while the vector is in use."""
        span = self._spans.get(id(index))
        if span is None or span.source is not index:
            if len(self._spans) >= MOST_SPANS:
                self._spans.clear()
            span = self._spans[id(index)] = Span(index, self.active)
        return span

    def place(self) -> str:
        """``file:line`` of the statement that runs."""
        file, line = self.where()
        return f"{file}:{line}"

    def where(self) -> tuple[str, int]:
        """File and line of the statement that runs."""
        frame = self.lanes.frame()
        return frame.f_code.co_filename, frame.f_lineno

    def access(
        self,
        array: Array,
        base: int,
        offset: Value,
        lost: Mask,
        how: str,
        width: int = 1,
        value: Value = None,
    ) -> None:
        """Take note of an access to global or shared memory.

        Parameters
        ----------
        array : Array
        base, offset : int, lane vector or None
            Where, as `Array.locate` gives it: elements of ``array.space``.
        lost : mask or None
            Active lanes whose address is out of bounds.
        how : {"read", "write", "atomic"}
        width : int
            Elements in a row that each lane touches.
        value
            What a write stores.
        """
        mask = without(self.lanes.mask, lost)
        if self.lanes.visited is not None:
            first = None if offset is None else offset.flat[0]
            self.lanes.visited.add((id(array.space), base, first))
        place = self.where()
        if self.counts is not None:
            self.counts.access(array, base, offset, mask, how, width, place)
        if self.races is not None:
            self.races.access(array, base, offset, mask, how, width, place, value)

    def multiply_adds(self, number: int) -> None:
        """Count so many multiply-adds at the statement that runs."""
        if self.counts is not None:
            self.counts.multiply_adds(number, self.where())

    def fused(self, value: Value) -> Value:
        """The value of ``a * b + c``, which is counted for floats: one operation a lane."""
        if getattr(value, "dtype", INT64).kind == "f":
            self.multiply_adds(self.lanes.count)
        return value

    def count_bulk(
        self, array: Array, places: np.ndarray, how: str, place: tuple[str, int]
    ) -> None:
        """Count what a tensor copy moves: elements, by their places in ``array.space.flat``."""
        if self.counts is not None:
            self.counts.bulk(array, places, how, place)

    def fault(
        self,
        kind: str,
        message: str,
        mask: np.ndarray,
        array: str | None = None,
        index: tuple[int, ...] | None = None,
    ) -> None:
        frame = self.lanes.frame()
        wide = np.broadcast_to(mask, self.lanes.shape)
        block, _ = first(wide)
        threads = np.flatnonzero(wide[block])[:MOST_THREADS]
        self.report.add(
            Fault(
                kind=kind,
                message=message,
                line=frame.f_lineno,
                array=array,
                index=index,
                threads=tuple(self.lanes.thread(t) for t in threads),
                block=self.lanes.blocks[block],
                file=frame.f_code.co_filename,
                count=int(np.count_nonzero(wide)),
            )
        )

    def who(self, block: int, thread: int) -> str:
        return f"thread {show(self.lanes.thread(thread))} of block {show(self.lanes.blocks[block])}"

    # Memory

    def out_of_bounds(self, array: Array, index: tuple, lost: np.ndarray) -> None:
        lane = first(np.broadcast_to(lost, self.lanes.shape))
        at = tuple(self.entry(x, lane) for x in index)
        shape = tuple(self.entry(extent, lane) for extent in array.shape)
        self.fault(
            "out-of-bounds",
            f"index {show(at)} lies outside the {array.space.kind} array {array.name} of shape "
            f"{show(shape)}, {self.who(*lane)}",
            lost,
            array.name,
            at,
        )

    def read_too_early(
        self, array: Array, index: tuple, base: int, offset: Value, unwritten: np.ndarray
    ) -> None:
        """Nothing was written there, or what was is still on its way."""
        flying = unwritten & array.space.in_flight(base, offset)
        if np.any(flying):
            self.missing_wait(array, index, "read", np.asarray(flying))
        rest = unwritten & ~flying
        if np.any(rest):
            self.uninitialised_read(array, index, rest)

    def write_in_flight(
        self, array: Array, index: tuple, base: int, offset: Value, mask: Mask
    ) -> None:
        """Report a store to elements that an asynchronous instruction is still writing."""
        busy = np.atleast_2d(both(mask, array.space.busy(base, offset)))
        if self.active and busy.any():
            self.missing_wait(array, index, "written", busy)

    def missing_wait(self, array: Array, index: tuple, what: str, flying: np.ndarray) -> None:
        lane = first(np.broadcast_to(flying, self.lanes.shape))
        at = tuple(self.entry(x, lane) for x in index)
        self.fault(
            "missing-wait",
            f"element {show(at)} of the {array.space.kind} array {array.name} is {what} while an "
            f"asynchronous instruction is still using it, {self.who(*lane)}; wait for it first",
            flying,
            array.name,
            at,
        )

    def uninitialised_read(self, array: Array, index: tuple, unwritten: np.ndarray) -> None:
        lane = first(np.broadcast_to(unwritten, self.lanes.shape))
        at = tuple(self.entry(x, lane) for x in index)
        self.fault(
            "uninitialised-read",
            f"element {show(at)} of the {array.space.kind} array {array.name} is read before "
            f"anything was written to it, {self.who(*lane)}",
            unwritten,
            array.name,
            at,
        )

    def entry(self, x: Value, lane: tuple[int, int]) -> int:
        return int(np.broadcast_to(x, self.lanes.shape)[lane])

    # Barriers

    def barrier(self, name: str, votes: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """All threads of a block must arrive, except those that have returned.

        In a group that runs on its own this waits for the others, and gives back the sum of the
        votes that every group brought along.
        """
        if self.trace is not None:
            self.trace.barrier(self.lanes)
        first = self.group is None or not self.group.block.everybody.arrived
        if self.counts is not None and first:
            self.counts.barrier(self.lanes, self.where())
        self.check_barrier(name)
        return votes if self.group is None else self.group.sync_block(name, votes)

    def check_barrier(self, name: str) -> None:
        if not self.active:
            return
        for memory in self.shared:
            memory.settle()
        if self.lanes.mask is None:
            self.end_interval(None)
            return
        exited = self.lanes.exited()
        here = self.lanes.full_mask()
        expected = np.broadcast_to(True if exited is None else ~exited, self.lanes.shape)
        arrived = here.any(axis=1, keepdims=True)
        missing = arrived & expected & ~here
        if missing.any():
            block, thread = first(missing)
            self.fault(
                "barrier-divergence",
                f"only {np.count_nonzero(here[block])} of {np.count_nonzero(expected[block])} "
                f"threads reach {name}; {self.who(block, thread)} does not",
                missing,
            )
        elif (arrived & ~expected).any():
            self.report.note(
                f"{self.place()}: some threads have returned before {name}; the hardware no "
                "longer waits for them, older cards and other compilers may"
            )
        self.end_interval(None if arrived.all() else arrived)

    def end_interval(self, arrived: Mask) -> None:
        """What the blocks of ``arrived`` did so far is ordered before what they do next."""
        if self.races is not None:
            self.races.barrier(arrived)

    def syncwarp(self, members: np.ndarray | None) -> None:
        if self.group is not None:
            self.group.sync_warp()
        if self.races is not None:
            self.races.syncwarp(members)

    def fence(self) -> None:
        """``threadfence``: other blocks may see what the active lanes wrote."""
        if self.races is not None:
            self.races.fence(self.lanes.mask)

    def fence_block(self) -> None:
        """``threadfence_block``: the other threads of the block may see them."""
        if self.races is not None:
            self.races.fence_block(self.lanes.mask)

    def finish(self) -> None:
        """The batch has ended."""
        for action in self.at_end:
            action()
        if self.races is not None:
            self.races.finish()


def first(mask: np.ndarray) -> tuple[int, int]:
    """The first lane of a (blocks, threads) mask."""
    block, thread = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return int(block), int(thread)
