"""The one place that compiles and launches, on a GPU or on the emulator.

Numba compiles a kernel; the driver launches it. Numba's own dispatch costs about 90 microseconds
for seven device arrays, most of it spent on describing the arrays again at every call. Here a
``Program`` describes them once, in the flat form that Numba's kernels expect, and a call writes
nothing but the pointers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numba import cuda, float32, float64, int64, types, uint8, uint16

from .emulator import Report, emulate
from .plan import Plan, Step
from .problem import Device, Layout

STORAGE = {
    "float16": uint16,
    "bfloat16": uint16,
    "float32": float32,
    "float64": float64,
    "bool": uint8,
}
"""What a kernel sees of a dtype: 16-bit floats are bit patterns."""

EMULATOR = Device("the emulator", (9, 0), shared_bytes=232_448, memory_bytes=2 << 30)
SECONDS_PER_BATCH_STATEMENT = 12e-6
SECONDS_PER_LANE_STATEMENT = 6e-9
LANES_PER_BATCH = 8192
SLOT = ctypes.sizeof(ctypes.c_int64)


def contiguous_layout(shape: tuple[int, ...], dtype: str) -> Layout:
    """The C-contiguous layout of a shape."""
    itemsize = np.dtype(str(STORAGE[dtype])).itemsize
    strides = tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Layout(tuple(shape), strides, dtype)


@functools.cache
def gpu_count() -> int:
    """Number of CUDA devices that Numba can use; 0 without a driver."""
    try:
        return len(cuda.gpus) if cuda.is_available() else 0
    except Exception as error:  # any fault of the CUDA installation means "no GPU" to a caller
        warnings.warn(
            f"a CUDA driver is there but Numba cannot use it ({error}); "
            f"`numba-flash doctor` says what to do",
            stacklevel=2,
        )
        return 0


@functools.cache
def gpu(ordinal: int) -> Device:
    """The description of a CUDA device."""
    with cuda.gpus[ordinal]:
        context = cuda.current_context()
        device = context.device
        name = device.name.decode() if isinstance(device.name, bytes) else device.name
        return Device(
            name=name,
            compute_capability=tuple(device.compute_capability),
            shared_bytes=device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            memory_bytes=context.get_memory_info().total,
        )


class Program:
    """A plan bound to array layouts and to one CUDA device.

    Parameters
    ----------
    plan : Plan
    layouts : mapping of str to Layout
        For every array that the plan names, workspaces excepted.
    ordinal : int
        CUDA device.
    """

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout], ordinal: int):
        from cuda.bindings import driver

        self._driver = driver
        self._ordinal = ordinal
        self._lock = threading.Lock()
        layouts = {**layouts, **_workspace_layouts(plan)}
        steps = [step for step in plan.steps if step.grid]
        values: list[int | np.floating] = []
        self._pointer_slots: list[tuple[int, str]] = []
        self._launches: list[tuple[Any, ...]] = []
        with cuda.gpus[ordinal]:
            context = cuda.current_context()
            self._context = int(context.handle)
            for step in steps:
                first = len(values)
                for arg in step.args:
                    if isinstance(arg, str):
                        self._pointer_slots.append((len(values) + 4, arg))
                        values.extend(_array_words(layouts[arg]))
                    else:
                        values.append(arg)
                self._launches.append((self._function(step, layouts), step, first, len(values)))
        self._words = (ctypes.c_int64 * max(len(values), 1))()
        base = ctypes.addressof(self._words)
        for slot, value in enumerate(values):
            if isinstance(value, np.floating):
                raw = value.tobytes()
                ctypes.memmove(base + slot * SLOT, raw, len(raw))
            else:
                self._words[slot] = value
        self._addresses = (ctypes.c_void_p * max(len(values), 1))(
            *[base + slot * SLOT for slot in range(len(values))]
        )
        table = ctypes.addressof(self._addresses)
        self._launches = [
            (function, step.grid, *_block3(step.block), table + first * SLOT, step)
            for function, step, first, _ in self._launches
        ]

    def _function(self, step: Step, layouts: Mapping[str, Layout]) -> Any:
        """Compile a kernel for these arguments and load it on the current device."""
        kernel: Any = step.kernel
        signature = types.void(*[_numba_type(arg, layouts) for arg in step.args])
        function = kernel.compile(signature)._codelibrary.get_cufunc()
        return self._driver.CUfunction(int(function.handle))

    def launch(self, pointers: Mapping[str, int], stream: int) -> None:
        """Launch every step on a stream; the host does not wait.

        Parameters
        ----------
        pointers : mapping of str to int
            Device addresses of the arrays, workspaces included.
        stream : int
            A ``CUstream`` handle; 0 is the legacy default stream.
        """
        driver = self._driver
        with self._lock, _current(driver, self._context):
            for slot, name in self._pointer_slots:
                self._words[slot] = pointers[name]
            for function, grid, x, y, z, args, step in self._launches:
                (status,) = driver.cuLaunchKernel(function, grid, 1, 1, x, y, z, 0, stream, args, 0)
                if status:
                    raise RuntimeError(f"launch of {_name(step)} failed: {status.name}")
                if os.environ.get("NUMBA_FLASH_DEBUG") == "1":
                    (status,) = driver.cuStreamSynchronize(stream)
                    if status:
                        raise RuntimeError(f"{_name(step)} failed on the GPU: {status.name}")


@contextlib.contextmanager
def _current(driver: Any, context: int) -> Iterator[None]:
    """Make a context current for the calling thread, unless it is already."""
    if int(driver.cuCtxGetCurrent()[1]) == context:
        yield
        return
    driver.cuCtxPushCurrent(driver.CUcontext(context))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def _array_words(layout: Layout) -> list[int]:
    """An array as Numba kernels get it: no owner, size, item size, pointer, shape, strides."""
    itemsize = np.dtype(str(STORAGE[layout.dtype])).itemsize
    return [0, 0, prod(layout.shape), itemsize, 0, *layout.shape, *layout.strides]


def _numba_type(arg: Any, layouts: Mapping[str, Layout]) -> Any:
    if isinstance(arg, str):
        layout = layouts[arg]
        return types.Array(STORAGE[layout.dtype], len(layout.shape), "A")
    if isinstance(arg, np.floating):
        return float32 if arg.dtype == np.float32 else float64
    return int64


def _workspace_layouts(plan: Plan) -> dict[str, Layout]:
    return {name: contiguous_layout(*spec) for name, spec in plan.workspaces.items()}


def _block3(block: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*block, 1, 1)[:3]
    return x, y, z


def _name(step: Step) -> str:
    function: Any = getattr(step.kernel, "py_func", step.kernel)
    return f"{function.__module__}.{function.__name__}"


@dataclass
class Emulation:
    """How an ``emulation()`` block runs kernels, and what it saw."""

    checks: bool = True
    limit: float | None = 60.0
    reports: list[Report] = field(default_factory=list)


_emulation: ContextVar[Emulation | None] = ContextVar("numba_flash_emulation", default=None)


@contextlib.contextmanager
def emulation(*, checks: bool = True, limit: float | None = 60.0) -> Iterator[list[Report]]:
    """Run every call inside the block on the emulator, whatever the arrays live on.

    Parameters
    ----------
    checks : bool
        Look for faults (out-of-bounds access, uninitialised reads, divergent barriers).
    limit : float, optional
        Refuse a call whose estimated time is longer, in seconds. None runs anything.

    Yields
    ------
    list of Report
        One report for each kernel launch, in order.
    """
    state = Emulation(checks, limit)
    token = _emulation.set(state)
    try:
        yield state.reports
    finally:
        _emulation.reset(token)


def current_emulation() -> Emulation | None:
    """The emulation block that the caller is in, if any."""
    return _emulation.get()


def emulator_seconds(plan: Plan) -> float:
    """A rough estimate of the time that the emulator needs for a plan."""
    seconds = 0.0
    for step in plan.steps:
        threads = step.grid * prod(step.block)
        batches = -(-threads // LANES_PER_BATCH)
        lanes = threads / max(batches, 1)
        per_statement = SECONDS_PER_BATCH_STATEMENT + lanes * SECONDS_PER_LANE_STATEMENT
        seconds += batches * step.statements * per_statement
    return seconds


def run_emulated(plan: Plan, arrays: Mapping[str, np.ndarray], state: Emulation) -> None:
    """Run a plan on the emulator, on NumPy arrays in storage form.

    Raises
    ------
    RuntimeError
        If the estimated time exceeds the limit, or a kernel has a fault.
    """
    seconds = emulator_seconds(plan)
    if state.limit is not None and seconds > state.limit:
        raise RuntimeError(
            f"this call would take about {seconds:,.0f} seconds on the emulator, more than the "
            f"limit of {state.limit:g}: use smaller inputs or a GPU, or lift the limit with "
            f"numba_flash.emulation(limit=None)"
        )
    workspaces = {
        name: np.empty(layout.shape, np.dtype(str(STORAGE[layout.dtype])))
        for name, layout in _workspace_layouts(plan).items()
    }
    arrays = {**arrays, **workspaces}
    for step in plan.steps:
        if step.grid:
            args = [arrays[arg] if isinstance(arg, str) else arg for arg in step.args]
            report = emulate(step.kernel, checks=state.checks)[step.grid, step.block](*args)
            state.reports.append(report)
            if report.faults:
                raise RuntimeError(f"{_name(step)} has a fault: {report.faults[0].message}")
