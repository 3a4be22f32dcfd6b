"""Double precision that creeps into float32 arithmetic: 2 to 64 times slower on most cards."""

import math

import numpy as np
from numba import cuda, float32

from .case import cell, faulty, noise, ramp, zeros


@faulty(
    "a float literal is float64, and the sum stays what it began as",
    lambda: (noise(32, 8), zeros(32)),
)
@cuda.jit
def sum_begins_as_a_literal(x, out):
    i = cuda.threadIdx.x
    acc = 0.0  # fault: float64
    for k in range(8):
        acc += x[i, k]  # fault: float64
    out[i] = acc


@faulty("half of a float32 is a float64 where the half is a literal", lambda: (ramp(32), zeros(32)))
@cuda.jit
def half_as_a_literal(x, out):
    i = cuda.threadIdx.x
    out[i] = x[i] * 0.5  # fault: float64


@faulty(
    "a Python float as an argument is a float64",
    lambda: (ramp(32), 0.125, zeros(32)),
)
@cuda.jit
def scale_is_a_python_float(x, scale, out):
    i = cuda.threadIdx.x
    out[i] = x[i] * scale  # fault: float64


@faulty(
    "int64 and float32 make float64, and a literal 1 is an int64",
    lambda: (ramp(32) + 1, zeros(32)),
)
@cuda.jit
def one_over_a_float32(x, out):
    i = cuda.threadIdx.x
    out[i] = 1 / x[i]  # fault: float64


@faulty(
    "an index is an integer, and its product with a float32 a float64",
    lambda: (ramp(32), zeros(32)),
)
@cuda.jit
def index_times_float32(slope, out):
    i = cuda.grid(1)
    distance = 31 - i
    out[i] = -slope[0] * distance  # fault: float64


@faulty("math.pi is a float64", lambda: (ramp(32), zeros(32)))
@cuda.jit
def angle_in_degrees(x, out):
    i = cuda.threadIdx.x
    out[i] = x[i] * math.pi / float32(180)  # fault: float64


def make_scaled(scale):
    @cuda.jit
    def scale_is_captured(x, out):
        i = cuda.threadIdx.x
        value = x[i]
        value = value * scale  # fault: float64
        out[i] = value

    return scale_is_captured


faulty("a captured Python float is a float64", lambda: (ramp(32), zeros(32)))(
    make_scaled(1 / math.sqrt(80))
)


@faulty(
    "the square root of an integer is a float64",
    lambda: (noise(32, 16), zeros(32)),
)
@cuda.jit
def scale_from_an_integer(x, out):
    i = cuda.threadIdx.x
    scale = 1 / math.sqrt(x.shape[1])  # fault: float64
    out[i] = x[i, 0] * scale  # fault: float64


@faulty(
    "the running maximum begins at -math.inf, a float64, and drags the exponential along",
    lambda: (noise(32, 8), zeros(32)),
)
@cuda.jit
def maximum_begins_at_minus_infinity(scores, out):
    i = cuda.threadIdx.x
    row_max = -math.inf  # fault: float64
    row_sum = float32(0)
    for j in range(8):
        row_max = max(row_max, scores[i, j])  # fault: float64
    for j in range(8):
        row_sum += math.exp(scores[i, j] - row_max)  # fault: float64
    out[i] = row_sum  # fault: float64


@cuda.jit(device=True, inline="always")
def relu(x):
    return max(x, 0.0)  # fault: float64


@faulty("the literal hides in a device function", lambda: (noise(32), zeros(32)))
@cuda.jit
def literal_in_a_device_function(x, out):
    i = cuda.threadIdx.x
    out[i] = relu(x[i])  # fault: float64


CELL = """\
from numba import cuda, float32


@cuda.jit
def mean_over_a_count(x, out):
    i = cuda.threadIdx.x
    total = float32(0)
    for k in range(x.shape[1]):
        total += x[i, k]
    out[i] = total / x.shape[1]  # fault: float64
"""

faulty("a length is an int64 (notebook cell)", lambda: (noise(32, 8), zeros(32)))(
    cell(3, CELL)["mean_over_a_count"]
)

LN2 = 0.6931471805599453


@faulty(
    "a constant of the module is a Python float",
    lambda: (noise(32), zeros(32)),
)
@cuda.jit
def natural_logarithm_from_log2(x, out):
    i = cuda.threadIdx.x
    bits = cuda.libdevice.log2f(x[i] * x[i])
    out[i] = bits * LN2  # fault: float64


SLOPES = np.array([0.5, 0.25, 0.125])


@faulty(
    "NumPy's arrays are float64 unless told otherwise",
    lambda: (noise(3, 32), zeros(3, 32)),
    grid=3,
)
@cuda.jit
def slopes_in_a_float64_table(x, out):
    head, i = cuda.blockIdx.x, cuda.threadIdx.x
    slopes = cuda.const.array_like(SLOPES)  # fault: float64
    out[head, i] = x[head, i] * slopes[head]  # fault: float64
