"""Which block works on which tile, and which tiles a mask leaves to it.

The kernels run on one-dimensional grids, because the other two axes end at 65,535 blocks.
"""

from __future__ import annotations

from numba import cuda, uint32


def _split_block(block, num_tiles, num_heads):
    """The tile, head and batch of a block; the tiles of one head are neighbours, to share L2.

    In unsigned 32-bit arithmetic: a 64-bit division takes a GPU about a hundred instructions, and
    a compiler that knows an index to be positive need not prepare for counting from the end.
    """
    plane = uint32(block) // uint32(num_tiles)
    tile = uint32(block) % uint32(num_tiles)
    return tile, plane % uint32(num_heads), plane // uint32(num_heads)


def _key_range(first_row, num_rows, seqlen_q, seqlen_k, left, right):
    """The keys [begin, end) that at least one of the rows may see."""
    last_row = min(first_row + num_rows, seqlen_q) - 1
    begin = max(first_row + left, 0)
    end = min(last_row + right + 1, seqlen_k)
    return begin, end


def _query_range(first_key, num_keys, seqlen_q, seqlen_k, left, right):
    """The queries [begin, end) that may see at least one of the keys."""
    last_key = min(first_key + num_keys, seqlen_k) - 1
    begin = max(first_key - right, 0)
    end = min(last_key - left + 1, seqlen_q)
    return begin, end


def _tile_is_whole(first_row, num_rows, first_key, num_keys, seqlen_q, seqlen_k, left, right):
    """Whether every row of the tile may see every key of it, and none is past an end."""
    last_row = first_row + num_rows - 1
    last_key = first_key + num_keys - 1
    inside = last_row < seqlen_q and last_key < seqlen_k
    return inside and last_row + left <= first_key and last_key <= first_row + right


split_block = cuda.jit(device=True)(_split_block)
key_range = cuda.jit(device=True)(_key_range)
query_range = cuda.jit(device=True)(_query_range)
tile_is_whole = cuda.jit(device=True)(_tile_is_whole)
