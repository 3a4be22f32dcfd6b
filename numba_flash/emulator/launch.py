"""The launch: ``emulate(kernel)[grid, block](*arrays)``, in batches of blocks."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import numpy as np

from .arguments import GlobalRegions, argument
from .bind import Binder, python_function
from .check import Checker
from .facade import MOST_SHARED_BYTES, Cuda
from .functions import cast_of
from .lanes import Lanes
from .race import BlockOrder, Races
from .report import Coordinates, Report, errors_at_their_place
from .transform import transform

MOST_LANES = 8192
"""Lanes that run together: enough that a vector operation outweighs its call."""

# What every card since Hopper takes (CUDA C++ Programming Guide, compute capabilities).
MOST_THREADS = 1024
LARGEST_GRID = (2**31 - 1, 65535, 65535)
LARGEST_BLOCK = (1024, 1024, 64)


class Emulated:
    """A kernel that waits for its launch configuration."""

    def __init__(self, kernel: Any, checks: bool, raise_on_fault: bool):
        function = python_function(kernel)
        if not isinstance(function, FunctionType):
            raise TypeError(
                f"emulate() takes a @cuda.jit kernel or a plain function, not {kernel!r}"
            )
        self.kernel = kernel
        self.function = function
        self.checks = checks
        self.raise_on_fault = raise_on_fault

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
        report = Report(function.__name__, raise_on_fault=self.emulated.raise_on_fault)
        regions, order = GlobalRegions(arguments), BlockOrder()
        total, threads = math.prod(self.grid), math.prod(self.block)
        batches = -(-total * threads // MOST_LANES)
        size = -(-total // batches)
        with np.errstate(all="ignore"):
            for first in range(0, total, size):
                blocks = [self.coordinates(b) for b in range(first, min(first + size, total))]
                early_return = transform(function).early_return
                lanes = Lanes(blocks, self.block, early_return)
                races = Races(lanes, report, first, order, self.coordinates)
                checker = Checker(lanes, report, self.emulated.checks, cast_of, races, regions)
                self.run(lanes, checker, dict(zip(names, arguments, strict=False)))
        return report

    def coordinates(self, block: int) -> Coordinates:
        """Where the block of this number is in the grid; x runs fastest."""
        x, y, _ = self.grid
        return block % x, block // x % y, block // (x * y)

    def run(self, lanes: Lanes, checker: Checker, arguments: dict[str, Any]) -> None:
        """Run one batch of blocks to its end."""
        cuda = Cuda(lanes, checker, self.grid, self.shared_bytes)
        kernel = Binder(cuda, lanes, checker).bind(self.emulated.kernel)
        values = [argument(value, name, lanes, checker) for name, value in arguments.items()]
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


def emulate(kernel: Any, *, checks: bool = True, raise_on_fault: bool = False) -> Emulated:
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
    raise_on_fault : bool
        Raise `EmulatorFault` at the first fault instead of going on.

    Returns
    -------
    Emulated
        To be indexed with the launch configuration, then called.

    Raises
    ------
    UnsupportedConstruct
        At the launch, when the kernel uses what the emulator does not take; the message names it
        and its line.
    RuntimeError
        At the launch, when a loop runs very long without getting anywhere, as a spin lock does.
    """
    return Emulated(kernel, checks, raise_on_fault)
