"""Whether a kernel's threads can run in step, or some of them have to wait for others."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from .bind import known_instructions, python_function
from .hopper import GROUP_SIZES
from .transform import transform


def group_size(kernel: Any) -> int | None:
    """How many threads of a kernel may run in step; None: all of them.

    A spin lock is held by one thread and awaited by its neighbours, so each thread runs alone. A
    kernel with barriers of its own runs in warps, and one with products of a warpgroup in
    warpgroups.
    """
    things = list(reachable(kernel))
    sizes = [GROUP_SIZES[type(thing)] for thing in things if type(thing) in GROUP_SIZES]
    if sizes:
        return max(sizes)
    functions = (thing for thing in things if isinstance(thing, FunctionType))
    return 1 if any(transform(function).spins for function in functions) else None


def reachable(kernel: Any) -> Iterator[Any]:
    """The functions that a kernel consists of, and the descriptions of its instructions."""
    descriptions = known_instructions()
    waiting, seen = [kernel], set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        description = known(descriptions, thing)
        if description is not None:
            yield description
            continue
        function = python_function(thing)
        origin = getattr(function, "__module__", "") or ""
        if isinstance(function, FunctionType) and not origin.startswith(("numba.", "numpy")):
            yield function
            waiting += mentioned(function)
        elif isinstance(thing, tuple):
            waiting += thing


def known(descriptions: dict, thing: Any) -> Any:
    try:
        return descriptions.get(thing)
    except TypeError:
        return None


def mentioned(function: FunctionType) -> Iterator[Any]:
    """What the names in a function refer to; of a module, the parts that have such a name."""
    names = function.__code__.co_names
    things = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            things.append(cell.cell_contents)
        except ValueError:
            continue
    for thing in things:
        if isinstance(thing, ModuleType):
            if not thing.__name__.startswith(("numba.", "numpy")) and thing.__name__ != "math":
                yield from (vars(thing)[name] for name in names if name in vars(thing))
        else:
            yield thing
