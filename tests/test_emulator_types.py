"""Scalars on the emulator have the types and values that Numba gives them."""

import itertools
import linecache
import math
import operator

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, int64, njit, types, uint32, uint64

from numba_flash.emulator import arithmetic, functions
from numba_flash.emulator.arguments import GlobalRegions
from numba_flash.emulator.bind import Binder
from numba_flash.emulator.check import Checker
from numba_flash.emulator.facade import BlockMemory, Cuda
from numba_flash.emulator.functions import cast_of
from numba_flash.emulator.lanes import Lanes
from numba_flash.emulator.race import BlockOrder, Races
from numba_flash.emulator.report import Report

# numba-cuda has its own copy of the types, plain numba does not.
CUDA_TYPES = cuda.types if hasattr(cuda.types, "float32") else types
LANES = 32
VALUES = {
    "x": np.linspace(0.3, 9.7, LANES).astype(np.float32),
    "y": np.linspace(5.1, -3.3, LANES).astype(np.float32),
    "d": np.linspace(-2.0, 2.5, LANES),
    "i": np.arange(-7, LANES - 7, dtype=np.int32),
    "j": np.arange(LANES, dtype=np.int64) * 3_000_000_001 + 1,
    "u": np.arange(LANES, dtype=np.uint32) * np.uint32(200_000_000),
    "w": np.arange(LANES, dtype=np.uint64) * np.uint64(2**58 + 12345) + np.uint64(1),
    "s": np.arange(-16, LANES - 16, dtype=np.int16) * np.int16(1000),
    "q": np.arange(LANES, dtype=np.uint16) * np.uint16(2000) + np.uint16(1),
    "p": np.arange(LANES) % 3 == 0,
}
CONSTANTS = {"HALF": 0.5, "TWO": 2, "F32": np.float32(1.5), "U7": np.uint32(7), "FLAG": True}

EXPRESSIONS = [
    # float32 with literals, constants and integers
    *("x * y", "x * 2", "x * 2.0", "x * HALF", "x * TWO", "x * F32", "x + 0.0", "x / 2", "x - 1"),
    *("x / y", "x * i", "i * x", "x + j", "x / i", "x - u", "x * w", "x * s", "x * q", "x + p"),
    *("x * d", "d * 2", "float32(x * 2.0)", "float32(2) * x", "x * float32(HALF)", "-x", "+x"),
    *("x // y", "x % y", "x // 2", "x % 2", "d // 0.7", "d % 0.7", "y % x", "x * x + y", "2 - x"),
    # integers: widening, signs, wrapping
    *("i + i", "i - 1", "i * i", "i * j", "j * j", "j + 1", "s * s", "s + i", "q + q", "q * q"),
    *("u + u", "u - U7", "U7 - u", "u * u", "u + 1", "u - 7", "i + u", "u * i", "w + w", "w * w"),
    *("w + 1", "w - j", "w + i", "u + w", "w + u", "p + p", "p + i", "p * u", "q - s", "q + u"),
    *("-i", "-j", "-u", "-w", "-q", "+s", "~i", "~u", "~w", "~p", "~j", "-s"),
    *("i / 2", "i / i", "j / 3", "u / 2", "u / u", "w / 3", "p / 2", "i / j", "TWO / i"),
    *("i // 2", "i // 3", "(-i) // 2", "j // 7", "u // 3", "u // U7", "w // 3", "s // 7"),
    *("i % 3", "(-i) % 3", "i % -4", "j % 5", "u % 3", "u % U7", "w % 7", "q % 9", "j % 1000003"),
    *(
        "uint32(u - U7)",
        "uint32(i - 1)",
        "int32(j)",
        "int32(u)",
        "uint64(i)",
        "int64(w)",
        "int64(x)",
    ),
    *(
        "uint32(7) - uint32(9)",
        "uint32(u * U7)",
        "float32(i)",
        "float64(u)",
        "int32(y)",
        "int64(y)",
    ),
    *(
        "float32(j)",
        "uint32(x)",
        "int32(x * 100)",
        "uint32(w)",
        "int32(w)",
        "uint64(u) * uint64(u)",
    ),
    # bits
    *("u >> 3", "i << 3", "i >> 1", "u << 3", "u << 31", "w >> 5", "j >> 2", "s << 2", "q << 12"),
    *("u >> U7", "i >> i % 3", "uint64(u) << uint64(33)", "uint64(u) >> uint64(3)", "p << 2"),
    *("i & 1", "i & i", "u & 255", "u & U7", "w & 1", "w & u", "p & p", "p & i", "q & s", "j & 7"),
    *("i | 4", "u | U7", "u ^ u", "u ^ 5", "i ^ u", "p | p", "p ^ p", "w ^ w", "s | q", "w ^ j"),
    *(
        "(uint64(u) * uint64(0xD2511F53)) >> uint64(32)",
        "uint32(uint32(u ^ U7) * uint32(0x9E3779B9))",
    ),
    # powers
    *("x ** 2", "x ** 3", "i ** 2", "x ** 0.5", "d ** 2", "j ** 2", "x ** y", "x ** TWO", "u ** 2"),
    # comparisons and logic
    *("x > y", "i == u", "i < j", "u > 3", "x < 2", "x == 2.5", "w > j", "i < w", "0 < i < 9"),
    *("x > y and i > 2", "x > y or i > 2", "not p", "not i", "p == True", "i != s", "p and x > y"),
    # choices
    *(
        "x if x > y else 0.0",
        "x if x > y else F32",
        "x if p else 2",
        "i if p else j",
        "i if p else u",
    ),
    *("x if p else i", "u if p else 5", "p if x > y else i", "s if p else q", "x if FLAG else 0.0"),
    *("i if p else -1", "u if p else U7", "d if p else x", "w if p else u"),
    # min, max, abs and other builtins
    *(
        "max(x, y)",
        "max(x, 0.0)",
        "max(x, F32)",
        "min(i, 3)",
        "min(i, j)",
        "max(i, s)",
        "min(x, i)",
    ),
    *(
        "max(x, y, d)",
        "max(u, U7)",
        "min(p, p)",
        "max(i, x)",
        "min(q, s)",
        "max(TWO, 3)",
        "min(u, 3)",
    ),
    *("abs(x)", "abs(i)", "abs(s)", "abs(-x)", "abs(u)", "abs(d)", "int(x)", "int(i)", "int(u)"),
    *("float(x)", "float(i)", "bool(i)", "bool(x)", "round(x)", "round(d)", "round(y)", "int(d)"),
    # math
    *("math.exp(x)", "math.exp(i)", "math.exp(d)", "math.exp(s)", "math.sqrt(x)", "math.sqrt(u)"),
    *(
        "math.log(x)",
        "math.log2(x)",
        "math.log10(x)",
        "math.log1p(x)",
        "math.expm1(x)",
        "math.exp(-x)",
    ),
    *("math.sin(x)", "math.cos(x)", "math.tan(x)", "math.tanh(x)", "math.sinh(y)", "math.cosh(y)"),
    *(
        "math.atan(x)",
        "math.atan2(x, y)",
        "math.atan2(i, x)",
        "math.asin(x / 10)",
        "math.acos(x / 10)",
    ),
    *("math.pow(x, y)", "math.pow(x, 2)", "math.pow(x, 2.0)", "math.hypot(x, y)", "math.fabs(y)"),
    *("math.copysign(x, y)", "math.isnan(x)", "math.isinf(x)", "math.isfinite(d)", "math.isinf(i)"),
    *("math.erf(x)", "math.erfc(d)", "math.gamma(x)", "math.lgamma(x)", "math.degrees(x)"),
    *("math.radians(x)", "math.sqrt(x) * 2", "x * math.pi", "x + math.inf", "float32(-math.inf)"),
    *("math.ldexp(x, 3)", "math.asinh(x)", "math.acosh(x + F32)", "math.atanh(x / 10)"),
    # uniform values
    *(
        "TWO * 3",
        "TWO / 4",
        "7 // TWO",
        "-7 % TWO",
        "2 ** 10",
        "HALF * TWO",
        "F32 * F32",
        "F32 * TWO",
    ),
    *("U7 - 9", "U7 * U7", "float32(1) / 3", "float32(1) / float32(3)", "1 << 40", "-7 // 2"),
    *("9223372036854775807 + TWO", "F32 + 0.5", "float32(0.1) + 0.2", "U7 << 30", "~U7", "-U7"),
]
if hasattr(math, "exp2"):  # since Python 3.11
    EXPRESSIONS.append("math.exp2(x)")


def function_of(expressions):
    """A function of the scalars in `VALUES` that returns all the expressions."""
    file = f"<types {hash(tuple(expressions))}>"
    source = f"def f({', '.join(VALUES)}):\n    return (\n"
    source += "".join(f"        {e},\n" for e in expressions) + "    )\n"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"math": math, "float32": float32, "float64": float64, **CONSTANTS}
    names |= {"int32": int32, "int64": int64, "uint32": uint32, "uint64": uint64}
    exec(compile(source, file, "exec"), names)
    return names["f"]


def in_one_block(function):
    """The function over lane vectors, as a kernel of one block would call it."""
    lanes = Lanes([(0, 0, 0)], (LANES, 1, 1), early_return=False)
    report = Report("types")
    races = Races(lanes, report, 0, BlockOrder(), lambda block: (block, 0, 0))
    checker = Checker(lanes, report, True, cast_of, races, GlobalRegions(()))
    cuda_facade = Cuda(lanes, checker, (1, 1, 1), BlockMemory(1, 0))
    return Binder(cuda_facade, lanes, checker).bind(function)


@pytest.fixture(scope="module")
def by_numba():
    """For each expression: Numba's type, and its value in every lane."""
    out = {}
    for start in range(0, len(EXPRESSIONS), 25):
        part = EXPRESSIONS[start : start + 25]
        compiled = njit(error_model="numpy")(function_of(part))
        rows = [compiled(*lane) for lane in zip(*VALUES.values(), strict=True)]
        kinds = compiled.nopython_signatures[0].return_type
        for k, expression in enumerate(part):
            out[expression] = (str(types.unliteral(kinds[k])), [row[k] for row in rows])
    return out


@pytest.fixture(scope="module")
def by_emulator():
    with np.errstate(all="ignore"):
        lanes = [values[None, :] for values in VALUES.values()]
        return dict(zip(EXPRESSIONS, in_one_block(function_of(EXPRESSIONS))(*lanes), strict=True))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_has_the_type_and_value_that_numba_gives(expression, by_numba, by_emulator):
    kind, expected = by_numba[expression]
    got = np.asarray(by_emulator[expression])
    assert got.dtype == kind
    expected = np.array(expected, dtype=kind)
    got = np.broadcast_to(got.reshape(-1), expected.shape)
    if got.dtype.kind == "f":
        # The C library and NumPy may round a transcendental function differently by an ulp or two.
        np.testing.assert_allclose(got, expected, rtol=4 * np.finfo(kind).eps)
    else:
        np.testing.assert_array_equal(got, expected)


KINDS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)
OPERATORS = {
    operator.add: arithmetic.add,
    operator.sub: arithmetic.subtract,
    operator.mul: arithmetic.multiply,
    operator.truediv: arithmetic.divide,
    operator.floordiv: arithmetic.floor_divide,
    operator.mod: arithmetic.modulo,
    operator.and_: arithmetic.bit_and,
    operator.or_: arithmetic.bit_or,
    operator.xor: arithmetic.bit_xor,
    operator.lshift: arithmetic.shift_left,
    operator.rshift: arithmetic.shift_right,
    max: functions.maximum,
    min: functions.minimum,
}


def cuda_type(function, *kinds):
    """The type that Numba's CUDA target gives a call, or None where it refuses it."""
    from numba.cuda.descriptor import cuda_target

    context = cuda_target.typing_context
    context.refresh()
    arguments = tuple(getattr(CUDA_TYPES, "boolean" if k == "bool" else k) for k in kinds)
    try:
        return str(context.resolve_function_type(function, arguments, {}).return_type)
    except Exception:
        return None


@pytest.mark.parametrize("function", OPERATORS, ids=lambda f: f.__name__)
def test_operator_gives_the_type_of_the_cuda_target_for_every_pair(function):
    for a, b in itertools.product(KINDS, repeat=2):
        expected = cuda_type(function, a, b)
        if expected is not None:
            with np.errstate(all="ignore"):
                got = OPERATORS[function](np.ones((1, 1), a), np.ones((1, 1), b))
            assert str(got.dtype) == expected, (a, b)


@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "exp", "sqrt", "fabs", "isnan"])
def test_math_function_gives_the_type_of_the_cuda_target(name):
    for kind in ("int32", "int64", "uint64", "float32", "float64"):
        got = functions.FUNCTIONS[name](np.ones((1, 1), kind))
        assert str(got.dtype) == cuda_type(getattr(math, name), kind), kind
