"""Twins of cp.async: copies that arrive when the thread that began them waits, not before.

The hardware may deliver a copy at any time up to the wait. Here it is as late as that: until then
the target is in flight, and a copy that nobody waits for never arrives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import instructions as isa
from .arithmetic import Value, truth
from .check import Checker
from .lanes import Lanes, without
from .memory import READ, WRITE, Array
from .rows import Row, Rows, only
from .spaces import SharedSpace


class Copy(NamedTuple):
    """A copy of the lanes of ``mask``, which belongs to each lane's group of this number."""

    source: Row | None
    target: Row
    mask: np.ndarray
    keep: np.ndarray
    group: np.ndarray
    place: tuple[str, int]


class Copies:
    """The copies of a batch of blocks that have not arrived.

    Attributes
    ----------
    committed : ndarray
        How many groups each lane has made.
    """

    def __init__(self, lanes: Lanes, checker: Checker):
        self.lanes = lanes
        self.checker = checker
        self.rows = Rows(lanes, checker)
        self.pending: list[Copy] = []
        self.committed = np.zeros((1, 1), np.int64)

    def start(
        self,
        instruction: isa.CpAsync,
        dst: Array,
        dst_offset: Value,
        src: Array,
        src_offset: Value,
        keep: Value,
    ) -> None:
        """``cp_async_*``: what a lane does not keep is zeros, and its source is not looked at."""
        size, lanes = instruction.num_bytes, self.lanes
        target = self.rows.locate(dst, dst_offset, size, "cp.async", "shared")
        kept, source = np.broadcast_to(truth(keep), lanes.shape), None
        with only(lanes, None if kept.all() else kept):
            if lanes.count:
                source = self.rows.locate(src, src_offset, size, "cp.async", "global")
                self.rows.announce(source, READ)
        going = without(lanes.mask, target.lost)
        self.rows.announce(target, WRITE, lanes.rank)
        going = np.broadcast_to(True if going is None else going, lanes.shape)
        self.depart(target, going)
        place = self.checker.where()
        self.pending.append(Copy(source, target, going, kept, self.committed, place))

    def depart(self, target: Row, mask: np.ndarray) -> None:
        space = target.space
        assert isinstance(space, SharedSpace)
        space.depart(self.rows.spread(target.positions(), mask))

    def commit(self, instruction: isa.CpAsyncCommit) -> None:
        self.committed = self.committed + (1 if self.lanes.mask is None else self.lanes.mask)

    def wait(self, instruction: isa.CpAsyncWait, n: int) -> None:
        """Let the active lanes' copies arrive, except those of their ``n`` youngest groups."""
        waiting, done = self.lanes.full_mask(), self.committed - n
        pending, self.pending = self.pending, []
        for copy in pending:
            arrived = copy.mask & waiting & (copy.group < done)
            if arrived.any():
                self.land(copy, arrived)
            rest = copy.mask & ~arrived
            if rest.any():
                self.pending.append(copy._replace(mask=rest))

    def land(self, copy: Copy, mask: np.ndarray) -> None:
        target, space = copy.target, copy.target.space
        assert isinstance(space, SharedSpace)
        values = self.rows.spread(self.values(copy), mask)
        space.land(self.rows.spread(target.positions(), mask), values)
        self.lanes.stores += 1
        if (copy.mask & ~mask).any():
            self.depart(target, copy.mask & ~mask)
        if self.checker.races is not None and not self.read_before(target.array):
            self.checker.races.access(
                target.array,
                target.base,
                target.offset,
                mask,
                WRITE,
                target.width,
                copy.place,
                self.lanes.rank,
            )

    def values(self, copy: Copy) -> np.ndarray:
        """What arrives, (blocks, threads, elements of the target)."""
        target, source = copy.target, copy.source
        shape = (*self.lanes.shape, target.width)
        if source is None:
            return np.zeros(shape, target.space.dtype)
        values = source.space.flat.take(source.positions(), mode="clip")
        values = np.broadcast_to(values, (*self.lanes.shape, source.width))
        values = np.ascontiguousarray(values).view(target.space.dtype)
        if source.lost is not None:
            values = np.where(source.lost[..., None], target.space.poison, values)
        return values if copy.keep.all() else np.where(copy.keep[..., None], values, 0)

    def read_before(self, array: Array) -> bool:
        """Whether a read before the wait has been reported; it need not be called a race too."""
        faults = self.checker.report.faults
        return any(f.kind == "missing-wait" and f.array == array.name for f in faults)
