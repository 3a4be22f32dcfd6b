"""Launching kernels on a GPU with the arguments that the emulator takes, tensor maps too."""

from __future__ import annotations

import numpy as np
from numba import cuda

from numba_flash.tensor_map import TensorMap


def launch(kernel, grid, block, shared_bytes, *arguments):
    """Run a kernel; arrays, and those behind tensor maps, are written in place."""
    copies, given = [], []
    for value in arguments:
        array = value.array if isinstance(value, TensorMap) else value
        if not isinstance(array, np.ndarray):
            given.append(value)
            continue
        copy = cuda.to_device(array)
        copies.append((copy, array))
        if isinstance(value, TensorMap):
            words = value.encode(copy.__cuda_array_interface__["data"][0])
            copy = cuda.to_device(words)
        given.append(copy)
    if shared_bytes:
        allow_shared_bytes(kernel, given, shared_bytes)
    kernel[grid, block, 0, shared_bytes](*given)
    cuda.synchronize()
    for copy, array in copies:
        copy.copy_to_host(array)


def allow_shared_bytes(kernel, arguments, shared_bytes):
    """Ask for dynamic shared memory, which a kernel gets without asking up to 48 KB."""
    from cuda.bindings import driver

    signature = tuple(map(kernel.typeof_pyval, arguments))
    function = kernel.compile(signature)._codelibrary.get_cufunc()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(cuda.current_context().device.id)
    (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, device)
    assert status == driver.CUresult.CUDA_SUCCESS, status
