"""What no card or compiler takes is refused by a sentence that names the line or the argument."""

import math
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32

from numba_flash.emulator import EmulatorFault, UnsupportedConstruct, emulate, lanes

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


@cuda.jit
def nothing(x):
    pass


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ((1, 1025), "a block of x = 1025 is too large; at most 1024 fits"),
        ((1, (1, 1, 65)), "a block of z = 65 is too large; at most 64 fits"),
        ((1, (64, 32)), "a block of 2048 threads is too large; at most 1024 fit"),
        (((1, 65536), 1), "a grid of y = 65536 is too large; at most 65535 fits"),
        (((1, 1, 65536), 1), "a grid of z = 65536"),
        ((2**31, 1), "a grid of x = 2147483648"),
        ((1, 1, 0, -5), "whole number from 0 to 232448, not -5"),
        ((1, 1, 0, 232_449), "not 232449"),
        ((1, 1, 0, 2.5), r"not 2\.5"),
        ((1, 1, 0, None), "not None"),
    ],
)
def test_launch_that_no_card_takes_is_refused(configuration, message):
    with pytest.raises(ValueError, match=message):
        emulate(nothing)[configuration]


def test_largest_launches_of_a_card_are_taken():
    for configuration in [((1, 65535), 1), (1, (16, 1, 64)), (1, 1024), (1, 1, 0, 232_448)]:
        assert emulate(nothing)[configuration](np.zeros(1)).ok


def test_static_shared_arrays_of_more_than_48_kib_together_are_refused():
    def make(length):
        @cuda.jit
        def kernel(out):
            first = cuda.shared.array(8192, float32)
            second = cuda.shared.array(length, float32)
            first[0] = second[0] = out[0]

        return kernel

    assert emulate(make(4096))[1, 1](np.zeros(1)).ok
    with pytest.raises(UnsupportedConstruct, match=r"16388 bytes of second .* take 49156 bytes"):
        emulate(make(4097))[1, 1](np.zeros(1))
    with pytest.raises(UnsupportedConstruct, match="do not fit together"):
        emulate(make(4096))[1, 1, 0, 200_000](np.zeros(1))


def test_large_grid_costs_no_memory_before_it_runs():
    @cuda.jit
    def kernel(x):
        x[8] = 1

    tracemalloc.start()
    try:
        with pytest.raises(EmulatorFault):
            emulate(kernel, raise_on_fault=True)[1_000_000, 1](np.zeros(8))
        assert tracemalloc.get_traced_memory()[1] < 20e6  # a list of the blocks alone takes 70e6
    finally:
        tracemalloc.stop()


def test_float_of_a_word_is_infinity_or_nan():
    @cuda.jit
    def kernel(out):
        out[0] = float("inf")
        out[1] = float("-inf")
        out[2] = float("nan")
        out[3] = min(float("inf"), 3.0)

    out = np.zeros(4)
    assert emulate(kernel)[1, 1](out).ok
    np.testing.assert_array_equal(out, [np.inf, -np.inf, np.nan, 3])


def logarithm_to_a_base(x):
    x[0] = math.log(x[0], 2.0)


def power_with_a_modulus(x):
    x[0] = pow(x[0], 2, 3)


def float_index(x):
    x[x[cuda.threadIdx.x]] = 1


def too_deep_an_atomic(x):
    cuda.atomic.add(x, (), 1)


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        (logarithm_to_a_base, TypeError, r"log\(\) takes 1 positional argument but 2 were given"),
        (power_with_a_modulus, TypeError, r"pow\(\) takes 2 positional arguments but 3 were"),
        (float_index, TypeError, "an array index must be an integer, not float64"),
        (too_deep_an_atomic, IndexError, "an atomic operation on x needs 1 indices"),
    ],
)
def test_error_in_a_kernel_names_its_line_and_what_it_says(kernel, error, message):
    line = kernel.__code__.co_firstlineno + 1
    with pytest.raises(error, match=rf"errors\.py:{line}: {message}.*, in `.*x.*`"):
        emulate(kernel)[1, 2](np.zeros(8))


def test_error_in_a_condition_names_the_line_of_the_condition():
    @cuda.jit
    def kernel(out):
        if out[0] > 0:
            late = 1
        if late:
            out[1] = 1
            out[2] = 1

    line = kernel.py_func.__code__.co_firstlineno + 4
    with pytest.raises(UnboundLocalError, match=rf"errors\.py:{line}: .*, in `if late:`"):
        emulate(kernel)[1, 2](np.zeros(8))


def test_argument_that_should_be_an_array_is_named():
    @cuda.jit(device=True)
    def first(array):
        return array.shape[0]

    @cuda.jit
    def store(out, n):
        out[cuda.threadIdx.x] = n

    @cuda.jit
    def ask(out, n):
        n[0] = first(out)

    for nothing in (None, 1):
        with pytest.raises(
            TypeError, match=rf"`out\[.* = n`, where out is {nothing}, where n is 2"
        ):
            emulate(store)[1, 4](nothing, 2)
        with pytest.raises(AttributeError, match=rf"return array.*, where array is {nothing}"):
            emulate(ask)[1, 4](nothing, np.zeros(8))


def spin_with_break(lock, out):
    while True:
        if cuda.atomic.cas(lock, 0, 0, 1) == 0:
            break


def wait_for_a_flag(lock, out):
    spins = 0
    while lock[1] == 0:
        spins += 1
    out[0] = spins


def step_of_zero(lock, out):
    for _ in range(9, cuda.threadIdx.x, lock[cuda.threadIdx.x]):
        pass


def test_loop_that_gets_nowhere_is_stopped_with_its_line(monkeypatch):
    monkeypatch.setattr(lanes, "MOST_IDLE_TURNS", 1000)
    line = step_of_zero.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError, match=rf"errors\.py:{line}: the loop has run 1000 times"):
        emulate(step_of_zero)[1, 8](np.zeros(8, np.int64), np.zeros(8))


@pytest.mark.parametrize(
    ("kernel", "line", "who"),
    [
        (spin_with_break, 2, "threads 1 to 7 cannot pass"),
        (wait_for_a_flag, 3, "threads 0 to 7 cannot pass"),
    ],
)
def test_waiting_for_what_nobody_writes_is_a_deadlock(kernel, line, who):
    report = emulate(kernel)[1, 8](np.zeros(8, np.int64), np.zeros(8))
    (fault,) = report.faults
    assert (fault.kind, fault.line) == ("deadlock", kernel.__code__.co_firstlineno + line - 1)
    assert who in fault.message


def test_spin_lock_with_fences_works_and_without_them_is_a_race():
    @cuda.jit
    def locked(lock, out, FENCED):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        if FENCED:
            cuda.threadfence()
        out[0] += 1
        if FENCED:
            cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)

    for fenced in (True, False):
        out = np.zeros(1)
        report = emulate(locked)[2, 8](np.zeros(1, np.int64), out, fenced)
        assert {fault.kind for fault in report.faults} == (set() if fenced else {"race"})
        assert out[0] == 16


def test_long_loop_that_writes_or_loses_threads_is_not_stopped(monkeypatch):
    @cuda.jit
    def kernel(out, count):
        t = cuda.threadIdx.x
        i = 0
        while i < 100:
            out[t] = i
            i += 1
        while i < 105 + 8 * t:
            i += 1
        out[t] = i

    @cuda.jit
    def draw(out, count):
        i = 0
        while cuda.atomic.add(count, 0, 1) < 200:
            i += 1
        out[cuda.threadIdx.x] = i

    monkeypatch.setattr(lanes, "MOST_IDLE_TURNS", 10)
    assert emulate(kernel)[1, 8](np.zeros(8), np.zeros(1)).ok
    assert emulate(draw)[1, 8](np.zeros(8), np.zeros(1)).ok


class Undecorated:
    def __init__(self, x):
        self.x = x


NUMBERS = [1.0, 2.0]
TABLES = {"one": 1.0}
logaddexp = np.logaddexp


def numpy_function(x):
    x[0] = np.sum(x)


def numpy_array(x):
    x[0] = np.zeros(4)[0]


def captured_numpy_function(x):
    x[0] = logaddexp(x[0], x[1])


def host_function(x):
    cuda.to_device(x)


def unknown_memory(x):
    cuda.shared.zeros(4, float32)


def fourth_axis(x):
    x[0] = cuda.threadIdx.w


def made_list(x):
    held = []
    held.append(x[0])


def list_method(x):
    NUMBERS.append(x[0])


def list_element(x):
    x[0] = NUMBERS[0]


def dict_element(x):
    x[0] = TABLES["one"]


def undecorated_class(x):
    x[0] = Undecorated(x[0]).x


def array_method(x):
    x.fill(0)


def array_view(x):
    x[0] = x.view(float32)[0]


def kernel_in_a_kernel(x):
    nothing[1, 32](x)


def shown(x):
    print(x[0])


def guarded(x):
    try:
        x[0] = 1
    except ValueError:
        x[0] = 2


def sends_itself(x):
    x[0] = (lambda value: value)(x[0])


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (numpy_function, "numpy.sum is not .*; loop over the elements"),
        (numpy_array, "numpy.zeros is not .*; loop over the elements"),
        (captured_numpy_function, "numpy.logaddexp is not .*; loop over the elements"),
        (host_function, "cuda.to_device is not .*; what the host does .* outside of the kernel"),
        (unknown_memory, r"cuda.shared.zeros is not .*; arrays are made with \.array"),
        (fourth_axis, "cuda.threadIdx.w is not .*; it has x, y and z"),
        (made_list, "a list is not .*; values are held by a tuple or a cuda.local.array"),
        (list_method, "the list NUMBERS is not .* a tuple or a NumPy array"),
        (list_element, "the list NUMBERS is not .* a tuple or a NumPy array"),
        (dict_element, "the dict TABLES is not .* a tuple or a NumPy array"),
        (undecorated_class, r"Undecorated is not .*; a kernel calls @cuda.jit\(device=True\)"),
        (array_method, r"the array attribute \.fill is not .*; loop over the elements"),
        (array_view, r"the array attribute \.view is not .*; loop over the elements"),
        (kernel_in_a_kernel, "a kernel cannot launch a kernel; call a device function"),
        (shown, r"print\(\.\.\.\) is not .*; store what you want to see in an array"),
        (guarded, "a 'try' block is not .*; test conditions with 'if'"),
        (sends_itself, r"a lambda is not .*; define a @cuda.jit\(device=True\) function outside"),
    ],
)
def test_what_a_kernel_cannot_use_is_refused_with_its_line_and_what_to_do(kernel, message):
    lines = range(kernel.__code__.co_firstlineno + 1, kernel.__code__.co_firstlineno + 3)
    place = "|".join(map(str, lines))
    with pytest.raises(UnsupportedConstruct, match=rf"errors\.py:({place}): {message}"):
        emulate(kernel)[1, 2](np.zeros(8))
    assert NUMBERS == [1.0, 2.0]


def test_list_that_a_kernel_only_could_use_is_no_error():
    @cuda.jit
    def kernel(x, LISTED):
        x[0] = NUMBERS[0] if LISTED else 3

    x = np.zeros(8)
    assert emulate(kernel)[1, 1](x, False).ok
    assert x[0] == 3


class OfAnotherLibrary:
    __cuda_array_interface__ = None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (np.array([1, None]), r"x has dtype object; .* pass x\.astype\(numpy\.float32\)"),
        (np.zeros(3, [("a", "f4"), ("b", "f4")]), r"pass its fields one by one, x\['a'\]"),
        (np.zeros(3, complex), r"x has dtype complex128; .* pass x\.real and x\.imag"),
        (np.zeros(3, ml_dtypes.bfloat16), r"dtype bfloat16; .* pass x\.view\(numpy\.uint16\)"),
        (np.zeros(3, ">f4" if sys.byteorder == "little" else "<f4"), "has this machine's byte ord"),
        ([1.0, 2.0], r"the argument x is a list; .* pass numpy\.array\(x\)"),
        (OfAnotherLibrary(), r"x is a .*OfAnotherLibrary; .* such as x\.cpu\(\)\.numpy\(\)"),
        ("word", "the argument x is a str; an emulated kernel takes NumPy arrays, numbers"),
    ],
)
def test_argument_that_no_kernel_takes_is_refused_with_what_to_pass(argument, message):
    with pytest.raises(TypeError, match=message):
        emulate(nothing)[1, 1](argument)


def test_torch_tensor_as_an_argument_is_refused_with_what_to_pass():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor; .* such as x\.cpu\(\)\.numpy"):
        emulate(nothing)[1, 1](torch.zeros(3))


def test_what_is_no_kernel_with_a_source_is_refused():
    made = {}
    exec("def made(x):\n    x[0] = 1", made)
    for kernel in (made["made"], cuda.jit(made["made"])):
        with pytest.raises(UnsupportedConstruct, match="define it in a file or in a notebook cell"):
            emulate(kernel)[1, 1](np.zeros(8))
    with pytest.raises(UnsupportedConstruct, match=r"not written as a 'def' .*; write it as one"):
        emulate(lambda x: None)[1, 1](np.zeros(8))
    for thing in (len, Undecorated, nothing[256, 128]):
        with pytest.raises(TypeError, match=r"write emulate\(kernel\)\[grid, block\]\(\.\.\.\)"):
            emulate(thing)


def test_launch_without_a_configuration_says_how_one_is_written():
    with pytest.raises(TypeError, match=r"write emulate\(nothing\)\[grid, block\]\(\.\.\.\)"):
        emulate(nothing)(np.zeros(8))


def test_kernel_with_a_signature_is_refused():
    kernel = cuda.jit(numpy_function)
    kernel._can_compile = False  # what Numba does once it has compiled the signature
    with pytest.raises(TypeError, match=r"@cuda\.jit alone, or pass numpy_function\.py_func"):
        emulate(kernel)


CELL = """
import numpy as np
import numba_flash as nf
from numba import cuda

@cuda.jit
def shift(x):
    i = cuda.grid(1)
    x[i + 1] = 1

report = nf.emulate(shift)[1, 8](np.zeros(8))
"""


def test_fault_in_a_notebook_cell_names_the_line_of_the_cell_and_quotes_it():
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    for lines_before in (0, 2):  # the same kernel again, in another cell
        outcome = shell.run_cell("# Once more\n" * lines_before + CELL.lstrip())
        outcome.raise_error()
        (fault,) = shell.user_ns["report"].faults
        assert (fault.kind, fault.line) == ("out-of-bounds", 8 + lines_before)
        assert fault.source == "x[i + 1] = 1"
        assert "x[i + 1] = 1" in str(shell.user_ns["report"])
