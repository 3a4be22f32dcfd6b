"""The emulator runs unmodified kernels and finds their faults."""

import math
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, int64, types, uint8, uint16, uint32

from numba_flash.emulator import EmulatorFault, UnsupportedConstruct, bind, empty, emulate
from numba_flash.instructions import Elementwise

float16 = types.float16
FULL = 0xFFFFFFFF
X = np.arange(64, dtype=np.float32)


def line_of(kernel, text):
    """Line of the source file on which a kernel says ``text``."""
    import inspect

    lines, first = inspect.getsourcelines(kernel.py_func)
    return first + next(i for i, line in enumerate(lines) if text in line)


def run(kernel, *arguments, grid=1, block=32, shared=0):
    """Run a kernel that must have no fault."""
    report = emulate(kernel)[grid, block, 0, shared](*arguments)
    assert report.ok, str(report)
    return report


# Launches


@cuda.jit
def where_am_i(out):
    x, y, z = cuda.grid(3)
    out[z, y, x, 0] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z
    out[z, y, x, 1] = cuda.blockIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockIdx.z
    out[z, y, x, 2] = cuda.gridsize(1) + cuda.blockDim.y * 1000 + cuda.gridDim.z * 10000
    out[z, y, x, 3] = cuda.laneid + cuda.warpsize


def test_three_dimensional_launch_knows_every_position():
    grid, block = (2, 3, 2), (4, 2, 3)
    out = np.full((6, 6, 8, 4), -1)
    run(where_am_i, out, grid=grid, block=block)
    z, y, x = np.ogrid[:6, :6, :8]
    np.testing.assert_array_equal(out[..., 0], x % 4 + 10 * (y % 2) + 100 * (z % 3))
    np.testing.assert_array_equal(out[..., 1], x // 4 + 10 * (y // 2) + 100 * (z // 3))
    assert (out[..., 2] == 8 + 2000 + 20000).all()
    np.testing.assert_array_equal(out[..., 3], (x % 4 + 4 * (y % 2) + 8 * (z % 3)) % 32 + 32)


def test_more_blocks_than_run_together_are_all_run():
    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = i

    out = np.zeros(100_000, np.int64)
    run(kernel, out, grid=(100_000 + 255) // 256, block=256)
    np.testing.assert_array_equal(out, np.arange(100_000))


def test_plain_function_runs_like_a_kernel():
    def kernel(out):
        out[cuda.threadIdx.x] = 3

    out = np.zeros(32)
    assert emulate(kernel)[1, 32](out).ok
    assert (out == 3).all()


def test_second_launch_sees_new_values_of_what_the_kernel_captures():
    scale = 2

    def make():
        @cuda.jit
        def kernel(out):
            out[cuda.threadIdx.x] = scale

        return kernel

    out = np.zeros(32)
    kernel = make()
    run(kernel, out)
    scale = 5
    run(kernel, out)
    assert (out == 5).all()


@pytest.mark.parametrize(
    ("configuration", "arguments", "message"),
    [
        ((1,), (X,), "configured as"),
        ((0, 32), (X,), "a grid is one to three positive integers, not 0"),
        ((1, (32, 32, 2)), (X,), "a block of 2048 threads is too large"),
        ((1, 32), (), "takes 1 arguments"),
        ((1, 32), ([1.0],), "the argument out is a list"),
        ((1, 32), (np.zeros(3, complex),), "dtype complex128"),
    ],
)
def test_wrong_launch_says_what_would_do(configuration, arguments, message):
    @cuda.jit
    def kernel(out):
        pass

    with pytest.raises((TypeError, ValueError), match=message):
        emulate(kernel)[configuration](*arguments)


# Global memory


@cuda.jit
def double(source, out):
    i = cuda.grid(1)
    if i < source.shape[0]:
        for j in range(source.shape[1]):
            out[i, j] = source[i, j] * float32(2)


@pytest.mark.parametrize(
    "source",
    [
        np.arange(60, dtype=np.float32).reshape(20, 3),
        np.arange(60, dtype=np.float32).reshape(3, 20).T,
        np.arange(240, dtype=np.float32).reshape(40, 6)[::2, ::2],
        np.arange(60, dtype=np.float32).reshape(20, 3)[::-1, ::-1],
        np.broadcast_to(np.arange(3, dtype=np.float32), (20, 3)),
        np.broadcast_to(np.float32(7), (20, 3)),
    ],
    ids=["contiguous", "transposed", "strided", "reversed", "one row", "one element"],
)
def test_global_arrays_of_any_strides_are_read_and_written(source):
    out = np.zeros((20, 6), np.float32)[:, ::-2]
    run(double, source, out)
    np.testing.assert_array_equal(out, 2 * source)


def test_array_attributes_views_and_slices():
    @cuda.jit
    def kernel(a, out):
        t = cuda.threadIdx.x
        row = a[t % 2]
        tail = row[1:, ::2]
        block = a[:, t % 3, 1:4]
        window = a[0, 0, t % 2 : t % 2 + 2]
        out[t, 0] = a.size + a.ndim * 100 + len(a) * 1000
        out[t, 1] = row.shape[0] * 10 + tail.shape[1] + row.ndim * 100
        out[t, 2] = tail[t % 2, 1]
        out[t, 3] = block[1, 2]
        out[t, 4] = window[1] + window.shape[0] * 1000
        out[t, 5] = a[..., 2][1, 2]

    a = np.arange(24).reshape(2, 3, 4)
    out = np.zeros((32, 6), np.int64)
    run(kernel, a, out)
    for t in range(32):
        expected = [24 + 300 + 2000, 30 + 2 + 200, a[t % 2, 1:, ::2][t % 2, 1]]
        expected += [a[:, t % 3, 1:4][1, 2], a[0, 0, t % 2 + 1] + 2000, a[..., 2][1, 2]]
        assert out[t].tolist() == expected


def test_slices_are_assigned_from_numbers_and_from_slices():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        mine = cuda.local.array(6, int64)
        mine[:] = t
        mine[1:3] = 7
        mine[4:] = mine[:2]
        for i in range(6):
            out[t, i] = mine[i]

    out = np.zeros((32, 6), np.int64)
    run(kernel, out)
    assert out[5].tolist() == [5, 7, 7, 5, 5, 7]


def test_five_dimensional_and_scalar_arguments():
    @cuda.jit
    def kernel(a, n, scale, flag, pair, out):
        t = cuda.threadIdx.x
        if flag:
            out[t] = a[0, 1, t % 2, 0, 1] * scale + n + pair[1]

    a = np.arange(16, dtype=np.float64).reshape(1, 2, 2, 2, 2)
    out = np.zeros(32)
    run(kernel, a, 3, 0.5, True, (1, 10), out)
    np.testing.assert_array_equal(out, a[0, 1, np.arange(32) % 2, 0, 1] * 0.5 + 13)


def test_writing_to_a_read_only_array_is_refused():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = 1

    frozen = np.zeros(32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="the array out is read-only"):
        emulate(kernel)[1, 32](frozen)


def test_stores_convert_like_the_hardware():
    @cuda.jit
    def kernel(half, byte, word, out):
        t = cuda.threadIdx.x
        half[t] = float32(t) / float32(3)
        byte[t] = t * 100
        word[t] = t - 5
        out[t] = half[t] * float16(2) + byte[t] * 1.0

    half, byte = np.zeros(32, np.float16), np.zeros(32, np.uint8)
    word, out = np.zeros(32, np.uint32), np.zeros(32)
    run(kernel, half, byte, word, out)
    t = np.arange(32)
    np.testing.assert_array_equal(half, (t.astype("f") / np.float32(3)).astype(np.float16))
    np.testing.assert_array_equal(byte, (t * 100 % 256).astype(np.uint8))
    np.testing.assert_array_equal(word, (t - 5).astype(np.uint32))
    np.testing.assert_array_equal(out, half * np.float16(2) + byte.astype(float))


TABLE = np.array([3.0, 1.0, 4.0], np.float32)
OFFSETS = (10, 20, 30)


def test_captured_arrays_tuples_and_constants():
    weights = (2.0, np.float32(0.5))

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        table = cuda.const.array_like(TABLE)
        out[t] = table[t % 3] + TABLE[0] + OFFSETS[t % 3] + OFFSETS[1] + weights[1]

    out = np.zeros(32)
    run(kernel, out)
    t = np.arange(32) % 3
    np.testing.assert_array_equal(out, TABLE[t] + 3 + np.array(OFFSETS)[t] + 20 + 0.5)


# Shared and local memory


def test_shared_memory_is_one_copy_for_each_block():
    @cuda.jit
    def reverse(source, out):
        s = cuda.shared.array((4, 16), dtype=float32, alignment=16)
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        s[t // 16, t % 16] = source[b, t]
        cuda.syncthreads()
        out[b, t] = s[3 - t // 16, 15 - t % 16]

    source = np.arange(5 * 64, dtype=np.float32).reshape(5, 64)
    out = np.zeros_like(source)
    run(reverse, source, out, grid=5, block=64)
    np.testing.assert_array_equal(out, source[:, ::-1])


def test_dynamic_shared_arrays_alias_one_base_whatever_their_type():
    @cuda.jit
    def kernel(out, size):
        floats = cuda.shared.array(0, float32)
        words = cuda.shared.array(0, uint32)
        halves = cuda.shared.array(shape=0, dtype=uint16)
        t = cuda.threadIdx.x
        floats[t] = float32(1) + float32(t)
        cuda.syncthreads()
        out[t, 0] = words[31 - t]
        out[t, 1] = halves[2 * t + 1]
        if t == 0:
            size[0] = len(floats)
            size[1] = halves.shape[0]

    out, size = np.zeros((32, 2), np.uint32), np.zeros(2, np.int64)
    run(kernel, out, size, shared=256)
    bits = (1 + np.arange(32, dtype=np.float32)).view(np.uint32)
    np.testing.assert_array_equal(out[:, 0], bits[::-1])
    np.testing.assert_array_equal(out[:, 1], bits >> 16)
    assert size.tolist() == [64, 128]


def test_shared_array_of_a_device_function_is_the_same_at_every_call():
    @cuda.jit(device=True)
    def swap(value, t):
        s = cuda.shared.array(32, int64)
        cuda.syncthreads()
        s[t] = value
        cuda.syncthreads()
        return s[t ^ 1]

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = swap(t, t) * 100 + swap(swap(t, t), t)

    out = np.zeros(32, np.int64)
    run(kernel, out)
    np.testing.assert_array_equal(out, (np.arange(32) ^ 1) * 100 + np.arange(32))


def test_local_arrays_belong_to_one_thread():
    @cuda.jit
    def kernel(out):
        t = cuda.grid(1)
        mine = cuda.local.array((2, 3), float64)
        flags = cuda.local.array(2, uint8)
        for i in range(2):
            for j in range(3):
                mine[i, j] = t * 10 + i * 3 + j
            flags[i] = t % 2 == i
        mine[t % 2, (t + 1) % 3] = -1
        out[t] = mine[0, 0] + mine[t % 2, (t + 1) % 3] * 1000 + flags[t % 2]

    out = np.zeros(64)
    run(kernel, out, grid=2)
    t = np.arange(64)
    zero = np.where((t % 2 == 0) & ((t + 1) % 3 == 0), -1, t * 10)
    np.testing.assert_array_equal(out, zero - 1000 + 1)


def test_device_functions_of_one_factory_have_shared_arrays_of_their_own():
    def make(SIZE):
        @cuda.jit(device=True)
        def last(t):
            s = cuda.shared.array(SIZE, int64)
            if t < SIZE:
                s[t] = t
            cuda.syncthreads()
            return s[SIZE - 1] + s.size

        return last

    small, large = make(8), make(32)

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = small(t) + 100 * large(t)

    out = np.zeros(32, np.int64)
    run(kernel, out)
    assert (out == 15 + 6300).all()


# Control flow and calls


def steps(n):
    count = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    return count


@cuda.jit(device=True)
def device_steps(n):
    count = 0
    while True:
        if n == 1:
            return count
        if n % 2 == 0:
            n //= 2
            count += 1
            continue
        n = 3 * n + 1
        count += 1


def test_early_returns_of_device_functions_in_divergent_loops():
    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)
        out[i] = device_steps(i + 1)

    out = np.zeros(64, np.int64)
    run(kernel, out, grid=2)
    assert out.tolist() == [steps(i + 1) for i in range(64)]


def control_flow(t, out):
    total, last = 0, -1
    for i in range(10, t % 4, -3):
        if i == 7 and t % 3 == 0:
            continue
        if i < t % 8:
            break
        total += i
    else:
        total += 1000
    for step, (low, high) in enumerate(((1, t % 5), (t % 3, 4))):
        for last in range(low, high):
            total += last * (step + 1)
    k = 0
    while k < t % 6:
        k += 1
        if k == 4:
            break
    else:
        total -= 7
    for factor in (2, 3, 5):
        if t % factor:
            continue
        total *= factor
    a = b = total if 3 < t <= 20 else -total
    (a, b), c = (b + 1, a - 1), t in (3, 5, 7)
    x = not ((t % 2 and a > 0) or c)
    out[t, 0], out[t, 1], out[t, 2] = a, b, last
    out[t, 3] = k + 10 * c + 100 * x
    if t > 25:
        return
    out[t, 4] = 1


def test_python_control_flow_means_in_a_kernel_what_it_means_in_python():
    @cuda.jit
    def kernel(out):
        control_flow(cuda.threadIdx.x, out)

    out, expected = np.zeros((32, 5), np.int64), np.zeros((32, 5), np.int64)
    run(kernel, out)
    for t in range(32):
        control_flow(t, expected)
    np.testing.assert_array_equal(out, expected)


def test_condition_on_a_position_is_not_taken_for_a_constant():
    captured = True

    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x, 0] = 1 if cuda.threadIdx.x > 3 else 2
        out[cuda.threadIdx.x, 1] = 3 if captured and cuda.threadIdx.x > 3 else 4
        out[cuda.threadIdx.x, 2] = (float32(0.1) if captured else 0.1) * 10.0

    out = np.zeros((32, 3))
    run(kernel, out)
    assert out[3].tolist() == [2, 4, np.float64(np.float32(0.1)) * 10]
    assert out[4].tolist() == [1, 3, np.float64(np.float32(0.1)) * 10]


def test_device_functions_take_defaults_and_keywords_and_return_tuples():
    @cuda.jit(device=True, inline="always")
    def split(value, base=10, *, offset=0):
        return value // base, (value % base + offset, base)

    def recursive(n):
        if n <= 1:
            return 1
        return n * recursive(n - 1)

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        high, (low, base) = split(t, offset=1)
        other, _ = split(value=t, base=7)
        out[t] = high + 100 * low + 10000 * base + 1000000 * other + recursive(t % 5)

    out = np.zeros(32, np.int64)
    run(kernel, out)
    t = np.arange(32)
    factorial = np.array([1, 1, 2, 6, 24])[t % 5]
    expected = t // 10 + 100 * (t % 10 + 1) + 100000 + 1000000 * (t // 7) + factorial
    np.testing.assert_array_equal(out, expected)


def test_threads_of_a_block_choose_between_views_of_one_array():
    @cuda.jit
    def kernel(a, out):
        t = cuda.threadIdx.x
        row = a[0]
        if t % 3:
            row = a[t % 3]
        out[t] = row[1]

    a = np.arange(12).reshape(3, 4)
    out = np.zeros(32, np.int64)
    run(kernel, a, out)
    np.testing.assert_array_equal(out, a[np.arange(32) % 3, 1])


def test_blocks_that_leave_a_loop_early_do_not_hold_up_the_barriers_of_others():
    @cuda.jit
    def kernel(out):
        s = cuda.shared.array(32, int64)
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        total = 0
        for i in range(b + 1):
            cuda.syncthreads()
            s[t] = i * t
            cuda.syncthreads()
            total += s[31 - t]
        out[b, t] = total

    out = np.zeros((4, 32), np.int64)
    run(kernel, out, grid=4)
    b = np.arange(4)[:, None]
    np.testing.assert_array_equal(out, b * (b + 1) // 2 * (31 - np.arange(32)))


def test_a_uniform_temporary_under_a_mask_stays_uniform(monkeypatch):
    """A vector there would make every index that is computed from it a gather."""
    seen = []

    def spy(value):
        """Stands for an instruction."""

    def twin(value):
        seen.append(type(value))
        return value

    instruction = Elementwise("spy", twin, arguments={"value": "int64"}, result="int64")
    monkeypatch.setattr(bind, "known_instructions", lambda: {spy: instruction})

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        for i in range(t % 3):
            if t % 2:
                index = i * 4
                index += 1
                spy(index)
            out[t] = i

    run(kernel, np.zeros(32))
    assert set(seen) == {np.int64}


# Warps and blocks


def test_shuffles():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.shfl_sync(FULL, x[t], 5)
        out[t, 1] = cuda.shfl_sync(FULL, x[t], (t * 3) % 32)
        out[t, 2] = cuda.shfl_xor_sync(FULL, x[t], 6)
        out[t, 3] = cuda.shfl_up_sync(FULL, x[t], 3)
        out[t, 4] = cuda.shfl_down_sync(FULL, x[t], t % 4)

    out = np.zeros((64, 5), np.float32)
    run(kernel, X, out, block=64)
    t = np.arange(64)
    lane, warp = t % 32, t // 32 * 32
    np.testing.assert_array_equal(out[:, 0], X[warp + 5])
    np.testing.assert_array_equal(out[:, 1], X[warp + t * 3 % 32])
    np.testing.assert_array_equal(out[:, 2], X[t ^ 6])
    np.testing.assert_array_equal(out[:, 3], X[np.where(lane >= 3, t - 3, t)])
    np.testing.assert_array_equal(out[:, 4], X[np.where(lane + t % 4 < 32, t + t % 4, t)])


def test_votes_and_masks():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.ballot_sync(FULL, t % 3 == 0)
        out[t, 1] = cuda.all_sync(FULL, t < 40)
        out[t, 2] = cuda.any_sync(FULL, t == 40)
        out[t, 3] = cuda.match_any_sync(FULL, t % 4)
        out[t, 4] = cuda.lanemask_lt()
        if t % 2:
            out[t, 5] = cuda.activemask()

    out = np.zeros((64, 6), np.uint32)
    run(kernel, out, block=64)
    lanes = np.arange(64)

    def bits(chosen, t):
        return sum(1 << (i % 32) for i in lanes if chosen[i] and i // 32 == t // 32)

    for t in range(64):
        expected = [bits(lanes % 3 == 0, t), t < 32, t >= 32, bits(lanes % 4 == t % 4, t)]
        expected += [(1 << (t % 32)) - 1, bits(lanes % 2 == 1, t) if t % 2 else 0]
        assert out[t].tolist() == expected


def test_block_votes():
    @cuda.jit
    def kernel(out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        out[b, t, 0] = cuda.syncthreads_count(t < 10 + b)
        out[b, t, 1] = cuda.syncthreads_and(t < 32 + b)
        out[b, t, 2] = cuda.syncthreads_or(t > 31 - b)

    out = np.zeros((2, 32, 3), np.int64)
    run(kernel, out, grid=2)
    assert out[:, 7].tolist() == [[10, 1, 0], [11, 1, 1]]


def test_atomics_act_one_after_another_and_return_the_old_value():
    @cuda.jit
    def kernel(counts, order, extremes, words, slots):
        i = cuda.grid(1)
        order[i] = cuda.atomic.add(counts, i % 3, 1)
        cuda.atomic.max(extremes, 0, i * 7 % 50)
        cuda.atomic.min(extremes, (1,), i * 7 % 50 - 9)
        cuda.atomic.sub(extremes, 2, 2)
        cuda.atomic.or_(words, 0, uint32(1) << uint32(i % 32))
        cuda.atomic.xor(words, 1, uint32(i))
        cuda.atomic.and_(words, 2, uint32(i | 64))
        cuda.atomic.inc(words, 3, uint32(9))
        cuda.atomic.exch(slots, i % 2, i)
        cuda.atomic.cas(slots, 2, -1, i)

    counts, order = np.zeros(3, np.int64), np.zeros(64, np.int64)
    extremes, words = np.zeros(3, np.int64), np.array([0, 0, 127, 0], np.uint32)
    slots = np.array([-1, -1, -1])
    run(kernel, counts, order, extremes, words, slots, grid=2)
    assert counts.tolist() == [22, 21, 21]
    for k in range(3):
        assert sorted(order[k::3]) == list(range(counts[k]))
    assert extremes.tolist() == [49, -9, -128]
    assert words.tolist() == [2**32 - 1, 0, 64, 4]
    assert slots[0] % 2 == 0
    assert slots[1] % 2 == 1
    assert slots[2] in range(64)


def test_atomic_float_sums_under_a_mask():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(4, float32)
        if t < 4:
            s[t] = float32(0)
        cuda.syncthreads()
        if t % 2:
            cuda.atomic.add(s, t % 4, x[t])
        cuda.syncthreads()
        if t < 4:
            out[t] = s[t]

    out = np.zeros(4, np.float32)
    run(kernel, X, out)
    assert out.tolist() == [0, X[1:32:4].sum(), 0, X[3:32:4].sum()]


def test_bit_counting():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.popc(x[t])
        out[t, 1] = cuda.clz(x[t])
        out[t, 2] = cuda.ffs(x[t])
        out[t, 3] = cuda.brev(x[t])

    x = (np.arange(32, dtype=np.uint64) ** 7 % 2**32).astype(np.uint32)
    out = np.zeros((32, 4), np.int64)
    run(kernel, x, out)
    for value, row in zip(x.tolist(), out.tolist(), strict=True):
        text = f"{value:032b}"
        first = 32 - text.rindex("1") if value else 0
        assert row == [text.count("1"), 32 - value.bit_length(), first, int(text[::-1], 2)]


def test_min_and_max_ignore_nan_as_the_hardware_does():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t, 0] = max(x[t], float32(3))
        out[t, 1] = min(float32(3), x[t])
        out[t, 2] = cuda.fma(x[t], float32(2), float32(1))
        out[t, 3] = cuda.selp(t < 16, float32(1), float32(-math.inf))

    x = X[:32].copy()
    x[5] = np.nan
    out = np.zeros((32, 4), np.float32)
    run(kernel, x, out)
    assert out[5, :2].tolist() == [3, 3]
    np.testing.assert_array_equal(out[:, 0], np.fmax(x, 3))
    np.testing.assert_array_equal(out[:, 2], 2 * x + 1)
    assert out[15:17, 3].tolist() == [1, -np.inf]


# Faults


@pytest.mark.parametrize("shift", [1, -1])
def test_access_out_of_bounds_is_a_fault_and_the_run_goes_on(shift):
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        out[i, 0] = x[i + shift]
        out[i + shift, 1] = float32(5)

    out = np.zeros((64, 2), np.float32)
    report = emulate(kernel)[2, 32](X, out)
    read, write = report.faults
    bad, thread = (64, 31) if shift == 1 else (-1, 0)
    assert not report.ok
    assert (read.kind, read.array, read.index) == ("out-of-bounds", "x", (bad,))
    assert read.threads == ((thread, 0, 0),)
    assert read.block == ((1 if shift == 1 else 0), 0, 0)
    assert read.line == line_of(kernel, "out[i, 0]")
    assert (write.array, write.line) == ("out", line_of(kernel, "out[i + shift, 1]"))
    assert f"index ({bad}) lies outside the global array x of shape (64)" in read.message
    assert f"thread ({thread}, 0, 0) of block" in read.message
    # The load gave poison, the store was dropped, everything else was done.
    lost_read, lost_write = (63, 0) if shift == 1 else (0, 63)
    assert np.flatnonzero(np.isnan(out[:, 0])).tolist() == [lost_read]
    assert np.flatnonzero(out[:, 1] != 5).tolist() == [lost_write]


def test_each_dimension_has_its_own_bounds():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = x[t % 4, t // 4]

    report = emulate(kernel)[1, 32](np.zeros((4, 7)), np.zeros(32))
    (fault,) = report.faults
    assert fault.index == (0, 7)
    assert fault.count == 4
    assert len(fault.threads) == 4


def test_lanes_that_do_not_take_a_branch_may_compute_any_index():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        if i > 0 and x[i - 1] >= float32(0):
            out[i] = x[i - 1]
        out[i] += x[i + 1] if i + 1 < x.shape[0] else float32(0)
        for j in range(i, i + 3):
            if j >= x.shape[0]:
                break
            out[i] += x[j]

    out = np.zeros(64, np.float32)
    run(kernel, X, out, grid=2)
    padded = np.concatenate([[0], X, [0, 0, 0]])
    expected = padded[:64] + padded[2:66] + X + padded[2:66] + padded[3:67]
    np.testing.assert_array_equal(out, expected)


def test_same_fault_in_many_iterations_is_reported_once_and_counted():
    @cuda.jit
    def kernel(x, out):
        for i in range(5):
            out[cuda.threadIdx.x] = x[100 + i]

    report = emulate(kernel)[1, 32](X, np.zeros(32))
    (fault,) = report.faults
    assert fault.count == 5 * 32
    assert len(fault.threads) == 8
    assert "(160 times)" in str(report)


def test_reading_unwritten_shared_memory_is_a_fault():
    @cuda.jit
    def kernel(x, out):
        s = cuda.shared.array((2, 32), float32)
        t = cuda.threadIdx.x
        if t != 5:
            s[1, t] = x[t]
        cuda.syncthreads()
        out[cuda.blockIdx.x * 32 + t] = s[1, 31 - t]

    out = np.zeros(64, np.float32)
    report = emulate(kernel)[2, 32](X, out)
    (fault,) = report.faults
    assert (fault.kind, fault.array, fault.index) == ("uninitialised-read", "s", (1, 5))
    assert (fault.threads, fault.line) == (((26, 0, 0),), line_of(kernel, "out[cuda"))
    assert fault.count == 2
    assert np.isnan(out[26])


@pytest.mark.parametrize("dtype", [float32, float64, float16, int32, uint8, uint16, int64])
def test_reading_unwritten_local_memory_is_a_fault_in_every_type(dtype):
    @cuda.jit
    def kernel(out):
        mine = cuda.local.array(4, dtype)
        t = cuda.threadIdx.x
        for i in range(4):
            if i != t % 8:
                mine[i] = dtype(1)
        out[t] = mine[2]
        out[t] = mine[t % 4]

    report = emulate(kernel)[1, 32](np.zeros(32))
    assert [f.kind for f in report.faults] == ["uninitialised-read"] * 2
    assert report.faults[0].threads == ((2, 0, 0), (10, 0, 0), (18, 0, 0), (26, 0, 0))
    assert report.faults[1].count == 16


@pytest.mark.parametrize("dtype", [float32, float64, float16, int32, uint8, uint16, int64])
def test_reading_unwritten_dynamic_shared_memory_is_a_fault_in_every_type(dtype):
    @cuda.jit
    def kernel(out):
        s = cuda.shared.array(0, dtype)
        t = cuda.threadIdx.x
        if t != 3:
            s[t] = dtype(1)
        cuda.syncthreads()
        out[t] = s[t]

    (fault,) = emulate(kernel)[1, 8, 0, 64](np.zeros(8)).faults
    assert (fault.kind, fault.array, fault.index) == ("uninitialised-read", "s", (3,))
    assert fault.count == 1


@pytest.mark.parametrize(("whole", "part"), [(float64, float32), (float32, uint16), (int64, uint8)])
@pytest.mark.parametrize("written", ["low", "high"])
def test_reading_an_element_of_which_another_type_wrote_a_part_is_a_fault(whole, part, written):
    first = 0 if written == "low" else 1

    @cuda.jit
    def kernel(out):
        wholes = cuda.shared.array(0, whole)
        parts = cuda.shared.array(0, part)
        for i in range(first, parts.size, 2):
            parts[i] = part(1)
        cuda.syncthreads()
        out[cuda.threadIdx.x] = wholes[cuda.threadIdx.x]

    (fault,) = emulate(kernel)[1, 8, 0, 64](np.zeros(8)).faults
    assert (fault.kind, fault.array, fault.count) == ("uninitialised-read", "wholes", 8)


def test_a_value_that_looks_like_poison_is_not_a_fault():
    @cuda.jit
    def kernel(bits, floats, out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(32, uint32)
        f = cuda.shared.array(32, float32)
        s[t] = bits[t]
        f[t] = floats[t]
        cuda.syncthreads()
        out[t, 0] = s[31 - t]
        out[t, 1] = f[31 - t]

    bits = np.full(32, 0x7FF97FF9, np.uint32)
    run(kernel, bits, bits.view(np.float32), np.zeros((32, 2)))


def test_memory_from_empty_is_watched_through_views_until_it_is_written():
    @cuda.jit
    def write(out):
        t = cuda.threadIdx.x
        if t != 3:
            out[t] = 1.0

    @cuda.jit
    def read(source, out):
        t = cuda.threadIdx.x
        out[t] = source[t]

    memory = empty((2, 32), np.float32)
    assert np.isnan(memory).all()
    (fault,) = emulate(read)[1, 32](memory[1], np.zeros(32)).faults
    assert (fault.kind, fault.array, fault.count) == ("uninitialised-read", "source", 32)
    run(write, memory[1])
    (fault,) = emulate(read)[1, 32](memory[1], np.zeros(32)).faults
    assert fault.index == (3,)
    memory[1, 3] = 2.0
    run(read, memory[1], np.zeros(32))


def test_a_barrier_that_some_threads_miss_is_a_fault():
    @cuda.jit
    def kernel(out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if t < 40 or b == 0:
            cuda.syncthreads()
        out[b, t] = 1

    report = emulate(kernel)[2, 64](np.zeros((2, 64)))
    (fault,) = report.faults
    assert (fault.kind, fault.block, fault.count) == ("barrier-divergence", (1, 0, 0), 24)
    assert fault.line == line_of(kernel, "cuda.syncthreads")
    assert fault.threads[0] == (40, 0, 0)
    assert "only 40 of 64 threads reach syncthreads" in fault.message


def test_a_barrier_after_an_early_return_is_a_note_and_no_fault():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t >= 40:
            return
        cuda.syncthreads()
        out[t] = 1

    report = emulate(kernel)[1, 64](np.zeros(64))
    assert report.ok
    assert "returned before syncthreads" in report.notes[0]


def test_returning_from_a_device_function_before_its_barrier_is_a_fault():
    @cuda.jit(device=True)
    def helper(t):
        if t >= 40:
            return
        cuda.syncthreads()

    @cuda.jit
    def kernel(out):
        helper(cuda.threadIdx.x)
        out[cuda.threadIdx.x] = 1

    report = emulate(kernel)[1, 64](np.zeros(64))
    assert [f.kind for f in report.faults] == ["barrier-divergence"]


def test_a_shuffle_that_names_absent_lanes_is_a_fault():
    @cuda.jit
    def kernel(mask, x, out):
        t = cuda.threadIdx.x
        if t < 16:
            out[t] = cuda.shfl_xor_sync(mask, x[t], 1)

    out = np.zeros(32, np.float32)
    (fault,) = emulate(kernel)[1, 32](FULL, X, out).faults
    assert (fault.kind, fault.count) == ("barrier-divergence", 16)
    run(kernel, 0xFFFF, X, out)
    np.testing.assert_array_equal(out[:16], X[np.arange(16) ^ 1])


def test_raise_on_fault_stops_at_the_first():
    @cuda.jit
    def kernel(x, out):
        out[cuda.threadIdx.x] = x[99]
        out[99] = float32(0)

    with pytest.raises(EmulatorFault, match=r"index \(99\) lies outside") as caught:
        emulate(kernel, raise_on_fault=True)[1, 32](X, np.zeros(32))
    assert caught.value.fault.array == "x"


def test_without_checks_no_fault_is_looked_for():
    @cuda.jit
    def kernel(out):
        mine = cuda.local.array(2, float32)
        t = cuda.threadIdx.x
        if t < 16:
            out[t] = mine[1]
            cuda.syncthreads()

    assert emulate(kernel, checks=False)[1, 32](np.zeros(32)).ok


# Refusals and errors


def refused_list(out):
    a = [1, 2]
    out[0] = a[0]


def refused_print(out):
    print(out[0])


def refused_fstring(out):
    out[0] = len(f"{out[0]}")


def refused_try(out):
    try:
        out[0] = 1
    except ValueError:
        out[0] = 2


def refused_with(out):
    with out:
        pass


def refused_nested_function(out):
    def inner():
        return 1

    out[0] = inner()


def refused_comprehension(out):
    out[0] = sum(x for x in (1, 2))


def refused_walrus(out):
    if (n := out[0]) > 1:
        out[1] = n


def refused_assert(out):
    assert out[0] > 0


def refused_matmul(out):
    out[0] = out @ out


def refused_sorted(out):
    out[0] = sorted((2, 1))[0]


def refused_attribute(out):
    out[0] = out.mean()


def refused_cuda_name(out):
    cuda.cg.this_grid().sync()


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (refused_list, "a list"),
        (refused_print, r"print\(...\)"),
        (refused_fstring, "an f-string"),
        (refused_try, "a 'try' block"),
        (refused_with, "a 'with' block"),
        (refused_nested_function, "a function defined inside a kernel"),
        (refused_comprehension, "a generator expression"),
        (refused_walrus, "an assignment expression"),
        (refused_assert, "'assert'"),
        (refused_matmul, "matrix multiplication"),
        (refused_sorted, "sorted"),
        (refused_attribute, "the array attribute .mean"),
        (refused_cuda_name, "cuda.cg"),
    ],
)
def test_unsupported_construct_is_refused_by_name_and_line(kernel, what):
    first = kernel.__code__.co_firstlineno
    with pytest.raises(UnsupportedConstruct, match=what) as caught:
        emulate(kernel)[1, 32](np.zeros(32))
    assert f"test_emulator.py:{first + 1}" in str(caught.value) or "cuda.cg" in str(caught.value)


def test_kernel_without_source_is_refused():
    names = {}
    exec(compile("def kernel(out):\n    out[0] = 1\n", "<nowhere>", "exec"), names)
    with pytest.raises(UnsupportedConstruct, match="source of kernel"):
        emulate(names["kernel"])[1, 32](np.zeros(32))


def test_error_inside_a_kernel_shows_the_users_line():
    @cuda.jit(device=True)
    def helper(pair):
        a, b, c = pair
        return a + b + c

    @cuda.jit
    def kernel(out):
        out[0] = helper((1, 2))

    with pytest.raises(ValueError, match="not enough values") as caught:
        emulate(kernel)[1, 32](np.zeros(32))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename == __file__
    assert last.lineno == line_of(helper, "a, b, c = pair")


def run_python(program):
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, program], check=True, env={**os.environ, "PYTHONPATH": root})


def test_importing_the_emulator_needs_neither_numba_nor_torch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "sys.modules['numba'] = sys.modules['torch'] = None\n"
        "import numba_flash.emulator\n"
    )
    run_python(program)


def test_kernels_run_without_numba_when_a_stub_stands_in(tmp_path):
    """The decorator does nothing, and NumPy's scalar types are as good as Numba's."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, types\n"
        "sys.modules['numba'] = None\n"
        "import numpy as np\n"
        "from numpy import float32\n"
        "from numba_flash.emulator import emulate\n"
        "cuda = types.ModuleType('numba.cuda')\n"
        "cuda.jit = lambda function: function\n"
        "@cuda.jit\n"
        "def kernel(out):\n"
        "    s = cuda.shared.array(32, float32)\n"
        "    t = cuda.threadIdx.x\n"
        "    s[t] = float32(t)\n"
        "    cuda.syncthreads()\n"
        "    out[t] = s[31 - t]\n"
        "out = np.zeros(32, np.float32)\n"
        "assert emulate(kernel)[1, 32](out).ok\n"
        "assert (out == np.arange(32)[::-1]).all()\n"
    )
    run_python(program)


# Speed


def make_flash_attention_1(TILE, D):
    """One thread a query row, O, l and m of a row in global memory, tiles in shared memory."""

    @cuda.jit
    def kernel(Q, K, V, O, L, M, scale):
        t, head = cuda.threadIdx.x, cuda.blockIdx.x
        Qi = cuda.shared.array((TILE, D), float32)
        Kj = cuda.shared.array((TILE, D), float32)
        Vj = cuda.shared.array((TILE, D), float32)
        S = cuda.shared.array((TILE, TILE), float32)
        for j in range(K.shape[1] // TILE):
            cuda.syncthreads()
            for x in range(D):
                Kj[t, x] = K[head, j * TILE + t, x]
                Vj[t, x] = V[head, j * TILE + t, x]
            cuda.syncthreads()
            for i in range(Q.shape[1] // TILE):
                row = i * TILE + t
                for x in range(D):
                    Qi[t, x] = Q[head, row, x]
                tile_max = float32(-math.inf)
                for y in range(TILE):
                    s = float32(0)
                    for x in range(D):
                        s += Qi[t, x] * Kj[y, x]
                    S[t, y] = s * scale
                    tile_max = max(tile_max, s * scale)
                row_max = max(M[head, row], tile_max)
                tile_sum = float32(0)
                for y in range(TILE):
                    S[t, y] = math.exp(S[t, y] - row_max)
                    tile_sum += S[t, y]
                kept = L[head, row] * math.exp(M[head, row] - row_max)
                for x in range(D):
                    acc = float32(0)
                    for y in range(TILE):
                        acc += S[t, y] * Vj[y, x]
                    O[head, row, x] = (kept * O[head, row, x] + acc) / (kept + tile_sum)
                M[head, row] = row_max
                L[head, row] = kept + tile_sum

    return kernel


def make_flash_attention_2(TILE_N, D, TEAM, THREADS):
    """A team of threads a query row: scores and output in local arrays, P in shared memory."""
    ROWS, KEYS, COLUMNS = THREADS // TEAM, TILE_N // TEAM, D // TEAM

    @cuda.jit(device=True)
    def team_max(value):
        value = max(value, cuda.shfl_xor_sync(FULL, value, 1))
        return max(value, cuda.shfl_xor_sync(FULL, value, 2))

    @cuda.jit(device=True)
    def team_sum(value):
        value += cuda.shfl_xor_sync(FULL, value, 1)
        return value + cuda.shfl_xor_sync(FULL, value, 2)

    @cuda.jit
    def kernel(Q, K, V, O, scale):
        t = cuda.threadIdx.x
        r, member = t // TEAM, t % TEAM
        i = cuda.blockIdx.x * ROWS + r
        sQ = cuda.shared.array((ROWS, D), float32)
        sK = cuda.shared.array((TILE_N, D), float32)
        sV = cuda.shared.array((TILE_N, D), float32)
        sP = cuda.shared.array((ROWS, TILE_N), float32)
        acc_S = cuda.local.array(KEYS, float32)
        acc_O = cuda.local.array(COLUMNS, float32)
        for e in range(t, ROWS * D, THREADS):
            sQ[e // D, e % D] = Q[cuda.blockIdx.x * ROWS + e // D, e % D]
        for c in range(COLUMNS):
            acc_O[c] = float32(0)
        row_max, row_sum = float32(-math.inf), float32(0)
        for n in range(K.shape[0] // TILE_N):
            cuda.syncthreads()
            for e in range(t, TILE_N * D, THREADS):
                sK[e // D, e % D] = K[n * TILE_N + e // D, e % D]
                sV[e // D, e % D] = V[n * TILE_N + e // D, e % D]
            cuda.syncthreads()
            for c in range(KEYS):
                acc_S[c] = float32(0)
            for x in range(D):
                q = sQ[r, x]
                for c in range(KEYS):
                    acc_S[c] += q * sK[c * TEAM + member, x]
            new_max = row_max
            for c in range(KEYS):
                acc_S[c] *= scale
                new_max = max(new_max, acc_S[c])
            new_max = team_max(new_max)
            kept = math.exp(row_max - new_max)
            tile_sum = float32(0)
            for c in range(KEYS):
                p = math.exp(acc_S[c] - new_max)
                tile_sum += p
                sP[r, c * TEAM + member] = p
            row_sum = row_sum * kept + team_sum(tile_sum)
            row_max = new_max
            cuda.syncwarp()
            for c in range(COLUMNS):
                acc_O[c] *= kept
            for j in range(TILE_N):
                p = sP[r, j]
                for c in range(COLUMNS):
                    acc_O[c] += p * sV[j, c * TEAM + member]
        for c in range(COLUMNS):
            O[i, c * TEAM + member] = acc_O[c] / row_sum

    return kernel


def attention(q, k, v, scale):
    s = scale * q.astype(float) @ np.swapaxes(k, -1, -2)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


# The bars are for two cores of their own; a busy machine gets twice as long.
SLACK = 2


def test_flash_attention_1_with_12_heads_takes_less_than_3_seconds():
    heads, n, d = 12, 128, 32
    q, k, v = np.random.default_rng(0).standard_normal((3, heads, n, d)).astype(np.float32)
    o, row_sum = np.zeros_like(q), np.zeros((heads, n), np.float32)
    row_max = np.full((heads, n), -np.inf, np.float32)
    scale = np.float32(d**-0.5)
    start = time.perf_counter()
    run(make_flash_attention_1(32, d), q, k, v, o, row_sum, row_max, scale, grid=heads)
    assert time.perf_counter() - start < 3 * SLACK
    np.testing.assert_allclose(o, attention(q, k, v, scale), atol=2e-6)


def test_flash_attention_2_over_512_keys_takes_less_than_2_seconds():
    n, d = 512, 64
    q, k, v = np.random.default_rng(0).standard_normal((3, n, d)).astype(np.float32)
    o, scale = np.zeros_like(q[:256]), np.float32(d**-0.5)
    start = time.perf_counter()
    run(make_flash_attention_2(32, d, 4, 128), q[:256], k, v, o, scale, grid=8, block=128)
    assert time.perf_counter() - start < 2 * SLACK
    np.testing.assert_allclose(o, attention(q[:256], k, v, scale), atol=2e-6)
