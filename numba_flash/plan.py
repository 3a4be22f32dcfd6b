"""What to launch, as data: a rung answers a problem with a plan, ``launch`` carries it out.

A plan names arrays instead of holding them, so one plan serves every call of the same shape, on
a GPU or on the emulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Step:
    """One kernel launch.

    Attributes
    ----------
    kernel : numba CUDA dispatcher
    grid : int
        Number of blocks. One-dimensional: the y and z axes of a grid end at 65,535.
    block : tuple of int
        Threads of a block, (x,) or (x, y).
    args : tuple of str, int, numpy.float32 or numpy.float64
        A string names an array of the call or of the plan's workspaces; an int goes in as int64.
    statements : int
        Innermost statements that one thread executes, by which the emulator estimates its time.
    shared_bytes : int
        Dynamic shared memory of a block: what the kernel's ``cuda.shared.array(0, ...)`` holds.
    """

    kernel: object
    grid: int
    block: tuple[int, ...]
    args: tuple[str | int | np.floating, ...]
    statements: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """Kernel launches in order, and the arrays that live only between them.

    Attributes
    ----------
    steps : tuple of Step
    workspaces : mapping of str to (shape, dtype)
    """

    steps: tuple[Step, ...]
    workspaces: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
