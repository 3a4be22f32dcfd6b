"""What ``cuda`` means inside an emulated kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import Value, select, truth
from .atomics import Atomics
from .check import Checker
from .functions import (
    CASTS,
    FUNCTIONS,
    LIBDEVICE,
    Namespace,
    brev,
    clz,
    dtype_of,
    ffs,
    fma,
    popc,
)
from .lanes import Lanes
from .memory import Array, row_major
from .report import NAMESPACE, Coordinates, UnsupportedConstruct
from .spaces import LocalSpace, SharedMemory, SharedSpace
from .warp import WARP_SIZE, Warp

# Of a block, on a card of compute capability 9.0; more than 48 KiB must be dynamic everywhere.
MOST_STATIC_BYTES = 48 << 10
MOST_SHARED_BYTES = 227 << 10


Site = tuple[int, tuple[int, int]]
"""A place of the kernel: the number of a function's namespace, line and column."""


class BlockMemory:
    """The shared memory of a batch of blocks: an allocation for each array, one for dynamic ones.

    Parameters
    ----------
    num_blocks : int
    dynamic_bytes : int
        What the launch asks for.
    """

    def __init__(self, num_blocks: int, dynamic_bytes: int):
        self.num_blocks = num_blocks
        self.dynamic_bytes = dynamic_bytes
        self.static_bytes = 0
        self.all: list[SharedMemory] = []
        self._static: dict[Site, SharedMemory] = {}
        self._dynamic: SharedMemory | None = None

    def static(
        self, site: Site, name: str, size: int, kind: np.dtype, place: Callable[[], str]
    ) -> SharedMemory:
        """The memory of the array of this name that is made at ``site``."""
        if site not in self._static:
            self.reserve(size, name, place)
            self._static[site] = self.add(size, kind)
        return self._static[site]

    def dynamic(self) -> SharedMemory:
        if self._dynamic is None:
            self._dynamic = self.add(self.dynamic_bytes, np.dtype(np.uint16))
        return self._dynamic

    def add(self, size: int, kind: np.dtype) -> SharedMemory:
        self.all.append(SharedMemory(self.num_blocks, size, kind))
        return self.all[-1]

    def reserve(self, size: int, name: str, place: Callable[[], str]) -> None:
        """Take ``size`` bytes of static shared memory, for an array of this name."""
        self.static_bytes += size
        if self.static_bytes > MOST_STATIC_BYTES:
            raise UnsupportedConstruct(
                f"{place()}: with the {size} bytes of {name} the static shared "
                f"arrays take {self.static_bytes} bytes; at most {MOST_STATIC_BYTES} fit, more "
                "must be dynamic: cuda.shared.array(0, dtype), and the bytes in the launch"
            )
        if self.static_bytes + self.dynamic_bytes > MOST_SHARED_BYTES:
            raise UnsupportedConstruct(
                f"{place()}: static shared arrays of {self.static_bytes} bytes and "
                f"{self.dynamic_bytes} dynamic bytes do not fit together; at most "
                f"{MOST_SHARED_BYTES} do"
            )


class Cuda(Namespace):
    """``numba.cuda`` as a batch of blocks sees it."""

    def __init__(
        self,
        lanes: Lanes,
        checker: Checker,
        grid_dim: Coordinates,
        memory: BlockMemory,
    ):
        warp = Warp(lanes, checker)
        super().__init__(
            title="cuda",
            **{name: kind for name, kind in CASTS.items() if name != "bool"},
            **{f: getattr(warp, f) for f in dir(warp) if f.endswith("_sync")},
            activemask=warp.activemask,
            lanemask_lt=warp.lanemask_lt,
            syncwarp=warp.syncwarp,
            laneid=warp.laneid,
            warpsize=WARP_SIZE,
            atomic=Atomics(lanes),
            shared=Namespace(title="cuda.shared", array=self.shared_array),
            local=Namespace(title="cuda.local", array=self.local_array),
            const=Namespace(title="cuda.const", array_like=lambda array: array),
            libdevice=LIBDEVICE,
            threadIdx=thread_index(lanes),
            blockIdx=block_index(lanes, grid_dim),
            blockDim=Namespace(
                title="cuda.blockDim", **dict(zip("xyz", lanes.block_dim, strict=True))
            ),
            gridDim=Namespace(title="cuda.gridDim", **dict(zip("xyz", grid_dim, strict=True))),
            popc=popc,
            clz=clz,
            ffs=ffs,
            brev=brev,
            fma=fma,
            cbrt=FUNCTIONS["cbrt"],
            selp=select,
        )
        self.types = self
        self.lanes = lanes
        self.checker = checker
        self.memory = memory
        self.arrays: dict[Site, Array] = {}

    # Positions

    def grid(self, ndim: int) -> Value:
        """The thread's position in the whole grid."""
        positions = tuple(
            getattr(self.blockIdx, axis) * np.int64(getattr(self.blockDim, axis))
            + getattr(self.threadIdx, axis)
            for axis in "xyz"[:ndim]
        )
        return positions[0] if ndim == 1 else positions

    def gridsize(self, ndim: int) -> Value:
        sizes = tuple(
            getattr(self.blockDim, axis) * getattr(self.gridDim, axis) for axis in "xyz"[:ndim]
        )
        return sizes[0] if ndim == 1 else sizes

    # Memory

    def shared_array(
        self,
        shape: Any,
        dtype: Any,
        alignment: int | None = None,
        *,
        name: str = "array",
        site: tuple[int, int] = (0, 0),
    ) -> Array:
        """``cuda.shared.array``: one array a place in a function; shape 0 is dynamic memory."""
        key = self.lanes.frame().f_globals[NAMESPACE], site
        if key not in self.arrays:
            extents, kind = shape_of(shape), dtype_of(dtype)
            if extents == (0,):
                extents = (self.memory.dynamic_bytes // kind.itemsize,)
                memory = self.memory.dynamic()
            else:
                size = math.prod(extents) * kind.itemsize
                memory = self.memory.static(key, name, size, kind, self.checker.place)
            space = SharedSpace(memory, kind, self.lanes)
            self.arrays[key] = Array(space, name, extents, row_major(extents), self.checker)
            self.checker.shared = self.memory.all
        return self.arrays[key]

    def local_array(
        self,
        shape: Any,
        dtype: Any,
        alignment: int | None = None,
        *,
        name: str = "array",
        site: tuple[int, int] = (0, 0),
    ) -> Array:
        """``cuda.local.array``: unwritten each time it is reached."""
        extents = shape_of(shape)
        space = LocalSpace(int(np.prod(extents)), dtype_of(dtype), self.lanes)
        return Array(space, name, extents, row_major(extents), self.checker)

    # Barriers

    def syncthreads(self) -> None:
        self.checker.barrier("syncthreads")

    def syncthreads_count(self, predicate: Value) -> Value:
        return self.vote(predicate, "syncthreads_count")[0]

    def syncthreads_and(self, predicate: Value) -> Value:
        count, arrived = self.vote(predicate, "syncthreads_and")
        return (count == arrived).astype(np.int32)

    def syncthreads_or(self, predicate: Value) -> Value:
        return (self.vote(predicate, "syncthreads_or")[0] > 0).astype(np.int32)

    def vote(self, predicate: Value, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Per block, the threads for which the predicate holds, and the threads that arrived."""
        here = self.lanes.full_mask()
        ayes = per_block(np.broadcast_to(truth(predicate), self.lanes.shape) & here)
        arrived = per_block(here)
        all_ayes, all_arrived = self.checker.barrier(name, (int(ayes[0, 0]), int(arrived[0, 0])))
        if self.checker.group is None:
            return ayes, arrived
        return np.full((1, 1), all_ayes, np.int32), np.full((1, 1), all_arrived, np.int32)

    def threadfence(self) -> None:
        """Memory is always up to date here, but a kernel may not count on that."""
        self.checker.fence()

    threadfence_system = threadfence

    def threadfence_block(self) -> None:
        """Memory is always up to date here, but other threads may not count on that."""
        self.checker.fence_block()

    def nanosleep(self, nanoseconds: Value) -> None:
        """Time does not pass here."""


def per_block(mask: np.ndarray) -> np.ndarray:
    return np.asarray(np.count_nonzero(mask, axis=1, keepdims=True), np.int32)


def shape_of(shape: Any) -> tuple[int, ...]:
    return tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)


def thread_index(lanes: Lanes) -> Namespace:
    first = lanes.first_thread
    rank = np.arange(first, first + lanes.num_threads, dtype=np.int32)[None, :]
    x, y, z = lanes.block_dim
    parts = {"x": rank % np.int32(x), "y": rank // np.int32(x) % np.int32(y)}
    parts["z"] = rank // np.int32(x * y)
    sizes = {"x": x, "y": y, "z": z}
    return Namespace(
        title="cuda.threadIdx", **{a: part if sizes[a] > 1 else 0 for a, part in parts.items()}
    )


def block_index(lanes: Lanes, grid_dim: Coordinates) -> Namespace:
    columns = np.array(lanes.blocks, np.int32).T[:, :, None]
    values = {}
    for axis, column in zip("xyz", columns, strict=True):
        same = bool((column == column[0]).all())
        values[axis] = int(column[0, 0]) if same else column
    return Namespace(title="cuda.blockIdx", **values)
