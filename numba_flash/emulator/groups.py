"""Warps that run on their own: one coroutine a warp or warpgroup, and who waits for whom.

A kernel whose warps take different roles, and wait for each other at barriers of their own, cannot
run in one step. Each group of its threads gets its own `lanes.Lanes` and runs until it waits for
something; then the next group takes its turn. When nobody can go on, that is a deadlock. Blocks
run one after the other.

A coroutine is a thread of Python that runs only while it holds the turn, so nothing here is
concurrent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .check import MOST_THREADS, Checker
from .clocks import Clocks
from .race import WARP_SIZE
from .report import Coordinates, Fault, Report, show


class Stopped(BaseException):
    """Ends a coroutine whose block cannot be finished."""


class Meeting:
    """A barrier at which threads meet.

    Attributes
    ----------
    arrived, needed : int
        Threads that have come, and threads that open it.
    opened : int
        How often it has opened.
    result : (int, int)
        What the threads brought along, summed when it opened last.
    """

    def __init__(self) -> None:
        self.opened = 0
        self.result = (0, 0)
        self.clock: np.ndarray | None = None
        self.close()

    def close(self) -> None:
        """Begin the next round."""
        self.arrived = self.needed = 0
        self.votes = (0, 0)
        self.next_clock: np.ndarray | None = None

    def open_if_complete(self) -> None:
        if self.arrived and self.arrived >= self.needed:
            self.opened += 1
            self.clock, self.result = self.next_clock, self.votes
            self.close()


class Group:
    """The threads of a warp or warpgroup, and what they are waiting for."""

    def __init__(self, index: int, checker: Checker, block: Block):
        self.index = index
        self.checker = checker
        self.lanes = checker.lanes
        self.block = block
        self.clocks = block.clocks
        self.turn = threading.Semaphore(0)
        self.condition: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.place = ("", 0)
        self.waiting = range(0)
        self.finished = False
        checker.group = self
        self.lanes.group = self

    @property
    def name(self) -> str:
        """Its threads, as a message calls them."""
        return runs([self.threads])

    @property
    def threads(self) -> range:
        first = self.lanes.first_thread
        return range(first, first + self.lanes.num_threads)

    def wait_until(self, condition: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let the other groups run until the condition holds."""
        if condition():
            return
        frame = self.lanes.frame()
        self.place = frame.f_code.co_filename, frame.f_lineno
        here = np.flatnonzero(self.lanes.full_mask()[0]) + self.lanes.first_thread
        self.waiting = range(int(here[0]), int(here[-1]) + 1)
        self.condition, self.waits_for = condition, waits_for
        self.pause()
        self.condition = None

    def pause(self) -> None:
        """Give the turn back, and wait for it."""
        self.block.turn.release()
        self.turn.acquire()
        if self.block.stopped:
            raise Stopped

    def arrive(
        self, meeting: Meeting, threads: int, needed: int, votes: tuple[int, int] = (0, 0)
    ) -> int:
        """Come to a meeting without staying; how often it had opened before."""
        before = meeting.opened
        meeting.arrived += threads
        meeting.needed = needed
        meeting.votes = (meeting.votes[0] + votes[0], meeting.votes[1] + votes[1])
        meeting.next_clock = self.clocks.release(self.index, meeting.next_clock)
        meeting.open_if_complete()
        return before

    def meet(
        self,
        meeting: Meeting,
        threads: int,
        needed: int,
        name: str,
        votes: tuple[int, int] = (0, 0),
    ) -> tuple[int, int]:
        """Come to a meeting and wait until it opens; the sum of what everybody brought along."""
        before = self.arrive(meeting, threads, needed, votes)
        self.wait_until(
            lambda: meeting.opened > before,
            lambda: f"{name}, where {meeting.arrived} of {meeting.needed} threads have arrived",
        )
        self.clocks.acquire(self.index, meeting.clock)
        return meeting.result

    def sync_block(self, name: str, votes: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """``syncthreads``: meet all threads of the block but those of finished groups."""
        needed = self.block.unfinished_threads()
        return self.meet(self.block.everybody, self.lanes.num_threads, needed, name, votes)

    def sync_warp(self) -> None:
        """``syncwarp``, where a group is smaller than a warp."""
        if self.lanes.num_threads < WARP_SIZE:
            needed = self.block.unfinished_threads(self.warp)
            meeting = self.block.warps.setdefault(self.warp, Meeting())
            self.meet(meeting, self.lanes.num_threads, needed, "syncwarp")

    @property
    def warp(self) -> int:
        return self.lanes.first_thread // WARP_SIZE

    def wait_for_change(self) -> None:
        """A loop does nothing but look at memory: let the others run until one of them writes."""
        before = self.block.changes()
        self.wait_until(
            lambda: self.block.changes() != before,
            lambda: (
                "a loop that looks at memory until somebody changes it (blocks run one after the "
                "other here: they can wait for earlier ones, not for later ones)"
            ),
        )


class Block:
    """One block of a launch, whose groups take turns."""

    def __init__(self, coordinates: Coordinates, clocks: Clocks, report: Report):
        self.coordinates = coordinates
        self.clocks = clocks
        self.report = report
        self.everybody = Meeting()
        self.warps: dict[int, Meeting] = {}
        self.named: dict[int, Meeting] = {}
        self.mbarriers: dict[tuple[Any, int], Any] = {}
        self.groups: list[Group] = []
        self.turn = threading.Semaphore(0)
        self.stopped = False
        self.error: BaseException | None = None

    def unfinished_threads(self, warp: int | None = None) -> int:
        """Threads of the block, or of one of its warps, whose groups have not ended."""
        return sum(
            group.lanes.num_threads
            for group in self.groups
            if not group.finished and warp in (None, group.warp)
        )

    def changes(self) -> int:
        """How often the memory has been written."""
        return sum(group.lanes.stores for group in self.groups)

    def run(self, work: Callable[[Checker], None]) -> bool:
        """Let every group do its work, given its checker; whether all of them came to their end.

        A deadlock is added to the report. An error in a group is raised here.
        """
        threads = [threading.Thread(target=self.follow, args=(g, work)) for g in self.groups]
        for thread in threads:
            thread.start()
        while self.error is None and not all(group.finished for group in self.groups):
            ready = [g for g in self.groups if not g.finished and self.is_ready(g)]
            for group in ready:
                if self.error is None and (group.condition is None or group.condition()):
                    self.give_turn(group)
            if not ready:
                break
        stuck = [group for group in self.groups if not group.finished]
        if self.error is None and stuck:
            self.report_deadlock(stuck)
        self.stopped = True
        for group in stuck:
            if not group.finished:
                self.give_turn(group)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return not stuck

    @staticmethod
    def is_ready(group: Group) -> bool:
        return group.condition is None or group.condition()

    def give_turn(self, group: Group) -> None:
        group.turn.release()
        self.turn.acquire()

    def follow(self, group: Group, work: Callable[[Checker], None]) -> None:
        """The life of a group's thread."""
        group.turn.acquire()
        try:
            if not self.stopped:
                with np.errstate(all="ignore"):
                    work(group.checker)
        except Stopped:
            pass
        except BaseException as error:
            if self.error is None:
                self.error = error
        finally:
            group.finished = True
            for meeting, warp in [(self.everybody, None), *((m, w) for w, m in self.warps.items())]:
                meeting.needed = self.unfinished_threads(warp)
                meeting.open_if_complete()
            self.turn.release()

    def report_deadlock(self, stuck: list[Group]) -> None:
        """One fault for each line at which somebody waits; each tells the whole story."""
        done = [group.threads for group in self.groups if group.finished]
        waiting: dict[tuple, list[Group]] = {}
        for group in stuck:
            waiting.setdefault((group.place, group.waits_for()), []).append(group)
        story = [
            f"at line {place[1]} {runs(group.waiting for group in groups)} cannot pass {what}"
            for (place, what), groups in waiting.items()
        ]
        story += [f"at the end: {runs(done)}"] if done else []
        for place, groups in {place: groups for (place, _), groups in waiting.items()}.items():
            self.report.add(
                Fault(
                    kind="deadlock",
                    message=f"in block {show(self.coordinates)} nobody can go on: "
                    + "; ".join(story),
                    line=place[1],
                    threads=tuple(group.lanes.thread(0) for group in groups[:MOST_THREADS]),
                    block=self.coordinates,
                    file=place[0],
                )
            )


def runs(ranges: Iterable[range]) -> str:
    """Threads, as a message calls them."""
    parts: list[list[int]] = []
    for threads in ranges:
        if parts and parts[-1][1] == threads.start:
            parts[-1][1] = threads.stop
        else:
            parts.append([threads.start, threads.stop])
    names = [f"{a} to {b - 1}" if b - a > 1 else str(a) for a, b in parts]
    several = sum(b - a for a, b in parts) > 1
    return f"thread{'s' * several} {', '.join(names)}"
