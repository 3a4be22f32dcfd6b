"""One kernel for each idea of Hopper's instructions: a box, a sum, a product, a hand-over."""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, uint16, uint32, uint64

from numba_flash import ptx
from numba_flash.ptx import (
    INSTRUCTIONS,
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    fence_mbarrier_init,
    fence_proxy_async,
    ldmatrix_x4,
    make_touch,
    make_wgmma,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
    prefetch_tensor_map,
    tma_load_2d,
    tma_reduce_add_2d,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_flash.tensor_map import TensorMap

THREADS = 128
PANEL = 64


@functools.cache
def make_box_copy(box):
    """``(source_map, target_map, raw, corner)``: a box of uint16, its bytes in shared memory, back.

    ``corner`` has the coordinates of the box, the fastest axis first.
    """
    ndim, SIZE = len(box), math.prod(box)
    NUM_BYTES = 2 * SIZE
    load, store = getattr(ptx, f"tma_load_{ndim}d"), getattr(ptx, f"tma_store_{ndim}d")

    @cuda.jit(device=True)
    def transfer_2d(sX, source_map, target_map, corner, bars, loads):
        if loads:
            load(sX, 0, source_map, corner[0], corner[1], bars, 0)
        else:
            store(target_map, corner[0], corner[1], sX, 0)

    @cuda.jit(device=True)
    def transfer_3d(sX, source_map, target_map, corner, bars, loads):
        if loads:
            load(sX, 0, source_map, corner[0], corner[1], corner[2], bars, 0)
        else:
            store(target_map, corner[0], corner[1], corner[2], sX, 0)

    @cuda.jit(device=True)
    def transfer_4d(sX, source_map, target_map, corner, bars, loads):
        if loads:
            load(sX, 0, source_map, corner[0], corner[1], corner[2], corner[3], bars, 0)
        else:
            store(target_map, corner[0], corner[1], corner[2], corner[3], sX, 0)

    transfer = {2: transfer_2d, 3: transfer_3d, 4: transfer_4d}[ndim]

    @cuda.jit
    def box_copy(source_map, target_map, raw, corner):
        sX = cuda.shared.array(0, uint16, alignment=1024)
        bars = cuda.shared.array(1, uint64)
        thread = cuda.threadIdx.x
        if thread == 0:
            prefetch_tensor_map(source_map)
            mbarrier_init(bars, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if thread == 0:
            mbarrier_arrive_expect_tx(bars, 0, NUM_BYTES)
            transfer(sX, source_map, target_map, corner, bars, True)
        mbarrier_wait(bars, 0, 0)
        for i in range(thread, SIZE, THREADS):
            raw[i] = sX[i]
        if thread == 0:
            transfer(sX, source_map, target_map, corner, bars, False)
            bulk_commit()
            bulk_wait_read(0)
            bulk_wait(0)

    return box_copy


@cuda.jit
def box_add(target_map, x, column, row):
    """Adds 8 rows of 32 floats to the box at (column, row), with the swizzle of 128 bytes."""
    sX = cuda.shared.array(256, float32, alignment=1024)
    thread = cuda.threadIdx.x
    for i in range(thread, 256, THREADS):
        r, c = i // 32, i % 32
        sX[32 * r + 4 * (c // 4 ^ r) + c % 4] = x[i]
    fence_proxy_async()
    cuda.syncthreads()
    if thread == 0:
        tma_reduce_add_2d(target_map, column, row, sX, 0)
        bulk_commit()
        bulk_wait(0)


def product_maps(wgmma, a, b):
    """Tensor maps of the tiles of A and B, each as it is in memory."""
    return [TensorMap(tile, (PANEL, rows)) for tile, rows in ((a, wgmma.a_rows), (b, wgmma.b_rows))]


def tile_shapes(wgmma):
    """Rows and columns of the tiles of A and B; whole panels."""
    a_columns = wgmma.k if wgmma.a_major == "k" else 64
    b_columns = wgmma.k if wgmma.b_major == "k" else wgmma.n
    a_panels, b_panels = (-(-columns // PANEL) for columns in (a_columns, b_columns))
    return (wgmma.a_rows, PANEL * a_panels), (wgmma.b_rows, PANEL * b_panels)


def product_bytes(wgmma):
    return sum(2 * math.prod(shape) for shape in tile_shapes(wgmma))


@functools.cache
def make_product(accumulate, **options):
    """``(a_map, b_map, out)``: acc, which begins as 0, 1, 2... or as nothing, plus A B."""
    product = make_wgmma(**options)
    wgmma = INSTRUCTIONS[product]
    (A_ROWS, a_columns), (B_ROWS, b_columns) = tile_shapes(wgmma)
    A_PANELS, B_PANELS = a_columns // PANEL, b_columns // PANEL
    FIRST_B, NUM_BYTES = A_ROWS * a_columns, product_bytes(wgmma)
    SUMS, STEPS, FRAGMENT = wgmma.n // 2, wgmma.steps, 4 * wgmma.steps
    IN_REGISTERS, ACCUMULATE = wgmma.a == "registers", accumulate
    touch, touch_A = make_touch(SUMS), make_touch(FRAGMENT, "uint32")

    @cuda.jit(device=True)
    def multiply(acc, sX, thread):
        """A from shared memory."""
        wgmma_fence()
        product(acc, sX, 0, sX, FIRST_B, ACCUMULATE)

    @cuda.jit(device=True)
    def multiply_registers(acc, sX, thread):
        """A from registers, into which ldmatrix loads it past the swizzle."""
        rA = cuda.local.array(FRAGMENT, uint32)
        row = thread // 32 * 16 + thread % 16
        for step in range(STEPS):
            chunk = (2 * step + thread % 32 // 16) % 8
            at = step // 4 * (A_ROWS * PANEL) + row * PANEL + 8 * (chunk ^ row % 8)
            ldmatrix_x4(rA, 4 * step, sX, at)
        touch_A(rA)
        wgmma_fence()
        product(acc, rA, 0, sX, FIRST_B, ACCUMULATE)

    chosen = multiply_registers if IN_REGISTERS else multiply

    @cuda.jit
    def multiply_tiles(a_map, b_map, out):
        sX = cuda.shared.array(0, uint16, alignment=1024)
        bars = cuda.shared.array(1, uint64)
        acc = cuda.local.array(SUMS, float32)
        thread = cuda.threadIdx.x
        if thread == 0:
            mbarrier_init(bars, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if thread == 0:
            mbarrier_arrive_expect_tx(bars, 0, NUM_BYTES)
            for panel in range(A_PANELS):
                at = panel * (A_ROWS * PANEL)
                tma_load_2d(sX, at, a_map, PANEL * panel, 0, bars, 0)
            for panel in range(B_PANELS):
                at = FIRST_B + panel * (B_ROWS * PANEL)
                tma_load_2d(sX, at, b_map, PANEL * panel, 0, bars, 0)
        mbarrier_wait(bars, 0, 0)
        for i in range(SUMS):
            acc[i] = float32(i)
        touch(acc)
        chosen(acc, sX, thread)
        wgmma_commit()
        wgmma_wait(0)
        touch(acc)
        for i in range(SUMS):
            out[thread, i] = acc[i]

    return multiply_tiles


@cuda.jit
def hand_over(values, out, rounds):
    """The lower warp makes numbers, the upper one takes them, and gives the slot back."""
    slot = cuda.shared.array(32, float32)
    bars = cuda.shared.array(1, uint64)
    thread = cuda.threadIdx.x
    lane = thread % 32
    if thread == 0:
        mbarrier_init(bars, 0, 32)
    cuda.syncthreads()
    if thread < 32:
        for i in range(rounds):
            if i > 0:
                mbarrier_wait(bars, 0, (i - 1) % 2)
            slot[lane] = values[i, lane]
            named_barrier_arrive(1, 64)
    else:
        for i in range(rounds):
            named_barrier_sync(1, 64)
            out[i, lane] = slot[31 - lane]
            mbarrier_arrive(bars, 0)
