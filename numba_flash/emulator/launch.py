"""The launch: ``emulate(kernel)[grid, block](*arrays)``, in batches of blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from .arguments import GlobalRegions, argument
from .bind import Binder, python_function
from .check import Checker
from .clocks import Clocks, GroupRaces
from .count import Counts
from .facade import MOST_SHARED_BYTES, BlockMemory, Cuda
from .float64 import Precision
from .functions import cast_of
from .groups import Block, Group
from .lanes import Lanes
from .race import BlockOrder, Races
from .report import Coordinates, Report, errors_at_their_place
from .roles import group_size
from .trace import Trace, traced_names
from .transform import transform

MOST_LANES = 8192
"""Lanes that run together: enough that a vector operation outweighs its call."""

# What every card since Hopper takes (CUDA C++ Programming Guide, compute capabilities).
MOST_THREADS = 1024
LARGEST_GRID = (2**31 - 1, 65535, 65535)
LARGEST_BLOCK = (1024, 1024, 64)


class Emulated:
    """A kernel that waits for its launch configuration."""

    def __init__(self, kernel: Any, checks: bool, counts: bool, trace: Any, raise_on_fault: bool):
        function = python_function(kernel)
        if not isinstance(function, FunctionType):
            raise TypeError(
                f"emulate() takes a @cuda.jit kernel or a plain function, not {kernel!r}; write "
                "emulate(kernel)[grid, block](...)"
            )
        if not getattr(kernel, "_can_compile", True):
            raise TypeError(
                f"{function.__name__} was compiled for a signature, and the emulator goes by the "
                f"arguments; decorate it with @cuda.jit alone, or pass {function.__name__}.py_func"
            )
        self.kernel = kernel
        self.function = function
        self.checks = checks
        self.counts = counts
        self.trace = traced_names(trace, function)
        self.raise_on_fault = raise_on_fault

    def __call__(self, *arguments: Any) -> NoReturn:
        name = self.function.__name__
        raise TypeError(
            f"{name} has no launch configuration; write emulate({name})[grid, block](...), with "
            "the blocks of the grid and the threads of a block"
        )

    def __getitem__(self, configuration: Any) -> Launch:
        parts = configuration if isinstance(configuration, tuple) else (configuration,)
        if not 2 <= len(parts) <= 4:
            raise TypeError(
                "a launch is configured as [grid, block], [grid, block, stream] or "
                f"[grid, block, stream, shared_bytes], not with {len(parts)} entries"
            )
        grid = dimensions(parts[0], "grid", LARGEST_GRID)
        block = dimensions(parts[1], "block", LARGEST_BLOCK)
        threads = math.prod(block)
        if threads > MOST_THREADS:
            raise ValueError(
                f"a block of {threads} threads is too large; at most {MOST_THREADS} fit"
            )
        return Launch(self, grid, block, dynamic_bytes(parts[3]) if len(parts) == 4 else 0)


class Launch:
    """A configured kernel; calling it runs every block."""

    def __init__(
        self, emulated: Emulated, grid: Coordinates, block: Coordinates, shared_bytes: int
    ):
        self.emulated = emulated
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes

    def __call__(self, *arguments: Any) -> Report:
        function = self.emulated.function
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        fewest = len(names) - len(function.__defaults__ or ())
        if not fewest <= len(arguments) <= len(names):
            raise TypeError(
                f"{function.__name__} takes {len(names)} arguments ({', '.join(names)}), "
                f"{len(arguments)} were given"
            )
        code = function.__code__
        report = Report(function.__name__, raise_on_fault=self.emulated.raise_on_fault)
        report.place = code.co_filename, code.co_firstlineno
        report.counts = Counts(code.co_filename) if self.emulated.counts else None
        run = Run(self, report, dict(zip(names, arguments, strict=False)))
        size = group_size(self.emulated.kernel)
        if size is None:
            run.in_step()
        else:
            run.in_groups(size)
        return report

    def coordinates(self, block: int) -> Coordinates:
        """Where the block of this number is in the grid; x runs fastest."""
        x, y, _ = self.grid
        return block % x, block // x % y, block // (x * y)


class Run:
    """One call of a configured kernel."""

    def __init__(self, launch: Launch, report: Report, arguments: dict[str, Any]):
        self.launch = launch
        self.report = report
        self.arguments = arguments
        self.num_blocks = math.prod(launch.grid)
        self.num_threads = math.prod(launch.block)
        self.early_return = transform(launch.emulated.function).early_return
        emulated, values = launch.emulated, tuple(arguments.values())
        self.precision = Precision(emulated.kernel, values, report) if emulated.checks else None
        self.trace = Trace(emulated.trace, emulated.function, report) if emulated.trace else None
        self.regions = GlobalRegions(values)
        self.order = BlockOrder()

    def in_step(self) -> None:
        """Run batches of blocks, all threads of a batch in step."""
        batches = -(-self.num_blocks * self.num_threads // MOST_LANES)
        size = -(-self.num_blocks // batches)
        with np.errstate(all="ignore"):
            for first in range(0, self.num_blocks, size):
                numbers = range(first, min(first + size, self.num_blocks))
                lanes = self.lanes(numbers)
                races = Races(lanes, self.report, first, self.order, self.launch.coordinates)
                memory = BlockMemory(len(numbers), self.launch.shared_bytes)
                self.follow(memory, self.checker(lanes, races))

    def in_groups(self, size: int) -> None:
        """Run block after block, ``size`` threads in step, until one block cannot go on."""
        for number in range(self.num_blocks):
            starts = range(0, self.num_threads, size)
            clocks = Clocks(len(starts))
            block = Block(self.launch.coordinates(number), clocks, self.report)
            memory = BlockMemory(1, self.launch.shared_bytes)
            for i, start in enumerate(starts):
                threads = range(start, min(start + size, self.num_threads))
                lanes = self.lanes(range(number, number + 1), threads)
                races = GroupRaces(
                    clocks, i, lanes, self.report, number, self.order, self.launch.coordinates
                )
                block.groups.append(Group(i, self.checker(lanes, races), block))
            if not block.run(functools.partial(self.follow, memory)):
                self.report.note(f"the launch was stopped in block {block.coordinates}")
                return

    def lanes(self, numbers: range, threads: range | None = None) -> Lanes:
        blocks = [self.launch.coordinates(number) for number in numbers]
        return Lanes(blocks, self.launch.block, self.early_return, threads)

    def checker(self, lanes: Lanes, races: Races) -> Checker:
        active = self.launch.emulated.checks
        checker = Checker(lanes, self.report, active, cast_of, races, self.regions)
        checker.trace = self.trace
        return checker

    def follow(self, memory: BlockMemory, checker: Checker) -> None:
        """Run the lanes of a checker to their end."""
        lanes = checker.lanes
        cuda = Cuda(lanes, checker, self.launch.grid, memory)
        kernel = Binder(cuda, lanes, checker, self.precision).bind(self.launch.emulated.kernel)
        values = [argument(v, name, lanes, checker) for name, v in self.arguments.items()]
        with errors_at_their_place():
            kernel(*values)
        checker.finish()


def dimensions(extents: Any, what: str, largest: Coordinates) -> Coordinates:
    """A grid or block as three positive integers."""
    parts = tuple(extents) if isinstance(extents, (tuple, list)) else (extents,)
    whole = all(isinstance(part, (int, np.integer)) and part > 0 for part in parts)
    if not 1 <= len(parts) <= 3 or not whole:
        raise ValueError(f"a {what} is one to three positive integers, not {extents!r}")
    x, y, z = (*map(int, parts), 1, 1)[:3]
    for axis, extent, most in zip("xyz", (x, y, z), largest, strict=True):
        if extent > most:
            raise ValueError(f"a {what} of {axis} = {extent} is too large; at most {most} fits")
    return x, y, z


def dynamic_bytes(size: Any) -> int:
    """The bytes of dynamic shared memory that a launch asks for."""
    if not isinstance(size, (int, np.integer)) or not 0 <= size <= MOST_SHARED_BYTES:
        raise ValueError(
            "the shared_bytes of a launch are a whole number from 0 to "
            f"{MOST_SHARED_BYTES}, not {size!r}"
        )
    return int(size)


def emulate(
    kernel: Any,
    *,
    checks: bool = True,
    counts: bool = True,
    trace: str | Iterable[str] = (),
    raise_on_fault: bool = False,
) -> Emulated:
    """Run an unmodified CUDA kernel on the CPU and report what it did.

    ``emulate(kernel)[grid, block, stream, shared_bytes](*arguments)`` runs every block and
    returns a `Report`; the arrays given are written in place. The stream is ignored; it and the
    bytes of dynamic shared memory may be left out.

    Parameters
    ----------
    kernel : callable
        A ``@cuda.jit`` kernel without signature, or the plain function. Device functions and
        captured constants are found through its globals and its closure. Its source must be
        available: a file or a notebook cell.
    checks : bool
        Look for faults. Without, the run is faster and an access out of bounds is undefined.
    counts : bool
        Count what the kernel costs: `Report.traffic` and its kin.
    trace : str or sequence of str
        Variables, arguments and arrays of the kernel, whose values `Report.trace` keeps at every
        barrier and at the end of every iteration of an outermost loop.
    raise_on_fault : bool
        Raise `EmulatorFault` at the first fault instead of going on.

    Returns
    -------
    Emulated
        To be indexed with the launch configuration, then called.

    Raises
    ------
    ValueError
        If the kernel has no variable that ``trace`` asks for.
    UnsupportedConstruct
        At the launch, when the kernel uses what the emulator does not take; the message names it
        and its line.
    RuntimeError
        At the launch, when a loop runs very long without getting anywhere, as a spin lock does.
    """
    return Emulated(kernel, checks, counts, trace, raise_on_fault)
