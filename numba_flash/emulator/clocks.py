"""The order between groups of a block, by vector clocks.

Every group counts the times it has released something: at a barrier, by an arrival. It knows, of
every other group, up to which count it is ordered after that group: it learns that when it waits.
An access is in order when the one before it, by another group, is not younger than what the group
knows of the other. (Fidge, Mattern, 1988; as in Flanagan and Freund's FastTrack, 2009.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import Value
from .lanes import Mask
from .race import Access, Place, Races, Touch, constant_of
from .spaces import NOBODY, Region, SharedSpace

if TYPE_CHECKING:
    from .memory import Array

ALWAYS = 1 << 30
MOST_UNSYNCHRONISED = 64
"""Accesses since the lanes of a group met that are kept; later ones are taken to be in order."""
MOST_FOUND = 64
"""Cells of one access that are explained one by one."""


class History:
    """The last write, and every group's last read, of each cell of a region."""

    def __init__(self, region: Region, num_groups: int):
        cells = -(-region.num_bytes // region.granule)
        self.granule = region.granule
        self.time = np.zeros((1 + num_groups, cells), np.int32)
        self.lane = np.full((1 + num_groups, cells), NOBODY)
        self.place = np.zeros((1 + num_groups, cells), np.int32)
        self.writer = np.full(cells, NOBODY, np.int32)
        self.atomic = np.zeros(cells, bool)
        self.unfenced = np.zeros(cells, bool)

    def refine(self, granule: int) -> None:
        """Split every cell into cells of ``granule`` bytes."""
        factor = self.granule // granule
        for name in ("time", "lane", "place", "writer", "atomic", "unfenced"):
            setattr(self, name, np.repeat(getattr(self, name), factor, axis=-1))
        self.granule = granule


class Clocks:
    """What the groups of one block know of each other, and who touched what."""

    def __init__(self, num_groups: int):
        self.num_groups = num_groups
        self.known = np.zeros((num_groups, num_groups), np.int64)
        np.fill_diagonal(self.known, 1)
        self.histories: dict[Region, History] = {}
        self.places: list[tuple[Place, Value]] = []
        self.fenced = np.zeros(num_groups, bool)
        self.released: dict[tuple[int, int], np.ndarray] = {}

    def release(self, group: int, clock: np.ndarray | None = None) -> np.ndarray:
        """What the group has done so far, added to what ``clock`` holds; its time goes on."""
        now = self.known[group].copy() if clock is None else np.maximum(clock, self.known[group])
        self.known[group, group] += 1
        return now

    def acquire(self, group: int, clock: np.ndarray | None) -> None:
        """The group comes after everything that ``clock`` holds."""
        if clock is not None:
            np.maximum(self.known[group], clock, out=self.known[group])

    def atomic(self, group: int, cell: tuple[int, int]) -> None:
        """An atomic operation takes what earlier ones released; after a fence it releases too."""
        self.acquire(group, self.released.get(cell))
        if self.fenced[group]:
            self.released[cell] = self.release(group, self.released.get(cell))

    def history(self, region: Region) -> History:
        history = self.histories.get(region)
        if history is None:
            history = self.histories[region] = History(region, self.num_groups)
        if history.granule > region.granule:
            history.refine(region.granule)
        return history

    def number(self, place: tuple[Place, Value]) -> int:
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place)


class GroupRaces(Races):
    """Races within a group, as `Races` finds them, and between groups, by their clocks."""

    def __init__(self, clocks: Clocks, group: int, *args: Any):
        super().__init__(*args)
        self.clocks = clocks
        self.group = group
        self.unsynchronised: list[tuple[History, int, np.ndarray, np.ndarray]] = []
        self.learnt: list[tuple[np.ndarray, np.ndarray]] = []

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
        region = array.space.region
        if region is not None:
            granule = region.refine(array.space.dtype.itemsize)
            access = Access(array, base, offset, mask, how, width, place, 0, value)
            cells, lanes = self.cells(access, granule)
            self.order_of(access, region, cells)
            self.between_groups(access, region, cells, lanes)
        super().access(array, base, offset, mask, how, width, place, value)

    # What some lanes of the group do at a barrier, the others have no part in until they meet

    def acquire(self, clock: np.ndarray | None) -> None:
        """The active lanes come after what ``clock`` holds."""
        if clock is None or self.lanes.mask is None:
            self.clocks.acquire(self.group, clock)
        else:
            self.learnt.append((self.lanes.full_mask()[0].copy(), clock))

    def release(self, clock: np.ndarray | None) -> np.ndarray:
        """What the active lanes have done is ordered before whoever acquires the result.

        Of the other lanes, that holds for what they did before the group met last.
        """
        released = self.clocks.release(self.group, clock)
        if self.lanes.mask is not None:
            active = self.lanes.full_mask()[0]
            now = self.clocks.known[self.group, self.group]
            for history, row, cells, lanes in self.unsynchronised:
                others = ~active[lanes - self.first_lane]
                mine = history.lane[row][cells] == lanes
                history.time[row][cells[others & mine]] = now
        return released

    def meet(self) -> None:
        """The lanes of the group have met: what one knows, all know."""
        self.unsynchronised.clear()
        for _, clock in self.learnt:
            self.clocks.acquire(self.group, clock)
        self.learnt.clear()

    def meet_in_warps(self, members: np.ndarray) -> None:
        """These lanes have waited for the same; in each warp, they are in order."""
        super().syncwarp(members)

    def syncwarp(self, members: np.ndarray | None) -> None:
        super().syncwarp(members)
        self.meet()

    def barrier(self, arrived: Mask) -> None:
        super().barrier(arrived)
        self.meet()

    def parts(self, lanes: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Lanes with what they know: which of them, and the clock."""
        known = self.clocks.known[self.group]
        parts = [(np.ones(len(lanes), bool), known)]
        for members, clock in self.learnt:
            inside = members[lanes - self.first_lane]
            parts = [
                (where & side, now)
                for where, before in parts
                for side, now in ((inside, np.maximum(before, clock)), (~inside, before))
                if (where & side).any()
            ]
        return parts

    def order_of(self, access: Access, region: Region, cells: np.ndarray) -> None:
        """Follow the order that fences and atomic operations make between groups."""
        clocks = self.clocks
        if access.how == "write":
            clocks.fenced[self.group] = False
        elif access.how == "atomic":
            for cell in cells.tolist():
                clocks.atomic(self.group, (id(region), cell))

    def bulk(
        self, array: Array, places: np.ndarray, how: str, lanes: tuple[int, ...], place: Place
    ) -> None:
        """An asynchronous instruction touches elements, by their place in ``flat``.

        Each of ``lanes`` touches all of them: one that issued a copy, or one of each warp.
        """
        region = array.space.region
        if region is None or not len(places):
            return
        region.refine(array.space.dtype.itemsize)
        for i, lane in enumerate(lanes):
            everywhere = np.full(len(places), lane)
            access = Access(array, 0, places, None, how, 1, place, self.epoch, None, everywhere)
            if i == 0:
                cells, numbers = self.cells(access, region.granule)
                self.between_groups(access, region, cells, numbers)
            self.log(region, access, len(places))

    def unfenced(self, space: SharedSpace, places: np.ndarray) -> np.ndarray:
        """Which elements were stored by a thread with no ``fence_proxy_async`` since."""
        history = self.clocks.history(space.region)
        size, granule = space.dtype.itemsize, history.granule
        cells = (places * size)[:, None] // granule + np.arange(max(1, size // granule))
        return np.asarray(history.unfenced[cells].any(axis=1))

    def fence_proxy(self) -> None:
        """What the group has stored, or knows to be stored, is visible to TMA and wgmma."""
        known = self.clocks.known[self.group]
        for region, history in self.clocks.histories.items():
            if not region.is_global:
                mine = (history.writer == self.group) | (history.time[0] <= known[history.writer])
                history.unfenced &= ~mine

    def end_of_past(self, rank: int) -> int:
        """Groups count their own intervals; what one releases holds for the whole block."""
        return ALWAYS

    def fence(self, mask: Mask) -> None:
        self.fence_block(mask)
        super().fence(mask)

    def fence_block(self, mask: Mask) -> None:
        self.clocks.fenced[self.group] = True

    def between_groups(
        self, access: Access, region: Region, cells: np.ndarray, lanes: np.ndarray
    ) -> None:
        """Report what other groups did to these cells without being ordered before."""
        clocks, me = self.clocks, self.group
        history = clocks.history(region)
        for where, known in self.parts(lanes) if self.learnt else [(None, clocks.known[me])]:
            if where is None:
                self.look_back(access, history, cells, lanes, known)
            else:
                self.look_back(access, history, cells[where], lanes[where], known)
        row = 1 + me if access.how == "read" else 0
        history.time[row][cells] = clocks.known[me, me]
        history.lane[row][cells] = lanes
        history.place[row][cells] = clocks.number((access.place, constant_of(access)))
        if row == 0:
            history.writer[cells] = me
            history.atomic[cells] = access.how == "atomic"
            history.unfenced[cells] = access.lanes is None
        if access.lanes is None and len(self.unsynchronised) < MOST_UNSYNCHRONISED:
            self.unsynchronised.append((history, row, cells, lanes))

    def look_back(
        self,
        access: Access,
        history: History,
        cells: np.ndarray,
        lanes: np.ndarray,
        known: np.ndarray,
    ) -> None:
        clocks, me = self.clocks, self.group
        writer = history.writer[cells]
        young = (writer != me) & (writer != NOBODY) & (history.time[0][cells] > known[writer])
        if access.how == "atomic":
            young &= ~history.atomic[cells]
        found = [(0, young)]
        if access.how != "read":
            others = (g for g in range(clocks.num_groups) if g != me)
            found += [(1 + g, history.time[1 + g][cells] > known[g]) for g in others]
        for row, bad in found:
            if bad.any():
                self.report_cells(access, history, row, cells, lanes, np.flatnonzero(bad))

    def report_cells(
        self,
        access: Access,
        history: History,
        row: int,
        cells: np.ndarray,
        lanes: np.ndarray,
        bad: np.ndarray,
    ) -> None:
        for i in bad[np.linspace(0, len(bad) - 1, min(len(bad), MOST_FOUND)).astype(int)]:
            cell = int(cells[i])
            how = "read" if row else "atomic" if history.atomic[cell] else "write"
            place, constant = self.clocks.places[history.place[row][cell]]
            earlier = Touch(int(history.lane[row][cell]), how, place, 0, 0, constant)
            later = Touch(
                int(lanes[i]), access.how, access.place, 0, 0, constant_of(access), access
            )
            if self.clash(earlier, later):
                self.fault(earlier, later, cell, history.granule)
