"""Warp instructions on the emulator: they move what they should, and their faults are named."""

import linecache

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, uint16, uint32

from numba_flash import layouts
from numba_flash.emulator import empty, emulate
from numba_flash.ptx import (
    INSTRUCTIONS,
    cp_async_4,
    cp_async_8,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    element_offset,
    ex2,
    f32_to_tf32,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    lg2,
    load_x2,
    load_x4,
    loads_by_four,
    make_register_product,
    mma_m16n8k8_tf32,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    pack_bf16,
    pack_f16,
    rcp,
    stmatrix_x4,
    stmatrix_x4_trans,
    store_x2,
    store_x4,
    unpack_bf16,
    unpack_f16,
)

RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)
ROUNDING = {16: 16 * 2.0**-24, 8: 8 * 2.0**-24}
"""Of a sum of so many products in float32, relative to the sum of their absolute values."""


def run(kernel, *arguments, threads=32, blocks=1, shared=0):
    return emulate(kernel)[blocks, threads, 0, shared](*arguments)


def the_fault(report, kind):
    """The only fault of a report, and the source line it names."""
    assert [fault.kind for fault in report.faults] == [kind], report
    fault = report.faults[0]
    return fault, linecache.getline(__file__, fault.line)


# Matrices


def make_product(mma, columns):
    """One warp: A (16 x 16) from shared memory, B (16 x 8) as its transpose or as it is."""
    b_trans = columns == "rows of B"

    @cuda.jit
    def product(A, B, C):
        sA = cuda.shared.array(256, uint16)
        sB = cuda.shared.array(128, uint16)
        rA = cuda.local.array(4, uint32)
        rB = cuda.local.array(2, uint32)
        acc = cuda.local.array(4, float32)
        lane = cuda.threadIdx.x
        cp_async_16(sA, 8 * lane, A, 8 * lane, True)
        if lane < 16:
            cp_async_16(sB, 8 * lane, B, 8 * lane, True)
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        ldmatrix_x4(rA, 0, sA, (lane % 16) * 16 + (lane // 16) * 8)
        if b_trans:
            ldmatrix_x2_trans(rB, 0, sB, (lane % 16) * 8)
        else:
            ldmatrix_x2(rB, 0, sB, (lane % 8) * 16 + (lane // 8 % 2) * 8)
        for i in range(4):
            acc[i] = float32(i)
        mma(acc, 0, rA, 0, rB, 0)
        for i in range(4):
            C[lane, i] = acc[i]

    return product


@pytest.mark.parametrize("columns", ["rows of B", "columns of B"])
@pytest.mark.parametrize(
    ("mma", "dtype"), [(mma_m16n8k16_bf16, BF16), (mma_m16n8k16_f16, np.float16)]
)
def test_mma_of_what_ldmatrix_loads_is_the_matrix_product(mma, dtype, columns):
    a, b = RNG.standard_normal((16, 16)).astype(dtype), RNG.standard_normal((16, 8)).astype(dtype)
    stored = b if columns == "rows of B" else np.ascontiguousarray(b.T)
    c = np.zeros((32, 4), np.float32)
    report = run(
        make_product(mma, columns), *(x.view(np.uint16).reshape(-1) for x in (a, stored)), c
    )
    assert report.ok, report
    row, column = layouts.c_fragment()
    left, right = a.astype(np.float64), b.astype(np.float64)
    exact = (left @ right)[row, column] + np.arange(4)[:, None]
    terms = (abs(left) @ abs(right))[row, column] + np.arange(4)[:, None]
    assert np.all(abs(c.T - exact) <= ROUNDING[16] * terms)
    assert report.multiply_adds == 16 * 8 * 16


@cuda.jit
def product_tf32(A, B, C):
    rA = cuda.local.array(4, uint32)
    rB = cuda.local.array(2, uint32)
    acc = cuda.local.array(4, float32)
    lane = cuda.threadIdx.x
    group, member = lane // 4, lane % 4
    for i in range(4):
        acc[i] = float32(0)
        rA[i] = f32_to_tf32(A[group + 8 * (i % 2), member + 4 * (i // 2)])
    for i in range(2):
        rB[i] = f32_to_tf32(B[member + 4 * i, group])
    mma_m16n8k8_tf32(acc, 0, rA, 0, rB, 0)
    for i in range(4):
        C[group + 8 * (i // 2), 2 * member + i % 2] = acc[i]


def tf32(x):
    """Rounded to 10 bits of mantissa, ties away from zero."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.trunc(mantissa * 2**11 + np.copysign(0.5, mantissa)) / 2**11, exponent)


def test_tf32_product_rounds_its_operands_and_nothing_else():
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    c = np.zeros((16, 8), np.float32)
    assert run(product_tf32, a, b, c).ok
    left, right = tf32(a), tf32(b)
    assert np.all(abs(c - left @ right) <= ROUNDING[8] * (abs(left) @ abs(right)))


def make_transfer(load, store):
    @cuda.jit
    def transfer(source, target):
        sX = cuda.shared.array(256, uint16)
        r = cuda.local.array(4, uint32)
        lane = cuda.threadIdx.x
        for i in range(8):
            sX[8 * lane + i] = source[8 * lane + i]
        cuda.syncthreads()
        load(r, 0, sX, 8 * lane)
        cuda.syncthreads()
        store(sX, 8 * lane, r, 0)
        cuda.syncthreads()
        for i in range(8):
            target[8 * lane + i] = sX[8 * lane + i]

    return transfer


@pytest.mark.parametrize(
    ("load", "store", "transposed"),
    [
        (ldmatrix_x4, stmatrix_x4, False),
        (ldmatrix_x4_trans, stmatrix_x4_trans, False),
        (ldmatrix_x4, stmatrix_x4_trans, True),
        (ldmatrix_x4_trans, stmatrix_x4, True),
    ],
)
def test_stmatrix_puts_back_what_ldmatrix_took(load, store, transposed):
    source = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    target = np.zeros(256, np.uint16)
    assert run(make_transfer(load, store), source.reshape(-1), target).ok
    expected = source.swapaxes(1, 2) if transposed else source
    assert np.array_equal(target.reshape(4, 8, 8), expected)


@cuda.jit
def half_a_warp_multiplies(out):
    a = cuda.local.array(4, uint32)
    acc = cuda.local.array(4, float32)
    for i in range(4):
        a[i] = 0
        acc[i] = float32(0)
    if cuda.threadIdx.x % 32 < 16:
        mma_m16n8k16_bf16(acc, 0, a, 0, a, 0)
    out[cuda.threadIdx.x] = acc[0]


def test_mma_of_a_part_of_a_warp_is_a_divergence():
    fault, line = the_fault(
        run(half_a_warp_multiplies, np.zeros(64, np.float32), threads=64), "barrier-divergence"
    )
    assert "mma_m16n8k16" in line
    assert "all 32 lanes" in fault.message
    assert fault.threads[0] == (0, 0, 0)


@cuda.jit
def one_warp_of_two_multiplies(out):
    a = cuda.local.array(4, uint32)
    acc = cuda.local.array(4, float32)
    for i in range(4):
        a[i] = pack_bf16(float32(1), float32(1))
        acc[i] = float32(0)
    if cuda.threadIdx.x >= 32:
        mma_m16n8k16_bf16(acc, 0, a, 0, a, 0)
    out[cuda.threadIdx.x] = acc[0]


def test_whole_warps_may_branch_around_mma():
    out = np.zeros(64, np.float32)
    report = run(one_warp_of_two_multiplies, out, threads=64)
    assert report.ok
    assert np.array_equal(out, np.repeat(np.float32([0, 16]), 32))
    assert report.multiply_adds == 16 * 8 * 16


@cuda.jit
def third_register_is_forgotten(out):
    a = cuda.local.array(4, uint32)
    acc = cuda.local.array(4, float32)
    for i in range(4):
        acc[i] = float32(0)
        if i != 2:
            a[i] = 0
    mma_m16n8k16_f16(acc, 0, a, 0, a, 0)
    out[cuda.threadIdx.x] = acc[0]


def test_an_operand_register_that_nobody_wrote_is_named():
    fault, line = the_fault(
        run(third_register_is_forgotten, np.zeros(32, np.float32)), "uninitialised-read"
    )
    assert fault.array == "a"
    assert fault.index == (2,)
    assert "mma_m16n8k16" in line


@cuda.jit
def fragment_leaves_its_array(out):
    a = cuda.local.array(4, uint32)
    acc = cuda.local.array(4, float32)
    for i in range(4):
        a[i] = 0
        acc[i] = float32(0)
    mma_m16n8k16_f16(acc, 0, a, 1, a, 0)
    out[cuda.threadIdx.x] = acc[0]


def test_a_fragment_that_leaves_its_array_is_out_of_bounds():
    fault, _ = the_fault(run(fragment_leaves_its_array, np.zeros(32, np.float32)), "out-of-bounds")
    assert fault.index == (4,)


# Vector accesses


def make_vector_copy(load, store, words, dtype, step):
    @cuda.jit
    def copy(source, target):
        r = cuda.local.array(4, dtype)
        lane = cuda.threadIdx.x
        load(r, 0, source, step * lane)
        store(target, step * lane, r, 0)

    return copy


@pytest.mark.parametrize("registers", [uint32, float32])
@pytest.mark.parametrize("elements", [np.uint16, np.float32])
@pytest.mark.parametrize(
    ("load", "store", "words"), [(load_x2, store_x2, 2), (load_x4, store_x4, 4)]
)
def test_vector_accesses_move_bits_between_elements_of_2_and_4_bytes(
    load, store, words, elements, registers
):
    step = 4 * words // np.dtype(elements).itemsize
    source = RNG.integers(0, 2**16, 32 * step).astype(elements)
    target = np.zeros_like(source)
    report = run(make_vector_copy(load, store, words, registers, step), source, target)
    assert report.ok, report
    assert np.array_equal(source, target)
    assert report.traffic.read_bytes == report.traffic.write_bytes == source.nbytes


@cuda.jit
def load_between_vectors(source, out):
    r = cuda.local.array(4, float32)
    load_x4(r, 0, source, 4 * cuda.threadIdx.x + 2)
    out[cuda.threadIdx.x] = r[0]


def test_a_vector_access_off_its_alignment_is_refused_by_name():
    source, out = np.zeros(132, np.float32), np.zeros(32, np.float32)
    fault, line = the_fault(run(load_between_vectors, source, out), "out-of-bounds")
    assert "not aligned to 16 bytes" in fault.message
    assert fault.array == "source"
    assert "load_x4" in line


def test_a_base_off_its_alignment_counts_too():
    kernel = make_vector_copy(load_x4, store_x4, 4, float32, 4)
    fault, _ = the_fault(
        run(kernel, np.zeros(129, np.float32)[1:], np.zeros(128, np.float32)), "out-of-bounds"
    )
    assert "not aligned to 16 bytes" in fault.message


def test_the_end_of_a_vector_must_be_inside_too():
    kernel = make_vector_copy(load_x4, store_x4, 4, float32, 4)
    report = run(kernel, np.zeros(126, np.float32), np.zeros(128, np.float32))
    fault, _ = the_fault(report, "out-of-bounds")
    assert fault.index == (127,)
    assert fault.threads == ((31, 0, 0),)


def test_a_vector_that_nobody_wrote_is_named():
    source = empty((128,), np.float32)
    kernel = make_vector_copy(load_x4, store_x4, 4, float32, 4)
    fault, _ = the_fault(run(kernel, source, np.zeros(128, np.float32)), "uninitialised-read")
    assert fault.array == "source"


@cuda.jit
def place_of_every_element(source, offsets, by_four):
    i = cuda.threadIdx.x
    offsets[i] = element_offset(source, 1, 2, i // 5, i % 5)
    by_four[i] = loads_by_four(source)


BASE = np.zeros(2 * 3 * 6 * 12 + 8, np.float32)


@pytest.mark.parametrize(
    ("source", "by_four"),
    [
        (BASE[:432].reshape(2, 3, 6, 12), True),
        (BASE[:432].reshape(2, 3, 6, 12)[..., 4:9], True),
        (BASE[:432].reshape(2, 3, 6, 12)[..., 1:], False),  # a row begins off its alignment
        (BASE[:432].reshape(2, 3, 6, 12)[..., ::2], False),  # neighbours are not neighbours
        (BASE[:432].reshape(2, 3, 12, 6).swapaxes(2, 3), False),
        (BASE[:432].reshape(2, 3, 6, 12)[:, :, ::-1], False),  # rows lie before the first one
        (BASE[:360].reshape(2, 3, 6, 10), False),  # the next row is off its alignment
        (BASE[1:433].reshape(2, 3, 6, 12), False),  # so is the first
        (BASE[4:436].reshape(2, 3, 6, 12), True),
        (BASE[:432].astype(np.uint16).reshape(2, 3, 6, 12), True),  # 8 bytes are four of these
        (BASE[:396].astype(np.uint16).reshape(2, 3, 6, 11), False),
    ],
)
def test_offsets_follow_the_strides_and_vectors_the_alignment(source, by_four):
    offsets, found = np.zeros(20, np.int64), np.zeros(20, np.bool_)
    assert run(place_of_every_element, source, offsets, found, threads=20).ok
    strides = np.array(source.strides) // source.itemsize
    rows, columns = np.arange(20) // 5, np.arange(20) % 5
    expected = strides[0] + 2 * strides[1] + rows * strides[2] + columns * strides[3]
    assert offsets.tolist() == expected.tolist()
    assert (found == by_four).all()


def make_product_in_registers(rows, columns, depth, depth_first):
    add_product = make_register_product(rows, columns, depth, depth_first)
    num_a, num_b, num_acc = rows * depth, columns * depth, rows * columns

    @cuda.jit
    def product(A, B, C):
        a = cuda.local.array(num_a, float32)
        b = cuda.local.array(num_b, float32)
        acc = cuda.local.array(num_acc, float32)
        t = cuda.threadIdx.x
        for n in range(num_a):
            a[n] = A[t, n]
        for n in range(num_b):
            b[n] = B[t, n]
        for n in range(num_acc):
            acc[n] = C[t, n]
        add_product(acc, a, b)
        for n in range(num_acc):
            C[t, n] = acc[n]

    return product


@pytest.mark.parametrize("depth_first", [False, True])
def test_a_product_in_registers_is_the_product_of_each_lane(depth_first):
    rows, columns, depth = 4, 3, 2
    a = RNG.integers(-8, 8, (32, rows, depth)).astype(np.float32)
    b = RNG.integers(-8, 8, (32, columns, depth)).astype(np.float32)
    c = RNG.integers(-8, 8, (32, columns, rows)).astype(np.float32)
    expected = c + b @ a.swapaxes(1, 2)
    stored = [x.swapaxes(1, 2) if depth_first else x for x in (a, b)]
    A, B = (np.ascontiguousarray(x).reshape(32, -1) for x in stored)
    C = c.reshape(32, -1)
    report = run(make_product_in_registers(rows, columns, depth, depth_first), A, B, C)
    assert report.ok, report
    assert np.array_equal(C.reshape(expected.shape), expected)
    assert report.multiply_adds == 32 * rows * columns * depth


@cuda.jit
def two_lanes_store_one_vector(out):
    r = cuda.local.array(4, float32)
    for i in range(4):
        r[i] = float32(cuda.threadIdx.x)
    store_x4(out, 4 * (cuda.threadIdx.x // 2), r, 0)


def test_different_vectors_at_one_place_are_a_race():
    fault, _ = the_fault(run(two_lanes_store_one_vector, np.zeros(64, np.float32)), "race")
    assert fault.array == "out"


@cuda.jit
def load_from_registers(out):
    a = cuda.local.array(4, float32)
    load_x4(a, 0, a, 0)
    out[0] = a[0]


def test_memory_of_the_wrong_kind_is_refused_by_name():
    with pytest.raises(TypeError, match="global or shared memory here; a is a local array"):
        run(load_from_registers, np.zeros(1, np.float32))


# Asynchronous copies


def make_cp_async(copy, step):
    @cuda.jit
    def kernel(source, target, rows):
        sX = cuda.shared.array(256, uint16)
        lane = cuda.threadIdx.x
        copy(sX, step * lane, source, step * lane, lane < rows)
        cp_async_commit()
        cp_async_wait(0)
        for i in range(step):
            target[step * lane + i] = sX[step * lane + i]

    return kernel


@pytest.mark.parametrize(("copy", "step"), [(cp_async_4, 2), (cp_async_8, 4), (cp_async_16, 8)])
@pytest.mark.parametrize("rows", [0, 20, 32])
def test_cp_async_zero_fills_and_does_not_look_at_what_it_leaves_out(copy, step, rows):
    source = RNG.integers(1, 2**16, max(1, rows * step)).astype(np.uint16)
    target = np.ones(32 * step, np.uint16)
    report = run(make_cp_async(copy, step), source, target, rows)
    assert report.ok, report
    assert np.array_equal(target[: rows * step], source[: rows * step])
    assert not target[rows * step :].any()
    assert report.traffic.read_bytes == 2 * rows * step


@cuda.jit
def wait_is_forgotten(source, target):
    sX = cuda.shared.array(256, uint16)
    lane = cuda.threadIdx.x
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_commit()
    cuda.syncthreads()
    target[lane] = sX[8 * lane]


@cuda.jit
def commit_is_forgotten(source, target):
    sX = cuda.shared.array(256, uint16)
    lane = cuda.threadIdx.x
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_wait(0)
    cuda.syncthreads()
    target[lane] = sX[8 * lane]


@cuda.jit
def one_group_too_many_is_left(source, target):
    sX = cuda.shared.array(512, uint16)
    lane = cuda.threadIdx.x
    for stage in range(2):
        cp_async_16(sX, 256 * stage + 8 * lane, source, 8 * lane, True)
        cp_async_commit()
    cp_async_wait(1)
    cuda.syncthreads()
    target[lane] = sX[8 * lane]
    target[lane] = sX[256 + 8 * lane]


@cuda.jit
def matrix_is_loaded_too_early(source, target):
    sX = cuda.shared.array(256, uint16)
    r = cuda.local.array(4, uint32)
    lane = cuda.threadIdx.x
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_commit()
    cuda.syncthreads()
    ldmatrix_x4(r, 0, sX, 8 * lane)
    target[lane] = r[0]


@pytest.mark.parametrize(
    ("kernel", "culprit"),
    [
        (wait_is_forgotten, "target[lane] = sX[8 * lane]"),
        (commit_is_forgotten, "target[lane] = sX[8 * lane]"),
        (one_group_too_many_is_left, "target[lane] = sX[256 + 8 * lane]"),
        (matrix_is_loaded_too_early, "ldmatrix_x4"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_copy_that_is_read_before_its_wait_is_named_and_is_not_there(kernel, culprit):
    source, target = np.ones(256, np.uint16), np.zeros(32, np.uint16)
    fault, line = the_fault(run(kernel, source, target), "missing-wait")
    assert fault.array == "sX"
    assert culprit in line
    assert (target != 1).all()


@cuda.jit
def barrier_comes_before_the_wait(source, target):
    sX = cuda.shared.array(256, uint16)
    lane = cuda.threadIdx.x
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_commit()
    cuda.syncthreads()
    cp_async_wait(0)
    target[lane] = sX[255 - 8 * lane]


def test_a_wait_is_for_the_thread_alone_so_a_barrier_must_follow_it():
    source, target = np.ones(256, np.uint16), np.zeros(32, np.uint16)
    fault, line = the_fault(run(barrier_comes_before_the_wait, source, target), "race")
    assert "target[lane]" in line
    assert fault.array == "sX"


@cuda.jit
def buffer_is_filled_again_too_early(source, target):
    sX = cuda.shared.array(256, uint16)
    lane = cuda.threadIdx.x
    for _ in range(2):
        cp_async_16(sX, 8 * lane, source, 8 * lane, True)
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        target[lane] = sX[255 - 8 * lane]


def test_filling_a_buffer_that_others_still_read_is_a_race():
    source, target = np.ones(256, np.uint16), np.zeros(32, np.uint16)
    _, line = the_fault(run(buffer_is_filled_again_too_early, source, target), "race")
    assert "cp_async_16" in line


@cuda.jit
def lanes_count_their_own_groups(source, target):
    sX = cuda.shared.array(512, uint16)
    lane = cuda.threadIdx.x
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_commit()
    if lane >= 16:
        cp_async_16(sX, 256 + 8 * lane, source, 8 * lane, True)
        cp_async_commit()
    cp_async_wait(1)
    # One group is left in flight: of the upper half the second, of the lower half the first.
    if lane >= 16:
        target[lane] = sX[8 * lane]
    cp_async_wait(0)
    if lane < 16:
        target[lane] = sX[8 * lane]


def test_groups_are_counted_by_lane():
    source, target = RNG.integers(1, 99, 256).astype(np.uint16), np.zeros(32, np.uint16)
    report = run(lanes_count_their_own_groups, source, target)
    assert report.ok, report
    assert np.array_equal(target, source[::8])


@cuda.jit
def only_half_the_lanes_wait(source, target):
    sX = cuda.shared.array(256, uint16)
    lane = cuda.threadIdx.x
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_commit()
    if lane < 16:
        cp_async_wait(0)
    target[lane] = sX[8 * lane]


def test_a_copy_arrives_for_the_lanes_that_wait_and_for_no_other():
    source, target = np.ones(256, np.uint16), np.zeros(32, np.uint16)
    fault, _ = the_fault(run(only_half_the_lanes_wait, source, target), "missing-wait")
    assert fault.threads[0] == (16, 0, 0)
    assert (target[:16] == 1).all()
    assert (target[16:] != 1).all()


@cuda.jit
def prefetches_a_stage_ahead(source, target, steps):
    sX = cuda.shared.array(512, uint16)
    lane = cuda.threadIdx.x
    total = 0
    cp_async_16(sX, 8 * lane, source, 8 * lane, True)
    cp_async_commit()
    for step in range(steps):
        cp_async_wait(0)
        cuda.syncthreads()
        if step + 1 < steps:
            at = 256 * ((step + 1) % 2) + 8 * lane
            cp_async_16(sX, at, source, 256 * (step + 1) + 8 * lane, True)
        cp_async_commit()
        total += sX[256 * (step % 2) + 255 - 8 * lane]
    target[lane] = total


def test_a_pipeline_of_two_stages_is_clean_and_right():
    source, target = RNG.integers(0, 99, 5 * 256).astype(np.uint16), np.zeros(32, np.int64)
    report = run(prefetches_a_stage_ahead, source, target, 5)
    assert report.ok, report
    assert np.array_equal(target, source.reshape(5, 256)[:, 255 - 8 * np.arange(32)].sum(axis=0))


# Numbers


def twin(made, *values):
    with np.errstate(all="ignore"):
        return INSTRUCTIONS[made].twin(*values)


def test_two_floats_in_a_register_come_back_rounded_to_nearest_even():
    for made, back, dtype in ((pack_bf16, unpack_bf16, BF16), (pack_f16, unpack_f16, np.float16)):
        lo, hi = RNG.standard_normal((2, 1000)).astype(np.float32)
        word = twin(made, lo, hi)
        assert word.dtype == np.uint32
        for part, x in zip(twin(back, word), (lo, hi), strict=True):
            assert np.array_equal(part, x.astype(dtype).astype(np.float32))
        nan = twin(made, np.float32(np.nan), np.float32(-np.inf))
        assert np.isnan(twin(back, nan)[0])
        assert twin(back, nan)[1] == -np.inf


def test_approximate_functions_flush_subnormal_numbers():
    tiny = np.float32(1e-40)
    assert twin(ex2, np.float32(-130)) == 0
    assert twin(ex2, np.float32(-np.inf)) == 0
    assert twin(lg2, tiny) == -np.inf
    assert twin(rcp, tiny) == np.inf
    assert np.array_equal(twin(ex2, np.float32([-3, 0, 5])), np.float32([0.125, 1, 32]))


def test_tf32_keeps_infinity_and_rounds_ties_away_from_zero():
    x = np.array([1 + 2.0**-11, -1 - 2.0**-11, np.inf, 3e38], np.float32)
    rounded = twin(f32_to_tf32, x).view(np.float32)
    assert np.array_equal(rounded[:3], np.float32([1 + 2.0**-10, -1 - 2.0**-10, np.inf]))
    assert np.isnan(twin(f32_to_tf32, np.float32([np.nan])).view(np.float32))[0]
