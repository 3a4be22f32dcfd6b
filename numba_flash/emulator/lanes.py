"""The lanes of a batch of blocks: who is active, and how control flow changes that.

All threads of a batch run the kernel together. A value per lane is an array of shape (blocks,
threads), or anything that broadcasts to it: what depends on the thread alone is (1, threads), what
depends on the block alone (blocks, 1), what is the same everywhere a plain number. The active
lanes are a boolean mask of such a shape, or None when all are active. A branch narrows the mask
for its body, a jump takes lanes out until the place where they resume.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import INT64, UNASSIGNED, Value, select, truth
from .report import KERNEL_MARK, Coordinates

if TYPE_CHECKING:
    from .groups import Group

Mask = Any
"""A boolean lane vector, or None for all lanes."""

MOST_IDLE_TURNS = 1_000_000
"""Iterations of a loop in which no lane leaves and no memory is written, before it is stopped."""
SPIN_TURNS = 32
"""Iterations after which a loop without progress is looked at, in a group that runs on its own."""
MOST_SPIN_PLACES = 8
"""A loop that looks at more places of memory in SPIN_TURNS iterations is searching, not waiting."""
NO_LANE = np.zeros((1, 1), bool)


def both(a: Mask, b: Mask) -> Mask:
    """Intersection of two masks, where None is all lanes."""
    if a is None:
        return b
    return a if b is None else a & b


def either(a: Mask, b: Mask) -> Mask:
    """Union of two sets of lanes, where None is the empty set."""
    if a is None:
        return b
    return a if b is None else a | b


def without(mask: Mask, gone: np.ndarray | None) -> Mask:
    """``mask`` (None: all lanes) less the lanes of ``gone`` (None: nobody)."""
    if gone is None:
        return mask
    return ~gone if mask is None else mask & ~gone


@dataclass
class Branch:
    """An open ``if``: the mask to restore, and the condition that splits it."""

    mask: Mask
    count: int
    gone: Mask
    condition: Value


@dataclass
class Loop:
    """An open loop: lanes that entered, lanes still in it, lanes that left by ``break``.

    ``turns`` counts iterations since ``progress``, the active lanes and the stores, was noted.
    """

    mask: Mask
    count: int
    gone: Mask
    running: Mask
    returned: Mask
    progress: tuple[int, int]
    broken: Mask = None
    turns: int = 0


@dataclass
class Frame:
    """A called function with early returns."""

    mask: Mask
    count: int
    gone: Mask
    live: int
    returned: Mask
    value: Value = UNASSIGNED


class Lanes:
    """The active lanes of one batch of blocks.

    Attributes
    ----------
    mask : ndarray of bool or None
        The active lanes; None is all of them.
    count : int
        How many are active.
    alive : int
        How many have not returned from the kernel.
    live : int
        How many have not returned from the current function. When ``count == live``, no lane
        waits elsewhere and an assignment needs no merge.
    stores : int
        How many stores and atomic changes of memory there have been.
    num_threads, first_thread : int
        Threads of a block that run here, and the first of them: all of them, or one group.
    group : Group or None
        The coroutine in which a group runs.
    fences : int
        How many ``wgmma_fence`` there have been.
    visited : set or None
        The places in memory that a loop reads which may be waiting for somebody.
    """

    def __init__(
        self,
        blocks: list[Coordinates],
        block_dim: Coordinates,
        early_return: bool,
        threads: range | None = None,
    ):
        self.blocks = blocks
        self.block_dim = block_dim
        self.early_return = early_return
        self.block_threads = block_dim[0] * block_dim[1] * block_dim[2]
        threads = range(self.block_threads) if threads is None else threads
        self.first_thread, self.num_threads = threads.start, len(threads)
        self.group: Group | None = None
        self.visited: set[tuple] | None = None
        self.fences = 0
        self.shape = (len(blocks), self.num_threads)
        self.size = len(blocks) * self.num_threads
        self.rank = np.arange(self.size).reshape(self.shape)
        self.mask: Mask = None
        self.count = self.live = self.alive = self.size
        self.gone: Mask = None
        self.returned: Mask = None
        self.branches: list[Branch | bool] = []
        self.decisions: list[Value] = []
        self.loops: list[Loop] = []
        self.last_loop: Loop | None = None
        self.frames: list[Frame] = []
        self.stores = 0

    # The mask

    def narrow(self, mask: Mask) -> None:
        self.mask = mask
        if mask is None:
            self.count = self.size
        else:
            self.count = int(np.count_nonzero(mask)) * (self.size // mask.size)

    def nobody(self) -> None:
        self.mask, self.count = NO_LANE, 0

    def full_mask(self) -> np.ndarray:
        """The active lanes as a (blocks, threads) array."""
        return np.broadcast_to(True if self.mask is None else self.mask, self.shape)

    def spread(self, mask: Mask, *values: Value) -> list[np.ndarray]:
        """Values as one-dimensional arrays over the lanes of ``mask``, block after block."""
        wide = [np.broadcast_to(value, self.shape) for value in values]
        if mask is None:
            return [value.reshape(-1) for value in wide]
        chosen = np.broadcast_to(mask, self.shape)
        return [value[chosen] for value in wide]

    def exited(self) -> Mask:
        """The lanes that have returned from the kernel itself, or None."""
        if not self.early_return:
            return None
        return self.frames[1].returned if len(self.frames) > 1 else self.returned

    def merge(self, new: Value, old: Value) -> Value:
        """``new`` in the active lanes, ``old`` in those that wait."""
        if self.count == self.live or new is old:
            return new
        return select(self.mask, new, old) if self.count else old

    # Branches

    def then(self, condition: Value) -> bool:
        """Open an ``if``; whether any active lane takes it."""
        if not isinstance(condition, np.ndarray):
            taken = bool(condition)
            self.branches.append(taken)
            return taken
        condition = truth(condition)
        mask, count = self.mask, self.count
        self.narrow(both(mask, condition))
        if self.count == count:
            self.mask = mask
            self.branches.append(True)
            return True
        if not self.count:
            self.mask, self.count = mask, count
            self.branches.append(False)
            return False
        self.branches.append(Branch(mask, count, self.gone, condition))
        return True

    def otherwise(self) -> bool:
        """Go to the ``else``; whether any active lane takes it."""
        branch = self.branches[-1]
        if not isinstance(branch, Branch):
            return not branch
        self.narrow(without(branch.mask, branch.condition))
        return True

    def endif(self) -> None:
        branch = self.branches.pop()
        if isinstance(branch, Branch):
            if self.gone is branch.gone:
                self.mask, self.count = branch.mask, branch.count
            else:
                self.narrow(without(branch.mask, self.gone))

    def join(self, chosen: Value, other: Value) -> Value:
        """Close a conditional expression."""
        branch = self.branches[-1]
        self.endif()
        if isinstance(branch, Branch):
            return select(branch.condition, chosen, other)
        return chosen if branch else other

    def begin_and(self, left: Value) -> bool:
        self.decisions.append(left)
        return self.then(left)

    def begin_or(self, left: Value) -> bool:
        self.decisions.append(left)
        return self.then(np.logical_not(left) if isinstance(left, np.ndarray) else not left)

    def decided(self) -> Value:
        """The left side, where no lane needs the right one."""
        self.endif()
        return self.decisions.pop()

    def end_and(self, right: Value) -> Value:
        branch, left = self.branches[-1], self.decisions.pop()
        self.endif()
        return select(branch.condition, right, left) if isinstance(branch, Branch) else right

    end_or = end_and

    # Loops

    def range(self, leaves: bool, *bounds: Value) -> Iterable[Value]:
        """``range`` over uniform or per-lane bounds; ``leaves``: the body holds a jump."""
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        if any(isinstance(b, np.ndarray) for b in (start, stop, step)):
            return self._range_by_lane(start, stop, step)
        values = range(int(start), int(stop), int(step))
        return self._steps(values) if leaves else values

    def each(self, leaves: bool, values: Iterable[Value]) -> Iterable[Value]:
        """A loop over a tuple or a one-dimensional array."""
        return self._steps(values) if leaves else values

    def _steps(self, values: Iterable[Value]) -> Iterator[Value]:
        self.open_loop()
        for value in values:
            if not self.rejoin():
                break
            yield value
        self.close_loop()

    def _range_by_lane(self, start: Value, stop: Value, step: Value) -> Iterator[Value]:
        value, stop, step = (
            v.astype(INT64) if isinstance(v, np.ndarray) else int(v) for v in (start, stop, step)
        )
        self.open_loop()
        while self.rejoin():
            if isinstance(step, np.ndarray):
                going = np.where(step > 0, value < stop, value > stop)
            else:
                going = value < stop if step > 0 else value > stop
            if not self.hold(going):
                break
            yield value
            value = value + step
        self.close_loop()

    def open_loop(self) -> None:
        progress = self.count, self.stores
        self.loops.append(
            Loop(self.mask, self.count, self.gone, self.mask, self.returned, progress)
        )

    def rejoin(self) -> bool:
        """Start an iteration with the lanes still in the loop; whether there are any."""
        loop = self.loops[-1]
        if self.gone is loop.gone and self.mask is loop.running:
            return self.count > 0
        if self.gone is not loop.gone:
            loop.running = without(loop.running, self._left(loop))
            self.gone = loop.gone
        self.narrow(loop.running)
        return self.count > 0

    def hold(self, condition: Value) -> bool:
        """Keep the lanes for which the loop goes on; whether there are any."""
        loop = self.loops[-1]
        loop.turns += 1
        if loop.turns >= MOST_IDLE_TURNS:
            self.check_progress(loop)
        elif self.group is not None and loop.turns % SPIN_TURNS == 0:
            self.check_spin(loop, self.group)
        if not isinstance(condition, np.ndarray):
            return bool(condition)
        loop.running = both(self.mask, truth(condition))
        self.narrow(loop.running)
        return self.count > 0

    def check_progress(self, loop: Loop) -> None:
        """Stop a loop that does nothing, and start to count its iterations anew."""
        progress = self.count, self.stores
        if progress == loop.progress:
            raise RuntimeError(
                f"the loop has run {loop.turns} times without a thread leaving it or a value of "
                "memory changing, so it may never end; the threads of a batch run in step, and "
                "one cannot wait for another"
            )
        loop.turns, loop.progress = 0, progress

    def check_spin(self, loop: Loop, group: Group) -> None:
        """Let other groups run when a loop does nothing but look at a few places of memory."""
        progress = self.count, self.stores
        visited, self.visited = self.visited, None
        if progress != loop.progress:
            loop.turns, loop.progress = 0, progress
        elif visited is None:
            self.visited = set()
        elif 0 < len(visited) <= MOST_SPIN_PLACES:
            group.wait_for_change()

    def close_loop(self) -> None:
        loop = self.last_loop = self.loops.pop()
        if self.returned is loop.returned:
            self.mask, self.count, self.gone = loop.mask, loop.count, loop.gone
        else:
            self.gone = either(loop.gone, self.returned)
            self.narrow(without(loop.mask, self.returned))

    def unbroken(self) -> bool:
        """Open the ``else`` of the loop just closed; whether any lane left it without ``break``."""
        assert self.last_loop is not None
        broken = self.last_loop.broken
        return self.then(True if broken is None else ~broken)

    def _left(self, loop: Loop) -> Mask:
        return either(loop.broken, self.returned if self.returned is not loop.returned else None)

    # Jumps

    def _go(self) -> np.ndarray:
        lanes = np.ones((1, 1), bool) if self.mask is None else self.mask
        self.gone = either(self.gone, lanes)
        self.nobody()
        return lanes

    def break_(self) -> None:
        self.loops[-1].broken = either(self.loops[-1].broken, self._go())

    def continue_(self) -> None:
        self._go()

    def return_(self, value: Value) -> None:
        frame = self.frames[-1]
        frame.value = value if self.mask is None else select(self.mask, value, frame.value)
        self.live -= self.count
        if self.early_return and len(self.frames) == 1:
            self.alive -= self.count
        self.returned = either(self.returned, self._go())

    # Calls

    def enter(self) -> None:
        """Open the frame of a function with early returns."""
        self.frames.append(Frame(self.mask, self.count, self.gone, self.live, self.returned))
        self.live, self.returned = self.count, None

    def leave(self) -> Value:
        """Close it: all lanes are back at the call; the merged return value."""
        frame = self.frames.pop()
        self.mask, self.count, self.gone = frame.mask, frame.count, frame.gone
        self.live, self.returned = frame.live, frame.returned
        return None if frame.value is UNASSIGNED else frame.value

    # Where and who

    @staticmethod
    def frame() -> FrameType:
        """The innermost frame of kernel code."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and KERNEL_MARK not in frame.f_globals:
            frame = frame.f_back
        assert frame is not None
        return frame

    def thread(self, thread: int) -> Coordinates:
        """Coordinates of a thread from its rank in the block."""
        x, y, _ = self.block_dim
        thread = int(thread) + self.first_thread
        return thread % x, thread // x % y, thread // (x * y)
