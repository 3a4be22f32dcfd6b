"""Arrays in, arrays out: what the library needs to know about each array package.

An ``ArrayLibrary`` answers four questions: how an array is laid out, where it lives, how to make
another like it, and on which stream its owner is working. torch's is in ``torch.py``, the only
module that imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numba import cuda

from .launch import STORAGE, gpu_count
from .problem import Layout

NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
DLPACK_CPU = 1
"""The device type of host memory in DLPack."""


class ArrayLibrary:
    """NumPy, and the base of the others."""

    def key(self, arrays: Iterable[Any]) -> Hashable:
        """Everything about arrays that a launch depends on, except their addresses."""
        return tuple(
            [None if a is None else (a.shape, a.strides, a.dtype, self.device(a)) for a in arrays]
        )

    def layout(self, array: Any) -> Layout:
        """Shape, strides in bytes and dtype name."""
        return Layout(tuple(array.shape), tuple(array.strides), str(array.dtype))

    def device(self, array: Any) -> int | None:
        """CUDA device ordinal, or None for host memory."""
        return None

    def pointers(self, arrays: Iterable[Any]) -> list[int]:
        """Addresses of the first elements, 0 for None."""
        return [0 if array is None else self._pointer(array) for array in arrays]

    def _pointer(self, array: Any) -> int:
        return array.ctypes.data

    def stream(self, ordinal: int) -> int:
        """The stream that the caller is working on, as a ``CUstream`` handle."""
        return 0

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """An uninitialised C-contiguous array where ``like`` lives."""
        return np.empty(shape, NUMPY_DTYPES[dtype])

    def to_host(self, array: Any) -> np.ndarray:
        """The data as a NumPy array in storage form (16-bit floats as uint16, bool as uint8)."""
        return storage(array)

    def from_host(self, array: np.ndarray, dtype: str, like: Any) -> Any:
        """A NumPy array in storage form as an array where ``like`` lives."""
        return array.view(NUMPY_DTYPES[dtype])

    def wants_gradient(self, arrays: tuple[Any, ...]) -> bool:
        """Whether a gradient is to flow back to q, k or v."""
        return False

    def differentiable_attention(
        self, run: Callable[..., tuple[Any, ...]], arrays: tuple[Any, ...], options: Any
    ) -> tuple[Any, ...]:
        """``run(self, arrays, options)`` so that a gradient flows, where ``wants_gradient``."""
        raise NotImplementedError


class CupyLibrary(ArrayLibrary):
    """CuPy arrays: their device, CuPy's current stream, CuPy's memory pool."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")

    def device(self, array: Any) -> int | None:
        return array.device.id

    def _pointer(self, array: Any) -> int:
        return array.data.ptr

    def stream(self, ordinal: int) -> int:
        with self._cupy.cuda.Device(ordinal):
            return self._cupy.cuda.get_current_stream().ptr

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        with like.device:
            return self._cupy.empty(shape, NUMPY_DTYPES[dtype])

    def to_host(self, array: Any) -> np.ndarray:
        return storage(self._cupy.asnumpy(array))

    def from_host(self, array: np.ndarray, dtype: str, like: Any) -> Any:
        with like.device:
            return self._cupy.asarray(array.view(NUMPY_DTYPES[dtype]))


class NumbaLibrary(ArrayLibrary):
    """Numba device arrays; arrays of other packages are seen as such and come back as such."""

    def device(self, array: Any) -> int | None:
        from cuda.bindings import driver

        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        status, ordinal = driver.cuPointerGetAttribute(attribute, self._pointer(array))
        return 0 if status else int(ordinal)

    def _pointer(self, array: Any) -> int:
        return array.__cuda_array_interface__["data"][0]

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        with cuda.gpus[self.device(like)]:
            return cuda.device_array(shape, NUMPY_DTYPES[dtype])

    def to_host(self, array: Any) -> np.ndarray:
        with cuda.gpus[self.device(array)]:
            return storage(array.copy_to_host())

    def from_host(self, array: np.ndarray, dtype: str, like: Any) -> Any:
        with cuda.gpus[self.device(like)]:
            return cuda.to_device(array.view(NUMPY_DTYPES[dtype]))


class _CudaView:
    """A DLPack tensor of a CUDA device, seen through ``__cuda_array_interface__``."""

    def __init__(self, owner: Any) -> None:
        from cuda.core.utils import StridedMemoryView

        legacy_default_stream = 1
        view = StridedMemoryView.from_dlpack(owner, stream_ptr=legacy_default_stream)
        self._owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(view.shape),
            "typestr": view.dtype.str,
            "strides": view.strides and tuple(s * view.dtype.itemsize for s in view.strides),
            "data": (view.ptr, view.readonly),
        }


def storage(array: np.ndarray) -> np.ndarray:
    """An array's own memory as kernels see it: bit patterns instead of 16-bit floats and bools.

    A field of a structured array, whose elements are not a whole number of items apart, is copied.
    """
    if any(stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    stored = np.dtype(str(STORAGE[str(array.dtype)]))
    return array if array.dtype == stored else array.view(stored)


_NUMPY = ArrayLibrary()
_NUMBA = NumbaLibrary()
_known: dict[type, ArrayLibrary] = {np.ndarray: _NUMPY}


def known_library(array: Any) -> ArrayLibrary | None:
    """The library of an array whose type has been seen before."""
    return _known.get(type(array))


def adopt(array: Any, argument: str) -> tuple[ArrayLibrary, Any]:
    """The library of an argument, and the argument as an array of that library.

    Raises
    ------
    TypeError
        If the argument is no array, or one that needs a GPU where there is none.
    """
    library = known_library(array)
    if library is not None:
        return library, array
    packages = {base.__module__.partition(".")[0] for base in type(array).__mro__}
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{argument} is a masked array, whose mask would be ignored: fill it "
            f"({argument}.filled(0)) and say with mask= who may attend to whom"
        )
    if isinstance(array, np.ndarray):
        library = _NUMPY
    elif "torch" in packages and hasattr(array, "data_ptr"):
        library = importlib.import_module("numba_flash.torch").LIBRARY
    elif "cupy" in packages and hasattr(array, "__cuda_array_interface__"):
        library = CupyLibrary()
    else:
        return _adopt_foreign(array, argument)
    _known[type(array)] = library
    return library, array


def _adopt_foreign(array: Any, argument: str) -> tuple[ArrayLibrary, Any]:
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    if hasattr(array, "__cuda_array_interface__"):
        on_gpu = True
    elif hasattr(array, "__dlpack_device__"):
        on_gpu = int(array.__dlpack_device__()[0]) != DLPACK_CPU
    else:
        raise TypeError(
            f"{argument} is a {kind}; it must be a NumPy, torch or CuPy array, or an object with "
            f"__dlpack__ or __cuda_array_interface__"
        )
    if not on_gpu:
        return _NUMPY, np.from_dlpack(array)
    if not gpu_count():
        raise TypeError(
            f"{argument} is a {kind} in GPU memory, but no CUDA GPU can be used here; "
            f"`numba-flash doctor` says why"
        )
    if not hasattr(array, "__cuda_array_interface__"):
        array = _CudaView(array)
    # Waits for the producer only where its interface names a stream that it still works on.
    return _NUMBA, cuda.as_cuda_array(array)
