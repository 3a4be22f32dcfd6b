"""From a kernel's source to a function over lane vectors.

The source is parsed once per function and rewritten: operators become calls of `arithmetic`,
branches, loops and jumps become calls of `lanes.Lanes` (named ``_emu`` in the rewritten code),
assignments that other lanes must not see become merges. Positions are kept, so tracebacks and
faults show the user's file and line. The compiled code is cached on the function's code object;
what the names in it mean (device functions, captured constants, ``cuda``) is bound anew at each
launch by `bind`, so no captured value can go stale.
"""

from __future__ import annotations

import ast
import inspect
import tokenize
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from . import arithmetic
from .liveness import Merges, jumps, read, written
from .report import UnsupportedConstruct

JUMPS = (ast.Break, ast.Continue, ast.Return)

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
    ast.Pow: "raise_to",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
}
UNARY: dict[type[ast.unaryop], str] = {
    ast.USub: "negative",
    ast.UAdd: "positive",
    ast.Invert: "invert",
    ast.Not: "logical_not",
}
OPERATORS = {
    f"_emu_{name}": getattr(arithmetic, name)
    for name in (*BINARY.values(), *UNARY.values(), "select", "unify", "logical_and", "logical_or")
}

REFUSED: dict[type[ast.AST], str] = {
    ast.FunctionDef: "a function defined inside a kernel",
    ast.AsyncFunctionDef: "an async function",
    ast.ClassDef: "a class",
    ast.Lambda: "a lambda",
    ast.ListComp: "a list comprehension",
    ast.SetComp: "a set comprehension",
    ast.DictComp: "a dict comprehension",
    ast.GeneratorExp: "a generator expression",
    ast.List: "a list",
    ast.Set: "a set",
    ast.Dict: "a dict",
    ast.JoinedStr: "an f-string",
    ast.NamedExpr: "an assignment expression (:=)",
    ast.Starred: "a starred expression",
    ast.Await: "'await'",
    ast.Yield: "'yield'",
    ast.YieldFrom: "'yield from'",
    ast.With: "a 'with' block",
    ast.Try: "a 'try' block",
    ast.Raise: "'raise'",
    ast.Assert: "'assert'",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.Global: "'global'",
    ast.Nonlocal: "'nonlocal'",
    ast.Delete: "'del'",
    ast.Match: "a 'match' block",
    ast.MatMult: "matrix multiplication (@)",
}

OTHERWISE: dict[type[ast.AST], str] = {
    **dict.fromkeys(
        (ast.FunctionDef, ast.Lambda), "; define a @cuda.jit(device=True) function outside of it"
    ),
    **dict.fromkeys(
        (ast.List, ast.ListComp, ast.Set, ast.SetComp, ast.Dict, ast.DictComp, ast.GeneratorExp),
        "; values are held by a tuple or a cuda.local.array",
    ),
    **dict.fromkeys((ast.Import, ast.ImportFrom), "; import outside of it"),
    **dict.fromkeys((ast.Try, ast.Raise, ast.Assert, ast.Match), "; test conditions with 'if'"),
    ast.JoinedStr: "; store numbers in an array, and format them outside of it",
    ast.Call: "; store what you want to see in an array",
}
"""What to do instead of what is refused."""

FUSED = ("fma", "fmaf", "fma_rn")
"""Functions that are a multiply-add."""

PURE = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Attribute)
PURE_LEAVES = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)


class Code(NamedTuple):
    """A transformed function: ``outer(*free variables)`` in ``code`` returns it."""

    code: CodeType
    names: frozenset[str]
    constants: dict[str, Any]
    early_return: bool
    spins: bool


def pure(node: ast.AST) -> bool:
    """Whether an expression can be evaluated for lanes that do not want it: no memory, no call."""
    if isinstance(node, ast.Subscript):
        shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        return shape and isinstance(node.slice, ast.Constant)
    return isinstance(node, PURE_LEAVES) or (
        isinstance(node, PURE) and all(pure(child) for child in ast.iter_child_nodes(node))
    )


def name(identifier: str) -> ast.Name:
    return ast.Name(identifier, ast.Load())


def call(function: str, *args: ast.expr) -> ast.Call:
    """A call of one of the helpers that the rewritten code sees."""
    return ast.Call(name(f"_emu_{function}"), list(args), [])


def lanes(method: str, *args: ast.expr) -> ast.Call:
    """A call of a method of `lanes.Lanes`."""
    return ast.Call(ast.Attribute(name("_emu"), method, ast.Load()), list(args), [])


def begun(node: ast.AST) -> list[str]:
    """Names that a statement assigns a literal, or a constant of a module."""
    if not isinstance(node, ast.Assign):
        return []
    pairs = [(target, node.value) for target in node.targets]
    target, value = pairs[0]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    return [t.id for t, v in pairs if isinstance(t, ast.Name) and is_literal(v)]


def is_literal(node: ast.expr) -> bool:
    """Whether an expression is ``0.5``, ``-1`` or ``math.inf``."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, (ast.Constant, ast.Attribute))


def is_product(node: ast.expr) -> bool:
    """Whether a rewritten expression is a product, which a sum may take up in one instruction."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_emu_multiply"


def guard(test: ast.expr, body: list[ast.stmt]) -> ast.If:
    return ast.If(test, body, [])


def placed(new: ast.expr, old: ast.expr) -> ast.expr:
    """``new`` where ``old`` was, and not over the whole of a statement with a body."""
    return ast.fix_missing_locations(ast.copy_location(new, old))


class Transformer(ast.NodeTransformer):
    """Rewrites the body of one function."""

    def __init__(self, function: ast.FunctionDef, filename: str, kept: frozenset[str]):
        self.filename = filename
        self.constants: dict[str, Any] = {}
        self.temporaries = 0
        self.array_name = ""
        self.loops = 0
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        self.parameters = {a.arg for a in arguments}
        stores = {
            n.id
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        self.locals = self.parameters | stores
        self.literals = {target for n in ast.walk(function) for target in begun(n)}
        self.merges = Merges(function)
        self.merges.update(
            (id(stmt), name)
            for stmt in ast.walk(function)
            if kept and isinstance(stmt, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For))
            for name in kept & written(stmt.target if isinstance(stmt, ast.For) else stmt)
        )
        body = function.body
        before_the_end = body[:-1] if isinstance(body[-1], ast.Return) else body
        self.needs_frame = jumps(before_the_end, (ast.Return,))

    def refuse(self, node: ast.AST, what: str) -> UnsupportedConstruct:
        return UnsupportedConstruct(
            f"{self.filename}:{getattr(node, 'lineno', 0)}: {what} is not supported in a kernel "
            f"on the emulator{OTHERWISE.get(type(node), '')}"
        )

    def temporary(self) -> str:
        self.temporaries += 1
        return f"_emu_{self.temporaries}"

    def constant(self, value: Any) -> ast.Name:
        identifier = f"_emu_const_{len(self.constants)}"
        self.constants[identifier] = value
        return name(identifier)

    def visit(self, node: ast.AST) -> Any:
        if type(node) in REFUSED:
            raise self.refuse(node, REFUSED[type(node)])
        new = super().visit(node)
        if isinstance(node, ast.expr) and not hasattr(new, "lineno"):
            ast.copy_location(new, node)  # a statement may go over several lines
        return new

    # Function and blocks

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.args.vararg or node.args.kwarg:
            raise self.refuse(node, "a function with *args or **kwargs")
        body = self.block(node.body)
        unassigned = sorted({n for _, n in self.merges} - self.parameters)
        prologue: list[ast.stmt] = [
            ast.Assign([ast.Name(n, ast.Store())], name("_emu_UNASSIGNED")) for n in unassigned
        ]
        if self.needs_frame:
            prologue.append(ast.Expr(lanes("enter")))
            body.append(ast.Return(lanes("leave")))
        args = node.args
        for argument in args.posonlyargs + args.args + args.kwonlyargs:
            argument.annotation = None
        args.defaults, args.kw_defaults = [], [None] * len(args.kwonlyargs)
        node.body, node.decorator_list, node.returns = prologue + body, [], None
        return node

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for i, stmt in enumerate(body):
            new = self.visit(stmt)
            for piece in new if isinstance(new, list) else [new]:
                out.append(ast.copy_location(piece, stmt))
            if isinstance(stmt, JUMPS):
                break
            rest = body[i + 1 :]
            if rest and jumps([stmt], JUMPS):
                some_lanes = ast.Attribute(name("_emu"), "count", ast.Load())
                out.append(ast.copy_location(guard(some_lanes, self.block(rest)), rest[0]))
                break
        return out

    # Assignments

    def assign(self, stmt: ast.stmt, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        if isinstance(target, ast.Name):
            if (id(stmt), target.id) in self.merges:
                if target.id in self.literals and isinstance(stmt, ast.Assign):
                    value = call("unify", value, name(target.id))
                value = lanes("merge", value, name(target.id))
            return [ast.Assign([ast.Name(target.id, ast.Store())], value)]
        if isinstance(target, ast.Tuple):
            parts = [self.temporary() for _ in target.elts]
            unpack = ast.Tuple([ast.Name(p, ast.Store()) for p in parts], ast.Store())
            out: list[ast.stmt] = [ast.Assign([unpack], value)]
            for element, part in zip(target.elts, parts, strict=True):
                out += self.assign(stmt, element, name(part))
            return out
        if isinstance(target, ast.Subscript):
            array, index = self.visit(target.value), self.visit(target.slice)
            return [ast.Assign([ast.Subscript(array, index, ast.Store())], value)]
        raise self.refuse(target, "an assignment to an attribute or a starred name")

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        first = node.targets[0]
        self.array_name = first.id if isinstance(first, ast.Name) else ""
        value = self.visit(node.value)
        self.array_name = ""
        if len(node.targets) == 1:
            return self.assign(node, first, value)
        shared = self.temporary()
        out: list[ast.stmt] = [ast.Assign([ast.Name(shared, ast.Store())], value)]
        for target in node.targets:
            out += self.assign(node, target, name(shared))
        return out

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        if node.value is None:
            return [ast.Pass()]
        return self.assign(node, node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        if isinstance(node.target, ast.Name):
            value = self.operate(node, node.op, name(node.target.id), self.visit(node.value))
            return self.assign(node, node.target, value)
        if not isinstance(node.target, ast.Subscript):
            raise self.refuse(node, "an augmented assignment to an attribute")
        array, index = self.temporary(), self.temporary()
        old = call("item", name(array), name(index))
        new = self.operate(node, node.op, old, self.visit(node.value))
        return [
            ast.Assign([ast.Name(array, ast.Store())], self.visit(node.target.value)),
            ast.Assign([ast.Name(index, ast.Store())], self.visit(node.target.slice)),
            ast.Assign([ast.Subscript(name(array), name(index), ast.Store())], new),
        ]

    # Control flow

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Constant):
            return ast.Pass()
        return ast.Expr(self.visit(node.value))

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        test = placed(lanes("then", self.visit(node.test)), node.test)
        out: list[ast.stmt] = [guard(test, self.block(node.body))]
        if node.orelse:
            out.append(guard(lanes("otherwise"), self.block(node.orelse)))
        return [*out, ast.Expr(lanes("endif"))]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        leaves = jumps(node.body, JUMPS)
        source = node.iter
        if (
            isinstance(source, ast.Call)
            and isinstance(source.func, ast.Name)
            and source.func.id == "range"
            and "range" not in self.locals
        ):
            arguments = [self.visit(a) for a in source.args]
            iterator = lanes("range", ast.Constant(leaves), *arguments)
        else:
            iterator = lanes("each", ast.Constant(leaves), self.visit(source))
        value = self.temporary()
        loop_body = self.assign(node, node.target, name(value)) + self.turn(node)
        target = ast.Name(value, ast.Store())
        loop = ast.For(target, placed(iterator, source), loop_body, [])
        return [loop, *self.loop_else(node, leaves)]

    def turn(self, node: ast.For | ast.While) -> list[ast.stmt]:
        """The body of a loop; the trace is told where an iteration of an outermost loop ends."""
        self.loops += 1
        body = self.block(node.body)
        self.loops -= 1
        return body if self.loops else [*body, ast.Expr(call("turn"))]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        goes_on = ast.BoolOp(ast.And(), [lanes("rejoin"), lanes("hold", self.visit(node.test))])
        loop = ast.While(placed(goes_on, node.test), self.turn(node), [])
        out = [ast.Expr(lanes("open_loop")), loop, ast.Expr(lanes("close_loop"))]
        return [*out, *self.loop_else(node, True)]

    def loop_else(self, node: ast.For | ast.While, leaves: bool) -> list[ast.stmt]:
        if not node.orelse:
            return []
        body = self.block(node.orelse)
        if not leaves:
            return body
        return [guard(lanes("unbroken"), body), ast.Expr(lanes("endif"))]

    def visit_Break(self, node: ast.Break) -> ast.stmt:
        return ast.Expr(lanes("break_"))

    def visit_Continue(self, node: ast.Continue) -> ast.stmt:
        return ast.Expr(lanes("continue_"))

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        value = self.visit(node.value) if node.value else ast.Constant(None)
        return ast.Expr(lanes("return_", value)) if self.needs_frame else ast.Return(value)

    # Expressions

    def operate(self, node: ast.AST, op: ast.operator, left: ast.expr, right: ast.expr) -> ast.expr:
        if type(op) not in BINARY:
            raise self.refuse(node, REFUSED.get(type(op), "this operator"))
        result = call(BINARY[type(op)], left, right)
        if isinstance(op, (ast.Add, ast.Sub)) and (is_product(left) or is_product(right)):
            return call("fused", result)
        return result

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self.operate(node, node.op, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = node.operand
        if (
            isinstance(node.op, ast.USub)
            and isinstance(operand, ast.Constant)
            and isinstance(operand.value, (int, float))
        ):
            operand.value = -operand.value
            return self.visit_Constant(operand)
        return call(UNARY[type(node.op)], self.visit(operand))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if type(node.value) is float:
            return self.constant(np.float64(node.value))
        if type(node.value) is int and node.value > arithmetic.INT64_MAX:
            return self.constant(np.uint64(node.value))
        if type(node.value) in (complex, bytes):
            raise self.refuse(node, f"the constant {node.value!r}")
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        eager = all(pure(operand) for operand in node.comparators[1:])
        operands = [self.visit(operand) for operand in (node.left, *node.comparators)]
        left, parts = operands[0], []
        for i, (op, right) in enumerate(zip(node.ops, operands[1:], strict=True)):
            again: ast.expr = name("")
            if i + 1 < len(node.ops):
                kept = self.temporary()
                right, again = ast.NamedExpr(ast.Name(kept, ast.Store()), right), name(kept)
            if isinstance(op, (ast.In, ast.NotIn)):
                found: ast.expr = call("contains", right, left)
                parts.append(call("logical_not", found) if isinstance(op, ast.NotIn) else found)
            else:
                parts.append(ast.Compare(left, [op], [right]))
            left = again
        return self.short_circuit("and", parts, eager)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        eager = all(pure(value) for value in node.values[1:])
        operands = [self.visit(value) for value in node.values]
        return self.short_circuit("and" if isinstance(node.op, ast.And) else "or", operands, eager)

    def short_circuit(self, kind: str, operands: list[ast.expr], eager: bool) -> ast.expr:
        """``a and b``: at once when ``b`` is pure, else only for the lanes that ask for it."""
        result = operands[-1]
        for operand in reversed(operands[:-1]):
            if eager:
                result = call(f"logical_{kind}", operand, result)
            else:
                asked = lanes(f"begin_{kind}", operand)
                result = ast.IfExp(asked, lanes(f"end_{kind}", result), lanes("decided"))
        return result

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        static = self.is_constant(node.test)
        eager = pure(node.body) and pure(node.orelse)
        test, body, orelse = (self.visit(part) for part in (node.test, node.body, node.orelse))
        if static:
            return ast.IfExp(test, body, orelse)
        if eager:
            return call("select", test, body, orelse)
        chosen = ast.IfExp(lanes("then", test), body, name("_emu_UNASSIGNED"))
        other = ast.IfExp(lanes("otherwise"), orelse, name("_emu_UNASSIGNED"))
        return lanes("join", chosen, other)

    def is_constant(self, test: ast.expr) -> bool:
        """Whether Numba knows a condition at compile time, and compiles one branch only."""
        names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
        attributes = any(isinstance(n, ast.Attribute) for n in ast.walk(test))
        return pure(test) and not attributes and names.isdisjoint(self.locals)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        value, index = self.visit(node.value), self.visit(node.slice)
        if isinstance(index, ast.Constant):
            return ast.Subscript(value, index, ast.Load())
        return call("item", value, index)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            raise self.refuse(node, "print(...)")
        function = node.func
        new = ast.Call(
            self.visit(function),
            [self.visit(a) for a in node.args],
            [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords],
        )
        if getattr(function, "attr", getattr(function, "id", "")) in FUSED:
            return call("fused", new)
        if self.makes_array(function):
            site = ast.Tuple([ast.Constant(node.lineno), ast.Constant(node.col_offset)], ast.Load())
            new.keywords += [
                ast.keyword("name", ast.Constant(self.array_name or "array")),
                ast.keyword("site", site),
            ]
        return new

    @staticmethod
    def makes_array(function: ast.expr) -> bool:
        """Whether a callee reads ``shared.array`` or ``local.array``, with or without ``cuda``."""
        if not isinstance(function, ast.Attribute) or function.attr != "array":
            return False
        owner = function.value
        kind = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return kind in ("shared", "local")


_CACHE: dict[tuple[str, CodeType, frozenset[str]], Code] = {}
"""By file and code, because code of two files may be equal."""


def transform(function: FunctionType, kept: frozenset[str] = frozenset()) -> Code:
    """The rewritten code of a function, from the cache after the first time.

    Parameters
    ----------
    function : function
    kept : frozenset of str
        Variables of which somebody wants to see the value of every thread, also of those that
        never read it again.

    Raises
    ------
    UnsupportedConstruct
        If the source is not available, or uses what a kernel may not use.
    """
    key = function.__code__.co_filename, function.__code__, kept
    if key not in _CACHE:
        _CACHE[key] = rewrite(function, kept)
    return _CACHE[key]


def definition_of(function: FunctionType) -> ast.FunctionDef:
    """The ``def`` statement of a function; its nodes have the positions of the user's file."""
    filename, first_line = function.__code__.co_filename, function.__code__.co_firstlineno
    try:
        source = inspect.getsource(function.__code__)
        # An indented definition needs a block around it: some lines of it, in a docstring or a
        # comment, may be indented less, so that nothing can be taken away from all of them.
        if source[0].isspace():
            block = ast.parse("\n" * (first_line - 2) + "if True:\n" + source).body[0]
            assert isinstance(block, ast.If)
            definition = block.body[0]
        else:
            definition = ast.parse("\n" * (first_line - 1) + source).body[0]
    except OSError:
        raise UnsupportedConstruct(
            f"the source of {function.__name__} ({filename}) cannot be found; define it in a file "
            "or in a notebook cell, but not in one that begins with %%time"
        ) from None
    except (SyntaxError, tokenize.TokenError):
        definition = ast.Pass()  # a part of an expression, which a lambda may be
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__code__.co_name:
        raise UnsupportedConstruct(
            f"{filename}:{first_line}: {function.__name__} is not written as a 'def' statement, "
            "which the emulator reads; write it as one"
        )
    return definition


def waits(node: ast.AST) -> bool:
    """Whether a statement is a loop that may wait for another thread to change memory."""
    if not isinstance(node, ast.While):
        return False
    tests = [node.test, *(n.test for n in ast.walk(node) if isinstance(n, ast.If))]
    inside = [part for test in tests for part in ast.walk(test)]
    names = {getattr(part, "attr", getattr(part, "id", "")) for part in inside}
    looks = any(isinstance(part, ast.Subscript) for part in ast.walk(node.test))
    stores = any(
        isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store)
        for stmt in node.body
        for part in ast.walk(stmt)
    )
    changed = frozenset().union(*map(written, node.body))
    return "atomic" in names or (looks and not stores and read(node.test).isdisjoint(changed))


def rewrite(function: FunctionType, kept: frozenset[str]) -> Code:
    filename = function.__code__.co_filename
    definition = definition_of(function)
    spins = any(map(waits, ast.walk(definition)))
    transformer = Transformer(definition, filename, kept)
    rewritten = transformer.function(definition)
    outer = ast.parse(f"def _emu_outer({', '.join(function.__code__.co_freevars)}): pass")
    wrapper = outer.body[0]
    assert isinstance(wrapper, ast.FunctionDef)
    wrapper.body = [rewritten, ast.Return(name(rewritten.name))]
    ast.fix_missing_locations(outer)
    early = transformer.needs_frame
    names = {n.id for n in ast.walk(rewritten) if isinstance(n, ast.Name)}
    return Code(
        compile(outer, filename, "exec"), frozenset(names), transformer.constants, early, spins
    )
