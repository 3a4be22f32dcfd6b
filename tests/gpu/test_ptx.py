"""On a GPU an instruction does what its NumPy twin does: moves the same bits, rounds alike."""

import copy

import numpy as np
import pytest
import torch
from numba import cuda, uint16, uint32

from numba_flash import layouts, ptx
from numba_flash.emulator import emulate
from tests import test_emulator_tensor as warps
from tests.gpu.on_gpu import launch
from tests.judge import check
from tests.kernels import hopper_forward, mma_forward, pieces
from tests.kernels import test_forwards as forwards
from tests.kernels import test_pieces as hopper

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(1)
needs_hopper = pytest.mark.skipif(
    not cuda.is_available() or cuda.get_current_device().compute_capability[0] != 9,
    reason="needs a GPU of compute capability 9.0",
)


def on_both(kernel, arguments, grid=1, block=32, shared_bytes=0):
    """The arguments after a run on the emulator, and after one on the GPU."""
    emulated, launched = copy.deepcopy(arguments), copy.deepcopy(arguments)
    report = emulate(kernel)[grid, block, 0, shared_bytes](*emulated)
    assert report.ok, report
    launch(kernel, grid, block, shared_bytes, *launched)
    return emulated, launched


def assert_same_bits(emulated, launched):
    for one, other in zip(emulated, launched, strict=True):
        one, other = getattr(one, "array", one), getattr(other, "array", other)
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False)


# Arrays


def test_offsets_and_alignment_are_those_of_the_twins():
    source = np.zeros((2, 3, 6, 12), np.float32)
    for array in (source, source.astype(np.uint16)):
        arguments = (array, np.zeros(20, np.int64), np.zeros(20, np.bool_))
        assert_same_bits(*on_both(warps.place_of_every_element, arguments, block=20))


@pytest.mark.parametrize("depth_first", [False, True])
def test_products_in_registers_are_those_of_the_twin(depth_first):
    kernel = warps.make_product_in_registers(8, 4, 4, depth_first)
    integers = (RNG.integers(-8, 8, (32, n)).astype(np.float32) for n in (32, 16, 32))
    assert_same_bits(*on_both(kernel, tuple(integers)))


# Numbers

SPECIAL = [0, -0.0, 1, -1, np.inf, -np.inf, 1e-40, -1e-40, 3e38, 65519, 65520, 1 + 2.0**-8]
FLOATS = np.concatenate(
    [
        RNG.integers(0, 2**32, 4084, dtype=np.uint64).astype(np.uint32).view(np.float32),
        np.array(SPECIAL, np.float32),
    ]
)


@cuda.jit
def convert(x, y, words, halves, floats):
    i = cuda.grid(1)
    words[0, i] = ptx.pack_bf16(x[i], y[i])
    words[1, i] = ptx.pack_f16(x[i], y[i])
    words[2, i] = ptx.f32_to_tf32(x[i])
    halves[0, i] = ptx.f32_to_bf16(x[i])
    halves[1, i] = ptx.f32_to_f16(x[i])
    floats[0, i], floats[1, i] = ptx.unpack_bf16(words[0, i])
    floats[2, i], floats[3, i] = ptx.unpack_f16(words[1, i])
    floats[4, i] = ptx.bf16_to_f32(halves[0, i])
    floats[5, i] = ptx.f16_to_f32(halves[1, i])


def test_conversions_give_the_same_bits():
    x = FLOATS[~np.isnan(FLOATS)]
    x = x[: len(x) // 32 * 32]
    shapes = ((3, np.uint32), (2, np.uint16), (6, np.float32))
    results = [np.zeros((rows, len(x)), dtype) for rows, dtype in shapes]
    assert_same_bits(*on_both(convert, [x, RNG.permutation(x), *results], grid=len(x) // 32))


def test_conversions_treat_nan_alike():
    patterns = np.array([0x7FC00000, 0x7F812345, 0xFFC00001, 0xFF800001] * 8, np.uint32)
    x = patterns.view(np.float32)
    results = [np.zeros((n, 32), t) for n, t in ((3, np.uint32), (2, np.uint16), (6, np.float32))]
    emulated, launched = on_both(convert, [x, x, *results])
    assert np.array_equal(emulated[2], launched[2])
    assert np.isnan(launched[4]).all()


@cuda.jit
def approximate(x, out):
    i = cuda.grid(1)
    out[0, i] = ptx.ex2(x[i])
    out[1, i] = ptx.rcp(x[i])
    out[2, i] = ptx.lg2(abs(x[i]))


def test_approximate_functions_are_right_to_22_bits():
    x = np.concatenate([RNG.uniform(-130, 130, 4084), SPECIAL]).astype(np.float32)
    emulated, launched = on_both(approximate, [x, np.zeros((3, 4096), np.float32)], grid=128)
    one, other = emulated[1], launched[1]
    # PTX ISA: ex2 2^-22.5, rcp 1 ulp, lg2 2^-22.6 absolute near 1 and relative elsewhere; the twin
    # rounds once more.
    assert np.allclose(one[:2], other[:2], rtol=2.0**-21.5, atol=0)
    assert np.allclose(one[2], other[2], rtol=2.0**-21.5, atol=2.0**-21.5)


# Warps


@pytest.mark.parametrize("elements", [np.uint16, np.float32])
@pytest.mark.parametrize("words", [2, 4])
def test_vector_accesses_move_the_same_bits(words, elements):
    load, store = getattr(ptx, f"load_x{words}"), getattr(ptx, f"store_x{words}")
    step = 4 * words // np.dtype(elements).itemsize
    kernel = warps.make_vector_copy(load, store, words, uint32, step)
    source = RNG.integers(0, 2**16, 32 * step).astype(elements)
    assert_same_bits(*on_both(kernel, [source, np.zeros_like(source)]))


@pytest.mark.parametrize("store", [ptx.stmatrix_x4, ptx.stmatrix_x4_trans])
@pytest.mark.parametrize("load", [ptx.ldmatrix_x4, ptx.ldmatrix_x4_trans])
@needs_hopper
def test_matrices_are_loaded_and_stored_alike(load, store):
    source = RNG.integers(0, 2**16, 256).astype(np.uint16)
    assert_same_bits(*on_both(warps.make_transfer(load, store), [source, np.zeros_like(source)]))


@cuda.jit
def spread_matrices(source, out):
    sX = cuda.shared.array(256, uint16, alignment=16)
    r = cuda.local.array(12, uint32)
    lane = cuda.threadIdx.x
    for i in range(8):
        sX[8 * lane + i] = source[8 * lane + i]
    cuda.syncthreads()
    ptx.ldmatrix_x4(r, 0, sX, 8 * lane)
    ptx.ldmatrix_x4_trans(r, 4, sX, 8 * lane)
    ptx.ldmatrix_x2(r, 8, sX, 8 * (lane % 16))
    ptx.ldmatrix_x2_trans(r, 10, sX, 8 * (lane % 16))
    for i in range(12):
        out[i, lane] = r[i]


def test_ldmatrix_puts_the_same_elements_in_every_lane():
    source = RNG.integers(0, 2**16, 256).astype(np.uint16)
    assert_same_bits(*on_both(spread_matrices, [source, np.zeros((12, 32), np.uint32)]))


def assert_alike(emulated, launched, terms, count):
    """Two float32 sums of ``count`` products; the hardware truncates terms where NumPy rounds."""
    assert np.all(abs(emulated - launched) <= 2 * count * 2.0**-23 * terms)


@pytest.mark.parametrize("columns", ["rows of B", "columns of B"])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_mma_of_16_bits_multiplies_alike(name, columns):
    mma, dtype = getattr(ptx, f"mma_m16n8k16_{name}"), hopper.DTYPES[name]
    a = RNG.standard_normal((16, 16)).astype(dtype)
    b = RNG.standard_normal((16, 8)).astype(dtype)
    stored = b if columns == "rows of B" else np.ascontiguousarray(b.T)
    operands = [x.reshape(-1).view(np.uint16) for x in (a, stored)]
    kernel = warps.make_product(mma, columns)
    emulated, launched = on_both(kernel, [*operands, np.zeros((32, 4), np.float32)])
    row, column = layouts.c_fragment()
    terms = (abs(a.astype(float)) @ abs(b.astype(float)))[row, column].T + np.arange(4)
    assert_alike(emulated[2], launched[2], terms, 16)


def test_mma_of_tf32_multiplies_alike():
    a, b = RNG.standard_normal((16, 8)), RNG.standard_normal((8, 8))
    arguments = [a.astype(np.float32), b.astype(np.float32), np.zeros((16, 8), np.float32)]
    emulated, launched = on_both(warps.product_tf32, arguments)
    assert_alike(emulated[2], launched[2], abs(a) @ abs(b), 8)


@pytest.mark.parametrize(("num_bytes", "step"), [(4, 2), (8, 4), (16, 8)])
def test_cp_async_copies_and_zero_fills_alike(num_bytes, step):
    kernel = warps.make_cp_async(getattr(ptx, f"cp_async_{num_bytes}"), step)
    source = RNG.integers(1, 2**16, 20 * step).astype(np.uint16)
    assert_same_bits(*on_both(kernel, [source, np.ones(32 * step, np.uint16), 20]))


def test_a_pipeline_of_cp_async_runs_alike():
    source = RNG.integers(0, 99, 5 * 256).astype(np.uint16)
    assert_same_bits(*on_both(warps.prefetches_a_stage_ahead, [source, np.zeros(32, np.int64), 5]))


# Warpgroups


@needs_hopper
@pytest.mark.parametrize(("shape", "box", "corner"), hopper.BOXES)
def test_boxes_are_copied_alike(shape, box, corner):
    arguments = hopper.box_arguments(shape, box, corner)
    kernel = pieces.make_box_copy(box)
    assert_same_bits(*on_both(kernel, arguments, 1, pieces.THREADS, arguments[2].nbytes))


@needs_hopper
def test_boxes_are_added_alike():
    assert_same_bits(*on_both(pieces.box_add, hopper.sum_arguments(), 1, pieces.THREADS))


@needs_hopper
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("options", hopper.PRODUCTS, ids=str)
def test_wgmma_multiplies_alike(options, accumulate):
    wgmma, tiles, maps, out = hopper.product_arguments(options)
    kernel, shared_bytes = pieces.make_product(accumulate, **options), pieces.product_bytes(wgmma)
    emulated, launched = on_both(kernel, [*maps, out], 1, pieces.THREADS, shared_bytes)
    _, terms = hopper.product_formula(wgmma, tiles, accumulate)
    assert_alike(emulated[2], launched[2], terms, wgmma.k)


@needs_hopper
def test_barriers_hand_over_alike():
    values = RNG.standard_normal((5, 32)).astype(np.float32)
    assert_same_bits(*on_both(pieces.hand_over, [values, np.zeros_like(values), 5], block=64))


@pytest.mark.parametrize(
    "module",
    [mma_forward, pytest.param(hopper_forward, marks=needs_hopper)],
    ids=["mma", "hopper"],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim", "dtype", "causal"), forwards.CASES)
def test_small_forwards_meet_the_error_rule(module, seqlen_q, seqlen_k, head_dim, dtype, causal):
    q, k, v = forwards.inputs(seqlen_q, seqlen_k, head_dim, dtype)
    o, lse, _ = forwards.forward(module, q, k, v, dtype, causal, launch=launch)
    check({"o": o, "lse": lse}, q, k, v, torch.zeros_like(q), causal=causal)
