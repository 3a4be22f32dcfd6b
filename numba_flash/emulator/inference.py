"""The types of a kernel's expressions, found from its source and a frame in which it is running.

Nothing is evaluated that a kernel could notice: names are looked up, and operators and functions of
``math`` are asked for the type of their result on a made-up operand.
"""

from __future__ import annotations

import ast
from collections import ChainMap
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from . import arithmetic
from .arithmetic import FLOAT64, INT64, UNASSIGNED, select, strong
from .functions import BUILTINS, FUNCTIONS, LIBDEVICE, NUMPY, Cast
from .memory import Array
from .report import UnsupportedConstruct
from .transform import BINARY, UNARY

BOOL = np.dtype(bool)
NUMERIC = ("min", "max", "abs", "int", "float", "bool", "round", "pow")
TYPED = {
    id(function)
    for functions in (FUNCTIONS, vars(NUMPY), vars(LIBDEVICE), {n: BUILTINS[n] for n in NUMERIC})
    for function in functions.values()
    if callable(function)
}
"""Functions that only compute, by their id: their result's type can be asked for."""


@dataclass(frozen=True)
class ArrayType:
    """What a kernel's array holds, how many indices reach an element, and where it lives."""

    dtype: np.dtype
    ndim: int
    kind: str


Type = Any
"""The dtype of a number, an `ArrayType`, the object itself for anything else; None: not known."""


def type_of_value(value: Any) -> Type:
    if value is UNASSIGNED:
        return None
    if isinstance(value, Array):
        return ArrayType(value.space.dtype, value.ndim, value.space.kind)
    if isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        return strong(value).dtype
    return value


class Types:
    """The types of expressions in a frame of rewritten kernel code."""

    def __init__(self, frame: FrameType):
        self.names = ChainMap(dict(frame.f_locals), frame.f_globals)

    def of(self, node: ast.expr) -> Type:
        """The type of an expression of the kernel's own source."""
        find = getattr(self, f"of_{type(node).__name__.lower()}", None)
        return None if find is None else find(node)

    def number(self, node: ast.expr) -> np.dtype | None:
        """The dtype of an expression, if it is a number."""
        kind = self.of(node)
        return kind if isinstance(kind, np.dtype) else None

    def result(self, function: Any, *operands: ast.expr) -> np.dtype | None:
        """The type of what a function computes of some operands."""
        kinds = [self.number(operand) for operand in operands]
        if any(kind is None for kind in kinds):  # not `in`: to NumPy, None equals float64
            return None
        try:
            result = function(*(np.ones((1, 1), kind) for kind in kinds))
        except (TypeError, ValueError):
            return None
        return strong(result).dtype if not isinstance(result, tuple) else None

    def of_constant(self, node: ast.Constant) -> Type:
        return type_of_value(node.value)

    def of_name(self, node: ast.Name) -> Type:
        return type_of_value(self.names.get(node.id, BUILTINS.get(node.id)))

    def of_attribute(self, node: ast.Attribute) -> Type:
        owner = self.of(node.value)
        if isinstance(owner, ArrayType):
            return {"size": INT64, "T": owner, "dtype": Cast(owner.dtype)}.get(node.attr)
        try:
            return None if owner is None else type_of_value(getattr(owner, node.attr, None))
        except UnsupportedConstruct:
            return None

    def of_subscript(self, node: ast.Subscript) -> Type:
        if isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "strides"):
            return INT64
        owner = self.of(node.value)
        if isinstance(owner, ArrayType):
            index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            fixed = sum(not isinstance(part, ast.Slice) for part in index)
            whole = fixed == owner.ndim
            return owner.dtype if whole else ArrayType(owner.dtype, owner.ndim - fixed, owner.kind)
        if isinstance(owner, tuple) and owner:
            return type_of_value(owner[0])
        return None

    def of_binop(self, node: ast.BinOp) -> Type:
        if self.of(node.left) is FLOAT64 or self.of(node.right) is FLOAT64:
            return FLOAT64  # whatever the other may be
        return self.result(getattr(arithmetic, BINARY[type(node.op)]), node.left, node.right)

    def of_unaryop(self, node: ast.UnaryOp) -> Type:
        return self.result(getattr(arithmetic, UNARY[type(node.op)]), node.operand)

    def of_compare(self, node: ast.Compare) -> Type:
        return BOOL

    def of_ifexp(self, node: ast.IfExp) -> Type:
        return self.common(node.body, node.orelse)

    def of_boolop(self, node: ast.BoolOp) -> Type:
        return self.common(*node.values[:2])

    def common(self, *nodes: ast.expr) -> np.dtype | None:
        """The type that holds two expressions, where a condition chooses between them."""
        return self.result(lambda a, b: select(np.ones((1, 1), bool), a, b), *nodes)

    def of_call(self, node: ast.Call) -> Type:
        function = self.of(node.func)
        if isinstance(function, Cast):
            return function.dtype
        if id(function) in TYPED:
            return self.result(function, *node.args)
        title = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if title in ("len", "grid", "gridsize"):
            return INT64
        if title.startswith("shfl") and len(node.args) > 1:
            return self.of(node.args[1])
        if title == "selp" and len(node.args) == 3:
            return self.common(*node.args[1:])
        return self.result(function, *node.args) if title == "fma" and function else None
