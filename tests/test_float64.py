"""float64 that creeps into float32 arithmetic is found where it is born, and only there."""

import builtins
import inspect
import math
import re

import numpy as np
import pytest
from numba import cuda, float32, float64

import numba_flash as nf
from numba_flash.emulator import emulate

HALF = 0.5
acc_t = float64


def noise(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def run(kernel, *arguments):
    return emulate(kernel)[1, 32](*arguments, np.zeros(32, np.float32))


@cuda.jit
def branch_of_a_conditional_expression(x, out):
    i = cuda.threadIdx.x
    out[i] = x[i] if x[i] > 0 else 0.0  # fault: the literal 0.0 is a float64; write float32(0.0)


@cuda.jit
def function_of_an_integer(x, out):
    i = cuda.threadIdx.x
    out[i] = math.sqrt(i)  # fault: what math.sqrt(i) returns is a float64; write float32(math.sqrt


@cuda.jit
def quotient_of_integers(x, out):
    i = cuda.threadIdx.x
    out[i] = i / 2  # fault: the quotient i / 2 of integers is a float64; out[i] takes


@cuda.jit
def sum_that_begins_as_an_integer(x, out):
    i = cuda.threadIdx.x
    acc = 0  # fault: acc begins as 0, which is an int64; x[i, k] in line; write float32(0)
    for k in range(4):
        acc += x[i, k]
    out[i] = acc


@cuda.jit
def maximum_in_a_branch_that_all_threads_take(x, out):
    i = cuda.threadIdx.x
    best = -1e30  # fault: best begins as -1e+30, which is a float64; x[i, k] in line
    for k in range(4):
        if x[i, k] > best:
            best = x[i, k]
    out[i] = best


@cuda.jit(device=True)
def scaled(value, factor):
    return value * factor


@cuda.jit
def literal_for_a_device_function(x, out):
    i = cuda.threadIdx.x
    out[i] = scaled(x[i], 0.125)  # fault: the literal 0.125 is a float64; float32 value in line


@cuda.jit(device=True)
def positive_part(value):
    if value > 0:
        return value
    return 0.0  # fault: the literal 0.0 is a float64; drags the float32 value


@cuda.jit
def one_of_two_returns(x, out):
    i = cuda.threadIdx.x
    out[i] = positive_part(x[i])


@cuda.jit(device=True)
def half():
    return 0.5


@cuda.jit
def result_of_a_device_function(x, out):
    i = cuda.threadIdx.x
    out[i] = half() * x[i]  # fault: what half() returns is a float64; write float32(half())


@cuda.jit(device=True)
def first(x):
    return x[0]


@cuda.jit
def sum_of_what_a_device_function_returns(x, out):
    acc = 0.0  # fault: acc begins as 0.0, which is a float64; drags the float32 first(x) in line
    acc += first(x)
    out[cuda.threadIdx.x] = acc


@cuda.jit
def several_variables_at_once(x, out):
    i = cuda.threadIdx.x
    total, most = float32(0), -math.inf  # fault: most begins as -math.inf; write float32(-math.inf)
    for k in range(4):
        most = max(most, x[i, k])
        total += x[i, k]
    out[i] = most + total


@cuda.jit
def statement_of_several_lines(x, out):
    i = cuda.threadIdx.x
    # fmt: off
    out[i] = (x[i]
              + 0.5  # fault: the literal 0.5 is a float64
              * x[31 - i])
    # fmt: on


@cuda.jit
def atomic_sum(x, out):
    cuda.atomic.add(out, 0, x[cuda.threadIdx.x] * HALF)  # fault: HALF, from outside of the kernel


@cuda.jit
def square_root_as_a_power(x, out):
    i = cuda.threadIdx.x
    out[i] = abs(x[i]) ** 0.5  # fault: the literal 0.5 is a float64


@cuda.jit(device=True)
def successor(i):
    return i + 1


@cuda.jit
def variable_of_a_variable(x, out):
    i = cuda.threadIdx.x
    log2_e = 1.4426950408889634  # fault: log2_e begins as 1.4426950408889634; write float32(
    factor = log2_e * successor(i)
    out[i] = x[i] * factor


@cuda.jit
def while_loop(x, out):
    i = cuda.threadIdx.x
    total, k = 0.0, 0  # fault: total begins as 0.0, which is a float64
    while k < i:
        total = total + x[i, k % 4]
        k += 1
    out[i] = total


@pytest.mark.parametrize(
    ("kernel", "ndim"),
    [
        (branch_of_a_conditional_expression, 1),
        (function_of_an_integer, 1),
        (quotient_of_integers, 1),
        (sum_that_begins_as_an_integer, 2),
        (maximum_in_a_branch_that_all_threads_take, 2),
        (literal_for_a_device_function, 1),
        (one_of_two_returns, 1),
        (result_of_a_device_function, 1),
        (sum_of_what_a_device_function_returns, 1),
        (several_variables_at_once, 2),
        (statement_of_several_lines, 1),
        (atomic_sum, 1),
        (square_root_as_a_power, 1),
        (variable_of_a_variable, 1),
        (while_loop, 2),
    ],
    ids=lambda value: getattr(getattr(value, "py_func", None), "__name__", ""),
)
def test_birth_of_a_float64_is_the_only_fault_and_explained(kernel, ndim):
    report = run(kernel, noise(*(32, 4)[:ndim]))
    (fault,) = report.faults
    lines, _ = inspect.getsourcelines(inspect.getmodule(kernel.py_func))
    marked = lines[fault.line - 1].split("# fault: ")
    assert fault.kind == "float64"
    assert len(marked) == 2, f"line {fault.line} is no birth: {fault}"
    for words in marked[1].strip().split("; "):
        assert words in fault.message
    assert fault.source == lines[fault.line - 1].strip()


def make_constants():
    scale = 0.125

    @cuda.jit
    def arguments(x, n, length, factor, out):
        i = cuda.threadIdx.x
        out[i] = x[i] * n
        out[i] += x[i] / length
        out[i] += x[i] * factor
        out[i] += x[i] * factor * scale

    return arguments


def test_argument_and_captured_number_are_named_where_they_first_meet_a_float32():
    kernel = make_constants()
    first = kernel.py_func.__code__.co_firstlineno
    report = run(kernel, noise(32), 3, np.int32(5), np.float64(0.5))
    found = [(fault.array, fault.line - first) for fault in report.faults]
    assert found == [("n", 3), ("length", 4), ("factor", 5), ("scale", 6)]
    messages = [fault.message for fault in report.faults]
    assert "the argument n is an int64, and with the float32 x[i] it makes a float64" in messages[0]
    assert "length is an int32" in messages[1]
    assert "pass np.float32(factor)" in messages[2]
    assert "scale, from outside of the kernel, is a float64" in messages[3]
    assert run(kernel, noise(32), *map(np.float32, (3, 5, 0.5))).faults[0].array == "scale"


@cuda.jit
def choice_of_constants(x, out):
    i = cuda.threadIdx.x
    chosen = 0.0
    if x[i] > 0.5:
        chosen = 1.0
    out[i] = chosen
    out[i] = 1.0 if x[i] != -math.inf else 0.0


@cuda.jit
def constants_are_stored(x, out):
    i = cuda.threadIdx.x
    tile = cuda.shared.array(32, float32)
    tile[i] = 0.0
    cuda.syncthreads()
    out[i] = tile[31 - i]
    out[i] = -math.inf


@cuda.jit
def constants_are_converted(x, out):
    i = cuda.threadIdx.x
    n = x.shape[0]
    factor = float32(0.5 * math.pi) + float32(1.0 / n) + float32(1 / math.sqrt(n))
    out[i] = x[i] ** 2 * factor * x.dtype.type(0.5) * float32(i / 32)


@cuda.jit
def float64_is_named(x, out):
    acc = np.float64(0)
    for k in range(4):
        acc += x[k] * 0.5
    out[cuda.threadIdx.x] = acc


@cuda.jit
def float64_is_captured(x, out):
    acc = acc_t(0)
    for k in range(4):
        acc += x[k] * 0.5
    out[cuda.threadIdx.x] = acc


@cuda.jit(device=True)
def in_double(value):
    return float64(value) * 0.1


@cuda.jit
def device_function_names_float64(x, out):
    i = cuda.threadIdx.x
    out[i] = in_double(x[i]) * 0.5


@cuda.jit
def float64_in_registers(x, out):
    i = cuda.threadIdx.x
    sums = cuda.local.array(2, np.double)
    sums[0] = sums[1] = 0.0
    sums[0] += x[i]
    out[i] = sums[0] + 0.5 * x[i]


@cuda.jit
def small_integers(x, out):
    i = cuda.threadIdx.x
    out[i] = x[i] * np.int16(i) + x[i] * np.uint8(3)


@pytest.mark.parametrize(
    "kernel",
    [
        choice_of_constants,
        constants_are_stored,
        constants_are_converted,
        float64_is_named,
        float64_is_captured,
        device_function_names_float64,
        float64_in_registers,
        small_integers,
    ],
    ids=lambda kernel: kernel.py_func.__name__,
)
def test_float64_that_is_harmless_or_meant_is_no_fault(kernel):
    report = run(kernel, noise(32))
    assert report.ok, str(report)


def test_array_of_float64_among_the_arguments_means_double_precision():
    assert not run(atomic_sum, noise(32)).ok
    assert emulate(atomic_sum)[1, 32](noise(32), np.zeros(1)).ok


def test_float16_is_watched_too():
    (fault,) = run(square_root_as_a_power, noise(32, dtype=np.float16)).faults
    assert (fault.kind, fault.array) == ("float64", None)


def test_without_checks_nobody_looks():
    kernel = emulate(square_root_as_a_power, checks=False)
    assert kernel[1, 32](noise(32), np.zeros(32, np.float32)).ok


def test_compiler_is_asked_and_names_the_variables():
    pytest.importorskip("numba_cuda")
    (fault,) = run(sum_that_begins_as_an_integer, noise(32, 4)).faults
    assert fault.message.endswith("(Numba compiles acc as float64)")
    variables = nf.emulator.float64_variables(
        sum_that_begins_as_an_integer, noise(32, 4), np.zeros(32, np.float32)
    )
    first = sum_that_begins_as_an_integer.py_func.__code__.co_firstlineno
    assert ("acc", first + 3) in variables
    assert all(re.fullmatch(r"acc|", name) for name, _ in variables)


def test_compiler_that_finds_no_float64_has_the_last_word():
    """Numba drops the branch that it knows not to be taken; the emulator's types do not."""
    pytest.importorskip("numba_cuda")

    @cuda.jit
    def kernel(x, bias, out):
        i = cuda.threadIdx.x
        value = x[i] * float32(2)
        factor = float32(1)
        if bias is not None:
            factor = 0.5
        out[i] = value * factor

    assert run(kernel, noise(32), None).ok


def test_absent_compiler_is_no_obstacle_to_a_run(monkeypatch):
    real = builtins.__import__

    def importing(name, *rest, **more):
        if name == "numba.cuda.compiler":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", importing)
    (fault,) = run(sum_that_begins_as_an_integer, noise(32, 4)).faults
    assert "Numba compiles" not in fault.message
    with pytest.raises(ImportError, match=r"float64_variables\(\) asks the compiler of the numba-"):
        nf.emulator.float64_variables(sum_that_begins_as_an_integer)
