"""Device functions that move a tile between global and shared memory.

Storage and arithmetic differ for 16-bit floats: they are stored as ``uint16`` bit patterns and
computed with in float32. ``Number`` bundles what a kernel needs to know about a dtype.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from numba import cuda, float32, float64

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

    Neighbouring threads read neighbouring columns. Rows past the end of the sequence and columns
    past the head dimension are filled with zeros: no kernel reads memory nobody wrote.
    """
    acc_t, load, _ = NUMBERS[dtype]

    @cuda.jit(device=True)
    def load_tile(tile, source, batch, head, first_row, seqlen, thread):
        for element in range(thread, ROWS * PADDED, NUM_THREADS):
            row = element // PADDED
            column = element % PADDED
            value = acc_t(0)
            if first_row + row < seqlen and column < COLUMNS:
                value = load(source[batch, head, first_row + row, column])
            tile[row, column] = value

    return load_tile
