"""What a run of the emulator tells its caller: faults, notes, exceptions and their places."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING

from .steps import Step, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from .count import Counts, Table, Traffic
    from .picture import Picture

Coordinates = tuple[int, int, int]

KERNEL_MARK = "_emu"
"""Rewritten kernel code is recognised by this name among its globals."""


NAMESPACE = f"{KERNEL_MARK}_namespace"
"""Among its globals, the number of the namespace: the order in which the functions were bound."""

FUNCTION = f"{KERNEL_MARK}_function"
"""Among its globals, the function that was rewritten."""

PRECISION = f"{KERNEL_MARK}_precision"
"""Among its globals, who is told where a float32 becomes a float64; None: nobody."""


class EmulatorFault(RuntimeError):
    """The first fault of a run, raised when ``raise_on_fault=True``; ``.fault`` is the `Fault`."""

    def __init__(self, fault: Fault):
        super().__init__(str(fault))
        self.fault = fault


class UnsupportedConstruct(NotImplementedError):
    """A kernel uses something that the emulator, or Numba's CUDA target, does not take."""


@dataclass(frozen=True)
class Fault:
    """One kind of mistake at one place of a kernel.

    Attributes
    ----------
    kind : str
        "out-of-bounds", "uninitialised-read" or "barrier-divergence".
    message : str
        One sentence with array, index, thread and block of the first occurrence.
    line : int
        Line in the source file of the kernel; ``file`` is its path.
    array : str or None
        Name of the array in the kernel.
    index : tuple of int or None
        The index of the first occurrence.
    threads : tuple of (x, y, z)
        Threads concerned (at most eight are listed) in ``block``.
    block : (x, y, z) or None
    count : int
        How often it happened, each thread counted.
    source : str
        The text of the line.
    """

    kind: str
    message: str
    line: int
    array: str | None = None
    index: tuple[int, ...] | None = None
    threads: tuple[Coordinates, ...] = ()
    block: Coordinates | None = None
    file: str = ""
    count: int = 1
    source: str = ""

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count} times)"
        quoted = f", in `{self.source}`" if self.source else ""
        return f"{self.kind} at {title(self.file)}:{self.line}: {self.message}{quoted}{times}"


@dataclass
class Report:
    """The outcome of one launch.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    faults : list of Fault
        Each (kind, line, array) once, in the order of first occurrence.
    notes : list of str
        What is legal but worth knowing.
    counts : Counts or None
        What the kernel cost; None with ``counts=False``. The properties below are read from it.
    place : (str, int)
        File and line of the kernel.
    trace : list of Step
        What the names given to ``emulate(kernel, trace=...)`` held, in the order of time.
    """

    kernel: str
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: Counts | None = field(default=None, repr=False)
    raise_on_fault: bool = field(default=False, repr=False)
    place: tuple[str, int] = ("", 0)
    trace: list[Step] = field(default_factory=list, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the run had no fault."""
        return not self.faults

    def counted(self) -> Counts:
        if self.counts is None:
            raise ValueError("nothing was counted in this run; leave out counts=False")
        return self.counts

    @property
    def traffic(self) -> Traffic:
        """Global memory: bytes that lanes asked for, and sectors of 32 bytes that moved."""
        return self.counted().total().traffic

    @property
    def bank_conflicts(self) -> int:
        """Cycles of shared memory beyond the least that accesses of their width need."""
        return self.counted().total().bank_conflicts

    @property
    def barriers(self) -> int:
        """Arrivals of blocks at ``syncthreads`` and its kin."""
        return self.counted().total().barriers

    @property
    def multiply_adds(self) -> int:
        """``a * b + c`` of floats, each lane counted, and those inside matrix instructions."""
        return self.counted().total().multiply_adds

    @property
    def by_line(self) -> Table:
        """`Costs` of each line of the kernel's file."""
        return self.counted().by_line()

    @property
    def by_file(self) -> dict[str, Table]:
        """`Costs` by file, then line: device functions may be elsewhere."""
        return self.counted().by_file()

    @property
    def by_array(self) -> Table:
        """`Costs` of the accesses to each array, by its name in the kernel."""
        return self.counted().by_array()

    def trace_json(self) -> str:
        """The trace as strict JSON, one object a step with the attributes of `Step`.

        Arrays are nested lists, ``threads`` is first and behind the last; NaN, which also stands
        for what was not written, is null, the infinities are "Infinity" and "-Infinity".
        """
        return to_json(self.trace)

    def add(self, fault: Fault) -> None:
        """Record a fault, or count it when its place is known already."""
        place = (fault.kind, fault.file, fault.line, fault.array)
        for i, known in enumerate(self.faults):
            if (known.kind, known.file, known.line, known.array) == place:
                self.faults[i] = replace(known, count=known.count + fault.count)
                return
        fault = replace(fault, source=source_line(fault.file, fault.line))
        self.faults.append(fault)
        if self.raise_on_fault:
            raise EmulatorFault(fault)

    def note(self, text: str) -> None:
        """Record a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def show(self, console: Console | None = None) -> None:
        """Print the source with the costs and faults of each line beside it, by `rich`."""
        from .show import show

        show(self, console)

    def picture(self, line: int, file: str | None = None) -> Picture:
        """Draw one warp's accesses on a line: its lanes, and the sectors or banks they ask for.

        Parameters
        ----------
        line : int
        file : str, optional
            The kernel's if left out; device functions may be in another.

        Returns
        -------
        Picture
            A notebook shows it; ``.save(path)`` writes it to a file, ``.figure`` is matplotlib's.

        Raises
        ------
        ValueError
            If the line accesses neither global nor shared memory.
        ImportError
            Without matplotlib.
        """
        from .picture import picture

        return picture(self.counted(), file or self.place[0], line)

    def _repr_html_(self) -> str:
        from .show import as_html

        return as_html(self)

    def __str__(self) -> str:
        found = "no fault" if self.ok else f"{len(self.faults)} fault(s)"
        lines = [f"{self.kernel}: {found}"]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__


def source_line(file: str, line: int) -> str:
    """The text of a line, without the spaces around it."""
    return linecache.getline(file, line).strip()


def title(file: str) -> str:
    """What a message calls a file: its name, or the number of a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(file) if shell else None
    return " ".join(cell) if cell else os.path.basename(file)


def show(values: tuple[int, ...] | Coordinates) -> str:
    return f"({', '.join(map(str, values))})"


@contextlib.contextmanager
def errors_at_their_place() -> Iterator[None]:
    """Begin the message of an error in a kernel with file and line, and end it with the line."""
    try:
        yield
    except EmulatorFault:
        raise
    except Exception as error:
        inside = [
            (frame, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if KERNEL_MARK in frame.f_globals
        ]
        if inside and len(error.args) == 1:
            frame, line = inside[-1]
            file = frame.f_code.co_filename
            if not str(error).startswith(file):
                statement = source_line(file, line)
                numbers = numbers_among_arguments(frame, statement)
                error.args = (f"{file}:{line}: {error}, in `{statement}`{numbers}",)
        raise


def numbers_among_arguments(frame: FrameType, statement: str) -> str:
    """Which arguments in a statement are None or plain numbers: a kernel may expect arrays."""
    code = frame.f_code
    values = {name: frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]}
    return "".join(
        f", where {name} is {value}"
        for name, value in values.items()
        if (value is None or isinstance(value, (int, float)))
        and re.search(rf"\b{name}\b", statement)
    )
