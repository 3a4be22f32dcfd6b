"""Tensor maps: what a bulk tensor copy has to know of the array that it reads or writes.

A kernel gets one as a global array of 16 ``uint64``, aligned to 64 bytes (`TensorMap.encode`); the
emulator takes the `TensorMap` itself. Source: CUDA driver API, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

WORDS = 16
"""A tensor map is 128 bytes."""
ALIGNMENT = 16
MOST_AXES = 5
MOST_EXTENT = 2**32
MOST_STRIDE = 2**40
MOST_BOX = 256
SWIZZLED_BYTES = 128

ELEMENTS = {
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "int32": "INT32",
    "uint64": "UINT64",
    "int64": "INT64",
    "float16": "FLOAT16",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
    "bfloat16": "BFLOAT16",
}
"""The driver's names of dtypes."""


class TensorMap:
    """An array, and the box of it that one instruction copies; what lies outside reads as zero.

    Parameters
    ----------
    array : array
        Anything with a ``shape``, ``strides`` in bytes and a ``dtype``: a NumPy array, or one on a
        device.
    box : tuple of int
        Extents of the box, the fastest axis first, as coordinates are given.
    swizzled : bool
        Whether the box is swizzled in shared memory: its rows then have 128 bytes, whose 16-byte
        chunks are exchanged as `layouts.swizzle_128b` says.

    Raises
    ------
    ValueError, TypeError
        If the hardware has no such copy.
    """

    def __init__(self, array: Any, box: tuple[int, ...], swizzled: bool = True):
        self.array = array
        self.box = tuple(map(int, box))
        self.swizzled = bool(swizzled)
        self.shape = tuple(map(int, array.shape))
        self.strides = tuple(map(int, array.strides))
        self.dtype = np.dtype(array.dtype)
        self._check_array()
        self._check_box()

    def _check_array(self) -> None:
        if self.dtype.name not in ELEMENTS:
            raise TypeError(
                f"a tensor map cannot hold {self.dtype}; it takes {', '.join(ELEMENTS)}"
            )
        if not 1 <= len(self.shape) <= MOST_AXES:
            raise ValueError(
                f"a tensor map has 1 to {MOST_AXES} axes, the array has {len(self.shape)}"
            )
        if not all(1 <= extent <= MOST_EXTENT for extent in self.shape):
            raise ValueError(
                f"the array of a tensor map has 1 to 2**32 elements along each axis, not the shape "
                f"{self.shape}"
            )
        if self.strides[-1] != self.dtype.itemsize:
            raise ValueError(
                f"the last axis of a tensor map's array must be contiguous; its stride is "
                f"{self.strides[-1]} bytes, an element has {self.dtype.itemsize}"
            )
        for axis, stride in enumerate(self.strides[:-1]):
            if stride % ALIGNMENT or not 0 < stride < MOST_STRIDE:
                raise ValueError(
                    f"the strides of a tensor map's array are positive multiples of {ALIGNMENT} "
                    f"bytes below 2**40; axis {axis} has {stride}. Pad the rows or pass a copy"
                )

    def _check_box(self) -> None:
        if len(self.box) != len(self.shape):
            raise ValueError(
                f"the box {self.box} has {len(self.box)} axes, the array has {len(self.shape)}"
            )
        if not all(1 <= extent <= MOST_BOX for extent in self.box):
            raise ValueError(
                f"a box has 1 to {MOST_BOX} elements along each axis, not {self.box}; copy it in "
                "parts"
            )
        row = self.box[0] * self.dtype.itemsize
        if row % ALIGNMENT:
            raise ValueError(
                f"a row of a box is a multiple of {ALIGNMENT} bytes, not {row} (box {self.box} of "
                f"{self.dtype})"
            )
        if self.swizzled and row != SWIZZLED_BYTES:
            raise ValueError(
                f"a row of a swizzled box has {SWIZZLED_BYTES} bytes, not {row}; take "
                f"{SWIZZLED_BYTES // self.dtype.itemsize} elements of {self.dtype} along the "
                "fastest axis, or swizzled=False"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of one box; a copy counts all of them, also those outside the array."""
        return math.prod(self.box) * self.dtype.itemsize

    def encode(self, pointer: int | None = None) -> np.ndarray:
        """The 16 words that a kernel needs; a CUDA driver makes them.

        Parameters
        ----------
        pointer : int, optional
            Address of the array in device memory; left out, its ``__cuda_array_interface__`` says.

        Returns
        -------
        ndarray of uint64, (16,)

        Raises
        ------
        ValueError
            If the address is not aligned to 16 bytes.
        RuntimeError
            If the driver refuses.
        """
        from cuda.bindings import driver  # only where there is a GPU

        if pointer is None:
            pointer = self.array.__cuda_array_interface__["data"][0]
        if pointer % ALIGNMENT:
            raise ValueError(
                f"the array of a tensor map begins at a multiple of {ALIGNMENT} bytes, not at "
                f"{pointer:#x}; pass a copy"
            )
        kind = f"CU_TENSOR_MAP_DATA_TYPE_{ELEMENTS[self.dtype.name]}"
        swizzle = "128B" if self.swizzled else "NONE"
        status, encoded = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, kind),
            len(self.shape),
            pointer,
            [driver.cuuint64_t(extent) for extent in reversed(self.shape)],
            [driver.cuuint64_t(stride) for stride in reversed(self.strides[:-1])],
            [driver.cuuint32_t(extent) for extent in self.box],
            [driver.cuuint32_t(1)] * len(self.box),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver refused a tensor map: {status.name}")
        return np.frombuffer(ctypes.string_at(encoded.getPtr(), 8 * WORDS), np.uint64).copy()
