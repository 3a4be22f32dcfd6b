"""Where the values of a kernel come from: the literal, argument or operation that gave the type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import FLOAT16, FLOAT32, FLOAT64
from .bind import python_function
from .inference import Types
from .report import FUNCTION, KERNEL_MARK
from .transform import definition_of, is_literal

SMALL = (FLOAT32, FLOAT16)


class Origin(NamedTuple):
    """What made a value a float64, or an integer that makes a float64 of a float32.

    Attributes
    ----------
    scope : Scope
        The function in which it is.
    node : expression
    name : str or None
        The variable that has the value.
    what : str
        The beginning of a sentence: what is of which type.
    fix : str
        The end of the sentence: what to write instead.
    outside : bool
        Whether it comes from outside of the kernel, so that one change mends all its uses.
    """

    scope: Scope
    node: ast.expr | ast.stmt
    name: str | None
    what: str
    fix: str
    outside: bool = False


@dataclass(frozen=True)
class Scope:
    """A function while it runs: its source, its frame and the types there."""

    function: FunctionType
    frame: FrameType
    definition: ast.FunctionDef
    types: Types

    @classmethod
    def of(cls, frame: FrameType) -> Scope:
        function = frame.f_globals[FUNCTION]
        return cls(function, frame, definition_of(function), Types(frame))

    def caller(self) -> Scope | None:
        """The function that called this one; None for the kernel."""
        frame = self.frame.f_back
        while frame is not None and KERNEL_MARK not in frame.f_globals:
            frame = frame.f_back
        return None if frame is None else Scope.of(frame)

    def statements(self) -> list[ast.stmt]:
        """The innermost statements that run at this moment; there may be several in a line."""
        line, found = self.frame.f_lineno, []
        bodies = [self.definition.body]
        while bodies:
            for stmt in bodies.pop():
                if stmt.lineno <= line <= (stmt.end_lineno or stmt.lineno):
                    inner = [getattr(stmt, name, []) for name in ("body", "orelse")]
                    bodies += inner
                    if not any(covers(body, line) for body in inner):
                        found.append(stmt)
        return found

    def parameters(self) -> list[str]:
        arguments = self.definition.args
        return [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]

    def assigned(self, name: str) -> list[tuple[ast.stmt, ast.expr]]:
        """The statements that assign to a variable, each with the value that it gets."""
        found: list[tuple[ast.stmt, ast.expr]] = []
        pairs: list[tuple[ast.expr, ast.expr]]
        for stmt in ast.walk(self.definition):
            match stmt:
                case ast.Assign():
                    pairs = [pair for t in stmt.targets for pair in unpacked(t, stmt.value)]
                case ast.AnnAssign(value=ast.expr() as value):
                    pairs = [(stmt.target, value)]
                case ast.AugAssign(target=ast.Name(id=identifier)):
                    old = ast.copy_location(ast.Name(identifier, ast.Load()), stmt.target)
                    new = ast.BinOp(old, stmt.op, stmt.value)
                    pairs = [(stmt.target, ast.copy_location(new, stmt))]
                case ast.For():
                    pairs = unpacked(stmt.target, stmt.iter)
                case _:
                    continue
            found += [(stmt, v) for t, v in pairs if isinstance(t, ast.Name) and t.id == name]
        return found

    def argument(self, parameter: str) -> tuple[Scope, ast.expr] | None:
        """The expression that the caller hands to a parameter, and the scope of it."""
        caller = self.caller()
        if caller is None:
            return None
        for stmt in caller.statements():
            for node in ast.walk(stmt):
                if isinstance(node, ast.Call) and called(node, caller) is self.function:
                    given = dict(zip(self.parameters(), node.args, strict=False))
                    given |= {keyword.arg or "": keyword.value for keyword in node.keywords}
                    if parameter in given:
                        return caller, given[parameter]
        return None


def covers(body: list[ast.stmt], line: int) -> bool:
    return any(stmt.lineno <= line <= (stmt.end_lineno or stmt.lineno) for stmt in body)


def unpacked(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Targets and their values, where both are written as tuples."""
    if isinstance(target, ast.Tuple):
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            return [p for t, v in zip(target.elts, value.elts, strict=True) for p in unpacked(t, v)]
        return [(element, value) for element in target.elts]
    return [(target, value)]


def resolve(node: ast.expr, function: FunctionType) -> Any:
    """What a name or an attribute means outside of the emulator; None if that is not known."""
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value, function), node.attr, None)
    if not isinstance(node, ast.Name):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if node.id in cells:
        return cells[node.id].cell_contents
    return function.__globals__.get(node.id)


def called(node: ast.Call, scope: Scope) -> Any:
    """The Python function that a call calls."""
    return python_function(resolve(node.func, scope.function))


def operands(node: ast.AST) -> list[ast.expr]:
    """The parts of an expression that its type depends on."""
    match node:
        case ast.BinOp():
            return [node.left, node.right]
        case ast.UnaryOp():
            return [node.operand]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BoolOp():
            return node.values
        case ast.Call():
            return node.args
    return []


def article(kind: np.dtype) -> str:
    return f"{'an' if kind.name[0] in 'aeiou' else 'a'} {kind.name}"


def origins(
    node: ast.expr,
    scope: Scope,
    name: str | None = None,
    seen: frozenset[str] = frozenset(),
    whole: bool = False,
) -> Iterator[Origin]:
    """What an expression, a float64 or an integer beside a float32, has its type from.

    Parameters
    ----------
    node : expression
    scope : Scope
    name : str, optional
        The variable that the expression is assigned to.
    seen : frozenset of str
        Variables whose assignments are being looked at already.
    whole : bool
        Whether that variable is assigned the expression and nothing more.
    """
    if isinstance(node, ast.Name):
        yield from origins_of_name(node, scope, seen)
        return
    kind = scope.types.number(node)
    parts = operands(node)
    if kind is FLOAT64 and not is_literal(node):
        if any(scope.types.number(part) in SMALL for part in parts):
            culprits = [part for part in parts if scope.types.number(part) not in SMALL]
        else:
            culprits = [part for part in parts if scope.types.number(part) is FLOAT64]
        for part in culprits:
            yield from origins(part, scope, name, seen)
        if culprits:
            return
    yield leaf(node, scope, name, kind or FLOAT64, whole)


def origins_of_name(node: ast.Name, scope: Scope, seen: frozenset[str]) -> Iterator[Origin]:
    if node.id in seen:
        return
    kind = scope.types.number(node) or FLOAT64
    values = scope.assigned(node.id)
    if not values and node.id in scope.parameters():
        handed = scope.argument(node.id)
        if handed is not None:
            yield from origins(handed[1], handed[0])
            return
    if values and kind is FLOAT64:
        for _, value in values:
            if scope.types.number(value) is FLOAT64:
                yield from origins(value, scope, node.id, seen | {node.id}, whole=True)
            elif scope.types.number(value) is None and scope.types.of(value) is None:
                yield leaf(value, scope, node.id, kind, whole=True)
        return
    begins = [v for stmt, v in values if is_literal(v) and grows(node.id, values)]
    if begins:
        for value in begins:
            yield leaf(value, scope, node.id, kind, whole=True)
        return
    yield leaf(node, scope, node.id, kind)


def grows(name: str, values: list[tuple[ast.stmt, ast.expr]]) -> bool:
    """Whether a variable is assigned what is computed from it."""
    return any(
        isinstance(part, ast.Name) and part.id == name
        for _, value in values
        for part in ast.walk(value)
    )


def leaf(
    node: ast.expr, scope: Scope, name: str | None, kind: np.dtype, whole: bool = False
) -> Origin:
    """An expression that has its type from nothing else in the kernel."""
    text, title = ast.unparse(node), article(kind)
    fix, outside = f"write float32({text})", False
    reason = text
    match node:
        case ast.Name() if node.id in scope.parameters():
            reason, outside = f"the argument {text}", kind is FLOAT64
            fix = f"pass np.float32({text})" if outside else fix
        case ast.Name() if not scope.assigned(node.id):
            reason, outside = f"{text}, from outside of the kernel,", kind is FLOAT64
        case ast.Constant():
            reason = f"the literal {text}"
        case ast.Call():
            reason = f"what {text} returns"
        case ast.BinOp():
            reason = f"the quotient {text} of integers"
    if name is None or name == text:
        what = f"{reason} is {title}"
    elif whole and is_literal(node):
        what = f"{name} begins as {text}, which is {title}"
    else:
        what = f"{name} is {title}, because {reason} is one"
    return Origin(scope, node, name or named(node), what, fix, outside)


def named(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
