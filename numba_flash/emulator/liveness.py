"""Which assignments must keep the old value of the lanes that wait.

All lanes share one variable. When some of them wait outside a branch or a loop, an assignment
inside must merge old and new values, but only if a waiting lane may still read the old one. Most
temporaries are never read there, and a temporary that is not merged stays uniform. This is plain
backward liveness: for each assignment, the names alive at the places where waiting lanes resume.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

Names = frozenset[str]
NOTHING: Names = frozenset()


def read(node: ast.AST | None) -> Names:
    """Names that an expression loads."""
    if node is None:
        return NOTHING
    return frozenset(
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    )


def written(node: ast.AST) -> Names:
    """Names that a statement stores."""
    return frozenset(
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )


def jumps(body: list[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> bool:
    """Whether a block holds a jump of these kinds; break and continue of inner loops are theirs."""
    for stmt in body:
        if isinstance(stmt, kinds):
            return True
        if isinstance(stmt, ast.If) and jumps(stmt.body + stmt.orelse, kinds):
            return True
        if isinstance(stmt, (ast.For, ast.While)):
            leaving = tuple(kind for kind in kinds if kind is ast.Return)
            if jumps(stmt.orelse, kinds) or jumps(stmt.body, leaving):
                return True
    return False


class Exits(NamedTuple):
    """Names alive where ``break`` and ``continue`` of the innermost loop lead."""

    after_break: Names = NOTHING
    after_continue: Names = NOTHING


class Merges(set[tuple[int, str]]):
    """Pairs (id of a statement, name) whose assignment must merge with the old value."""

    def __init__(self, function: ast.FunctionDef):
        super().__init__()
        self._block(function.body, NOTHING, Exits(), NOTHING)

    def _block(self, body: list[ast.stmt], live: Names, exits: Exits, elsewhere: Names) -> Names:
        """Names alive before ``body``, given those after it; ``elsewhere``: where others wait."""
        for stmt in reversed(body):
            live = self._statement(stmt, live, exits, elsewhere)
        return live

    def _statement(self, stmt: ast.stmt, live: Names, exits: Exits, elsewhere: Names) -> Names:
        match stmt:
            case ast.If():
                otherwise = self._block(stmt.orelse, live, exits, elsewhere | live)
                body = self._block(stmt.body, live, exits, elsewhere | otherwise)
                return read(stmt.test) | body | otherwise
            case ast.For() | ast.While():
                return self._loop(stmt, live, exits, elsewhere)
            case ast.Return():
                return read(stmt.value)
            case ast.Break():
                return exits.after_break
            case ast.Continue():
                return exits.after_continue
        names = written(stmt)
        self.update((id(stmt), name) for name in names & elsewhere)
        reads = read(stmt)
        if isinstance(stmt, ast.AugAssign):
            reads |= names
        return (live - names) | reads

    def _loop(
        self, stmt: ast.For | ast.While, live: Names, exits: Exits, elsewhere: Names
    ) -> Names:
        after = self._block(stmt.orelse, live, exits, elsewhere | live)
        condition, target = NOTHING, NOTHING
        if isinstance(stmt, ast.While):
            condition = read(stmt.test)
        else:
            target = written(stmt.target)
        head = after | condition
        rejoin = jumps(stmt.body, (ast.Continue,))
        while True:
            waiting = elsewhere | after | live | (head if rejoin else NOTHING)
            body = self._block(stmt.body, head, Exits(live, head), waiting)
            before = head | (body - target)
            if before == head:
                break
            head = before
        self.update((id(stmt), name) for name in target & waiting)
        return head | (read(stmt.iter) if isinstance(stmt, ast.For) else NOTHING)
