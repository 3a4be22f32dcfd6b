"""What ``cuda`` means inside an emulated kernel."""

from __future__ import annotations

import math
from types import SimpleNamespace
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
from .report import Coordinates, UnsupportedConstruct
from .spaces import LocalSpace, SharedMemory, SharedSpace
from .warp import WARP_SIZE, Warp

# Of a block, on a card of compute capability 9.0; more than 48 KiB must be dynamic everywhere.
MOST_STATIC_BYTES = 48 << 10
MOST_SHARED_BYTES = 227 << 10


class Cuda(Namespace):
    """``numba.cuda`` as a batch of blocks sees it."""

    def __init__(
        self,
        lanes: Lanes,
        checker: Checker,
        grid_dim: Coordinates,
        dynamic_bytes: int,
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
            shared=SimpleNamespace(array=self.shared_array),
            local=SimpleNamespace(array=self.local_array),
            const=SimpleNamespace(array_like=lambda array: array),
            libdevice=LIBDEVICE,
            threadIdx=thread_index(lanes),
            blockIdx=block_index(lanes, grid_dim),
            blockDim=SimpleNamespace(**dict(zip("xyz", lanes.block_dim, strict=True))),
            gridDim=SimpleNamespace(**dict(zip("xyz", grid_dim, strict=True))),
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
        self.dynamic_bytes = dynamic_bytes
        self.static_arrays: dict[tuple[int, tuple[int, int]], Array] = {}
        self.dynamic_memory: SharedMemory | None = None
        self.static_bytes = 0

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
        key = (id(self.lanes.frame().f_globals), site)
        if key not in self.static_arrays:
            extents, kind = shape_of(shape), dtype_of(dtype)
            if extents == (0,):
                memory = self.dynamic()
                extents = (self.dynamic_bytes // kind.itemsize,)
            else:
                size = math.prod(extents) * kind.itemsize
                self.reserve(size, name)
                memory = SharedMemory(self.lanes.shape[0], size, kind)
                self.checker.shared.append(memory)
            space = SharedSpace(memory, kind, self.lanes)
            array = Array(space, name, extents, row_major(extents), self.checker)
            self.static_arrays[key] = array
        return self.static_arrays[key]

    def reserve(self, size: int, name: str) -> None:
        """Take ``size`` bytes of static shared memory, for an array of this name."""
        self.static_bytes += size
        if self.static_bytes > MOST_STATIC_BYTES:
            raise UnsupportedConstruct(
                f"{self.checker.place()}: with the {size} bytes of {name} the static shared "
                f"arrays take {self.static_bytes} bytes; at most {MOST_STATIC_BYTES} fit, more "
                "must be dynamic: cuda.shared.array(0, dtype), and the bytes in the launch"
            )
        if self.static_bytes + self.dynamic_bytes > MOST_SHARED_BYTES:
            raise UnsupportedConstruct(
                f"{self.checker.place()}: static shared arrays of {self.static_bytes} bytes and "
                f"{self.dynamic_bytes} dynamic bytes do not fit together; at most "
                f"{MOST_SHARED_BYTES} do"
            )

    def dynamic(self) -> SharedMemory:
        if self.dynamic_memory is None:
            byte = np.dtype(np.uint16)
            self.dynamic_memory = SharedMemory(self.lanes.shape[0], self.dynamic_bytes, byte)
            self.checker.shared.append(self.dynamic_memory)
        return self.dynamic_memory

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
        self.checker.barrier(name)
        here = self.lanes.full_mask()
        ayes = np.broadcast_to(truth(predicate), self.lanes.shape) & here
        return per_block(ayes), per_block(here)

    def threadfence(self) -> None:
        """Memory is always up to date here, but a kernel may not count on that."""
        self.checker.fence()

    threadfence_system = threadfence

    def threadfence_block(self) -> None:
        """Within a block there is nothing to wait for."""

    def nanosleep(self, nanoseconds: Value) -> None:
        """Time does not pass here."""


def per_block(mask: np.ndarray) -> np.ndarray:
    return np.asarray(np.count_nonzero(mask, axis=1, keepdims=True), np.int32)


def shape_of(shape: Any) -> tuple[int, ...]:
    return tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)


def thread_index(lanes: Lanes) -> SimpleNamespace:
    rank = np.arange(lanes.num_threads, dtype=np.int32)[None, :]
    x, y, z = lanes.block_dim
    parts = {"x": rank % np.int32(x), "y": rank // np.int32(x) % np.int32(y)}
    parts["z"] = rank // np.int32(x * y)
    sizes = {"x": x, "y": y, "z": z}
    return SimpleNamespace(**{a: part if sizes[a] > 1 else 0 for a, part in parts.items()})


def block_index(lanes: Lanes, grid_dim: Coordinates) -> SimpleNamespace:
    columns = np.array(lanes.blocks, np.int32).T[:, :, None]
    values = {}
    for axis, column in zip("xyz", columns, strict=True):
        same = bool((column == column[0]).all())
        values[axis] = int(column[0, 0]) if same else column
    return SimpleNamespace(**values)
