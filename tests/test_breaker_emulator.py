"""Kernels as a learner writes them, compared with NumPy; none of them has a fault."""

import math

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, uint8, uint32

from numba_flash.emulator import emulate

rng = np.random.default_rng(0)


def run(kernel, configuration, *arrays):
    report = emulate(kernel)[configuration](*arrays)
    assert report.ok, report


def test_tiled_transpose_of_a_matrix_that_fills_no_tile():
    @cuda.jit
    def transpose(A, out):
        tile = cuda.shared.array((16, 17), float32)
        bx, by = cuda.blockIdx.x * 16, cuda.blockIdx.y * 16
        x = bx + cuda.threadIdx.x
        for r in range(cuda.threadIdx.y, 16, cuda.blockDim.y):
            if x < A.shape[1] and by + r < A.shape[0]:
                tile[r, cuda.threadIdx.x] = A[by + r, x]
        cuda.syncthreads()
        x = by + cuda.threadIdx.x
        for r in range(cuda.threadIdx.y, 16, cuda.blockDim.y):
            if x < out.shape[1] and bx + r < out.shape[0]:
                out[bx + r, x] = tile[cuda.threadIdx.x, r]

    A = rng.standard_normal((21, 35)).astype(np.float32)
    out = np.zeros((35, 21), np.float32)
    run(transpose, ((3, 2), (16, 4)), A, out)
    np.testing.assert_array_equal(out, A.T)


def test_bitonic_sort_swaps_elements_of_shared_memory():
    @cuda.jit
    def sort(x):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = x[t]
        cuda.syncthreads()
        k = 2
        while k <= 64:
            j = k >> 1
            while j > 0:
                p = t ^ j
                if p > t and (t & k == 0) == (s[t] > s[p]):
                    s[t], s[p] = s[p], s[t]
                cuda.syncthreads()
                j >>= 1
            k <<= 1
        x[t] = s[t]

    x = rng.standard_normal(64).astype(np.float32)
    expected = np.sort(x)
    run(sort, (1, 64), x)
    np.testing.assert_array_equal(x, expected)


def test_insertion_sort_in_local_memory_has_its_own_trip_count_in_each_thread():
    @cuda.jit
    def sort_rows(A):
        i = cuda.grid(1)
        b = cuda.local.array(8, float64)
        for j in range(8):
            b[j] = A[i, j]
        for j in range(1, 8):
            value = b[j]
            k = j - 1
            while k >= 0 and b[k] > value:
                b[k + 1] = b[k]
                k -= 1
            b[k + 1] = value
        for j in range(7, -1, -1):
            A[i, j] = b[j]

    A = rng.standard_normal((40, 8))
    expected = np.sort(A, axis=1)
    run(sort_rows, (5, 8), A)
    np.testing.assert_array_equal(A, expected)


def test_histogram_by_atomics_in_shared_memory():
    @cuda.jit
    def histogram(x, bins):
        s = cuda.shared.array(16, int32)
        for i in range(cuda.threadIdx.x, 16, cuda.blockDim.x):
            s[i] = 0
        cuda.syncthreads()
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            cuda.atomic.add(s, x[i], 1)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, 16, cuda.blockDim.x):
            cuda.atomic.add(bins, i, s[i])

    x = rng.integers(0, 16, 777).astype(np.uint8)
    bins = np.zeros(16, np.int32)
    run(histogram, (3, 40), x, bins)
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=16))


def test_prefix_sum_between_two_buffers():
    @cuda.jit
    def scan(x, out):
        s = cuda.shared.array((2, 32), float64)
        t = cuda.threadIdx.x
        now = 0
        s[now, t] = x[t]
        cuda.syncthreads()
        for d in (1, 2, 4, 8, 16):
            s[1 - now, t] = s[now, t] + (s[now, t - d] if t >= d else 0.0)
            now = 1 - now
            cuda.syncthreads()
        out[t] = s[now, t]

    x = rng.standard_normal(32)
    out = np.zeros(32)
    run(scan, (1, 32), x, out)
    np.testing.assert_allclose(out, np.cumsum(x), rtol=1e-12, atol=1e-12)  # another order


def test_small_unsigned_integers_wrap_where_they_are_cast():
    @cuda.jit
    def hashes(seed, out, small):
        i = cuda.grid(1)
        s = uint32(seed[i])
        for _ in range(5):
            s = uint32(s ^ uint32(s << uint32(13)))
            s = uint32(s ^ (s >> uint32(17)))
            s = uint32(s ^ uint32(s << uint32(5)))
        out[i] = s
        small[i] = uint8(250 + i)

    def xorshift(s):
        for _ in range(5):
            s ^= (s << 13) & 0xFFFFFFFF
            s ^= s >> 17
            s ^= (s << 5) & 0xFFFFFFFF
        return s

    seed = rng.integers(1, 2**32, 32).astype(np.uint32)
    out, small = np.zeros(32, np.uint32), np.zeros(32, np.uint8)
    run(hashes, (1, 32), seed, out, small)
    assert out.tolist() == [xorshift(int(s)) for s in seed]
    assert small.tolist() == [(250 + i) % 256 for i in range(32)]


def collatz(i):
    n, steps = i + 1, 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def is_prime(i):
    for d in range(2, i):
        if d * d > i:
            break
        if i % d:
            continue
        return False
    return i > 1


def loops_with_else(i):
    total = 0
    for a in range(i % 5):
        for b in range(a, i % 7):
            if b == 3:
                continue
            if a + b > 6:
                break
            total += a * b + 1
        else:
            total += 100
    return total


def newton(i):
    x = i + 1.0
    guess = x
    for _ in range(60):
        step = (guess * guess - x) / (2 * guess)
        if abs(step) < 1e-9:
            break
        guess -= step
    return guess


def greatest_divisor(i):
    a, b = 6 * i, 18
    while b:
        a, b = b, a % b
    return a


@pytest.mark.parametrize(
    "function",
    [collatz, is_prime, loops_with_else, newton, greatest_divisor],
    ids=lambda f: f.__name__,
)
def test_a_function_of_the_thread_number_gives_what_python_gives(function):
    device = cuda.jit(device=True)(function)

    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)
        if i >= out.size:
            return
        out[i] = device(i)

    out = np.zeros(100)
    run(kernel, (4, 32), out)
    assert out.tolist() == [function(i) for i in range(100)]


def test_views_of_rows_columns_steps_and_transposes_in_one_expression():
    @cuda.jit
    def views(A, out):
        i = cuda.threadIdx.x
        row, column = A[i, 1:7:2], A[:, i % 4]
        total = column[i] + A.T[i, 1] + A[::2][i % 3, 0] + A[..., 0][i] + A[2:, 3][i % 3]
        for value in row:
            total += value
        out[i] = total

    A = rng.standard_normal((8, 8))
    out = np.zeros(8)
    run(views, (1, 8), A, out)
    i = np.arange(8)
    expected = A[i, i % 4] + A[1, i] + A[::2][i % 3, 0] + A[i, 0] + A[2:, 3][i % 3]
    np.testing.assert_allclose(out, expected + A[:, 1:7:2].sum(1), rtol=1e-12, atol=1e-12)


def test_kernels_of_one_factory_and_redefined_kernels_are_not_mixed_up():
    def factory(n):
        @cuda.jit
        def kernel(out):
            for i in range(n):
                out[cuda.grid(1)] = n * 10 + i

        return kernel

    out = np.zeros(3)
    for n in (1, 3, 2):
        run(factory(n), (1, 3), out)
        assert (out == n * 10 + n - 1).all()


def test_right_sides_of_and_or_and_conditional_expressions_load_only_where_they_are_asked():
    @cuda.jit
    def guarded(x, out):
        i = cuda.grid(1)
        out[0, i] = x[i] if i < x.size else -1.0
        out[1, i] = i < x.size and x[i] > 0
        out[2, i] = i >= x.size or x[i] > 0
        j = i
        while j < x.size and x[j] > 0:
            j += 3
        out[3, i] = j

    def walk(i):
        while i < 20 and x[i] > 0:
            i += 3
        return i

    x = rng.standard_normal(20)
    out = np.zeros((4, 32))
    run(guarded, (1, 32), x, out)
    positive = np.r_[x > 0, np.zeros(12, bool)]
    inside = np.arange(32) < 20
    assert out[0].tolist() == [*x, *[-1.0] * 12]
    assert out[1].tolist() == positive.tolist()
    assert out[2].tolist() == (~inside | positive).tolist()
    assert out[3].tolist() == [walk(i) for i in range(32)]


def test_grid_stride_reduction_by_shuffles():
    @cuda.jit
    def norm(x, out):
        total = 0.0
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            total += x[i] * x[i]
        for distance in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, distance)
        if cuda.laneid == 0:
            cuda.atomic.add(out, 0, total)

    x = rng.standard_normal(1003)
    out = np.zeros(1)
    run(norm, (2, 96), x, out)
    assert math.isclose(out[0], (x * x).sum(), rel_tol=1e-12)  # another order


def test_votes_in_a_branch_count_only_the_lanes_that_take_it():
    @cuda.jit
    def votes(ballots, anyone, everyone):
        i = cuda.grid(1)
        if i < 16:
            ballots[i] = cuda.ballot_sync(0xFFFF, i >= 4)
            anyone[i] = cuda.any_sync(0xFFFF, i >= 16)
            everyone[i] = cuda.all_sync(0xFFFF, i < 16)

    ballots, anyone, everyone = np.zeros(16, np.int64), np.ones(16, bool), np.zeros(16, bool)
    run(votes, (1, 32), ballots, anyone, everyone)
    assert (ballots == 0xFFF0).all()
    assert not anyone.any()
    assert everyone.all()
