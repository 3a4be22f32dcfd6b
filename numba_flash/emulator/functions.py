"""Elementwise functions of a kernel: casts, ``min`` and its kin, ``math``, bit counting.

None of these needs to know which lanes are active: a lane that does not want the result computes
it too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from .arithmetic import FLOAT32, FLOAT64, INT64, UINT64, Value, cast, meet, raise_to, strong, truth
from .report import UnsupportedConstruct


class Cast:
    """A scalar type: a dtype where one is asked for, a conversion when called."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self.name = dtype.name

    @property
    def type(self) -> Cast:
        """``array.dtype.type`` converts a number to what the array holds."""
        return self

    def __call__(self, value: Value = 0) -> Value:
        value = cast(value, self.dtype)
        return int(value) if type(value) is np.int64 else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cast) and self.dtype == other.dtype

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> str:
        return self.name


TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
CASTS = {name: Cast(np.dtype(name)) for name in TYPES}
ALIASES = {"boolean": "bool", "bool_": "bool", "b1": "bool", "intp": "int64", "uintp": "uint64"}
ALIASES |= {"i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "f2": "float16"}
ALIASES |= {"u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64", "f4": "float32"}
ALIASES |= {"f8": "float64", "double": "float64"}
CASTS |= {alias: CASTS[name] for alias, name in ALIASES.items()}


def cast_of(dtype: np.dtype) -> Cast:
    return CASTS[dtype.name]


def dtype_of(kind: Any) -> np.dtype:
    """The NumPy dtype of whatever stands for one in a kernel."""
    if isinstance(kind, Cast):
        return kind.dtype
    try:
        return np.dtype(kind)
    except TypeError:
        raise UnsupportedConstruct(f"{kind!r} is not a scalar type that arrays can hold") from None


# Builtins


def fold(uniform: Callable, elementwise: np.ufunc) -> Callable[..., Value]:
    """``min`` or ``max``: of two floats, one of them NaN, the other one, as the hardware does."""

    def apply(*values: Value) -> Value:
        if len(values) == 1:
            values = tuple(values[0])
        if set(map(type, values)) == {int}:
            return uniform(values)
        return functools.reduce(functools.partial(pairwise, elementwise), map(strong, values))

    return apply


def pairwise(function: Callable, a: Value, b: Value) -> Value:
    if a.dtype is not b.dtype:
        meet(a, b)
    return function(a, b)


def to_int(value: Value = 0) -> Value:
    value = strong(value)
    if value.dtype.kind in "fb":
        value = cast(value, INT64)
    return int(value) if type(value) is np.int64 else value


def to_float(value: Value = 0.0) -> Value:
    if isinstance(value, str):
        return np.float64(value)
    value = strong(value)
    return value if value.dtype.kind == "f" else cast(value, FLOAT64)


def rounded(value: Value, digits: int | None = None) -> Value:
    if digits is not None:
        return np.round(floating(value), digits)
    return to_int(np.rint(floating(value)))


def contains(container: Any, value: Value) -> Value:
    """``value in container`` for a tuple."""
    found: Value = False
    for element in container:
        found = np.logical_or(found, element == value)
    return found if isinstance(found, np.ndarray) else bool(found)


def zipped(*tuples: tuple) -> tuple:
    return tuple(zip(*tuples, strict=False))


def numbered(values: tuple, start: int = 0) -> tuple:
    return tuple(enumerate(values, start))


minimum, maximum = fold(min, np.fmin), fold(max, np.fmax)
BUILTINS: dict[str, Any] = {
    "min": minimum,
    "max": maximum,
    "abs": abs,
    "int": to_int,
    "float": to_float,
    "bool": truth,
    "round": rounded,
    "pow": raise_to,
    "len": len,
    "range": range,
    "zip": zipped,
    "enumerate": numbered,
    "tuple": tuple,
}

# math


def floating(value: Value) -> Value:
    value = strong(value)
    return value if value.dtype.kind == "f" else value.astype(FLOAT64)


def unary(function: Callable) -> Callable[[Value], Value]:
    return lambda x: function(floating(x))


def binary(function: Callable) -> Callable[[Value, Value], Value]:
    def apply(x: Value, y: Value) -> Value:
        x, y = strong(x), strong(y)
        both_floats = x.dtype.kind == y.dtype.kind == "f"
        return (
            pairwise(function, x, y)
            if both_floats
            else function(x.astype(FLOAT64), y.astype(FLOAT64))
        )

    return apply


def by_element(function: Callable[[float], float]) -> Callable[[Value], Value]:
    """A function of Python's ``math`` that NumPy lacks."""

    def safe(x: float) -> float:
        try:
            return function(x)
        except (ValueError, OverflowError):
            return math.nan if x <= 0 else math.inf

    vectorised = np.vectorize(safe, otypes=[np.float64])

    def apply(x: Value) -> Value:
        x = floating(x)
        return vectorised(x).astype(x.dtype)[()]

    return apply


def frexp(x: Value) -> tuple[Value, Value]:
    mantissa, exponent = np.frexp(floating(x))
    return mantissa, exponent


def modf(x: Value) -> tuple[Value, Value]:
    fraction, integer = np.modf(floating(x))
    return fraction, integer


def ldexp(x: Value, exponent: Value) -> Value:
    return np.ldexp(floating(x), cast(exponent, np.dtype(np.int32)))


def ieee_remainder(x: Value, y: Value) -> Value:
    return x - np.rint(x / y) * y


CALLABLE = "a kernel calls @cuda.jit(device=True) functions, and those of math, cuda and ptx"
ADVICE = {
    "numpy": "loop over the elements, with functions of math",
    "cuda": "what the host does with cuda stands outside of the kernel",
    **dict.fromkeys(("cuda.shared", "cuda.local"), "arrays are made with .array(shape, dtype)"),
    **dict.fromkeys(
        ("cuda.threadIdx", "cuda.blockIdx", "cuda.blockDim", "cuda.gridDim"), "it has x, y and z"
    ),
}
"""What to do instead of using a name that a module lacks inside a kernel."""


class Namespace(SimpleNamespace):
    """A module inside a kernel; a name it lacks is refused, with the advice for this module."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise UnsupportedConstruct(
            f"{self.__dict__['title']}.{attribute} is not supported in a kernel on the emulator; "
            + ADVICE.get(self.__dict__["title"], CALLABLE)
        )


SAME_NAME = (
    *("exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "sqrt", "cbrt", "fabs"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh"),
)
FUNCTIONS: dict[str, Any] = {name: unary(getattr(np, name)) for name in SAME_NAME}
FUNCTIONS |= {
    "asin": unary(np.arcsin),
    "acos": unary(np.arccos),
    "atan": unary(np.arctan),
    "asinh": unary(np.arcsinh),
    "acosh": unary(np.arccosh),
    "atanh": unary(np.arctanh),
    "degrees": unary(np.degrees),
    "radians": unary(np.radians),
    "isnan": unary(np.isnan),
    "isinf": unary(np.isinf),
    "isfinite": unary(np.isfinite),
    "erf": by_element(math.erf),
    "erfc": by_element(math.erfc),
    "gamma": by_element(math.gamma),
    "lgamma": by_element(math.lgamma),
    "pow": binary(np.power),
    "atan2": binary(np.arctan2),
    "hypot": binary(np.hypot),
    "fmod": binary(np.fmod),
    "copysign": binary(np.copysign),
    # On the CUDA target these three return floats, unlike in Python.
    "floor": unary(np.floor),
    "ceil": unary(np.ceil),
    "trunc": unary(np.trunc),
    "nextafter": binary(np.nextafter),
    "remainder": binary(ieee_remainder),
    "frexp": frexp,
    "modf": modf,
    "ldexp": ldexp,
}
CONSTANTS = {name: np.float64(getattr(math, name)) for name in ("pi", "e", "inf", "nan", "tau")}
MATH = Namespace(title="math", **FUNCTIONS, **CONSTANTS)

NUMPY = Namespace(
    title="numpy",
    **{name: FUNCTIONS[name] for name in SAME_NAME},
    **{name: FUNCTIONS[name] for name in ("hypot", "fmod", "copysign")},
    **{name: FUNCTIONS[name] for name in ("isnan", "isinf", "isfinite", "floor", "ceil", "trunc")},
    **{name: CONSTANTS[name] for name in ("pi", "e", "inf", "nan")},
    **{name: kind for name, kind in CASTS.items() if name not in ("bool", "double")},
    double=CASTS["float64"],
    abs=abs,
    minimum=binary(np.minimum),
    maximum=binary(np.maximum),
    fmin=minimum,
    fmax=maximum,
    dtype=dtype_of,
)


def single(function: Callable) -> Callable[..., Value]:
    """A libdevice function on float32."""
    return lambda *values: function(*(cast(value, FLOAT32) for value in values))


def fma(x: Value, y: Value, z: Value) -> Value:
    """``x * y + z``; for float32 the product is exact, as in the hardware."""
    x, y, z = strong(x), strong(y), strong(z)
    if x.dtype == y.dtype == z.dtype == FLOAT32:
        return cast(x.astype(FLOAT64) * y + z, FLOAT32)
    return floating(x) * y + z


def rsqrt(x: Value) -> Value:
    return 1 / np.sqrt(x)


LIBDEVICE = Namespace(
    title="cuda.libdevice",
    **{
        prefix + name + "f": single(FUNCTIONS[name])
        for name in (*SAME_NAME, "erf")
        for prefix in ("", "fast_")
    },
    fmaxf=single(np.fmax),
    fminf=single(np.fmin),
    fmaf=single(fma),
    fma_rn=fma,
    rsqrtf=single(rsqrt),
    rsqrt=rsqrt,
    powf=single(np.power),
    fast_powf=single(np.power),
    floorf=single(np.floor),
    ceilf=single(np.ceil),
    rintf=single(np.rint),
    truncf=single(np.trunc),
)

for _namespace in (BUILTINS, FUNCTIONS, vars(LIBDEVICE)):
    for _name, _function in _namespace.items():
        if isinstance(_function, FunctionType) and "<locals>" in _function.__qualname__:
            _function.__qualname__ = _name  # what Python's errors call it

# Bits


def bits(value: Value) -> tuple[Value, int, np.dtype]:
    """An integer's bits as uint64, its width, its type."""
    value = strong(value)
    width = 8 * value.dtype.itemsize
    return value.astype(np.dtype(f"u{value.dtype.itemsize}")).astype(UINT64), width, value.dtype


def count_bits(x: Value) -> Value:
    one = np.uint64(1)
    return sum(((x >> np.uint64(i)) & one for i in range(64)), start=np.uint64(0))


def popc(value: Value) -> Value:
    x, _, dtype = bits(value)
    return cast(count_bits(x), dtype)


def clz(value: Value) -> Value:
    x, width, dtype = bits(value)
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> np.uint64(shift))
    return cast(np.uint64(width) - count_bits(x), dtype)


def ffs(value: Value) -> Value:
    x, _, _ = bits(value)
    below = ~x & (x - np.uint64(1))
    return cast(np.where(x == 0, 0, count_bits(below) + np.uint64(1))[()], np.dtype(np.uint32))


def brev(value: Value) -> Value:
    x, width, _ = bits(value)
    width = max(width, 32)
    out = np.uint64(0)
    for i in range(width):
        out = (out << np.uint64(1)) | ((x >> np.uint64(i)) & np.uint64(1))
    return cast(out, np.dtype(f"u{width // 8}"))
