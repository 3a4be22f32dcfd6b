"""Atomic operations: read-modify-write, lane after lane where lanes meet at one element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import Value, cast
from .lanes import Lanes, without
from .memory import ATOMIC, Array

Update = Callable[..., np.ndarray]


def increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + 1)


def decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - 1)


def exchange(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new


def compare_and_swap(old: np.ndarray, expected: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old == expected, new, old)


UPDATES: dict[str, Update] = {
    "add": np.add,
    "sub": np.subtract,
    "max": np.fmax,
    "min": np.fmin,
    "nanmax": np.fmax,
    "nanmin": np.fmin,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": increment,
    "dec": decrement,
    "exch": exchange,
    "cas": compare_and_swap,
}


class Atomics:
    """``cuda.atomic`` for one batch of blocks; each function returns the old value."""

    def __init__(self, lanes: Lanes):
        self.lanes = lanes

    def __getattr__(self, operation: str) -> Callable[..., Value]:
        if operation not in UPDATES:
            raise AttributeError(f"cuda.atomic has no function {operation}")
        update = UPDATES[operation]
        return lambda array, index, *operands: self.apply(update, array, index, operands)

    def compare_and_swap(self, array: Array, old: Value, value: Value) -> Value:
        return self.apply(compare_and_swap, array, (0,) * array.ndim, (old, value))

    def apply(self, update: Update, array: Any, index: Any, operands: tuple) -> Value:
        if not isinstance(array, Array):
            raise TypeError(f"an atomic operation needs an array, not a {type(array).__name__}")
        if not array.writeable:
            raise array.read_only()
        index = index if type(index) is tuple else (index,)
        if array.is_view(index):
            raise IndexError(f"an atomic operation on {array.name} needs {array.ndim} indices")
        base, offset, lost = array.locate(index, array.shape, array.strides)
        array.read(index, base, offset, lost, ATOMIC)
        mask = without(self.lanes.mask, lost)
        space = array.space
        wide = [cast(operand, space.dtype) for operand in operands]
        places, *wide = self.lanes.spread(mask, space.address(base, offset), *wide)
        before = np.empty(len(places), space.dtype)
        for turn in turns(places):
            place = places[turn]
            before[turn] = space.flat[place]
            after = update(before[turn], *(operand[turn] for operand in wide))
            self.lanes.stores += bool(np.any(after != before[turn]))
            space.flat[place] = after
        if mask is None:
            return before.reshape(self.lanes.shape)
        old = np.zeros(self.lanes.shape, space.dtype)
        old[np.broadcast_to(mask, self.lanes.shape)] = before
        return old


def turns(places: np.ndarray) -> list[np.ndarray | slice]:
    """Lanes in rounds: each round touches an element once, lower lanes come first."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else ordered
    if len(starts) == len(places):
        return [slice(None)]
    lengths = np.diff(np.r_[starts, len(ordered)])
    turn = np.arange(len(ordered)) - np.repeat(starts, lengths)
    by_turn = np.argsort(turn, kind="stable")
    ends = np.cumsum(np.bincount(turn))
    return [order[part] for part in np.split(by_turn, ends[:-1])]
