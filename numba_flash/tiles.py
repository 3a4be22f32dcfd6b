"""Device functions that move a tile between global and shared memory.

Storage and arithmetic differ for 16-bit floats: they are stored as ``uint16`` bit patterns and
computed with in float32. ``Number`` bundles what a kernel needs to know about a dtype.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from numba import cuda, float32, float64, uint32

from .ptx import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16


class Number(NamedTuple):
    """How a kernel computes with a dtype: the accumulator's type, and both conversions."""

    acc_t: object
    load: object
    store: object


NUMBERS = {
    "float16": Number(float32, f16_to_f32, f32_to_f16),
    "bfloat16": Number(float32, bf16_to_f32, f32_to_bf16),
    "float32": Number(float32, float32, float32),
    "float64": Number(float64, float64, float64),
}


@functools.cache
def make_load_tile(NUM_THREADS: int, ROWS: int, COLUMNS: int, PADDED: int, dtype: str):
    """Device function ``load_tile`` for a shared tile of ROWS x PADDED, of which COLUMNS are data.

    Neighbouring threads read neighbouring columns, and a thread keeps its column from row to row,
    so that one address with a step is all it has to hold. Rows past the end of the sequence and
    columns past the head dimension are filled with zeros: no kernel reads memory nobody wrote.
    """
    acc_t, load, _ = NUMBERS[dtype]
    WIDTH = min(PADDED, NUM_THREADS)
    ROWS_AT_ONCE = NUM_THREADS // WIDTH

    @cuda.jit(device=True)
    def load_tile(tile, source, batch, head, first_row, seqlen, thread):
        first = thread // WIDTH
        if first < ROWS_AT_ONCE:
            end = min(first_row + ROWS, seqlen)
            for x in range(thread % WIDTH, PADDED, WIDTH):
                column = uint32(x)
                for y in range(first_row + first, end, ROWS_AT_ONCE):
                    row = uint32(y)
                    value = acc_t(0)
                    if column < COLUMNS:
                        value = load(source[batch, head, row, column])
                    tile[row - first_row, column] = value
                for row in range(end + first, first_row + ROWS, ROWS_AT_ONCE):
                    tile[row - first_row, column] = acc_t(0)

    return load_tile
