"""Scalar arithmetic with Numba's types, on lane vectors and on uniform values.

A value is uniform (a Python ``int`` for int64, ``bool``, or a NumPy scalar) or a lane vector (a
NumPy array of shape (blocks, threads), either of which may be 1). NumPy and Numba agree on most
result types; the tables here hold where they do not: integers widen to 64 bits, a signed operand
makes the result signed, and Python's literals are never "weak".
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from .report import KERNEL_MARK, PRECISION

INT64 = np.dtype(np.int64)
UINT64 = np.dtype(np.uint64)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
NUMBERS = (np.generic, np.ndarray)
SMALL_FLOATS = (FLOAT32, FLOAT16)
DTYPES = [np.dtype(c) for c in "?bBhHiIlLqQefd"]

Value = Any
"""A uniform value or a lane vector."""


class Unassigned:
    """The value of a variable that no thread has assigned; arithmetic passes it on."""

    __array_ufunc__ = None

    def _pass_on(self, *_: Any) -> Unassigned:
        return self

    def __bool__(self) -> bool:
        raise UnboundLocalError("a variable is read before any thread has assigned it")


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
BITWISE = ("lshift", "rshift", "and", "or", "xor")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
for _operator in (*ARITHMETIC, *BITWISE, *COMPARISONS, "neg", "pos", "invert"):
    setattr(Unassigned, f"__{_operator}__", Unassigned._pass_on)
    setattr(Unassigned, f"__r{_operator}__", Unassigned._pass_on)
UNASSIGNED = Unassigned()


def strong(value: Value) -> Value:
    """The value with a definite dtype, as Numba types it: int is int64, float is float64."""
    kind = type(value)
    if kind is int:
        return np.int64(value) if INT64_MIN <= value <= INT64_MAX else np.uint64(value)
    if kind is float:
        return np.float64(value)
    if kind is bool:
        return np.bool_(value)
    return value


def wrap(value: int) -> int:
    """A Python integer wrapped to int64."""
    if INT64_MIN <= value <= INT64_MAX:
        return value
    return (value - INT64_MIN) % 2**64 + INT64_MIN


def cast(value: Value, dtype: np.dtype) -> Value:
    """``value`` converted as C converts: integers wrap, floats truncate towards zero."""
    value = strong(value)
    if value.dtype is dtype:
        return value
    if value.dtype is FLOAT64 and isinstance(value, np.ndarray) and dtype in SMALL_FLOATS:
        tell_precision(sure=False)
    if dtype.kind == "u" and value.dtype.kind == "f":
        value = value.astype(INT64)
    return value.astype(dtype)


def truth(value: Value) -> Value:
    """A lane vector as booleans; a uniform value as ``bool``."""
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind == "b" else value != 0
    return bool(value)


# Where a float32 becomes a float64: slow paths only, for nobody wants that


def meet(a: Value, b: Value) -> None:
    """Tell `float64.Precision` if what comes of two values is a float64, and one was smaller."""
    kinds = a.dtype, b.dtype
    if (FLOAT32 in kinds or FLOAT16 in kinds) and arithmetic_rule(*kinds) == FLOAT64:
        tell_precision(sure=True)


def tell_precision(sure: bool) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and KERNEL_MARK not in frame.f_globals:
        frame = frame.f_back
    precision = None if frame is None else frame.f_globals[PRECISION]
    if precision is not None:
        precision.notice(frame, sure)


# Result types: for each pair of dtype numbers the dtype both operands are converted to first, or
# None where NumPy's own rule is Numba's.

Table = list[list["np.dtype | None"]]


def table(rule: Callable[[np.dtype, np.dtype], np.dtype | None]) -> Table:
    size = max(d.num for d in DTYPES) + 1
    out: Table = [[None] * size for _ in range(size)]
    for a in DTYPES:
        for b in DTYPES:
            out[a.num][b.num] = rule(a, b)
    return out


def integer_type(a: np.dtype, b: np.dtype) -> np.dtype:
    return UINT64 if a.kind == b.kind == "u" else INT64


def arithmetic_rule(a: np.dtype, b: np.dtype) -> np.dtype | None:
    if a.kind in "biu" and b.kind in "biu":
        common = integer_type(a, b)
        return None if a == b == common else common
    # Numba finds the next larger float for small unsigned integers than NumPy does.
    if "u" in (a.kind, b.kind):
        number, unsigned = (a, b) if b.kind == "u" else (b, a)
        if unsigned == np.uint16 and number != FLOAT64:
            return FLOAT64
        if unsigned == np.uint8 and number == FLOAT16:
            return FLOAT32
    if a != b and np.result_type(a, b) == FLOAT64:
        return FLOAT64  # NumPy's rule too; said here for `meet`
    return None


def division_rule(a: np.dtype, b: np.dtype) -> np.dtype | None:
    if a.kind in "biu" and b.kind in "biu":
        return FLOAT64
    return arithmetic_rule(a, b)


def bitwise_rule(a: np.dtype, b: np.dtype) -> np.dtype | None:
    return None if a.kind == b.kind == "b" else arithmetic_rule(a, b)


def shift_rule(a: np.dtype, b: np.dtype) -> np.dtype | None:
    return UINT64 if a.kind == "u" else INT64


def power_rule(a: np.dtype, b: np.dtype) -> np.dtype | None:
    if b.kind in "iu" and (a == FLOAT16 or (a == FLOAT32 and b.itemsize >= 4)):
        return FLOAT32
    return floor_rule(a, b)


def floor_rule(a: np.dtype, b: np.dtype) -> np.dtype | None:
    """The rule of ``//`` and ``%``, which have no float16 version."""
    if FLOAT16 in (a, b) and np.result_type(a, b) == FLOAT16:
        return FLOAT32
    return arithmetic_rule(a, b)


def binary(operate: Callable, rule: Callable, uniform: Callable) -> Callable[[Value, Value], Value]:
    """A binary operator: ``uniform`` on two Python integers, ``operate`` on everything else."""
    conversion = table(rule)

    def apply(a: Value, b: Value) -> Value:
        if type(b) is int:
            if type(a) is int:
                return uniform(a, b)
            b = strong(b)
        elif type(a) is int:
            a = strong(a)
        try:
            common = conversion[a.dtype.num][b.dtype.num]
        except AttributeError:
            return fallback(a, b)
        if common is None:
            return operate(a, b)
        if common is FLOAT64:
            meet(a, b)
        return operate(a.astype(common), b.astype(common))

    def fallback(a: Value, b: Value) -> Value:
        if type(a) in (bool, float) or type(b) in (bool, float):
            return apply(strong(a), strong(b))
        return operate(a, b)

    return apply


def wrapping(operate: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda a, b: wrap(operate(a, b))


def uniform_floordiv(a: int, b: int) -> int:
    return wrap(a // b) if b else 0


def uniform_mod(a: int, b: int) -> int:
    return a % b if b else 0


def uniform_power(a: int, b: int) -> int:
    if b < 0:
        return int(a**b) if a else 0
    return wrap(pow(a, b, 2**64))


def uniform_lshift(a: int, b: int) -> int:
    return wrap(a << b) if 0 <= b < 64 else 0


def uniform_rshift(a: int, b: int) -> int:
    return a >> b if 0 <= b < 64 else (0 if a >= 0 else -1)


def power(a: Value, b: Value) -> Value:
    if not isinstance(b, np.ndarray) and b == 2:
        return a * a
    if a.dtype.kind in "iu" and b.dtype.kind == "i":
        negative = b < 0
        if np.any(negative):
            whole = np.power(a, np.where(negative, 0, b))
            return np.where(negative, (a.astype(FLOAT64) ** b).astype(a.dtype), whole)[()]
    # Not a**b: before NumPy 2.3 that turns some powers into functions that ignore the type of b.
    return np.power(a, b)


add = binary(operator.add, arithmetic_rule, wrapping(operator.add))
subtract = binary(operator.sub, arithmetic_rule, wrapping(operator.sub))
multiply = binary(operator.mul, arithmetic_rule, wrapping(operator.mul))
divide = binary(operator.truediv, division_rule, np.true_divide)
floor_divide = binary(operator.floordiv, floor_rule, uniform_floordiv)
modulo = binary(operator.mod, floor_rule, uniform_mod)
raise_to = binary(power, power_rule, uniform_power)
shift_left = binary(operator.lshift, shift_rule, uniform_lshift)
shift_right = binary(operator.rshift, shift_rule, uniform_rshift)
bit_and = binary(operator.and_, bitwise_rule, operator.and_)
bit_or = binary(operator.or_, bitwise_rule, operator.or_)
bit_xor = binary(operator.xor, bitwise_rule, operator.xor)


def widened(value: Value) -> Value:
    """A small integer or boolean as its 64-bit type."""
    if value.dtype.kind in "biu":
        return value.astype(UINT64 if value.dtype.kind == "u" else INT64)
    return value


def negative(value: Value) -> Value:
    """``-value``; Numba negates in the width of the operand and widens the result."""
    if type(value) is int:
        return wrap(-value)
    value = strong(value)
    return -widened(value) if value.dtype.kind == "b" else widened(-value)


def positive(value: Value) -> Value:
    return value if type(value) is int else widened(value)


def invert(value: Value) -> Value:
    """``~value``, widened like `negative`; of a boolean, its opposite."""
    if type(value) is int:
        return ~value
    value = strong(value)
    return ~value if value.dtype.kind == "b" else widened(~value)


def logical_not(value: Value) -> Value:
    return ~truth(value) if isinstance(value, np.ndarray) else not value


def select(condition: Value, chosen: Value, other: Value) -> Value:
    """``chosen if condition else other`` with both at hand, in the type that holds both."""
    if chosen is other or other is UNASSIGNED:
        return chosen
    if chosen is UNASSIGNED:
        return other
    if not isinstance(condition, np.ndarray):
        picked = chosen if condition else other
        if type(chosen) is type(other):
            return picked
        try:
            chosen, other = strong(chosen), strong(other)
            meet(chosen, other)
            return cast(picked, np.result_type(chosen, other))
        except (AttributeError, TypeError):
            return picked
    if type(chosen) is tuple:
        return tuple(select(condition, a, b) for a, b in zip(chosen, other, strict=True))
    if hasattr(chosen, "merged"):
        return chosen.merged(other, condition)
    chosen, other = strong(chosen), strong(other)
    if chosen.dtype is not other.dtype:
        meet(chosen, other)
    return np.where(truth(condition), chosen, other)


def unify(new: Value, old: Value) -> Value:
    """``new``, which takes the place of ``old`` in some threads, in Numba's type of both."""
    if type(new) is not type(old) and new is not UNASSIGNED and old is not UNASSIGNED:
        chosen, other = strong(new), strong(old)
        if isinstance(chosen, NUMBERS) and isinstance(other, NUMBERS):
            meet(chosen, other)
    return new


def logical_and(a: Value, b: Value) -> Value:
    if not isinstance(a, np.ndarray):
        return b if a else a
    return select(a, b, False if a.dtype.kind == "b" else a)


def logical_or(a: Value, b: Value) -> Value:
    if not isinstance(a, np.ndarray):
        return a if a else b
    return select(a, True if a.dtype.kind == "b" else a, b)
