"""One attention problem: its sizes, dtypes and masks, and every complaint about them."""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .masks import UNBOUNDED, Band, make_band

MAX_HEAD_DIM = 256
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, for each dtype that attention takes."""


@dataclass(frozen=True)
class Layout:
    """An array without its data: shape, strides in bytes, dtype by name."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Device:
    """What a rung asks of a device.

    Attributes
    ----------
    name : str
    compute_capability : (int, int)
    shared_bytes : int
        Shared memory a block may have, opt-in included.
    memory_bytes : int
        Global memory.
    """

    name: str
    compute_capability: tuple[int, int]
    shared_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Problem:
    """The sizes, dtype and masks of one attention call, checked.

    Attributes
    ----------
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v : int
    dtype : {"float16", "bfloat16", "float32", "float64"}
    softmax_scale : float
    band : Band
        Causal mask and window: query i may attend to key j when i + left <= j <= i + right.
    has_mask : bool
        Whether a boolean mask comes with the arrays.
    """

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    softmax_scale: float
    band: Band
    has_mask: bool

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_heads_kv

    @property
    def acc_dtype(self) -> str:
        """The dtype of sums and of the LSE."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_16_bit(self) -> bool:
        return DTYPES[self.dtype] == 2

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_heads, self.seqlen_q, self.head_dim

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_heads, self.seqlen_q, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.num_heads, self.seqlen_q


def make_problem(
    q: Layout,
    k: Layout,
    v: Layout,
    *,
    causal: Any = False,
    align: Any = "bottom-right",
    window: Any = None,
    softmax_scale: Any = None,
    mask: Layout | None = None,
) -> Problem:
    """Check the arguments of an attention call and sum them up.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype.
    ValueError
        For a shape or value that does not fit.
    """
    for name, layout in (("q", q), ("k", k), ("v", v)):
        _check_operand(name, layout)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must share one: "
            f"convert them to the same dtype first"
        )
    batch, num_heads, seqlen_q, head_dim = q.shape
    _, num_heads_kv, seqlen_k, _ = k.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(
            f"q, k and v have batch sizes {batch}, {k.shape[0]} and {v.shape[0]}; "
            f"they must be equal (expand the smaller along dimension 0)"
        )
    if v.shape[1] != num_heads_kv:
        raise ValueError(f"k has {num_heads_kv} heads and v has {v.shape[1]}; they must be equal")
    if num_heads % num_heads_kv:
        raise ValueError(
            f"q has {num_heads} heads and k has {num_heads_kv}; the heads of q must be a multiple "
            f"of the heads of k, so that each key head serves the same number of query heads"
        )
    if v.shape[2] != seqlen_k:
        raise ValueError(f"k has seqlen {seqlen_k} and v has {v.shape[2]}; they must be equal")
    if k.shape[3] != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and k has {k.shape[3]}; they must be equal")
    if not isinstance(align, str) or align not in ("bottom-right", "top-left"):
        raise ValueError(f"align is {align!r}; it must be 'bottom-right' or 'top-left'")
    check_bool("causal", causal)
    if mask is not None:
        _check_mask(mask, (batch, num_heads, seqlen_q, seqlen_k))
    return Problem(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        softmax_scale=_check_scale(softmax_scale, head_dim, q.dtype),
        band=make_band(seqlen_q, seqlen_k, bool(causal), align, _check_window(window)),
        has_mask=mask is not None,
    )


def check_backward(problem: Problem, do: Layout, o: Layout, lse: Layout) -> None:
    """Check the forward's outputs and the gradient that a backward pass starts from.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape.
    """
    for name, layout, shape, dtype in (
        ("do", do, problem.o_shape, problem.dtype),
        ("o", o, problem.o_shape, problem.dtype),
        ("lse", lse, problem.lse_shape, problem.acc_dtype),
    ):
        if layout.shape != shape:
            raise ValueError(
                f"{name} has shape {layout.shape}; for these q, k and v it must be {shape}"
            )
        if layout.dtype != dtype:
            raise TypeError(
                f"{name} has dtype {layout.dtype}; for q, k and v of {problem.dtype} it must be "
                f"{dtype}" + (", as attention(..., return_lse=True) gives it" * (name == "lse"))
            )


def _check_operand(name: str, layout: Layout) -> None:
    if layout.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {layout.dtype}; attention takes {', '.join(DTYPES)}: "
            f"convert it first"
        )
    if len(layout.shape) != 4:
        raise ValueError(
            f"{name} has shape {layout.shape}; it must have 4 dimensions "
            f"(batch, heads, seqlen, head_dim)"
        )
    if layout.shape[1] < 1:
        raise ValueError(f"{name} has no heads (shape {layout.shape}); it needs at least one")
    if not 1 <= layout.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has head_dim {layout.shape[3]} (shape {layout.shape}); "
            f"it must be between 1 and {MAX_HEAD_DIM}"
        )


def _check_mask(mask: Layout, scores: tuple[int, int, int, int]) -> None:
    if mask.dtype != "bool":
        raise TypeError(
            f"mask has dtype {mask.dtype}; it must be bool, True where a query may attend "
            f"(for a 0/1 mask pass mask != 0)"
        )
    shape = (1,) * (4 - len(mask.shape)) + mask.shape
    if len(shape) != 4 or any(
        have not in (1, want) for have, want in zip(shape, scores, strict=True)
    ):
        raise ValueError(
            f"mask has shape {mask.shape}; it must be broadcastable to "
            f"(batch, heads, seqlen_q, seqlen_k) = {scores}"
        )


def check_bool(name: str, value: Any) -> None:
    """Refuse a flag that is neither True nor False.

    Raises
    ------
    TypeError
    """
    if not _is_bool(value):
        raise TypeError(f"{name} is {value!r}; it must be True or False")


def _check_scale(softmax_scale: Any, head_dim: int, dtype: str) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if _is_bool(softmax_scale) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(
            f"softmax_scale is {softmax_scale!r}; it must be a number, or None for 1/sqrt(head_dim)"
        )
    largest = float(np.finfo(np.float64 if dtype == "float64" else np.float32).max)
    number: Any = softmax_scale
    if not -largest <= number <= largest:
        raise ValueError(
            f"softmax_scale is {softmax_scale}; it must be finite, and at most {largest:.2g} for "
            f"q, k and v of {dtype}"
        )
    return float(softmax_scale)


def _check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"window is {window!r}; it must be (left, right), each a number of keys or None, "
            f"or None for no window"
        )
    return _check_side("left", window[0], window), _check_side("right", window[1], window)


def _check_side(side: str, value: Any, window: Any) -> int | None:
    if value is None:
        return None
    try:
        if _is_bool(value):
            raise TypeError
        distance = operator.index(value)
    except TypeError:
        raise TypeError(
            f"window is {tuple(window)}; its {side} side must be an integer or None (unbounded)"
        ) from None
    if distance < 0:
        raise ValueError(
            f"window is {tuple(window)}; its {side} side is negative. It counts keys, so it must "
            f"be 0 or more; None is unbounded"
        )
    return min(distance, UNBOUNDED)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)
