"""Rung 3, register_tiled: a micro-tile of every product in each thread's registers.

What changes from ``fa2``:

- The block is two-dimensional. A thread has several rows of a tile and every TX-th number of each:
  a *micro-tile* of S, and one of O. A number loaded from shared memory serves a whole line of it.
  For 8 x 8 numbers, 16 loads feed 256 multiply-adds, where a thread of fa2 takes 72.
- All loads inside the products are of 16 bytes (`ptx.load_x4`), rows in shared memory are padded so
  that lanes that are served together touch every bank once, and lanes are dealt out so that
  neighbours ask for the same: those are served at once (`Block.APART`).
- P changes hands transposed, the rows of a thread next to each other: 16 bytes again.
- The products of micro-tiles are one call (`ptx.make_register_product`), because sums stay in
  registers only where every loop over them is unrolled, and that is up to the compiler. For the
  same reason, what is left of such loops does one thing each.
- Q, K and V come through shared memory in *slices*, some columns of Q and K for S, some rows of V
  for O, so that tiles are as large for every head dimension. Q is loaded again for every key tile;
  the tile is still in the L2 cache. A thread loads several numbers before it stores the first.
- Only tiles that the mask cuts are tested number by number.

Two products make up attention in both directions, and differ in what they sum over:

- *dots* over the head dimension, of rows with rows: S = Q K^T, dP = dO V^T;
- *mix* over keys or queries, of weights with rows: O = P V, dV = P^T dO, dK = dS^T Q, dQ = dS K.

What it bought: forward 45.7 ms to 16.7, backward 179 ms to 73 (float32, 4 x 32 heads, 4096 tokens,
head_dim 64, H200; notebooks/data/ladder-h200.json).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from numba import cuda, float32, int64, uint32

from ..masks import make_may_attend
from ..plan import Plan, Step
from ..problem import DTYPES, Device, Problem
from ..ptx import (
    element_offset,
    load_x2,
    load_x4,
    loads_by_four,
    make_register_product,
    make_touch,
    store_x4,
    unpack_bf16,
    unpack_f16,
)
from ..schedule import key_range, query_range, split_block, tile_is_whole
from ..softmax import make_probability, make_row_softmax, make_team_reduce
from ..tiles import NUMBERS
from .fa2 import DELTA_ROWS, make_delta
from .rung import Rung, require_positive, scalar

WARP = 32
MIN_TEAM = 8
"""Threads that share a row, at least: those that shared memory serves together."""
SEEN_BITS = 64
"""Scores of a thread, at most: a bit each in one number."""
VECTOR = 4
"""Numbers in a load of 16 bytes."""
SLICE = 32
"""Columns of a slice, at most."""
SLICE_ROWS = 16
"""Rows of a slice that there is always room for."""
MAX_REGISTERS, REGISTERS_OF_A_BLOCK = 255, 65_536
OTHER_REGISTERS = 64
"""Registers of a thread that hold no sums: operands and addresses."""
UNROLL = 4
"""Keys or queries that `mix` takes in one pass of its loop."""


@dataclass(frozen=True)
class Config:
    """Tile sizes, and the size of a micro-tile.

    A thread has ``rows`` rows of the tile that its block owns (``tile_m`` queries, or ``tile_n``
    keys in the dK and dV pass), and ``columns`` columns of what the block writes; more where a
    team of 32 threads would not reach the head dimension.
    """

    tile_m: int = 64
    tile_n: int = 64
    rows: int = 8
    columns: int = 8

    def __post_init__(self):
        require_positive(self)
        for name, numbers in (("rows", self.rows), ("columns", self.columns)):
            if numbers not in (4, 8, 16):
                raise ValueError(
                    f"register_tiled.Config.{name} is {numbers}; it must be 4, 8 or 16"
                )
        for name, tile in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
            if tile % WARP or tile % (4 * self.rows) or tile > WARP * self.rows:
                raise ValueError(
                    f"register_tiled.Config.{name} is {tile} with {self.rows} rows a thread; it "
                    f"must be a multiple of {WARP} and of {4 * self.rows}, at most "
                    f"{WARP * self.rows}"
                )

        largest = max(self.tile_m, self.tile_n) // MIN_TEAM * self.rows
        if largest > SEEN_BITS:
            raise ValueError(
                f"register_tiled.Config has micro-tiles of {largest} scores; at most {SEEN_BITS} "
                f"have room: use fewer rows, or smaller tiles"
            )

    def team_for(self, head_dim: int) -> int:
        """Threads that share a row of so many numbers."""
        threads = MIN_TEAM
        while threads < WARP and threads * self.columns < head_dim:
            threads *= 2
        return threads


class Block(NamedTuple):
    """How the threads of a block divide the tile it owns and the tiles it walks over.

    Attributes
    ----------
    OWNED, OTHER : int
        Rows of either tile.
    TX, TY : int
        Threads; TX of them share a row.
    APART : int
        Lanes from one thread of a row to the next. Shared memory serves 16 lanes at a time, not 8,
        where all lanes i and i ^ 1, or all i and i ^ 2, ask for the same 16 bytes. With 2 apart,
        the former share their columns and the latter their rows, so both operands come so.
    ROWS, OTHER_ROWS : int
        The micro-tile of S: thread (tx, ty) has rows ty, ty + TY, ... and tx, tx + TX, ...
    WEIGHTS_ROW, WEIGHTS : int
        P and dS in shared memory: OTHER rows of so many numbers, and all of them. The rows of a
        thread are together by fours, TY * 4 apart.
    SLICES : int
        Numbers that the slices take in shared memory.
    """

    OWNED: int
    OTHER: int
    TX: int
    TY: int
    APART: int
    ROWS: int
    OTHER_ROWS: int
    WEIGHTS_ROW: int
    WEIGHTS: int
    SLICES: int


def make_block(owned: int, other: int, config: Config, D: int, DV: int, out: int) -> Block:
    """The block for head dimensions D and DV that writes rows of at most ``out`` numbers."""
    TX = config.team_for(out)
    apart = 1 if TX == WARP else 2
    weights_row = owned + VECTOR * apart  # eight lanes have `apart` threads of a column
    row = max(_spread(_slice_width(D)), _spread(_slice_width(DV)))
    return Block(
        OWNED=owned,
        OTHER=other,
        TX=TX,
        TY=owned // config.rows,
        APART=apart,
        ROWS=config.rows,
        OTHER_ROWS=other // TX,
        WEIGHTS_ROW=weights_row,
        WEIGHTS=other * weights_row,
        SLICES=max((owned + other) * row, SLICE_ROWS * _round_up(out, TX * VECTOR)),
    )


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _spread(columns: int) -> int:
    """A row length that puts the same 16 bytes of eight neighbouring rows into different banks."""
    return columns + VECTOR * (columns // VECTOR % 2 == 0)


def _slice_width(head_dim: int) -> int:
    """Columns of a slice: the head dimension in equal parts of at most SLICE."""
    return _round_up(-(-head_dim // -(-head_dim // SLICE)), VECTOR)


def columns_of(block: Block, head_dim: int) -> int:
    """Columns of a row that a thread has; it has them by fours, TX * 4 apart."""
    return _round_up(head_dim, block.TX * VECTOR) // block.TX


@functools.cache
def make_place(block: Block):
    """Device function ``place``: (tx, ty) of this thread in its block."""
    TX, APART = block.TX, block.APART

    @cuda.jit(device=True)
    def place():
        thread = int64(cuda.threadIdx.y * TX + cuda.threadIdx.x)
        return thread // APART % TX, thread // (APART * TX) * APART + thread % APART

    return place


@functools.cache
def make_recomputed():
    """Device function ``recomputed``: the same number, of which the compiler knows nothing.

    What follows from a thread's place is the same for all tiles. The compiler would compute it once
    and keep it, for every slice of every array, in more registers than there are.
    """
    touch = make_touch(1, "uint32")

    @cuda.jit(device=True)
    def recomputed(place):
        kept = cuda.local.array(1, uint32)
        kept[0] = uint32(place)
        touch(kept)
        return int64(kept[0])

    return recomputed


@functools.cache
def make_load_four(dtype: str):
    """Device function ``load_four``: four neighbours, computed with in float32."""
    unpack = {"float16": unpack_f16, "bfloat16": unpack_bf16}.get(dtype)

    @cuda.jit(device=True)
    def load_four_16_bit(values, at, source, offset):
        words = cuda.local.array(2, uint32)
        load_x2(words, 0, source, offset)
        for n in range(2):
            values[at + 2 * n], values[at + 2 * n + 1] = unpack(words[n])

    return load_x4 if unpack is None else load_four_16_bit


@functools.cache
def make_load_slice(NUM_THREADS: int, ROWS: int, WIDTH: int, ROW: int, D: int, dtype: str):
    """Device function ``load_slice`` for ROWS rows of WIDTH columns, ROW apart in shared memory.

    Neighbouring threads read neighbouring columns, four each where the array lets them. Rows past
    the end of the sequence and columns past the head dimension D are filled with zeros: no kernel
    reads memory nobody wrote.
    """
    _, load, _ = NUMBERS[dtype]
    load_four = make_load_four(dtype)
    recomputed = make_recomputed()
    WHOLE_FOURS, WHOLE_SLICES = D % VECTOR == 0, D % WIDTH == 0
    FOURS = WIDTH // VECTOR
    AT_ONCE = NUM_THREADS // FOURS
    WHOLE_ROWS = ROWS % AT_ONCE == 0
    COUNT = -(-ROWS // AT_ONCE)
    NUM_VALUES = COUNT * VECTOR

    @cuda.jit(device=True)
    def load_slice(tile, start, source, batch, head, first_row, seqlen, first_column):
        thread = recomputed(cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        end = uint32(max(0, min(seqlen - first_row, ROWS)))
        if WHOLE_FOURS and loads_by_four(source):
            values = cuda.local.array(NUM_VALUES, float32)
            x = thread % FOURS * VECTOR
            first = thread // FOURS
            offset = element_offset(source, batch, head, first_row + first, first_column + x)
            row_step = element_offset(source, 0, 0, AT_ONCE, 0)
            if first < AT_ONCE:
                for n in range(NUM_VALUES):
                    values[n] = float32(0)
                for n in range(COUNT):
                    row = uint32(first + n * AT_ONCE)
                    if row < end and (WHOLE_SLICES or first_column + x < D):
                        load_four(values, n * VECTOR, source, offset + n * row_step)
                for n in range(COUNT):
                    row = first + n * AT_ONCE
                    if WHOLE_ROWS or row < ROWS:
                        store_x4(tile, start + row * ROW + x, values, n * VECTOR)
        else:
            for n in range(thread, ROWS * WIDTH, NUM_THREADS):
                row = n // WIDTH
                x = n % WIDTH
                column = first_column + x
                value = float32(0)
                if uint32(row) < end and column < D:
                    value = load(source[batch, head, uint32(first_row + row), uint32(column)])
                tile[start + row * ROW + x] = value

    return load_slice


@functools.cache
def make_dots(block: Block, D: int, dtype: str):
    """Device function ``dots``: rows of one tile times rows of another, over D columns."""
    TX, TY, ROWS, OTHER_ROWS = block.TX, block.TY, block.ROWS, block.OTHER_ROWS
    WIDTH = _slice_width(D)
    ROW = _spread(WIDTH)
    OTHER_TILE = block.OWNED * ROW
    NUMBERS_A, NUMBERS_B, NUMBERS_ACC = ROWS * VECTOR, OTHER_ROWS * VECTOR, ROWS * OTHER_ROWS
    add_product = make_register_product(ROWS, OTHER_ROWS, VECTOR, depth_first=False)
    load_a = make_load_slice(TX * TY, block.OWNED, WIDTH, ROW, D, dtype)
    load_b = make_load_slice(TX * TY, block.OTHER, WIDTH, ROW, D, dtype)

    @cuda.jit(device=True)
    def dots(acc, slices, A, batch, head_a, first_a, len_a, B, head_b, first_b, len_b, tx, ty):
        rA = cuda.local.array(NUMBERS_A, float32)
        rB = cuda.local.array(NUMBERS_B, float32)
        for c in range(NUMBERS_ACC):
            acc[c] = float32(0)
        for first_column in range(0, D, WIDTH):
            cuda.syncthreads()  # the last slice is no longer read
            load_a(slices, 0, A, batch, head_a, first_a, len_a, first_column)
            load_b(slices, OTHER_TILE, B, batch, head_b, first_b, len_b, first_column)
            cuda.syncthreads()
            for x in range(0, WIDTH, VECTOR):
                for r in range(ROWS):
                    load_x4(rA, r * VECTOR, slices, (r * TY + ty) * ROW + x)
                for c in range(OTHER_ROWS):
                    load_x4(rB, c * VECTOR, slices, OTHER_TILE + (c * TX + tx) * ROW + x)
                add_product(acc, rA, rB)

    return dots


@functools.cache
def make_mix(block: Block, D: int, dtype: str):
    """Device function ``mix``: rows of D columns, mixed with the weights in shared memory."""
    TX, TY, ROWS = block.TX, block.TY, block.ROWS
    COLUMNS = columns_of(block, D)
    WIDTH = COLUMNS * TX
    NUMBERS_ACC = ROWS * COLUMNS
    NUM_W, NUM_B = UNROLL * ROWS, UNROLL * COLUMNS
    add_product = make_register_product(ROWS, COLUMNS, UNROLL, depth_first=True)
    WEIGHTS_ROW = block.WEIGHTS_ROW
    OTHER = LENGTH = block.OTHER
    while LENGTH * WIDTH > block.SLICES:
        LENGTH //= 2
    load_slice = make_load_slice(TX * TY, LENGTH, WIDTH, WIDTH, D, dtype)

    @cuda.jit(device=True)
    def mix(acc, weights, slices, B, batch, head, first_row, seqlen, tx, ty):
        # What a tile adds is summed up before it joins the accumulator.
        acc_tile = cuda.local.array(NUMBERS_ACC, float32)
        rW = cuda.local.array(NUM_W, float32)
        rB = cuda.local.array(NUM_B, float32)
        for c in range(NUMBERS_ACC):
            acc_tile[c] = float32(0)
        for first in range(0, OTHER, LENGTH):
            cuda.syncthreads()  # the last slice is no longer read, the weights are there
            load_slice(slices, 0, B, batch, head, first_row + first, seqlen, 0)
            cuda.syncthreads()
            for step in range(0, LENGTH, UNROLL):
                for u in range(UNROLL):
                    y = step + u
                    at = (first + y) * WEIGHTS_ROW + ty * VECTOR
                    for r in range(0, ROWS, VECTOR):
                        load_x4(rW, u * ROWS + r, weights, at + r * TY)
                    for c in range(0, COLUMNS, VECTOR):
                        load_x4(rB, u * COLUMNS + c, slices, y * WIDTH + c * TX + tx * VECTOR)
                add_product(acc_tile, rW, rB)
        for c in range(NUMBERS_ACC):
            acc[c] += acc_tile[c]

    return mix


@functools.cache
def make_hand_over(block: Block):
    """Device function ``hand_over``: a micro-tile of P or dS to the threads of the same rows."""
    TX, TY, ROWS, WEIGHTS_ROW = block.TX, block.TY, block.ROWS, block.WEIGHTS_ROW
    NUM_S = ROWS * block.OTHER_ROWS

    @cuda.jit(device=True)
    def hand_over(weights, acc, tx, ty):
        for n in range(0, NUM_S, VECTOR):
            at = (n // ROWS * TX + tx) * WEIGHTS_ROW + n % ROWS * TY + ty * VECTOR
            store_x4(weights, at, acc, n)

    return hand_over


@functools.cache
def make_hide(block: Block, ROWS_ARE_KEYS: bool, HAS_MASK: bool, HIDDEN: float):
    """Device function ``hide``: HIDDEN where a query may not attend to a key.

    A loop finds out and keeps a bit for each number: only loops that are unrolled may touch sums in
    registers, and this one is too long for that.
    """
    TX, TY, ROWS, NUM_S = block.TX, block.TY, block.ROWS, block.ROWS * block.OTHER_ROWS
    may_attend = make_may_attend(HAS_MASK)

    @cuda.jit(device=True)
    def hide(
        acc, Mask, batch, head, first_own, first_other, seqlen_q, seqlen_k, left, right, tx, ty
    ):
        seen = int64(0)
        for n in range(NUM_S):
            own = first_own + n % ROWS * TY + ty
            other = first_other + n // ROWS * TX + tx
            i, j = (other, own) if ROWS_ARE_KEYS else (own, other)
            inside = i < seqlen_q and j < seqlen_k
            if inside and may_attend(Mask, batch, head, i, j, left, right):
                seen |= int64(1) << n
        for n in range(NUM_S):
            if seen >> n & 1 == 0:
                acc[n] = float32(HIDDEN)

    return hide


@functools.cache
def make_store_rows(block: Block, D: int, dtype: str):
    """Device function ``store_rows``: write the micro-tiles of a sum, scaled."""
    TX, TY, ROWS = block.TX, block.TY, block.ROWS
    COLUMNS = columns_of(block, D)
    _, _, store = NUMBERS[dtype]

    @cuda.jit(device=True)
    def store_rows(target, batch, head, first_row, acc, scale, tx, ty):
        for r in range(ROWS):
            row = first_row + r * TY + ty
            if row < target.shape[2]:
                for c in range(COLUMNS):
                    x = uint32((c // VECTOR * TX + tx) * VECTOR + c % VECTOR)
                    if x < D:
                        target[batch, head, uint32(row), x] = store(acc[c * ROWS + r] * scale[r])

    return store_rows


@functools.cache
def make_forward(config: Config, D: int, DV: int, dtype: str, HAS_MASK: bool):
    """The forward kernel for one set of tiles, head dimensions and dtype."""
    TILE_M, TILE_N = config.tile_m, config.tile_n
    block = make_block(TILE_M, TILE_N, config, D, DV, DV)
    TX, TY, ROWS, KEYS = block.TX, block.TY, block.ROWS, block.OTHER_ROWS
    COLUMNS = columns_of(block, DV)
    NUM_S, NUM_O, NUM_P, NUM_SLICES = ROWS * KEYS, ROWS * COLUMNS, block.WEIGHTS, block.SLICES
    q_dot_k = make_dots(block, D, dtype)
    place, hand_over = make_place(block), make_hand_over(block)
    mix_v = make_mix(block, DV, dtype)
    store_o = make_store_rows(block, DV, dtype)
    hide = make_hide(block, False, HAS_MASK, -math.inf)
    update, finish = make_row_softmax(float32)
    team_max, team_sum = make_team_reduce(TX, block.APART)

    @cuda.jit
    def forward_kernel(Q, K, V, Mask, O, LSE, group, left, right, softmax_scale):
        seqlen_q = Q.shape[2]
        seqlen_k = K.shape[2]
        m_block, head, batch = split_block(
            cuda.blockIdx.x, (seqlen_q + TILE_M - 1) // TILE_M, Q.shape[1]
        )
        head_kv = head // group
        tx, ty = place()
        first_row = m_block * TILE_M

        slices = cuda.shared.array(NUM_SLICES, float32, alignment=16)
        sP = cuda.shared.array(NUM_P, float32, alignment=16)  # P^T
        acc_S = cuda.local.array(NUM_S, float32)  # [KEYS, ROWS]
        acc_O = cuda.local.array(NUM_O, float32)  # [COLUMNS, ROWS]
        row_max = cuda.local.array(ROWS, float32)
        row_sum = cuda.local.array(ROWS, float32)
        tile_max = cuda.local.array(ROWS, float32)
        tile_sum = cuda.local.array(ROWS, float32)
        base = cuda.local.array(ROWS, float32)
        row_scale = cuda.local.array(ROWS, float32)

        for c in range(NUM_O):
            acc_O[c] = float32(0)
        for r in range(ROWS):
            row_max[r] = float32(-math.inf)
            row_sum[r] = float32(0)

        begin, end = key_range(first_row, TILE_M, seqlen_q, seqlen_k, left, right)
        for n_block in range(begin // TILE_N, (end + TILE_N - 1) // TILE_N):
            first_key = n_block * TILE_N

            # S = softmax_scale * Q K^T
            q_dot_k(
                acc_S, slices,
                Q, batch, head, first_row, seqlen_q,
                K, head_kv, first_key, seqlen_k, tx, ty,
            )  # fmt: skip
            for c in range(NUM_S):
                acc_S[c] *= softmax_scale

            if HAS_MASK or not tile_is_whole(
                first_row, TILE_M, first_key, TILE_N, seqlen_q, seqlen_k, left, right
            ):
                hide(
                    acc_S, Mask, batch, head, first_row, first_key,
                    seqlen_q, seqlen_k, left, right, tx, ty,
                )  # fmt: skip

            # m = max(m, rowmax(S)); O = row_scale * O
            for r in range(ROWS):
                tile_max[r] = acc_S[r]
            for n in range(ROWS, NUM_S):
                tile_max[n % ROWS] = max(tile_max[n % ROWS], acc_S[n])
            for r in range(ROWS):
                row_max[r], base[r], row_scale[r] = update(row_max[r], team_max(tile_max[r]))
            for n in range(NUM_O):
                acc_O[n] *= row_scale[n % ROWS]

            # P = exp(S - m); l = row_scale * l + rowsum(P)
            for r in range(ROWS):
                tile_sum[r] = float32(0)
            for n in range(NUM_S):
                acc_S[n] -= base[n % ROWS]
            for n in range(NUM_S):
                acc_S[n] = math.exp(acc_S[n])
            for n in range(NUM_S):
                tile_sum[n % ROWS] += acc_S[n]
            for r in range(ROWS):
                row_sum[r] = row_scale[r] * row_sum[r] + tile_sum[r]

            # O += P V
            hand_over(sP, acc_S, tx, ty)
            mix_v(acc_O, sP, slices, V, batch, head_kv, first_key, seqlen_k, tx, ty)

        for r in range(ROWS):
            i = first_row + r * TY + ty
            row_sum[r], lse = finish(row_max[r], team_sum(row_sum[r]))
            if tx == 0 and i < seqlen_q and i < LSE.shape[2]:
                LSE[batch, head, i] = lse
        store_o(O, batch, head, first_row, acc_O, row_sum, tx, ty)

    return forward_kernel


@functools.cache
def make_key_gradients(config: Config, D: int, DV: int, dtype: str, HAS_MASK: bool):
    """The kernel of the second backward pass: dK and dV, a block a key tile.

    S and dP are computed transposed: a thread's rows are keys.
    """
    TILE_M, TILE_N = config.tile_m, config.tile_n
    block = make_block(TILE_N, TILE_M, config, D, DV, max(D, DV))
    TX, ROWS, QUERIES = block.TX, block.ROWS, block.OTHER_ROWS
    NUM_S, NUM_P, NUM_SLICES = ROWS * QUERIES, block.WEIGHTS, block.SLICES
    NUM_DK, NUM_DV = ROWS * columns_of(block, D), ROWS * columns_of(block, DV)
    k_dot_q, v_dot_do = make_dots(block, D, dtype), make_dots(block, DV, dtype)
    place, hand_over = make_place(block), make_hand_over(block)
    mix_q, mix_do = make_mix(block, D, dtype), make_mix(block, DV, dtype)
    store_dk, store_dv = make_store_rows(block, D, dtype), make_store_rows(block, DV, dtype)
    hide = make_hide(block, True, HAS_MASK, 0)
    probability = make_probability(float32)

    @cuda.jit
    def key_gradients_kernel(
        Q, K, V, Mask, dO, LSE, Delta, dK, dV, group, left, right, softmax_scale
    ):
        seqlen_q = Q.shape[2]
        seqlen_k = K.shape[2]
        n_block, head_kv, batch = split_block(
            cuda.blockIdx.x, (seqlen_k + TILE_N - 1) // TILE_N, K.shape[1]
        )
        tx, ty = place()
        first_key = n_block * TILE_N

        slices = cuda.shared.array(NUM_SLICES, float32, alignment=16)
        weights = cuda.shared.array(NUM_P, float32, alignment=16)  # P, then dS
        acc_S = cuda.local.array(NUM_S, float32)  # [QUERIES, ROWS], becomes P
        acc_dP = cuda.local.array(NUM_S, float32)  # becomes dS
        acc_dK = cuda.local.array(NUM_DK, float32)  # [columns, ROWS]
        acc_dV = cuda.local.array(NUM_DV, float32)
        scale = cuda.local.array(ROWS, float32)

        for c in range(NUM_DK):
            acc_dK[c] = float32(0)
        for c in range(NUM_DV):
            acc_dV[c] = float32(0)

        begin, end = query_range(first_key, TILE_N, seqlen_q, seqlen_k, left, right)
        for head in range(head_kv * group, (head_kv + 1) * group):
            for m_block in range(begin // TILE_M, (end + TILE_M - 1) // TILE_M):
                first_row = m_block * TILE_M
                whole = not HAS_MASK and tile_is_whole(
                    first_row, TILE_M, first_key, TILE_N, seqlen_q, seqlen_k, left, right
                )

                # S^T = K Q^T, P = exp(softmax_scale * S - LSE)
                k_dot_q(
                    acc_S, slices,
                    K, batch, head_kv, first_key, seqlen_k,
                    Q, head, first_row, seqlen_q, tx, ty,
                )  # fmt: skip
                for c in range(QUERIES):
                    i = first_row + c * TX + tx
                    lse = float32(-math.inf)
                    if i < seqlen_q:
                        lse = LSE[batch, head, i]
                    for r in range(ROWS):
                        score = acc_S[c * ROWS + r] * softmax_scale
                        acc_S[c * ROWS + r] = probability(score, lse, True)
                if not whole:
                    hide(
                        acc_S, Mask, batch, head, first_key, first_row,
                        seqlen_q, seqlen_k, left, right, tx, ty,
                    )  # fmt: skip

                # dV += P^T dO
                hand_over(weights, acc_S, tx, ty)
                mix_do(acc_dV, weights, slices, dO, batch, head, first_row, seqlen_q, tx, ty)

                # dP^T = V dO^T, dS = P * (dP - delta)
                v_dot_do(
                    acc_dP, slices,
                    V, batch, head_kv, first_key, seqlen_k,
                    dO, head, first_row, seqlen_q, tx, ty,
                )  # fmt: skip
                for c in range(QUERIES):
                    i = first_row + c * TX + tx
                    delta = float32(0)
                    if i < seqlen_q:
                        delta = Delta[batch, head, i]
                    for r in range(ROWS):
                        p = acc_S[c * ROWS + r]
                        ds = p * (acc_dP[c * ROWS + r] - delta)
                        acc_dP[c * ROWS + r] = float32(0) if p == float32(0) else ds

                # dK += dS^T Q
                hand_over(weights, acc_dP, tx, ty)
                mix_q(acc_dK, weights, slices, Q, batch, head, first_row, seqlen_q, tx, ty)

        for r in range(ROWS):
            scale[r] = softmax_scale
        store_dk(dK, batch, head_kv, first_key, acc_dK, scale, tx, ty)
        for r in range(ROWS):
            scale[r] = float32(1)
        store_dv(dV, batch, head_kv, first_key, acc_dV, scale, tx, ty)

    return key_gradients_kernel


@functools.cache
def make_query_gradient(config: Config, D: int, DV: int, dtype: str, HAS_MASK: bool):
    """The kernel of the third backward pass: dQ, a block a query tile."""
    TILE_M, TILE_N = config.tile_m, config.tile_n
    block = make_block(TILE_M, TILE_N, config, D, DV, D)
    TY, ROWS, KEYS = block.TY, block.ROWS, block.OTHER_ROWS
    NUM_S, NUM_DS, NUM_SLICES = ROWS * KEYS, block.WEIGHTS, block.SLICES
    NUM_DQ = ROWS * columns_of(block, D)
    q_dot_k, do_dot_v = make_dots(block, D, dtype), make_dots(block, DV, dtype)
    place, hand_over = make_place(block), make_hand_over(block)
    mix_k = make_mix(block, D, dtype)
    store_dq = make_store_rows(block, D, dtype)
    hide = make_hide(block, False, HAS_MASK, 0)
    probability = make_probability(float32)

    @cuda.jit
    def query_gradient_kernel(Q, K, V, Mask, dO, LSE, Delta, dQ, group, left, right, softmax_scale):
        seqlen_q = Q.shape[2]
        seqlen_k = K.shape[2]
        m_block, head, batch = split_block(
            cuda.blockIdx.x, (seqlen_q + TILE_M - 1) // TILE_M, Q.shape[1]
        )
        head_kv = head // group
        tx, ty = place()
        first_row = m_block * TILE_M

        slices = cuda.shared.array(NUM_SLICES, float32, alignment=16)
        sdS = cuda.shared.array(NUM_DS, float32, alignment=16)  # dS^T
        acc_S = cuda.local.array(NUM_S, float32)  # [KEYS, ROWS], becomes P
        acc_dP = cuda.local.array(NUM_S, float32)  # becomes dS
        acc_dQ = cuda.local.array(NUM_DQ, float32)  # [columns, ROWS]
        lse = cuda.local.array(ROWS, float32)
        delta = cuda.local.array(ROWS, float32)

        for c in range(NUM_DQ):
            acc_dQ[c] = float32(0)
        for r in range(ROWS):
            i = first_row + r * TY + ty
            lse[r] = float32(-math.inf)
            delta[r] = float32(0)
            if i < seqlen_q:
                lse[r] = LSE[batch, head, i]
                delta[r] = Delta[batch, head, i]

        begin, end = key_range(first_row, TILE_M, seqlen_q, seqlen_k, left, right)
        for n_block in range(begin // TILE_N, (end + TILE_N - 1) // TILE_N):
            first_key = n_block * TILE_N
            whole = not HAS_MASK and tile_is_whole(
                first_row, TILE_M, first_key, TILE_N, seqlen_q, seqlen_k, left, right
            )

            # S = Q K^T, P = exp(softmax_scale * S - LSE)
            q_dot_k(
                acc_S, slices,
                Q, batch, head, first_row, seqlen_q,
                K, head_kv, first_key, seqlen_k, tx, ty,
            )  # fmt: skip
            for n in range(NUM_S):
                acc_S[n] = probability(acc_S[n] * softmax_scale, lse[n % ROWS], True)
            if not whole:
                hide(
                    acc_S, Mask, batch, head, first_row, first_key,
                    seqlen_q, seqlen_k, left, right, tx, ty,
                )  # fmt: skip

            # dP = dO V^T, dS = P * (dP - delta)
            do_dot_v(
                acc_dP, slices,
                dO, batch, head, first_row, seqlen_q,
                V, head_kv, first_key, seqlen_k, tx, ty,
            )  # fmt: skip
            for n in range(NUM_S):
                ds = acc_S[n] * (acc_dP[n] - delta[n % ROWS])
                acc_dP[n] = float32(0) if acc_S[n] == float32(0) else ds

            # dQ += dS K
            hand_over(sdS, acc_dP, tx, ty)
            mix_k(acc_dQ, sdS, slices, K, batch, head_kv, first_key, seqlen_k, tx, ty)

        for r in range(ROWS):
            lse[r] = softmax_scale
        store_dq(dQ, batch, head, first_row, acc_dQ, lse, tx, ty)

    return query_gradient_kernel


def forward(problem: Problem, config: Config) -> Plan:
    p = problem
    block = make_block(config.tile_m, config.tile_n, config, p.head_dim, p.head_dim_v, p.head_dim_v)
    step = Step(
        make_forward(config, p.head_dim, p.head_dim_v, p.dtype, p.has_mask),
        grid=p.batch * p.num_heads * -(-p.seqlen_q // config.tile_m),
        block=(block.TX, block.TY),
        args=("q", "k", "v", "mask", "o", "lse", *_scalars(p)),
        statements=p.seqlen_k * (p.head_dim + p.head_dim_v) * block.ROWS // block.TX,
    )
    return Plan((step,))


def backward(problem: Problem, config: Config) -> Plan:
    p = problem
    key = (config, p.head_dim, p.head_dim_v, p.dtype, p.has_mask)
    rows = p.batch * p.num_heads * p.seqlen_q
    inputs = ("q", "k", "v", "mask", "do", "lse", "delta")
    products = 2 * p.head_dim + p.head_dim_v
    keys, queries = _backward_blocks(p, config)
    return Plan(
        steps=(
            Step(
                make_delta(p.head_dim_v, p.dtype),
                grid=-(-rows // DELTA_ROWS),
                block=(WARP, DELTA_ROWS),
                args=("do", "o", "delta"),
                statements=-(-p.head_dim_v // WARP),
            ),
            Step(
                make_key_gradients(*key),
                grid=p.batch * p.num_heads_kv * -(-p.seqlen_k // config.tile_n),
                block=(keys.TX, keys.TY),
                args=(*inputs, "dk", "dv", *_scalars(p)),
                statements=p.group
                * p.seqlen_q
                * (products + p.head_dim_v)
                * config.rows
                // keys.TX,
            ),
            Step(
                make_query_gradient(*key),
                grid=p.batch * p.num_heads * -(-p.seqlen_q // config.tile_m),
                block=(queries.TX, queries.TY),
                args=(*inputs, "dq", *_scalars(p)),
                statements=p.seqlen_k * products * config.rows // queries.TX,
            ),
        ),
        workspaces={"delta": (p.lse_shape, p.acc_dtype)},
    )


def _backward_blocks(p: Problem, config: Config) -> tuple[Block, Block]:
    """The blocks of the dK and dV pass, and of the dQ pass."""
    d, d_v = p.head_dim, p.head_dim_v
    keys = make_block(config.tile_n, config.tile_m, config, d, d_v, max(d, d_v))
    return keys, make_block(config.tile_m, config.tile_n, config, d, d_v, d)


def _scalars(problem: Problem) -> tuple:
    return problem.group, *problem.band, scalar(problem, problem.softmax_scale)


def shared_bytes(problem: Problem, config: Config, backward: bool) -> int:
    """The slices, and P or dS; the larger of the two tile passes backward."""
    d, d_v = problem.head_dim, problem.head_dim_v
    blocks = [make_block(config.tile_m, config.tile_n, config, d, d_v, d_v)]
    if backward:
        blocks = list(_backward_blocks(problem, config))
    return max(block.SLICES + block.WEIGHTS for block in blocks) * DTYPES["float32"]


def suits(problem: Problem, config: Config, backward: bool) -> bool:
    """Whether a thread's sums leave it room for what else it holds."""
    d, d_v = problem.head_dim, problem.head_dim_v
    if backward:
        block = _backward_blocks(problem, config)[0]
        kept, mixed = columns_of(block, d) + columns_of(block, d_v), columns_of(block, max(d, d_v))
    else:
        block = make_block(config.tile_m, config.tile_n, config, d, d_v, d_v)
        kept = mixed = columns_of(block, d_v)
    scores = block.OTHER_ROWS if backward else 0
    sums = block.ROWS * (kept + scores + max(mixed, scores))
    limit = min(MAX_REGISTERS, REGISTERS_OF_A_BLOCK // (block.TX * block.TY))
    return sums + OTHER_REGISTERS <= limit


def refuses(problem: Problem, device: Device) -> str | None:
    if problem.dtype == "float64":
        return "it sums in float32; fa2 and the rungs below take float64"
    return None


RUNG = Rung(
    name="register_tiled",
    Config=Config,
    candidates=(Config(64, 64, 8, 8), Config(64, 64, 4, 8), Config(32, 32, 4, 8)),
    shared_bytes=shared_bytes,
    refuses=refuses,
    forward=forward,
    backward=backward,
    suits=suits,
)
