"""A tensor map that the hardware would refuse is refused with the reason."""

import ml_dtypes
import numpy as np
import pytest

from numba_flash.tensor_map import TensorMap

ROWS = np.zeros((2, 100, 128), np.uint16)


@pytest.mark.parametrize(
    ("array", "box", "swizzled", "reason"),
    [
        (np.zeros((8, 59), np.uint16), (64, 8), True, "axis 0 has 118"),
        (np.zeros((8, 64), np.uint16).T, (64, 8), True, "contiguous"),
        (np.zeros((8, 128), np.uint16)[:, ::2], (64, 8), True, "contiguous"),
        (np.zeros((0, 64), np.uint16), (64, 8), True, "1 to 2\\*\\*32 elements"),
        (np.zeros((1,) * 6, np.float32), (1,) * 6, False, "the array has 6"),
        (ROWS, (64, 64), True, "2 axes, the array has 3"),
        (ROWS, (64, 257, 1), True, "1 to 256"),
        (ROWS, (64, 0, 1), True, "1 to 256"),
        (ROWS, (128, 64, 1), True, "has 128 bytes, not 256; take 64 elements"),
        (ROWS, (32, 64, 1), True, "has 128 bytes, not 64"),
        (ROWS, (4, 64, 1), False, "multiple of 16 bytes, not 8"),
        (np.broadcast_to(ROWS[:1], (2, 100, 128)), (64, 8, 1), True, "axis 0 has 0"),
    ],
)
def test_what_the_hardware_cannot_copy_is_refused_with_a_reason(array, box, swizzled, reason):
    with pytest.raises(ValueError, match=reason):
        TensorMap(array, box, swizzled)


def test_a_dtype_that_no_map_holds_is_refused():
    with pytest.raises(TypeError, match="cannot hold complex64"):
        TensorMap(np.zeros((8, 16), np.complex64), (16, 8), False)


def test_an_address_off_16_bytes_is_refused_before_the_driver_sees_it():
    with pytest.raises(ValueError, match="multiple of 16 bytes, not at 0x1008"):
        TensorMap(ROWS, (64, 64, 1)).encode(0x1008)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_box_counts_its_own_bytes_also_beyond_the_array(dtype):
    array = np.zeros((3, 32, 64), dtype)
    columns = 128 // array.itemsize
    assert TensorMap(array, (columns, 128, 1)).num_bytes == 128 * 128
