"""Whether a kernel's threads can run in step, or some of them have to wait for others."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from .bind import known_instructions, python_function
from .hopper import GROUP_SIZES, WARP_SIZE
from .transform import transform


def group_size(kernel: Any) -> int | None:
    """How many threads of a kernel may run in step; None: all of them.

    A spin lock is held by one thread and awaited by its neighbours, so each thread runs alone,
    unless it needs its warp: then neighbours in a warp must not wait for each other. A
    kernel with barriers of its own runs in warps, and one with products of a warpgroup in
    warpgroups.
    """
    things = list(reachable(kernel))
    sizes = [GROUP_SIZES[type(thing)] for thing in things if type(thing) in GROUP_SIZES]
    if sizes:
        return max(sizes)
    functions = [thing for thing in things if isinstance(thing, FunctionType)]
    if not any(transform(function).spins for function in functions):
        return None
    names = {name for function in functions for name in function.__code__.co_names}
    return WARP_SIZE if any(map(is_of_a_warp, names)) else 1


def is_of_a_warp(name: str) -> bool:
    """Whether a name is a function of ``cuda`` that lanes of a warp execute together."""
    return name.endswith("_sync") or name in ("laneid", "activemask", "lanemask_lt")


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
