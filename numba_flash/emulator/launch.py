"""The launch: ``emulate(kernel)[grid, block](*arrays)``, in batches of blocks."""

from __future__ import annotations

import itertools
from types import FunctionType
from typing import Any

import numpy as np

from .arguments import argument
from .bind import Binder, python_function
from .check import Checker
from .facade import Cuda
from .functions import cast_of
from .lanes import Lanes
from .report import Coordinates, Report
from .transform import transform

MOST_LANES = 8192
"""Lanes that run together: enough that a vector operation outweighs its call."""
MOST_THREADS = 1024


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
        grid, block = dimensions(parts[0], "grid"), dimensions(parts[1], "block")
        if np.prod(block) > MOST_THREADS:
            raise ValueError(
                f"a block of {np.prod(block)} threads is too large; at most {MOST_THREADS} fit"
            )
        return Launch(self, grid, block, int(parts[3]) if len(parts) == 4 else 0)


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
        total = self.grid[0] * self.grid[1] * self.grid[2]
        threads = self.block[0] * self.block[1] * self.block[2]
        batches = -(-total * threads // MOST_LANES)
        size = -(-total // batches)
        order = itertools.product(*(range(extent) for extent in reversed(self.grid)))
        blocks = [(x, y, z) for z, y, x in order]
        with np.errstate(all="ignore"):
            for first in range(0, total, size):
                self.run(blocks[first : first + size], names, arguments, report)
        return report

    def run(
        self,
        blocks: list[Coordinates],
        names: tuple[str, ...],
        arguments: tuple[Any, ...],
        report: Report,
    ) -> None:
        """Run one batch of blocks to its end."""
        early_return = transform(self.emulated.function).early_return
        lanes = Lanes(blocks, self.block, early_return)
        checker = Checker(lanes, report, self.emulated.checks, cast_of)
        cuda = Cuda(lanes, checker, self.grid, self.shared_bytes)
        kernel = Binder(cuda, lanes, checker).bind(self.emulated.kernel)
        kernel(*(argument(a, n, lanes, checker) for a, n in zip(arguments, names, strict=False)))


def dimensions(extents: Any, what: str) -> Coordinates:
    """A grid or block as three positive integers."""
    parts = tuple(extents) if isinstance(extents, (tuple, list)) else (extents,)
    whole = all(isinstance(part, (int, np.integer)) and part > 0 for part in parts)
    if not 1 <= len(parts) <= 3 or not whole:
        raise ValueError(f"a {what} is one to three positive integers, not {extents!r}")
    x, y, z = (*map(int, parts), 1, 1)[:3]
    return x, y, z


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
    """
    return Emulated(kernel, checks, raise_on_fault)
