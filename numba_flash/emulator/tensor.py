"""NumPy twins of the instructions that a lane or a warp executes.

`Tensor.handlers` gives the method for each description of `instructions`. All warps of a batch
execute a matrix instruction together, as one product of stacked matrices. Which register holds
which element stands in `layouts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import instructions as isa
from ..layouts import WARP_SIZE, gather_order, matrix_fragment
from .arithmetic import INT64, Value, add, cast
from .check import Checker, first
from .copies import Copies
from .lanes import Lanes, Mask
from .memory import Array
from .rows import Rows, flat, only

ROW_BYTES = 16
"""A row of an 8 x 8 matrix of 16-bit elements."""
TF32_BITS = np.uint32(0xFFFFE000)
"""What a matrix instruction looks at in a float32."""


class Tensor:
    """The twins for one batch of blocks."""

    def __init__(self, lanes: Lanes, checker: Checker):
        self.lanes = lanes
        self.checker = checker
        self.rows = Rows(lanes, checker)
        copies = Copies(lanes, checker)
        self.handlers: dict[type, Callable[..., Any]] = {
            isa.ElementOffset: element_offset,
            isa.RegisterProduct: self.register_product,
            isa.LoadsByFour: loads_by_four,
            isa.Elementwise: elementwise,
            isa.VectorLoad: self.vector_load,
            isa.VectorStore: self.vector_store,
            isa.LdMatrix: self.ldmatrix,
            isa.StMatrix: self.stmatrix,
            isa.Mma: self.mma,
            isa.CpAsync: copies.start,
            isa.CpAsyncCommit: copies.commit,
            isa.CpAsyncWait: copies.wait,
        }

    # Registers: (registers, blocks, threads), or by warp (warps, registers, 32)

    def fragment(self, array: Array, offset: Value, count: int) -> np.ndarray:
        """So many registers, from an element offset on."""
        line = flat(array)
        parts = [line[add(offset, i)] for i in range(count)]
        return np.stack([np.broadcast_to(part, self.lanes.shape) for part in parts])

    def put(self, array: Array, offset: Value, values: np.ndarray) -> None:
        """Assign registers, from an element offset on."""
        line = flat(array)
        for i, value in enumerate(values):
            line[add(offset, i)] = value

    def by_warp(self, registers: np.ndarray) -> np.ndarray:
        missing = -self.lanes.num_threads % WARP_SIZE
        if missing:
            registers = np.pad(registers, ((0, 0), (0, 0), (0, missing)))
        warps = registers.reshape(len(registers), -1, WARP_SIZE)
        return np.ascontiguousarray(warps.swapaxes(0, 1))

    def by_lane(self, registers: np.ndarray) -> np.ndarray:
        count, (blocks, threads) = registers.shape[1], self.lanes.shape
        return registers.swapaxes(0, 1).reshape(count, blocks, -1)[..., :threads]

    def whole_warps(self, name: str) -> None:
        """Report the warps of which only some lanes execute an instruction of the warp."""
        mask = self.lanes.mask
        if not self.checker.active or (mask is None and not self.lanes.num_threads % WARP_SIZE):
            return
        active = np.broadcast_to(True if mask is None else mask, self.lanes.shape)
        here = self.by_warp(active[None])
        whole = here == here[:, :, :1]
        partial = np.repeat(np.asarray(~whole.all(axis=2, keepdims=True)), WARP_SIZE, axis=2)
        partial = self.by_lane(partial)[0] & active
        if not partial.any():
            return
        block, thread = first(partial)
        self.checker.fault(
            "barrier-divergence",
            f"{name} is executed by a part of a warp; all 32 lanes must execute it together, as "
            f"those of {self.checker.who(block, thread)} do not",
            partial,
        )

    # Lane by lane

    def vector_load(
        self, instruction: isa.VectorLoad, dst: Array, dst_offset: Value, src: Array, offset: Value
    ) -> None:
        size = 4 * instruction.words
        row = self.rows.locate(src, offset, size, "a vector load", "global", "shared")
        words = self.rows.load(row).view(dst.space.dtype)
        self.put(dst, dst_offset, np.moveaxis(words, -1, 0))

    def vector_store(
        self, instruction: isa.VectorStore, dst: Array, offset: Value, src: Array, src_offset: Value
    ) -> None:
        size = 4 * instruction.words
        row = self.rows.locate(dst, offset, size, "a vector store", "global", "shared")
        words = np.moveaxis(self.fragment(src, src_offset, instruction.words), 0, -1)
        self.rows.store(row, np.ascontiguousarray(words).view(dst.space.dtype))

    def register_product(
        self, product: isa.RegisterProduct, acc: Array, a: Array, b: Array
    ) -> None:
        rows, columns, depth = product.rows, product.columns, product.depth
        left, right = self.fragment(a, 0, rows * depth), self.fragment(b, 0, columns * depth)
        sums = self.fragment(acc, 0, rows * columns).reshape(columns, rows, *self.lanes.shape)
        for x in range(depth):
            line = left[[product.place(r, x, rows) for r in range(rows)]]
            column = right[[product.place(c, x, columns) for c in range(columns)]]
            sums = sums + line * column[:, None]
        self.put(acc, 0, sums.reshape(rows * columns, *self.lanes.shape))
        self.checker.multiply_adds(rows * columns * depth * self.lanes.count)

    # Matrices of a warp

    def ldmatrix(
        self, instruction: isa.LdMatrix, dst: Array, dst_offset: Value, src: Array, offset: Value
    ) -> None:
        self.whole_warps("ldmatrix")
        with only(self.lanes, self.row_owners(instruction.count)):
            row = self.rows.locate(src, offset, ROW_BYTES, "ldmatrix", "shared")
            values = self.rows.load(row).view(np.uint16)
        warps = self.by_warp(np.moveaxis(values, -1, 0))
        halves = warps.reshape(len(warps), -1).take(matrix_order(instruction), axis=1)
        self.put(dst, dst_offset, self.by_lane(halves.view(np.uint32)[..., 0]))

    def stmatrix(
        self, instruction: isa.StMatrix, dst: Array, offset: Value, src: Array, src_offset: Value
    ) -> None:
        self.whole_warps("stmatrix")
        registers = self.fragment(src, src_offset, instruction.count).astype(np.uint32)
        halves = self.by_warp(registers).view(np.uint16)
        warps = np.zeros((len(halves), 8 * WARP_SIZE), np.uint16)
        warps[:, matrix_order(instruction).reshape(-1)] = halves.reshape(len(halves), -1)
        values = np.moveaxis(self.by_lane(warps.reshape(-1, 8, WARP_SIZE)), 0, -1)
        with only(self.lanes, self.row_owners(instruction.count)):
            row = self.rows.locate(dst, offset, ROW_BYTES, "stmatrix", "shared")
            self.rows.store(row, np.ascontiguousarray(values).view(dst.space.dtype))

    def row_owners(self, count: int) -> Mask:
        """The lanes whose addresses count: 8 for each matrix."""
        lane = np.arange(self.lanes.num_threads)[None, :] % WARP_SIZE
        return None if count == 4 else lane < 8 * count

    def mma(
        self,
        instruction: isa.Mma,
        d: Array,
        d_offset: Value,
        a: Array,
        a_offset: Value,
        b: Array,
        b_offset: Value,
    ) -> None:
        self.whole_warps("mma")
        a_order, b_order, d_order = mma_orders(instruction)
        left = self.values(self.fragment(a, a_offset, 4), instruction.dtype).take(a_order, axis=1)
        right = self.values(self.fragment(b, b_offset, 2), instruction.dtype).take(b_order, axis=1)
        products = (left @ right).reshape(len(left), -1).take(d_order, axis=1)
        self.put(d, d_offset, self.fragment(d, d_offset, 4) + self.by_lane(products))
        self.checker.multiply_adds(instruction.multiply_adds * (self.lanes.count // WARP_SIZE))

    def values(self, registers: np.ndarray, dtype: str) -> np.ndarray:
        """What registers hold, in float32: (warps, elements) by register, lane, part."""
        words = self.by_warp(registers.astype(np.uint32, copy=False))
        return unpacked(words, dtype).reshape(len(words), -1)


def element_offset(instruction: isa.ElementOffset, array: Array, *indices: Value) -> Value:
    """From the array's first element on, in elements."""
    terms = (
        cast(index, INT64) * stride for index, stride in zip(indices, array.strides, strict=True)
    )
    return functools.reduce(add, terms)


def loads_by_four(instruction: isa.LoadsByFour, array: Array) -> bool:
    """From the strides and the address of the first element."""
    itemsize, rows = array.space.dtype.itemsize, array.strides[:-1]
    first = array.start * itemsize + array.space.misalignment
    aligned = first % (4 * itemsize) == 0 and all(n >= 0 and n % 4 == 0 for n in rows)
    return aligned and array.strides[-1] == 1


def elementwise(instruction: isa.Elementwise, *values: Value) -> Value:
    """A function of each lane's numbers."""
    dtypes = map(np.dtype, instruction.arguments.values())
    result = instruction.twin(*map(cast, values, dtypes))
    if isinstance(result, tuple):
        return tuple(np.asarray(part)[()] for part in result)
    return np.asarray(result)[()]


def unpacked(words: np.ndarray, dtype: str) -> np.ndarray:
    """The elements in registers as float32, those of a register one after the other."""
    if dtype == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return words.view(np.float16).astype(np.float32)
    return (words & TF32_BITS).view(np.float32)


@functools.cache
def matrix_order(instruction: isa.LdMatrix | isa.StMatrix) -> np.ndarray:
    """Where the halves of the registers (count, 32, 2) are among a warp's rows (8 elements, 32)."""
    row, column = matrix_fragment(instruction.trans)
    matrix = np.arange(instruction.count)[:, None, None]
    return (column * WARP_SIZE + 8 * matrix + row).swapaxes(1, 2)


@functools.cache
def mma_orders(instruction: isa.Mma) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where elements of a and b are among registers, and registers of d in the matrix."""
    row, column = instruction.d_layout
    a_order, b_order = map(gather_order, (instruction.a_layout, instruction.b_layout))
    return a_order, b_order, row * 8 + column
