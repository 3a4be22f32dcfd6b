"""What no card or compiler takes is refused by a sentence that names the line or the argument."""

import numpy as np
import pytest
from numba import cuda

from numba_flash.emulator import emulate

TABLE = np.arange(8.0)
MASKED = np.ma.masked_less(np.arange(8.0), 3)


def test_masked_array_is_refused_because_its_mask_would_be_ignored():
    @cuda.jit
    def kernel(x):
        x[0] = 1

    @cuda.jit
    def capturing(x):
        x[0] = MASKED[0]

    with pytest.raises(TypeError, match=r"the array x is a masked array.* x\.filled"):
        emulate(kernel)[1, 1](MASKED)
    with pytest.raises(TypeError, match="the array MASKED is a masked array"):
        emulate(capturing)[1, 1](np.zeros(8))


@pytest.mark.parametrize("operation", ["add", "max", "exch", "cas"])
def test_atomic_operation_on_an_array_that_is_read_only_is_refused(operation):
    @cuda.jit
    def argument(x):
        if operation == "cas":
            cuda.atomic.cas(x, 0, 0.0, 5.0)
        elif operation == "add":
            cuda.atomic.add(x, 0, 5.0)
        elif operation == "max":
            cuda.atomic.max(x[:4], 0, 5.0)
        else:
            cuda.atomic.exch(x, 0, 5.0)

    frozen = np.zeros(8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"errors\.py:\d+: the array x is read-only"):
        emulate(argument)[1, 4](frozen)
    assert not frozen.any()


def test_atomic_operation_on_a_captured_constant_is_refused():
    @cuda.jit
    def kernel(x):
        x[0] = cuda.atomic.add(TABLE, 0, 1.0)

    with pytest.raises(ValueError, match="the array TABLE is read-only"):
        emulate(kernel)[1, 4](np.zeros(8))
    assert TABLE[0] == 0
