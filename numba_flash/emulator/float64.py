"""Double precision that nobody asked for: a float64 that creeps into float32 arithmetic.

A bare ``0.5`` is a float64 to Numba, and so is what comes of it and a float32. `arithmetic` tells
`Precision` where the two meet, which a clean kernel never does. From there on the source is read:
what met (`inference`), and where was it born (`origin`)?
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import FLOAT64
from .bind import python_function
from .compiled import Float64Variable, float64_variables
from .inference import ArrayType
from .liveness import Merges
from .origin import SMALL, Origin, Scope, called, operands, origins, resolve
from .report import Fault, Report, UnsupportedConstruct
from .transform import definition_of

DOUBLE = {"float64", "double", "f8"}
"""What double precision is called by those who mean it."""
CHOOSING = {"min", "max", "minimum", "maximum", "fmin", "fmax"}


class Meeting(NamedTuple):
    """A float32, as it is written, and what makes a float64 of it.

    Attributes
    ----------
    small : str
    other : expression
    stored : bool
        Whether ``small`` is an element in which the other, a float64, is stored.
    """

    small: str
    other: ast.expr
    stored: bool = False


class Precision:
    """Watches a launch, and says where a float64 that meets a float32 comes from.

    Parameters
    ----------
    kernel : dispatcher or function
    arguments : iterable
        What the kernel is launched with.
    report : Report
    """

    def __init__(self, kernel: Any, arguments: Iterable[Any], report: Report):
        self.kernel = kernel
        self.arguments = tuple(arguments)
        self.report = report
        self.seen: set[tuple[CodeType, int]] = set()
        self.found: set[tuple] = set()
        self.guilty: set[FunctionType] = set()
        self.busy = False
        self._meant: bool | None = None
        self._compiled: list[Float64Variable] | None = None
        self._asked = False

    def notice(self, frame: FrameType, sure: bool) -> None:
        """A float32 and a float64 meet in kernel code; ``sure``: and a float64 comes of it."""
        place = frame.f_code, frame.f_lasti
        if self.busy or place in self.seen:
            return
        self.seen.add(place)
        self.busy = True  # `inference` asks the same arithmetic
        try:
            if not self.meant():
                self.examine(Scope.of(frame), sure)
        finally:
            self.busy = False

    def meant(self) -> bool:
        """Whether an array among the arguments, or a word of the source, is double precision."""
        if self._meant is None:
            function = python_function(self.kernel)
            self._meant = any(map(holds_float64, self.arguments)) or names_float64(function, set())
        return self._meant

    def examine(self, scope: Scope, sure: bool) -> None:
        met = [m for stmt in scope.statements() for m in meetings(stmt, scope)]
        if sure and not met:
            met = [m for stmt in scope.statements() for m in likely_meetings(stmt, scope)]
        for meeting in met:
            for origin in origins(meeting.other, scope):
                self.tell(origin, meeting, scope)
        if sure and not met:
            place = Origin(scope, scope.statements()[0], None, "", "")
            self.add(place, "a float32 meets a wider number here, and the result is a float64")

    def tell(self, origin: Origin, meeting: Meeting, at: Scope) -> None:
        function = origin.scope.function
        at_node = origin.node.lineno, origin.node.col_offset
        key = function, origin.name if origin.outside else at_node
        if key in self.found or self.told(meeting.other, at):
            return
        self.found.add(key)
        line = at.frame.f_lineno
        here = origin.scope.function is at.function and origin.node.lineno == line
        small = meeting.small if here else f"{meeting.small} in line {line}"
        kind = at.types.number(meeting.other)
        if meeting.stored:
            effect = f"the float32 {small} takes what was computed in double precision"
        elif kind is not None and kind.kind in "iu":
            effect = f"with the float32 {small} it makes a float64"
        else:
            effect = f"drags the float32 {small} into double precision"
        self.add(origin, f"{origin.what}, and {effect}; {origin.fix}")

    def told(self, node: ast.expr, scope: Scope) -> bool:
        """Whether an expression is the result of a function that has a fault of its own."""
        return isinstance(node, ast.Call) and called(node, scope) in self.guilty

    def add(self, origin: Origin, message: str) -> None:
        """Report a fault, unless the compiler knows of no float64 in the kernel."""
        function = origin.scope.function
        variables = self.compiled()
        if variables is not None and function is python_function(self.kernel):
            if not variables:
                return
            names = sorted({variable.name for variable in variables if variable.name})
            if names:
                message += f" (Numba compiles {', '.join(names)} as float64)"
        self.guilty.add(function)
        file = function.__code__.co_filename
        self.report.add(Fault("float64", message, origin.node.lineno, array=origin.name, file=file))

    def compiled(self) -> list[Float64Variable] | None:
        """What Numba's compiler says, or None where it cannot be asked."""
        if not self._asked:
            self._asked = True
            try:
                self._compiled = float64_variables(self.kernel, *self.arguments)
            except Exception:  # it is a second opinion; a run does not depend on it
                self._compiled = None
        return self._compiled


# What is meant


def holds_float64(value: Any) -> bool:
    """Whether a kernel argument is an array of float64, or has one."""
    if isinstance(value, tuple):
        return any(map(holds_float64, value))
    return isinstance(value, np.ndarray) and value.dtype == FLOAT64


def names_float64(function: FunctionType, seen: set[FunctionType]) -> bool:
    """Whether the source of a function, or of one that it calls, says float64."""
    seen.add(function)
    try:
        body = definition_of(function).body
    except UnsupportedConstruct:
        return False
    for node in (node for stmt in body for node in ast.walk(stmt)):
        word = getattr(node, "attr", getattr(node, "value", None))
        if isinstance(word, str) and word in DOUBLE:
            return True
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        thing = resolve(node, function)
        if is_float64(thing):
            return True
        inner = python_function(thing)
        if isinstance(inner, FunctionType) and inner not in seen:
            numba = (inner.__module__ or "").startswith("numba.")
            if not numba and names_float64(inner, seen):
                return True
    return False


def is_float64(thing: Any) -> bool:
    """Whether an object is the type, to Numba or to NumPy."""
    if isinstance(thing, np.dtype):
        return thing == FLOAT64
    return thing is np.float64 or (
        type(thing).__module__.startswith("numba") and str(thing) == "float64"
    )


# What meets


def meetings(stmt: ast.stmt, scope: Scope) -> Iterator[Meeting]:
    """The places in a statement where a float32 becomes a float64."""
    for node in reversed(list(own_expressions(stmt))):  # the innermost first
        if isinstance(node, (ast.BinOp, ast.IfExp, ast.BoolOp, ast.Call)):
            yield from met(node, operands(node), scope)
    match stmt:
        case ast.AugAssign():
            old = loaded(stmt.target)
            new = ast.copy_location(ast.BinOp(old, stmt.op, stmt.value), stmt)
            yield from met(new, [old, stmt.value], scope)
            yield from stored(stmt.target, new, scope)
        case ast.Assign(targets=[ast.Subscript() as target]):
            yield from stored(target, stmt.value, scope)
        case ast.Assign(targets=[ast.Name() as target]):
            if (id(stmt), target.id) in Merges(scope.definition):
                yield from either(loaded(target), stmt.value, scope)
        case ast.Return(value=ast.expr() as value):
            for other in ast.walk(scope.definition):
                if isinstance(other, ast.Return) and other.value not in (None, value):
                    yield from either(value, other.value, scope)


def likely_meetings(stmt: ast.stmt, scope: Scope) -> Iterator[Meeting]:
    """Where a number meets what a device function returns, whose type is not known."""
    pairs = [operands(node) for node in own_expressions(stmt)]
    if isinstance(stmt, ast.AugAssign):
        pairs.append([loaded(stmt.target), stmt.value])
    for parts in pairs:
        kinds = [scope.types.number(part) for part in parts]
        known = zip(parts, kinds, strict=True)
        unknown = [part for part, kind in known if kind is None and isinstance(part, ast.Call)]
        for part, kind in zip(parts, kinds, strict=True):
            if unknown and kind in SMALL:
                yield Meeting(ast.unparse(part), unknown[0])
            elif unknown and kind is not None:
                yield Meeting(ast.unparse(unknown[0]), part)


def own_expressions(stmt: ast.stmt) -> Iterator[ast.AST]:
    """The expressions in a statement, but not those of the statements in it."""
    for child in ast.iter_child_nodes(stmt):
        if not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as the expression of its old value."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    return target


def met(node: ast.expr, parts: list[ast.expr], scope: Scope) -> Iterator[Meeting]:
    """An operation on a float32 and something else whose result is a float64."""
    kinds = [scope.types.number(part) for part in parts]
    small = [ast.unparse(part) for part, kind in zip(parts, kinds, strict=True) if kind in SMALL]
    if small and scope.types.number(node) is FLOAT64:
        for part, kind in zip(parts, kinds, strict=True):
            if kind not in SMALL:
                yield Meeting(small[0], part)


def either(a: ast.expr, b: ast.expr, scope: Scope) -> Iterator[Meeting]:
    """A choice between two expressions that are written apart."""
    choice = ast.copy_location(ast.IfExp(ast.Constant(True), a, b), a)
    yield from met(choice, [a, b], scope)


def stored(target: ast.expr, value: ast.expr, scope: Scope) -> Iterator[Meeting]:
    """A float32 element that takes what was computed as a float64."""
    if isinstance(target, ast.Subscript):
        array = scope.types.of(target.value)
        small = isinstance(array, ArrayType) and array.dtype in SMALL
        if small and scope.types.number(value) is FLOAT64 and computed(value, scope, frozenset()):
            yield Meeting(ast.unparse(target), value, stored=True)


def computed(node: ast.expr, scope: Scope, seen: frozenset[str]) -> bool:
    """Whether an expression is more than a choice of constants and arguments."""
    match node:
        case ast.BinOp() | ast.Call():
            return True
        case ast.IfExp() | ast.UnaryOp():
            return any(computed(part, scope, seen) for part in operands(node))
        case ast.Name() if node.id not in seen:
            values = scope.assigned(node.id)
            return any(computed(v, scope, seen | {node.id}) for _, v in values)
    return False
