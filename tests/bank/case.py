"""What a kernel of the bank comes with: a launch, and what the emulator must say about it.

A faulty kernel marks its faulty lines with a trailing comment, ``# fault: race``. Where two lines
are equally right (a race has two ends), both are marked; a line that may be judged in two ways
names both kinds, with a comma between them.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

MARK = re.compile(r"# fault: ([a-z0-9, -]+)$")
Place = tuple[str, str, int]
"""Kind, file and line of a fault."""


@dataclass(frozen=True)
class Case:
    """A kernel and how it is launched.

    Attributes
    ----------
    kernel : dispatcher
    reason : str
        One line: what is wrong, or why it is right.
    arguments : callable
        Makes fresh arguments.
    want : callable or None
        Of a right kernel: from the arguments before the launch, what its last argument holds after
        it; a tuple for as many arguments at the end.
    """

    kernel: Any
    reason: str
    arguments: Callable[[], tuple[Any, ...]]
    grid: Any
    block: Any
    shared_bytes: int
    want: Callable[..., Any] | None = None
    rtol: float = 0.0

    @property
    def name(self) -> str:
        return self.kernel.py_func.__name__

    @property
    def launch(self) -> tuple[Any, ...]:
        return self.grid, self.block, 0, self.shared_bytes

    def marks(self) -> set[Place]:
        """The faults that the source of the kernel, and of what it calls, says it has."""
        return {place for function in functions(self.kernel) for place in marks_of(function)}


FAULTY: list[Case] = []
RIGHT: list[Case] = []


def faulty(
    reason: str,
    arguments: Callable[[], tuple[Any, ...]],
    *,
    grid: Any = 1,
    block: Any = 32,
    shared_bytes: int = 0,
) -> Callable[[Any], Any]:
    """Enter a kernel that has a fault."""

    def enter(kernel: Any) -> Any:
        FAULTY.append(Case(kernel, reason, arguments, grid, block, shared_bytes))
        return kernel

    return enter


def right(
    reason: str,
    arguments: Callable[[], tuple[Any, ...]],
    want: Callable[..., Any],
    *,
    grid: Any = 1,
    block: Any = 32,
    shared_bytes: int = 0,
    rtol: float = 0.0,
) -> Callable[[Any], Any]:
    """Enter a kernel that has none; sums that NumPy adds in another order need an ``rtol``."""

    def enter(kernel: Any) -> Any:
        RIGHT.append(Case(kernel, reason, arguments, grid, block, shared_bytes, want, rtol))
        return kernel

    return enter


def functions(kernel: Any) -> Iterator[FunctionType]:
    """The Python function of a kernel and of every device function that it calls."""
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, FunctionType):
        return
    yield function
    captured = inspect.getclosurevars(function)
    for called in (captured.globals | captured.nonlocals).values():
        if getattr(called, "py_func", None) is not None:
            yield from functions(called)


def marks_of(function: FunctionType) -> Iterator[Place]:
    lines, first = inspect.getsourcelines(function)
    file = os.path.basename(function.__code__.co_filename)
    for line, text in enumerate(lines, first):
        mark = MARK.search(text.rstrip())
        if mark:
            yield from ((kind.strip(), file, line) for kind in mark[1].split(","))


def cell(number: int, source: str, **names: Any) -> dict[str, Any]:
    """What a notebook cell defines: the source is known to ``linecache`` and in no file."""
    title = f"<ipython-input-{number}>"
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
    scope = dict(names)
    exec(compile(source, title, "exec"), scope)
    return scope


# Arguments


def ramp(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """0, 1, 2 and so on."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def noise(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)
