"""What no card or compiler takes is refused by a sentence that names the line or the argument."""

import numpy as np
import pytest
from numba import cuda

from numba_flash.emulator import emulate

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
