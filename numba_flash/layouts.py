"""Where matrix instructions keep their elements: in which lane's register, at which byte.

Each layout is written down once, as NumPy index arrays. The emulator moves data with them, and the
tests hold the hardware to them. Source: PTX ISA, "Matrix fragments for mma.m16n8k16",
"Register fragments for wgmma" and "Swizzling modes".
"""

from __future__ import annotations

import math

import numpy as np

WARP_SIZE = 32
ATOM_ROWS = 8
"""Rows after which the swizzle repeats itself."""
PANEL_BYTES = 128
"""A row of a swizzled tile; a tile with longer rows is a sequence of such panels."""
PANEL_COLUMNS = PANEL_BYTES // 2
ATOM_BYTES = ATOM_ROWS * PANEL_BYTES

STEP_K = 16
"""Columns of A, and rows of B, that one wgmma takes."""

LANE = np.arange(WARP_SIZE)
GROUP, MEMBER = LANE // 4, LANE % 4
"""A warp's eight groups of four lanes; a group holds a row of 8 columns, two a lane."""

Positions = tuple[np.ndarray, np.ndarray]
"""Row and column of the element in each slot."""


def a_fragment(per_register: int = 2, steps: int = 1) -> Positions:
    """The left operand of a warp, 16 rows by 8 * per_register columns a step of K.

    Parameters
    ----------
    per_register : int
        2 for 16-bit elements, 1 for 32-bit ones.
    steps : int
        Steps of K, whose registers follow each other.

    Returns
    -------
    row, column : ndarray of shape (4 * steps, per_register, 32)
        Position of the element in each register, each part of it, each lane.
    """
    register = np.arange(4 * steps)[:, None, None]
    part = np.arange(per_register)[None, :, None]
    step, quarter = register // 4, register % 4
    row = GROUP + 8 * (quarter % 2) + 0 * part
    column = per_register * (MEMBER + 4 * (quarter // 2) + 8 * step) + part
    return row, column


def b_fragment(per_register: int = 2) -> Positions:
    """The right operand of a warp, 8 * per_register rows (K) by 8 columns.

    Returns
    -------
    row, column : ndarray of shape (2, per_register, 32)
    """
    register = np.arange(2)[:, None, None]
    part = np.arange(per_register)[None, :, None]
    row = per_register * (MEMBER + 4 * register) + part
    return row, GROUP + 0 * row


def c_fragment(columns: int = 8) -> Positions:
    """The sums of a warp, 16 rows by ``columns``.

    `wgmma` gives each of its four warps 16 rows of 64, so this is its layout too.

    Returns
    -------
    row, column : ndarray of shape (columns // 2, 32)
        Position of the element in each register, each lane.
    """
    register = np.arange(columns // 2)[:, None]
    row = GROUP + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * MEMBER + register % 2
    return row, column


def matrix_fragment(trans: bool = False) -> Positions:
    """One 8 x 8 matrix of 16-bit elements as ldmatrix and stmatrix spread it over a warp.

    Returns
    -------
    row, column : ndarray of shape (2, 32)
        Position of the element in each half of the register, each lane.
    """
    row, column = GROUP + np.zeros((2, 1), int), 2 * MEMBER + np.arange(2)[:, None]
    return (column, row) if trans else (row, column)


def swizzle_128b(byte: np.ndarray) -> np.ndarray:
    """The 128-byte swizzle of byte addresses: bits 4 to 6 are xor-ed with bits 7 to 9."""
    return byte ^ ((byte >> 7 & 7) << 4)


def panel_bytes(start: int, rows: int, columns: int, tile_rows: int) -> np.ndarray:
    """Byte addresses of a swizzled tile of 16-bit elements, which is made of panels.

    Parameters
    ----------
    start : int
        Byte address of the tile's first element; the swizzle looks at whole addresses.
    rows, columns : int
        The part of the tile that is asked for.
    tile_rows : int
        Rows of a panel: its successor begins ``tile_rows * 128`` bytes later.

    Returns
    -------
    ndarray of shape (rows, columns)
    """
    panel, column = np.divmod(np.arange(columns), PANEL_COLUMNS)
    row = np.arange(rows)[:, None]
    return swizzle_128b(start + (panel * tile_rows + row) * PANEL_BYTES + 2 * column)


def box_bytes(start: int, box: tuple[int, ...], itemsize: int, swizzled: bool) -> np.ndarray:
    """Byte addresses in shared memory of the elements of a tensor copy's box.

    Returns
    -------
    ndarray of shape ``box``, the fastest axis last
    """
    byte = start + itemsize * np.arange(math.prod(box)).reshape(box)
    return swizzle_128b(byte) if swizzled else byte


def gather_order(layout: Positions) -> np.ndarray:
    """Where each matrix element is among registers in the order (register, lane, part).

    Parameters
    ----------
    layout : (row, column)
        As `a_fragment` and `b_fragment` give it.

    Returns
    -------
    ndarray of int, of the shape of the matrix
    """
    row, column = layout
    registers, parts, lanes = row.shape
    source = np.arange(row.size).reshape(registers, lanes, parts).swapaxes(1, 2)
    order = np.empty((row.max() + 1, column.max() + 1), int)
    order[row, column] = source
    return order
