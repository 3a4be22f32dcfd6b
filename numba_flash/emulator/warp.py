"""What the 32 lanes of a warp do together: shuffles and votes."""

from __future__ import annotations

import numpy as np

from .arithmetic import Value, cast, strong, truth
from .check import Checker, first
from .lanes import Lanes
from .spaces import poison

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF
SHUFFLED = {np.dtype(name) for name in ("int32", "int64", "float32", "float64")}
WEIGHTS = np.int64(1) << np.arange(WARP_SIZE, dtype=np.int64)


class Warp:
    """The warp functions of ``cuda`` for one batch of blocks."""

    def __init__(self, lanes: Lanes, checker: Checker):
        self.lanes = lanes
        self.checker = checker
        self.rank = np.arange(lanes.num_threads)[None, :]
        self.laneid = ((self.rank + lanes.first_thread) % WARP_SIZE).astype(np.int32)
        self.num_warps = -(-lanes.num_threads // WARP_SIZE)

    # A (blocks, threads) array as (blocks, warps, 32) and back

    def by_warp(self, values: Value) -> np.ndarray:
        wide = np.broadcast_to(values, self.lanes.shape)
        missing = self.num_warps * WARP_SIZE - self.lanes.num_threads
        if missing:
            wide = np.pad(wide, ((0, 0), (0, missing)))
        return wide.reshape(len(wide), self.num_warps, WARP_SIZE)

    def to_lanes(self, values: np.ndarray) -> np.ndarray:
        """One value a warp, or one a lane, as a (blocks, threads) array."""
        if values.ndim == 2:
            values = np.repeat(values[:, :, None], WARP_SIZE, axis=2)
        return values.reshape(len(values), -1)[:, : self.lanes.num_threads]

    def participants(self, members: Value, function: str) -> np.ndarray:
        """The active lanes, by warp; a named lane that is missing is a fault."""
        here = self.by_warp(self.lanes.full_mask())
        if self.lanes.mask is None and type(members) is int and members in (FULL_MASK, -1):
            return here
        named = self.named(members, here)
        if self.checker.active:
            strangers = self.to_lanes(here & ~named)
            if strangers.any():
                block, thread = first(strangers)
                self.checker.fault(
                    "barrier-divergence",
                    f"{function} is called by lanes that its mask does not name; "
                    f"{self.checker.who(block, thread)} is one",
                    strangers,
                )
            exited = self.lanes.exited()
            gone = np.zeros_like(here) if exited is None else self.by_warp(exited)
            absent = named & here.any(axis=2, keepdims=True) & ~here & ~gone
            absent = self.to_lanes(np.asarray(absent))
            if absent.any():
                block, thread = first(absent)
                self.checker.fault(
                    "barrier-divergence",
                    f"{function} names lanes of the warp that do not reach it; "
                    f"{self.checker.who(block, thread)} does not",
                    absent,
                )
        return here & named

    def named(self, members: Value, here: np.ndarray) -> np.ndarray:
        """The lanes that the mask argument of the active lanes names, by warp."""
        masks = np.where(here, self.by_warp(cast(members, np.dtype(np.int64))), 0)
        union = np.bitwise_or.reduce(masks, axis=2, keepdims=True)
        return (union & WEIGHTS) != 0

    # Shuffles

    def shfl_sync(self, mask: Value, value: Value, src_lane: Value) -> Value:
        lane = np.bitwise_and(src_lane, WARP_SIZE - 1)
        return self.shuffle(mask, value, lane, "shfl_sync")

    def shfl_xor_sync(self, mask: Value, value: Value, lane_mask: Value) -> Value:
        return self.shuffle(mask, value, self.laneid ^ lane_mask, "shfl_xor_sync")

    def shfl_up_sync(self, mask: Value, value: Value, delta: Value) -> Value:
        return self.shuffle(mask, value, self.laneid - delta, "shfl_up_sync")

    def shfl_down_sync(self, mask: Value, value: Value, delta: Value) -> Value:
        return self.shuffle(mask, value, self.laneid + delta, "shfl_down_sync")

    def shuffle(self, mask: Value, value: Value, lane: Value, function: str) -> Value:
        """Each lane's value from another lane; its own where that one lies outside the warp."""
        value = strong(value)
        if value.dtype not in SHUFFLED:
            raise TypeError(
                f"{self.checker.place()}: {function} takes int32, int64, float32 or float64, "
                f"not {value.dtype}"
            )
        whole = self.lanes.mask is None and type(mask) is int and mask in (FULL_MASK, -1)
        members = None if whole else self.to_lanes(self.participants(mask, function))
        if not isinstance(value, np.ndarray) or value.shape[1] == 1 < self.lanes.num_threads:
            return value
        source = self.rank - self.laneid + lane
        outside = (lane < 0) | (lane >= WARP_SIZE) | (source >= self.lanes.num_threads)
        source = np.where(outside, self.rank, source)
        if len(source) == 1 and members is None:
            return value.take(source[0], axis=1)
        source = np.broadcast_to(source, self.lanes.shape)
        taken = np.take_along_axis(np.broadcast_to(value, self.lanes.shape), source, axis=1)
        if members is None:
            return taken
        # What a lane that takes no part would give is not defined.
        return np.where(np.take_along_axis(members, source, axis=1), taken, poison(value.dtype))

    # Votes

    def votes(self, mask: Value, predicate: Value, function: str) -> tuple[np.ndarray, np.ndarray]:
        members = self.participants(mask, function)
        return self.by_warp(truth(predicate)) & members, members

    def ballot_sync(self, mask: Value, predicate: Value) -> Value:
        ayes, _ = self.votes(mask, predicate, "ballot_sync")
        return self.to_lanes((ayes @ WEIGHTS).astype(np.int32))

    def all_sync(self, mask: Value, predicate: Value) -> Value:
        ayes, members = self.votes(mask, predicate, "all_sync")
        return self.to_lanes(unanimous(ayes, members))

    def any_sync(self, mask: Value, predicate: Value) -> Value:
        ayes, _ = self.votes(mask, predicate, "any_sync")
        return self.to_lanes(np.asarray(ayes.any(axis=2)))

    def eq_sync(self, mask: Value, predicate: Value) -> Value:
        ayes, members = self.votes(mask, predicate, "eq_sync")
        return self.to_lanes(unanimous(ayes, members) | ~ayes.any(axis=2))

    def match_any_sync(self, mask: Value, value: Value) -> Value:
        members = self.participants(mask, "match_any_sync")
        values = self.by_warp(strong(value))
        same = (values[..., :, None] == values[..., None, :]) & members[..., None, :]
        return self.to_lanes((same @ WEIGHTS).astype(np.int32))

    def match_all_sync(self, mask: Value, value: Value) -> tuple[Value, Value]:
        members = self.participants(mask, "match_all_sync")
        values = self.by_warp(strong(value))
        leader = np.take_along_axis(values, members.argmax(axis=2)[..., None], axis=2)
        same = ((values == leader) | ~members).all(axis=2)
        found = np.where(same, members @ WEIGHTS, 0).astype(np.int32)
        return self.to_lanes(found), self.to_lanes(same)

    def activemask(self) -> Value:
        here = self.by_warp(self.lanes.full_mask())
        return self.to_lanes((here @ WEIGHTS).astype(np.uint32))

    def lanemask_lt(self) -> Value:
        return ((np.int64(1) << self.laneid.astype(np.int64)) - 1).astype(np.uint32)

    def syncwarp(self, mask: Value = FULL_MASK) -> None:
        members = None
        if self.lanes.mask is not None or type(mask) is not int or mask not in (FULL_MASK, -1):
            members = self.to_lanes(self.participants(mask, "syncwarp"))
        self.checker.syncwarp(members)


def unanimous(ayes: np.ndarray, members: np.ndarray) -> np.ndarray:
    """By warp, whether all members voted aye."""
    return np.asarray(~(members & ~ayes).any(axis=2))
