"""What chosen variables of a kernel hold, step by step: at every barrier and after every turn.

The names are looked up in the frame of the running kernel, so that nothing slows down a kernel
that is not traced.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from types import FrameType, FunctionType
from typing import Any

import numpy as np

from .arithmetic import UNASSIGNED, strong
from .lanes import Lanes, Mask
from .memory import Array
from .report import FUNCTION, KERNEL_MARK, Coordinates, Report
from .spaces import GlobalSpace, LocalSpace, SharedSpace
from .steps import BARRIER, ITERATION, Step


class Trace:
    """Takes the steps of a launch.

    Parameters
    ----------
    names : sequence of str
    kernel : function
    report : Report
        Where they go.
    """

    def __init__(self, names: Iterable[str], kernel: FunctionType, report: Report):
        self.names = tuple(names)
        self.kernel = kernel
        self.steps = report.trace
        self.taken: Counter[Coordinates] = Counter()

    def barrier(self, lanes: Lanes) -> None:
        """The active lanes arrive at a barrier, in the kernel or in a function that it calls."""
        frame = lanes.frame()
        line = frame.f_lineno
        while frame.f_globals.get(FUNCTION) is not self.kernel:
            outer = frame.f_back
            assert outer is not None
            frame = outer
        self.take(lanes, lanes.mask, frame, line, BARRIER)

    def turn(self) -> None:
        """An iteration of an outermost loop ends in the function that calls this."""
        frame = sys._getframe(1)
        if frame.f_globals[FUNCTION] is self.kernel:
            lanes = frame.f_globals[KERNEL_MARK]
            running = lanes.loops[-1].running if lanes.loops else lanes.mask
            self.take(lanes, running, frame, frame.f_lineno, ITERATION)

    def take(self, lanes: Lanes, mask: Mask, frame: FrameType, line: int, kind: str) -> None:
        """A step of every block that has a lane in ``mask``."""
        here = np.broadcast_to(True if mask is None else mask, lanes.shape).any(axis=1)
        variables = frame.f_locals
        found = {
            name: values_of(variables[name], lanes) for name in self.names if name in variables
        }
        threads = range(lanes.first_thread, lanes.first_thread + lanes.num_threads)
        for i in np.flatnonzero(here):
            block = lanes.blocks[i]
            values = {name: value[i] for name, value in found.items() if value is not None}
            self.steps.append(Step(block, self.taken[block], line, kind, threads, values))
            self.taken[block] += 1


def nothing() -> None:
    """What the end of an iteration means where nothing is traced."""


def traced_names(names: Any, kernel: FunctionType) -> tuple[str, ...]:
    """The names to trace, each of which must be a variable or an argument of the kernel."""
    names = (names,) if isinstance(names, str) else names
    try:
        chosen = tuple(names)
    except TypeError:
        chosen = (names,)
    if not all(isinstance(name, str) for name in chosen):
        raise TypeError(
            f"trace takes the names of variables, as in trace=('S', 'row_max'), not {names!r}"
        )
    known = kernel.__code__.co_varnames
    missing = [name for name in chosen if name not in known]
    if missing:
        raise ValueError(
            f"trace asks for {', '.join(missing)}, and {kernel.__name__} has no such variable; it "
            f"has {', '.join(sorted(known))}"
        )
    return chosen


# Values of all blocks


def values_of(value: Any, lanes: Lanes) -> np.ndarray | None:
    """What a name stands for, block by block in the first axis; None for what is no number."""
    if isinstance(value, tuple):
        parts = [values_of(part, lanes) for part in value]
        if not parts or any(part is None or part.shape != lanes.shape for part in parts):
            return None
        return np.stack([part for part in parts if part is not None], axis=-1)
    if isinstance(value, Array):
        return elements_of(value, lanes)
    if value is UNASSIGNED or not isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return None
    return np.broadcast_to(strong(value), lanes.shape).copy()


def elements_of(array: Array, lanes: Lanes) -> np.ndarray | None:
    """The elements of an array or a view; None if its shape differs between lanes."""
    if not all(isinstance(extent, int) for extent in array.shape):
        return None
    steps = zip(np.indices(array.shape), array.strides, strict=True)
    places = sum((index * stride for index, stride in steps), np.zeros(array.shape, int))
    start, space = array.start, array.space
    by_lane = isinstance(start, np.ndarray)
    if by_lane:
        start = np.broadcast_to(start, lanes.shape).reshape(lanes.shape + (1,) * array.ndim)
    data, valid = space.data, space.valid
    places = np.clip(places + start, 0, data.shape[isinstance(space, SharedSpace)] - 1)
    blocks, threads = (n.reshape(n.shape + (1,) * array.ndim) for n in np.indices(lanes.shape))
    written: Any = True
    if isinstance(space, LocalSpace):
        at: Any = places, blocks, threads
        places = places if by_lane else places[None, None]
    elif isinstance(space, SharedSpace):
        at = (blocks if by_lane else blocks[:, 0], places)
    else:
        assert isinstance(space, GlobalSpace)
        at = (places if by_lane else np.broadcast_to(places, (len(lanes.blocks), *array.shape)),)
    if valid is not None:
        written = valid.reshape(data.shape)[at] == space.written
    return marked(data[at], written)


def marked(values: np.ndarray, written: Any) -> np.ndarray:
    """Values, NaN where nothing was written."""
    if np.all(written):
        return values
    return np.where(written, values if values.dtype.kind == "f" else values.astype(float), math.nan)
