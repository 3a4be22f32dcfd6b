"""Boxes, sums, products and hand-overs of Hopper's instructions agree with their formulas."""

import ml_dtypes
import numpy as np
import pytest

from numba_flash import layouts
from numba_flash.emulator import emulate
from numba_flash.ptx import INSTRUCTIONS, make_wgmma
from numba_flash.tensor_map import TensorMap

from . import pieces

RNG = np.random.default_rng(0)
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}

BOXES = [
    pytest.param((20, 128), (64, 16), (64, 9), id="2d-beyond-the-last-row"),
    pytest.param((3, 20, 128), (64, 16, 2), (64, 10, 2), id="3d-beyond-two-ends"),
    pytest.param((2, 3, 20, 72), (64, 8, 1, 2), (32, 4, 1, 0), id="4d-beyond-the-columns"),
]
PRODUCTS = [
    {"n": 128, "k": 64},
    {"n": 64, "k": 128, "dtype": "f16"},
    {"n": 128, "k": 128, "a": "registers", "b_major": "mn"},
    {"n": 256, "k": 64, "a_rows": 128},
    {"n": 64, "k": 64, "a_major": "mn", "b_major": "mn", "a_rows": 128, "b_rows": 80},
    {"n": 8, "k": 16, "b_rows": 64, "a_major": "mn"},
]


def box_of(array, box, corner):
    """The box, zeros where the array has ended."""
    part = np.zeros(box[::-1], array.dtype)
    for index in np.ndindex(part.shape):
        at = tuple(i + c for i, c in zip(index, corner[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
            part[index] = array[at]
    return part


def box_arguments(shape, box, corner):
    source = RNG.integers(1, 2**16, shape).astype(np.uint16)
    raw = np.zeros(np.prod(box), np.uint16)
    maps = TensorMap(source, box), TensorMap(np.zeros_like(source), box)
    return (*maps, raw, np.array(corner, np.int32))


@pytest.mark.parametrize(("shape", "box", "corner"), BOXES)
def test_a_box_is_swizzled_filled_with_zeros_and_stored_where_it_came_from(shape, box, corner):
    source_map, target_map, raw, at = box_arguments(shape, box, corner)
    kernel = pieces.make_box_copy(box)
    report = emulate(kernel)[1, pieces.THREADS, 0, raw.nbytes](source_map, target_map, raw, at)
    assert report.ok, report
    part = box_of(source_map.array, box, corner)
    places = layouts.box_bytes(0, box[::-1], 2, swizzled=True) // 2
    assert np.array_equal(raw[places], part)
    assert np.array_equal(box_of(target_map.array, box, corner), part)
    assert np.count_nonzero(target_map.array) == np.count_nonzero(part)


def test_a_load_may_begin_before_the_array_and_a_store_may_not():
    source_map, target_map, raw, at = box_arguments((20, 128), (64, 16), (64, -3))
    kernel = pieces.make_box_copy((64, 16))
    report = emulate(kernel)[1, pieces.THREADS, 0, raw.nbytes](source_map, target_map, raw, at)
    (fault,) = report.faults
    assert (fault.kind, fault.array) == ("out-of-bounds", "target_map")
    places = layouts.box_bytes(0, (16, 64), 2, swizzled=True) // 2
    assert np.array_equal(raw[places], box_of(source_map.array, (64, 16), (64, -3)))
    assert not target_map.array.any()


def sum_arguments():
    target = RNG.standard_normal((12, 64)).astype(np.float32)
    x = RNG.standard_normal(256).astype(np.float32)
    return TensorMap(target, (32, 8)), x, np.int32(32), np.int32(6)


def test_a_box_is_added_to_what_is_there_and_ends_with_the_array():
    target_map, x, column, row = sum_arguments()
    expected = target_map.array.copy()
    expected[6:, 32:] += x.reshape(8, 32)[:6]
    assert emulate(pieces.box_add)[1, pieces.THREADS](target_map, x, column, row).ok
    assert np.array_equal(target_map.array, expected)


def product_arguments(options):
    wgmma = INSTRUCTIONS[make_wgmma(**options)]
    tiles = [
        RNG.standard_normal(shape).astype(DTYPES[wgmma.dtype])
        for shape in pieces.tile_shapes(wgmma)
    ]
    maps = pieces.product_maps(wgmma, *(tile.view(np.uint16) for tile in tiles))
    return wgmma, tiles, maps, np.zeros((pieces.THREADS, wgmma.n // 2), np.float32)


def product_formula(wgmma, tiles, accumulate):
    """The sums by thread and register, in float64, and the sums of absolute terms."""
    a, b = (tile.astype(np.float64) for tile in tiles)
    n, k = wgmma.n, wgmma.k
    a = a[:64, :k] if wgmma.a_major == "k" else a[:k, :64].T
    b = b[:n, :k].T if wgmma.b_major == "k" else b[:k, :n]
    row, column = wgmma.acc_layout
    warp = np.arange(4)[:, None, None]
    begun = accumulate * np.arange(wgmma.n // 2)
    exact, terms = (
        x[16 * warp + row, column].transpose(0, 2, 1).reshape(pieces.THREADS, -1) + begun
        for x in (a @ b, abs(a) @ abs(b))
    )
    return exact, terms


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("options", PRODUCTS, ids=str)
def test_a_product_reads_its_tiles_as_described_and_sums_over_all_of_k(options, accumulate):
    wgmma, tiles, maps, out = product_arguments(options)
    kernel = pieces.make_product(accumulate, **options)
    shared = pieces.product_bytes(wgmma)
    report = emulate(kernel)[1, pieces.THREADS, 0, shared](*maps, out)
    assert report.ok, report
    exact, terms = product_formula(wgmma, tiles, accumulate)
    # A float32 sum of k + 1 terms rounds at most k times.
    assert np.all(abs(out - exact) <= wgmma.k * 2.0**-24 * terms)
    assert report.multiply_adds == wgmma.multiply_adds


def test_named_barriers_and_mbarriers_hand_a_slot_back_and_forth():
    values, out = RNG.standard_normal((5, 32)).astype(np.float32), np.zeros((5, 32), np.float32)
    report = emulate(pieces.hand_over)[1, 64](values, out, 5)
    assert report.ok, report
    assert np.array_equal(out, values[:, ::-1])
