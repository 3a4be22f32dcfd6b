"""The product of a warpgroup: how its operands lie in shared memory, and its PTX.

Source: PTX ISA 9.0, "Asynchronous warpgroup level matrix instructions".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layouts import (
    ATOM_BYTES,
    ATOM_ROWS,
    PANEL_BYTES,
    PANEL_COLUMNS,
    STEP_K,
    Positions,
    a_fragment,
    c_fragment,
    panel_bytes,
)


@dataclass(frozen=True)
class Wgmma:
    """acc += A B, or acc = A B, for a warpgroup: 64 x n in float32, over the whole of k.

    A is 64 x k and B is k x n, of 16-bit floats. A tile in shared memory has the 128-byte swizzle
    and begins at a multiple of 1024 bytes; rows longer than 64 elements are cut into panels
    (`layouts.panel_bytes`).

    Attributes
    ----------
    n, k : int
    dtype : {"bf16", "f16"}
    a : {"shared", "registers"}
        Registers hold A as `layouts.a_fragment` says, 4 a step of 16.
    a_rows, b_rows : int
        Rows of a panel of A's and B's tile; more than the product takes when it reads a part.
    a_major, b_major : {"k", "mn"}
        Which index is contiguous: with "k", tile rows are the rows of A or the columns of B;
        with "mn", they are the steps of k.
    """

    n: int
    k: int
    dtype: str
    a: str
    a_rows: int
    b_rows: int
    a_major: str
    b_major: str

    def __post_init__(self) -> None:
        def check(name: str, good: bool, wanted: str) -> None:
            if not good:
                raise ValueError(f"wgmma takes {wanted} as {name}, not {getattr(self, name)!r}")

        check("n", self.n % 8 == 0 < self.n <= 256, "a multiple of 8 from 8 to 256")
        check("k", self.k % STEP_K == 0 < self.k, f"a multiple of {STEP_K}")
        check("dtype", self.dtype in ("bf16", "f16"), "'bf16' or 'f16'")
        check("a", self.a in ("shared", "registers"), "'shared' or 'registers'")
        for side, extent in (("a", 64), ("b", self.n)):
            major, rows = getattr(self, f"{side}_major"), getattr(self, f"{side}_rows")
            check(f"{side}_major", major in ("k", "mn"), "'k' or 'mn'")
            least = extent if major == "k" else self.k
            check(
                f"{side}_rows",
                rows % ATOM_ROWS == 0 and rows >= least,
                f"a multiple of {ATOM_ROWS} from {least} on",
            )
        check("a_major", self.a == "shared" or self.a_major == "k", "'k' (A is in registers)")

    @property
    def steps(self) -> int:
        return self.k // STEP_K

    @property
    def acc_layout(self) -> Positions:
        """Row within a warp's 16 and column, as `layouts.c_fragment`."""
        return c_fragment(self.n)

    @property
    def a_layout(self) -> Positions:
        """Row within a warp's 16 and step of k of A in registers."""
        return a_fragment(2, self.steps)

    @property
    def multiply_adds(self) -> int:
        return 64 * self.n * self.k

    def a_bytes(self, start: int) -> np.ndarray:
        """Byte address of each element of A, (64, k), in a tile at ``start``."""
        return self._bytes(start, 64, self.a_rows, self.a_major)

    def b_bytes(self, start: int) -> np.ndarray:
        """Byte address of each element of B, (k, n), in a tile at ``start``."""
        return self._bytes(start, self.n, self.b_rows, self.b_major).T

    def _bytes(self, start: int, extent: int, tile_rows: int, major: str) -> np.ndarray:
        if major == "k":
            return panel_bytes(start, extent, self.k, tile_rows)
        return panel_bytes(start, self.k, extent, tile_rows).T

    def step_bytes(self, side: str) -> list[int]:
        """Where each step of k begins in the tile of ``side`` "a" or "b"."""
        major, rows = getattr(self, f"{side}_major"), getattr(self, f"{side}_rows")
        if major == "mn":
            return [step * STEP_K * PANEL_BYTES for step in range(self.steps)]
        places = [divmod(step * STEP_K, PANEL_COLUMNS) for step in range(self.steps)]
        return [panel * rows * PANEL_BYTES + 2 * column for panel, column in places]

    def descriptor(self, side: str) -> int:
        """The matrix descriptor of a tile at address 0 (PTX ISA, "Matrix descriptor format").

        Distances count in 16 bytes. The stride is that of 8 rows; the leading one, of panels, is
        looked at only where the tile is not contiguous along k.
        """
        rows = getattr(self, f"{side}_rows")
        swizzle, stride, leading = 1 << 62, ATOM_BYTES >> 4, rows * PANEL_BYTES >> 4
        return swizzle | stride << 32 | leading << 16

    def step_text(self, acc: str, a: str, b: str, scale_d: str) -> str:
        """The PTX of one step; ``scale_d`` is 0 or 1, or a predicate: whether acc is added to."""
        trans = [int(self.b_major == "mn")]
        if self.a == "shared":
            trans.insert(0, int(self.a_major == "mn"))
        return (
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k{STEP_K}.f32.{self.dtype}.{self.dtype} "
            f"{acc}, {a}, {b}, {scale_d}, 1, 1, {', '.join(map(str, trans))};"
        )
