"""Counts against a count by hand: lane by lane with sets, or a number that theory gives."""

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, float32, float64, int32, uint16, uint32

from numba_flash import ptx
from numba_flash.emulator import emulate
from numba_flash.emulator.count import Site, measure

THREADS = 64


def line_of(kernel, text):
    """The line of a kernel that contains a text."""
    lines, first = inspect.getsourcelines(kernel.py_func)
    return first + next(n for n, line in enumerate(lines) if text in line)


# By hand


def sectors_by_hand(addresses, active, size):
    """Sectors that one warp touches: a set of all the bytes' sectors."""
    return len(
        {(a + b) // 32 for a, on in zip(addresses, active, strict=True) if on for b in range(size)}
    )


def wavefronts_by_hand(addresses, active, size):
    """Wavefronts of one warp, and the least: group by group, bank by bank."""
    together = min(32, 128 // size)
    here = {
        lane: address
        for lane, (address, on) in enumerate(zip(addresses, active, strict=True))
        if on
    }
    for step in (1, 2):
        if all(here.get(lane ^ step, a) == a for lane, a in here.items()):
            together = min(32, 2 * (128 // size))
    needed = least = 0
    for first in range(0, len(addresses), together):
        words = {
            (a + b) // 4
            for a, on in list(zip(addresses, active, strict=True))[first : first + together]
            if on
            for b in range(size)
        }
        banks = [sum(word % 32 == bank for word in words) for bank in range(32)]
        needed += max(banks)
        least += bool(words)
    return needed, least


def by_hand(kind, size, addresses, active):
    """Lanes, requests, sectors or wavefronts, the least: over (blocks, threads)."""
    total = np.zeros(4, int)
    for block, on in zip(addresses, active, strict=True):
        for w in range(0, len(block), 32):
            warp, here = block[w : w + 32], on[w : w + 32]
            if not any(here):
                continue
            if kind == "global":
                cost = sectors_by_hand(warp, here, size), 1
            else:
                cost = wavefronts_by_hand(warp, here, size)
            total += (sum(map(bool, here)), 1, *cost)
    return tuple(total.tolist())


@st.composite
def accesses(draw):
    """Kind, bytes a lane, addresses and active lanes of some blocks."""
    kind = draw(st.sampled_from(["global", "shared"]))
    size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    blocks, threads = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    numbers = st.integers(0, draw(st.sampled_from([8, 200, 5000])))
    lanes = st.lists(numbers, min_size=blocks * threads, max_size=blocks * threads)
    addresses = np.array(draw(lanes), np.int64).reshape(blocks, threads) * size
    seed = draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.1, 0.7, 1.0]))
    active = np.random.default_rng(seed).random((blocks, threads)) < share
    return kind, size, addresses, active


@given(accesses())
def test_an_access_costs_what_a_count_by_hand_says(access):
    kind, size, addresses, active = access
    site = Site(("", 0), "", kind, "read", size)
    cost = measure(site, addresses, active, addresses.shape)
    assert tuple(cost) == by_hand(kind, size, addresses, active)


@cuda.jit
def gather(source, index, wanted, out):
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    tile = cuda.shared.array(256, float32)
    for i in range(thread, 256, cuda.blockDim.x):
        tile[i] = float32(i)
    cuda.syncthreads()
    if wanted[block, thread]:
        value = source[index[block, thread]]
        out[block, thread] = value + tile[index[block, thread]]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_engine_counts_what_lanes_ask_for_by_hand(data):
    blocks, threads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 70))
    dtype = np.dtype(data.draw(st.sampled_from(["uint8", "float16", "float32", "float64"])))
    skipped = data.draw(st.integers(0, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    index = rng.integers(0, 256, (1 if data.draw(st.booleans()) else blocks, threads))
    index = np.broadcast_to(index, (blocks, threads)).copy()
    shape = (blocks, threads) if data.draw(st.booleans()) else (blocks, 1)
    wanted = np.broadcast_to(rng.random(shape) < 0.7, (blocks, threads)).copy()
    source, out = np.zeros(300, dtype)[skipped:], np.zeros((blocks, threads), np.float32)
    report = emulate(gather)[blocks, threads](source, index, wanted, out)
    addresses = (index + skipped) * dtype.itemsize
    lanes, requests, sectors, _ = by_hand("global", dtype.itemsize, addresses, wanted)
    loads = report.by_array["source"].traffic
    assert (loads.read_bytes, loads.read_sectors) == (lanes * dtype.itemsize, sectors)
    assert (loads.requests, loads.write_bytes, loads.write_sectors) == (requests, 0, 0)
    line = report.by_line[line_of(gather, "value + tile")]
    _, _, wavefronts, least = by_hand("shared", 4, index * 4, wanted)
    assert (line.shared.read_wavefronts, line.bank_conflicts) == (wavefronts, wavefronts - least)
    assert line.traffic.write_bytes == 4 * lanes


# By theory


@cuda.jit
def strided(source, out, stride):
    out[cuda.threadIdx.x] = source[cuda.threadIdx.x * stride]


@pytest.mark.parametrize(
    ("dtype", "sectors"),
    [
        (np.float32, {0: 1, 1: 4, 2: 8, 8: 32, 32: 32, 33: 32}),
        (np.float64, {0: 1, 1: 8, 2: 16, 8: 32, 32: 32, 33: 32}),
    ],
)
def test_strided_loads_touch_the_sectors_of_theory(dtype, sectors):
    for stride, expected in sectors.items():
        source, out = np.zeros(32 * 33, dtype), np.zeros(32, dtype)
        report = emulate(strided)[1, 32](source, out, stride)
        loads = report.by_array["source"].traffic
        assert (stride, loads.read_sectors) == (stride, expected)
        assert loads.read_bytes == 32 * dtype().itemsize


def test_a_load_that_starts_inside_a_sector_touches_one_more():
    memory, out = np.zeros(64, np.float32), np.zeros(32, np.float32)
    aligned = emulate(strided)[1, 32](memory[8:], out, 1)
    shifted = emulate(strided)[1, 32](memory[1:], out, 1)
    assert aligned.by_array["source"].traffic.read_sectors == 4
    assert shifted.by_array["source"].traffic.read_sectors == 5


def test_blocks_that_start_at_different_places_of_a_sector_are_counted_apart():
    @cuda.jit
    def windows(source, out):
        out[cuda.blockIdx.x, cuda.threadIdx.x] = source[3 * cuda.blockIdx.x + cuda.threadIdx.x]

    source, out = np.zeros(64, np.float32), np.zeros((8, 32), np.float32)
    report = emulate(windows)[8, 32](source, out)
    # Of eight starts, 3 b modulo 8 numbers, one is the start of a sector.
    assert report.by_array["source"].traffic.read_sectors == 4 + 7 * 5


def make_shared_strided(dtype):
    @cuda.jit
    def shared_strided(out, stride):
        tile = cuda.shared.array(1100, dtype)
        for i in range(cuda.threadIdx.x, 1100, 32):
            tile[i] = dtype(0)
        cuda.syncthreads()
        out[cuda.threadIdx.x] = tile[cuda.threadIdx.x * stride]

    return shared_strided


@pytest.mark.parametrize(
    ("dtype", "wavefronts"),
    [
        (float32, {0: 1, 1: 1, 2: 2, 8: 8, 32: 32, 33: 1}),
        (float64, {0: 1, 1: 2, 2: 4, 8: 16, 32: 32, 33: 2}),
    ],
)
def test_strided_loads_from_shared_memory_take_the_wavefronts_of_theory(dtype, wavefronts):
    kernel = make_shared_strided(dtype)
    for stride, expected in wavefronts.items():
        report = emulate(kernel)[1, 32](np.zeros(32, np.float64), stride)
        line = report.by_line[line_of(kernel, "* stride")]
        assert (stride, line.shared.read_wavefronts) == (stride, expected)
        assert line.bank_conflicts == expected - wavefronts[min(stride, 1)]


@cuda.jit
def transpose(source, out):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile = cuda.shared.array((32, 32), float32)
    tile[y, x] = source[y, x]
    cuda.syncthreads()
    out[y, x] = tile[x, y]


@cuda.jit
def transpose_padded(source, out):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile = cuda.shared.array((32, 33), float32)
    tile[y, x] = source[y, x]
    cuda.syncthreads()
    out[y, x] = tile[x, y]


def test_a_column_of_a_square_tile_is_31_conflicts_a_warp_and_padding_takes_them_away():
    source, out = np.zeros((32, 32), np.float32), np.zeros((32, 32), np.float32)
    square = emulate(transpose)[1, (32, 32)](source, out)
    padded = emulate(transpose_padded)[1, (32, 32)](source, out)
    assert (square.bank_conflicts, padded.bank_conflicts) == (32 * 31, 0)
    assert square.traffic.read_bytes == square.traffic.write_bytes == 4096
    assert square.traffic.read_sectors == square.traffic.write_sectors == 128
    assert square.traffic.efficiency == 1.0


VECTOR_WAVEFRONTS = {0: 2, 1: 4, 2: 8, 8: 32, 32: 32, 33: 4}
VECTOR_SECTORS = {0: 1, 1: 16, 2: 32, 8: 32, 32: 32, 33: 32}


@pytest.mark.parametrize("stride", VECTOR_WAVEFRONTS)
def test_16_bytes_a_lane_are_served_in_quarters_of_a_warp_or_in_halves(stride):
    @cuda.jit
    def vectors(source, out):
        tile = cuda.shared.array(4200, float32, alignment=16)
        words = cuda.local.array(4, float32)
        place = 4 * stride * cuda.threadIdx.x
        ptx.load_x4(words, 0, source, place)
        ptx.store_x4(tile, place, words, 0)
        ptx.load_x4(words, 0, tile, place)
        out[cuda.threadIdx.x] = words[0] + words[3]

    report = emulate(vectors)[1, 32](np.zeros(4200, np.float32), np.zeros(32, np.float32))
    load = report.by_line[line_of(vectors, "source, place")].traffic
    assert (load.read_bytes, load.read_sectors) == (512, VECTOR_SECTORS[stride])
    store = report.by_line[line_of(vectors, "store_x4")]
    loaded = report.by_line[line_of(vectors, "tile, place)")]
    wavefronts = VECTOR_WAVEFRONTS[stride]
    assert store.shared.write_wavefronts == loaded.shared.read_wavefronts == wavefronts
    assert store.bank_conflicts == loaded.bank_conflicts == max(wavefronts - 4, 0)


@pytest.mark.parametrize("swizzled", [False, True])
def test_ldmatrix_of_a_64_wide_tile_conflicts_8_ways_unless_it_is_swizzled(swizzled):
    XOR = 7 if swizzled else 0

    @cuda.jit
    def fragments(out):
        tile = cuda.shared.array(16 * 64, uint16, alignment=16)
        for i in range(cuda.threadIdx.x, 16 * 64, 32):
            tile[i] = 0
        cuda.syncwarp()
        words = cuda.local.array(4, uint32)
        row, chunk = cuda.threadIdx.x % 16, cuda.threadIdx.x // 16
        for step in range(4):
            at = row * 64 + ((2 * step + chunk) ^ (row & XOR)) * 8
            ptx.ldmatrix_x4(words, 0, tile, at)
            out[cuda.threadIdx.x] = words[0]

    report = emulate(fragments)[1, 32](np.zeros(32, np.uint32))
    assert report.ok
    line = report.by_line[line_of(fragments, "ldmatrix")]
    assert line.shared.read_bytes == 4 * 512
    assert line.shared.read_wavefronts == 4 * (4 if swizzled else 32)
    assert report.bank_conflicts == (0 if swizzled else 4 * 28)


def test_a_smaller_ldmatrix_takes_addresses_of_16_lanes():
    @cuda.jit
    def half(out):
        tile = cuda.shared.array(16 * 8, uint16, alignment=16)
        for i in range(cuda.threadIdx.x, 16 * 8, 32):
            tile[i] = 0
        cuda.syncwarp()
        words = cuda.local.array(2, uint32)
        ptx.ldmatrix_x2(words, 0, tile, 8 * (cuda.threadIdx.x % 16))
        out[cuda.threadIdx.x] = words[0] + words[1]

    shared = emulate(half)[1, 32](np.zeros(32, np.uint32)).by_line[line_of(half, "ldmatrix")].shared
    assert (shared.read_bytes, shared.read_wavefronts, shared.requests) == (256, 2, 1)


def test_an_asynchronous_copy_reads_global_and_writes_shared_memory():
    @cuda.jit
    def copy(source, out):
        tile = cuda.shared.array(256, float32, alignment=16)
        i = 4 * cuda.threadIdx.x
        ptx.cp_async_16(tile, i, source, i, cuda.threadIdx.x < 24)
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
        cuda.syncthreads()
        out[cuda.threadIdx.x] = tile[i]

    report = emulate(copy)[1, 64](np.zeros(256, np.float32), np.zeros(64, np.float32))
    line = report.by_line[line_of(copy, "cp_async_16")]
    assert (line.traffic.read_bytes, line.traffic.read_sectors) == (24 * 16, 24 // 2)
    assert (line.shared.write_bytes, line.bank_conflicts) == (64 * 16, 0)


def test_narrow_elements_of_one_word_do_not_conflict():
    @cuda.jit
    def bytes_in_a_row(out):
        tile = cuda.shared.array(64, np.uint8)
        tile[cuda.threadIdx.x] = 1
        tile[cuda.threadIdx.x + 32] = 1
        cuda.syncthreads()
        out[cuda.threadIdx.x] = tile[2 * cuda.threadIdx.x]

    report = emulate(bytes_in_a_row)[1, 32](np.zeros(32, np.int32))
    assert report.bank_conflicts == 0
    line = report.by_line[line_of(bytes_in_a_row, "out[")]
    assert (line.shared.read_bytes, line.shared.read_wavefronts) == (32, 1)


# Requests


def test_lanes_that_loop_on_their_own_make_one_request_an_iteration():
    @cuda.jit
    def triangle(source, out):
        total = float32(0)
        for i in range(cuda.threadIdx.x % 4):
            total += source[i, cuda.threadIdx.x]
        out[cuda.threadIdx.x] = total

    report = emulate(triangle)[2, 64](np.zeros((3, 64), np.float32), np.zeros(64, np.float32))
    loads = report.by_array["source"].traffic
    assert loads.requests == 2 * 2 * 3  # blocks, warps, iterations
    assert loads.read_bytes == 4 * 2 * 16 * (1 + 2 + 3)
    assert loads.read_sectors == 2 * 2 * 3 * 4


def test_a_warp_without_an_active_lane_makes_no_request():
    @cuda.jit
    def second_warp(source, out):
        if cuda.threadIdx.x >= 32:
            out[cuda.threadIdx.x] = source[cuda.threadIdx.x]

    report = emulate(second_warp)[3, 64](np.zeros(64, np.float32), np.zeros(64, np.float32))
    assert report.by_array["source"].traffic.requests == 3
    assert report.traffic.read_bytes == 3 * 128


def test_lanes_out_of_bounds_ask_for_nothing():
    @cuda.jit
    def too_far(source, out):
        out[cuda.threadIdx.x] = source[cuda.threadIdx.x]

    report = emulate(too_far)[1, 32](np.zeros(20, np.float32), np.zeros(32, np.float32))
    assert report.by_array["source"].traffic.read_bytes == 80
    assert report.by_array["source"].traffic.read_sectors == 3


def test_an_atomic_operation_reads_and_writes_in_one_request():
    @cuda.jit
    def add(out):
        cuda.atomic.add(out, cuda.threadIdx.x % 8, 1)

    traffic = emulate(add)[1, 64](np.zeros(8, np.int32)).traffic
    assert (traffic.read_bytes, traffic.write_bytes) == (256, 256)
    assert (traffic.read_sectors, traffic.write_sectors, traffic.requests) == (2, 2, 2)


def test_a_batch_of_blocks_counts_like_its_blocks_one_by_one():
    @cuda.jit
    def tail(source, out):
        i = cuda.grid(1)
        if i < len(source):
            out[i] = source[i] * 2

    n = 100_000
    traffic = emulate(tail)[-(-n // 96), 96](np.zeros(n), np.zeros(n)).traffic
    assert (traffic.read_bytes, traffic.write_bytes) == (8 * n, 8 * n)
    assert traffic.sectors == 2 * n // 4
    assert traffic.requests == 2 * -(-n // 32)


CONSTANT = np.arange(32, dtype=np.float32)


def test_constants_are_not_global_memory():
    @cuda.jit
    def constant(out):
        out[cuda.threadIdx.x] = CONSTANT[cuda.threadIdx.x]

    traffic = emulate(constant)[1, 32](np.zeros(32, np.float32)).traffic
    assert (traffic.read_bytes, traffic.write_bytes) == (0, 128)


# Barriers and multiply-adds


def test_barriers_are_counted_once_a_block_that_arrives():
    @cuda.jit
    def some_blocks(out):
        cuda.syncthreads()
        if cuda.blockIdx.x < 2:
            out[cuda.blockIdx.x] = cuda.syncthreads_count(cuda.threadIdx.x > 3)

    report = emulate(some_blocks)[5, 64](np.zeros(5, np.int32))
    assert report.barriers == 5 + 2
    assert report.by_line[line_of(some_blocks, "count")].barriers == 2
    unchecked = emulate(some_blocks, checks=False)[5, 64](np.zeros(5, np.int32))
    assert unchecked.barriers == 7


@cuda.jit
def products(x, out):
    i = cuda.threadIdx.x
    a, b, n = x[i], x[i + 32], int32(i)
    out[i] = a * b
    out[i] += a * b
    a += a * b
    a -= a * b
    c = a + b * a
    d = a * b + a
    e = a * b - a * c
    f = cuda.fma(a, b, c)
    m = n * n + n
    g = a * (b + c)
    if i < 8:
        out[i] = c + d + e + f + g + m * d


def test_multiply_adds_of_floats_are_counted_by_lane():
    report = emulate(products)[3, 32](np.ones(64, np.float32), np.zeros(32, np.float32))
    per_line = {line: costs.multiply_adds for line, costs in report.by_line.items()}
    one = ("out[i] += a", "a += a", "a -= a", "c = a", "d = a", "e = a", "f = ")
    expected = {line_of(products, text): 3 * 32 for text in one}
    expected[line_of(products, "m * d")] = 3 * 8
    assert {line: number for line, number in per_line.items() if number} == expected
    assert report.multiply_adds == 7 * 96 + 24


def test_a_matrix_instruction_is_its_product_of_multiply_adds():
    @cuda.jit
    def product(out):
        d = cuda.local.array(4, float32)
        a = cuda.local.array(4, uint32)
        b = cuda.local.array(2, uint32)
        for i in range(4):
            d[i] = float32(0)
            a[i] = uint32(0)
        b[0] = uint32(0)
        b[1] = uint32(0)
        ptx.mma_m16n8k16_bf16(d, 0, a, 0, b, 0)
        out[cuda.grid(1)] = d[0]

    report = emulate(product)[3, 64](np.zeros(192, np.float32))
    assert report.multiply_adds == 6 * 16 * 8 * 16


# Where


@cuda.jit(device=True)
def load(source, i):
    return source[i]


@cuda.jit
def through_device_function(a, b, out):
    i = cuda.threadIdx.x
    out[i] = load(a, i) + load(b, i)


def test_a_device_function_counts_at_its_own_line_and_by_array():
    arrays = [np.zeros(32, np.float32) for _ in range(3)]
    report = emulate(through_device_function)[1, 32](*arrays)
    assert report.by_line[line_of(load, "return")].traffic.read_bytes == 256
    assert report.by_line[line_of(through_device_function, "out[i]")].traffic.write_bytes == 128
    assert {name: c.traffic.bytes for name, c in report.by_array.items()} == dict.fromkeys(
        ("a", "b", "out"), 128
    )
    assert list(report.by_file) == [__file__]


def test_lines_and_arrays_add_up_to_the_whole():
    report = emulate(transpose)[1, (32, 32)](*np.zeros((2, 32, 32), np.float32))
    lines = report.by_line.values()
    assert sum(c.traffic.read_bytes for c in lines) == report.traffic.read_bytes
    assert sum(c.bank_conflicts for c in lines) == report.bank_conflicts
    assert sum(c.shared.bytes for c in report.by_array.values()) == 2 * 4096


def test_a_line_without_costs_costs_nothing():
    report = emulate(strided)[1, 32](np.zeros(32), np.zeros(32), 1)
    assert report.by_line[1].traffic.bytes == 0
    assert 1 not in report.by_line


def test_counting_can_be_left_out():
    report = emulate(strided, counts=False)[1, 32](np.zeros(32), np.zeros(32), 1)
    with pytest.raises(ValueError, match="counts=False"):
        _ = report.traffic
