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
import numbers
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numba import cuda, float32, float64, int64, types, uint8, uint16

from . import cache
from .emulator import Report, empty, emulate
from .fingerprint import fingerprint
from .plan import Plan, Step
from .problem import Device, Layout, check_bool

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
WORD = ctypes.sizeof(ctypes.c_int64)
POINTER_WORD = 4
"""Where an array's address stands among its words (see ``_array_words``)."""
MAX_DYNAMIC_SHARED_SIZE_BYTES = ctypes.c_int(8)
"""A member of the driver's enumeration CUfunction_attribute."""


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
    order : list of str
        The names, in the order in which ``launch`` gets their addresses.
    ordinal : int
        CUDA device.
    """

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout], order: list[str], ordinal: int):
        layouts = {**layouts, **_workspace_layouts(plan)}
        self._driver = _cuda_driver()
        self._debug = os.environ.get("NUMBA_FLASH_DEBUG") == "1"
        self._lock = threading.Lock()
        self._current = ctypes.c_void_p()
        self._current_slot = ctypes.byref(self._current)
        with cuda.gpus[ordinal]:
            self._context = int(cuda.current_context().handle)
            steps = [(step, _function(step, layouts)) for step in plan.steps if step.grid]
            for step, function in steps:
                if step.shared_bytes:
                    self._allow_shared_memory(step, function)
        words: list[int | np.floating] = []
        first_words = []
        self._pointers: list[tuple[int, int]] = []
        for step, _ in steps:
            first_words.append(len(words))
            for arg in step.args:
                if isinstance(arg, str):
                    self._pointers.append((len(words) + POINTER_WORD, order.index(arg)))
                    words.extend(_array_words(layouts[arg]))
                else:
                    words.append(arg)
        self._words = (ctypes.c_int64 * max(len(words), 1))()
        word = [ctypes.addressof(self._words) + n * WORD for n in range(len(words))]
        for address, value in zip(word, words, strict=True):
            raw = np.int64(value).tobytes() if isinstance(value, int) else value.tobytes()
            ctypes.memmove(address, raw, len(raw))
        self._addresses = (ctypes.c_void_p * max(len(words), 1))(*word)
        table = ctypes.addressof(self._addresses)
        self._stream = ctypes.c_void_p()
        self._launches = [
            (step, self._launch_arguments(step, function, table + first * WORD))
            for (step, function), first in zip(steps, first_words, strict=True)
        ]

    def _allow_shared_memory(self, step: Step, function: int) -> None:
        """Let blocks of a kernel have the dynamic shared memory that they ask for.

        The limit belongs to the kernel on the device, not to a program, so it only ever grows.
        """
        attribute, kernel = MAX_DYNAMIC_SHARED_SIZE_BYTES, ctypes.c_void_p(function)
        device, allowed = ctypes.c_int(), ctypes.c_int()
        with _attributes_lock:
            status = self._driver.cuCtxGetDevice(ctypes.byref(device))
            status = status or self._driver.cuKernelGetAttribute(
                ctypes.byref(allowed), attribute, kernel, device
            )
            if not status and step.shared_bytes > allowed.value:
                status = self._driver.cuKernelSetAttribute(
                    attribute, ctypes.c_int(step.shared_bytes), kernel, device
                )
        if status:
            self._fail(step, status, f"cannot have {step.shared_bytes:,} bytes of shared memory")

    def _launch_arguments(self, step: Step, function: int, args: int) -> tuple[Any, ...]:
        """The arguments of cuLaunchKernel, converted for C once and for all."""
        block = (*step.block, 1, 1)[:3]
        sizes = (step.grid, 1, 1, *block, step.shared_bytes)
        return (
            ctypes.c_void_p(function),
            *map(ctypes.c_uint, sizes),
            self._stream,
            ctypes.c_void_p(args),
            ctypes.c_void_p(),
        )

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch every step on a stream; the host does not wait.

        Parameters
        ----------
        addresses : sequence of int
            Device addresses of the arrays, in the program's order.
        stream : int
            A ``CUstream`` handle; 0 is the legacy default stream.

        Raises
        ------
        RuntimeError
            If the driver refuses a launch; with ``NUMBA_FLASH_DEBUG=1`` when the program was
            made, also if a kernel fails.
        """
        driver, words = self._driver, self._words
        with self._lock:
            driver.cuCtxGetCurrent(self._current_slot)
            foreign = self._current.value != self._context
            if foreign:
                driver.cuCtxPushCurrent_v2(ctypes.c_void_p(self._context))
            try:
                self._stream.value = stream
                for word, position in self._pointers:
                    words[word] = addresses[position]
                for step, arguments in self._launches:
                    status = driver.cuLaunchKernel(*arguments)
                    if status:
                        self._fail(step, status, "could not be launched")
                    if self._debug:
                        status = driver.cuStreamSynchronize(self._stream)
                        if status:
                            self._fail(step, status, "failed on the GPU")
            finally:
                if foreign:
                    driver.cuCtxPopCurrent_v2(self._current_slot)

    def _fail(self, step: Step, status: int, what: str) -> None:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(status, ctypes.byref(name))
        error = (name.value or b"an unknown error").decode()
        raise RuntimeError(f"{_name(step)} {what}: {error} ({status})")


_attributes_lock = threading.Lock()


@functools.cache
def _cuda_driver() -> ctypes.CDLL:
    """The driver's own library: called with ctypes objects, it costs the host half a microsecond
    on top of the driver's own time."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


_functions: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""Of each kernel, what was loaded for which arguments on which device; it stays loaded."""
_functions_lock = threading.Lock()


def _function(step: Step, layouts: Mapping[str, Layout]) -> int:
    """A kernel for these arguments on the current device: loaded before, kept on disk, or new."""
    kernel: Any = step.kernel
    argument_types = tuple([_numba_type(arg, layouts) for arg in step.args])
    device = cuda.current_context().device
    with _functions_lock:
        functions = _functions.setdefault(kernel, {})
        place = argument_types, device.id
        if place not in functions:
            functions[place] = _load_or_compile(kernel, argument_types, device.compute_capability)
        return functions[place]


def _load_or_compile(
    kernel: Any, argument_types: tuple[Any, ...], capability: tuple[int, int]
) -> int:
    key = None
    if cache.directory() is not None:
        key = fingerprint(kernel, argument_types, capability)
    if key is not None:
        kept = cache.load(key)
        function = kept and _load(kept)
        if function:
            return function
    function, cubin = _compile(kernel, argument_types)
    if key is not None and cubin is not None:
        cache.store(key, cubin)
    return function


def _load(cubin: cache.Cubin) -> int | None:
    """Load machine code by the driver, or None where the driver does not take it."""
    driver = _cuda_driver()
    library, function = ctypes.c_void_p(), ctypes.c_void_p()
    no_options = (None, None, ctypes.c_uint(0)) * 2
    status = driver.cuLibraryLoadData(ctypes.byref(library), cubin.code, *no_options)
    status = status or driver.cuLibraryGetKernel(
        ctypes.byref(function), library, cubin.name.encode()
    )
    return None if status else function.value


def _compile(kernel: Any, argument_types: tuple[Any, ...]) -> tuple[int, cache.Cubin | None]:
    """A kernel fresh from Numba, with its machine code if that is all there is to it."""
    compiled = kernel.compile(types.void(*argument_types))
    library = compiled._codelibrary
    needs_more = (
        library._setup_functions
        or library.referenced_objects
        or library.use_cooperative
        or compiled.shared_memory_carveout is not None
    )
    cubin = None if needs_more else cache.Cubin(compiled.entry_name, library.get_cubin().code)
    return int(library.get_cufunc().handle), cubin


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


def _name(step: Step) -> str:
    function: Any = getattr(step.kernel, "py_func", step.kernel)
    return f"{function.__module__}.{function.__name__}"


@dataclass
class Emulation:
    """How an ``emulation()`` block runs kernels, and what it saw."""

    checks: bool = True
    limit: float | None = 60.0
    counts: bool = True
    trace: tuple[str, ...] = ()
    reports: list[Report] = field(default_factory=list)


_emulation: ContextVar[Emulation | None] = ContextVar("numba_flash_emulation", default=None)


@contextlib.contextmanager
def emulation(
    *,
    checks: bool = True,
    limit: float | None = 60.0,
    counts: bool = True,
    trace: str | tuple[str, ...] = (),
) -> Iterator[list[Report]]:
    """Run every call inside the block on the emulator, whatever the arrays live on.

    Parameters
    ----------
    checks : bool
        Look for faults: accesses out of bounds, races, missing waits and their like.
    limit : float, optional
        Refuse a call whose estimated time is longer, in seconds. None runs anything.
    counts : bool
        Count bytes, sectors, bank conflicts, barriers and multiply-adds.
    trace : str or tuple of str
        Names of variables; each kernel that has some of them records their values
        (``report.trace``).

    Yields
    ------
    list of Report
        One report for each kernel launch, in order.
    """
    check_bool("checks", checks)
    if limit is not None and (not isinstance(limit, numbers.Real) or not limit > 0):
        raise ValueError(
            f"limit is {limit!r}; it must be a positive number of seconds, or None for no limit"
        )
    check_bool("counts", counts)
    names = (trace,) if isinstance(trace, str) else tuple(trace)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"trace takes names of variables, as in trace=('row_max',), not {trace!r}")
    state = Emulation(checks, limit, counts, names)
    with resume_emulation(state):
        yield state.reports


@contextlib.contextmanager
def resume_emulation(state: Emulation | None) -> Iterator[None]:
    """Be inside the emulation block of somebody else, or inside none."""
    token = _emulation.set(state)
    try:
        yield
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


def emulated_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory in storage form that the emulator knows nobody has written."""
    return empty(shape, np.dtype(str(STORAGE[dtype])))


def refuse_long_emulation(plan: Plan, state: Emulation) -> None:
    """Raise RuntimeError if a plan's estimated time exceeds the limit."""
    seconds = emulator_seconds(plan)
    if state.limit is not None and seconds > state.limit:
        raise RuntimeError(
            f"this call would take about {seconds:,.0f} seconds on the emulator, more than the "
            f"limit of {state.limit:g}: use smaller inputs or a GPU, or lift the limit with "
            f"numba_flash.emulation(limit=None)"
        )


def run_emulated(plan: Plan, arrays: Mapping[str, np.ndarray], state: Emulation) -> None:
    """Run a plan on the emulator, on NumPy arrays in storage form.

    Raises
    ------
    RuntimeError
        If a kernel has a fault.
    """
    arrays = dict(arrays)
    for name, (shape, dtype) in plan.workspaces.items():
        arrays[name] = emulated_empty(shape, dtype)
    for step in plan.steps:
        if step.grid:
            args = [arrays[arg] if isinstance(arg, str) else arg for arg in step.args]
            function: Any = getattr(step.kernel, "py_func", step.kernel)
            has = function.__code__.co_varnames
            trace = tuple(name for name in state.trace if name in has)
            emulated = emulate(step.kernel, checks=state.checks, counts=state.counts, trace=trace)
            report = emulated[step.grid, step.block, 0, step.shared_bytes](*args)
            state.reports.append(report)
            if report.faults:
                raise RuntimeError(f"{_name(step)} has a fault: {report.faults[0].message}")
