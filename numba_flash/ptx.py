"""Instructions, one a line: the GPU's form by ``@intrinsic``, and its NumPy twin for the emulator.

A 16-bit float travels through the kernels as its ``uint16`` bit pattern and is computed with in
float32, so four conversions are all that the scalar rungs need. They are written as LLVM
instructions that exist on every architecture; the native bfloat16 ones start at sm_80.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types

intrinsic: Any
try:
    from numba.cuda.extending import intrinsic
except ImportError:  # plain numba, without the numba-cuda package
    from numba.extending import intrinsic

TWINS: dict[object, Callable[..., object]] = {}
"""NumPy function that computes the same as an instruction, lane by lane."""

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


def _instruction(name, result, argument, emit, twin):
    """An intrinsic of one argument whose LLVM code is ``emit(builder, value)``."""

    def typer(typingctx, value):
        signature = result(argument)

        def codegen(context, builder, signature, args):
            return emit(builder, args[0])

        return signature, codegen

    typer.__name__ = name
    instruction = intrinsic(typer)
    TWINS[instruction] = twin
    return instruction


def _emit_f32_to_bf16(builder, value):
    """Round to nearest, ties to even: add half a unit of the last kept bit, less one if it is 0."""
    bits = builder.bitcast(value, _I32)
    last = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(bits, builder.add(last, _I32(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, _I32(0x400000))
    return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), _I32(16)), _I16)


def _emit_bf16_to_f32(builder, value):
    return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)


def _bits(dtype):
    return lambda x: np.asarray(x, np.float32).astype(dtype).view(np.uint16)


def _value(dtype):
    return lambda x: np.asarray(x).astype(np.uint16).view(dtype).astype(np.float32)


bf16_to_f32 = _instruction(
    "bf16_to_f32", types.float32, types.uint16, _emit_bf16_to_f32, _value(ml_dtypes.bfloat16)
)
f32_to_bf16 = _instruction(
    "f32_to_bf16", types.uint16, types.float32, _emit_f32_to_bf16, _bits(ml_dtypes.bfloat16)
)
f16_to_f32 = _instruction(
    "f16_to_f32",
    types.float32,
    types.uint16,
    lambda builder, value: builder.fpext(builder.bitcast(value, _F16), _F32),
    _value(np.float16),
)
f32_to_f16 = _instruction(
    "f32_to_f16",
    types.uint16,
    types.float32,
    lambda builder, value: builder.bitcast(builder.fptrunc(value, _F16), _I16),
    _bits(np.float16),
)
