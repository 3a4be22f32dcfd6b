"""What a rung is: a name, its tiles, and a plan for each direction."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..plan import Plan
from ..problem import Device, Problem

STATIC_SHARED_BYTES = 48 * 1024
"""What every GPU from sm_75 on gives a kernel without asking; ptxas refuses more."""


@dataclass(frozen=True)
class Rung:
    """One kernel family.

    Attributes
    ----------
    name : str
        What ``kernel=`` takes.
    Config : type
        Frozen dataclass of tile sizes.
    candidates : tuple of Config
        Tiles to try, the fastest first; the first that fits is the default.
    shared_bytes : callable (problem, config, backward) -> int
        Shared memory that a block needs.
    refuses : callable (problem, device) -> str or None
        Why the rung cannot solve the problem, shared memory aside, or None.
    forward, backward : callable (problem, config) -> Plan
    suits : callable (problem, config, backward) -> bool
        Whether a candidate's sums have room in registers; by default they always do.
    """

    name: str
    Config: type
    candidates: tuple[Any, ...]
    shared_bytes: Callable[[Problem, Any, bool], int]
    refuses: Callable[[Problem, Device], str | None]
    forward: Callable[[Problem, Any], Plan]
    backward: Callable[[Problem, Any], Plan]
    suits: Callable[[Problem, Any, bool], bool] = lambda problem, config, backward: True

    def supports(self, problem: Problem, device: Device) -> str | None:
        """Why the rung cannot solve the problem in both directions, or None."""
        reason = self.refuses(problem, device)
        if reason is not None:
            return reason
        for backward in (False, True):
            if not any(self._fits(problem, c, device, backward) for c in self.candidates):
                wanted = min(self.shared_bytes(problem, c, backward) for c in self.candidates)
                return (
                    f"its smallest tiles need {wanted:,} bytes of shared memory for head_dim "
                    f"{problem.head_dim} and {problem.head_dim_v} in {problem.dtype}, and a block "
                    f"has {self._limit(device):,}"
                )
        return None

    def default_config(self, problem: Problem, device: Device, backward: bool = False) -> Any:
        """The first candidate whose tiles suit, and fit the device's shared memory."""
        suiting = (c for c in self.candidates if self.suits(problem, c, backward))
        return next(c for c in suiting if self._fits(problem, c, device, backward))

    def resolve_config(
        self, problem: Problem, device: Device, config: Any, backward: bool = False
    ) -> Any:
        """The tiles to use: the default, or the caller's once they are known to fit.

        Raises
        ------
        TypeError
            If ``config`` is neither a Config of this rung nor a mapping of its fields.
        ValueError
            If the tiles do not fit in shared memory.
        """
        if config is None:
            return self.default_config(problem, device, backward)
        fields = [f.name for f in dataclasses.fields(self.Config)]
        if isinstance(config, Mapping):
            unknown = sorted(set(map(str, config)) - set(fields))
            if unknown:
                raise TypeError(
                    f"config has no field {unknown[0]!r} for kernel {self.name!r}; "
                    f"its fields are {', '.join(fields)}"
                )
            base = self.default_config(problem, device, backward)
            config = dataclasses.replace(base, **config)
        elif not isinstance(config, self.Config):
            raise TypeError(
                f"config is a {type(config).__module__}.{type(config).__name__}, but kernel "
                f"{self.name!r} takes its own Config({', '.join(fields)}) or a dict of those fields"
            )
        if not self._fits(problem, config, device, backward):
            wanted = self.shared_bytes(problem, config, backward)
            limit = self._limit(device)
            fitting = self.default_config(problem, device, backward)
            raise ValueError(
                f"config {config} needs {wanted:,} bytes of shared memory a block for head_dim "
                f"{problem.head_dim} and {problem.dtype}, but kernel {self.name!r} has "
                f"{limit:,} on {device.name}; {fitting} would fit"
            )
        return config

    def _fits(self, problem: Problem, config: Any, device: Device, backward: bool) -> bool:
        return self.shared_bytes(problem, config, backward) <= self._limit(device)

    @staticmethod
    def _limit(device: Device) -> int:
        return min(STATIC_SHARED_BYTES, device.shared_bytes)


def require_positive(config: object) -> None:
    """Make the fields of a frozen Config plain integers, and refuse those that are not positive.

    Raises
    ------
    ValueError
    """
    rung = type(config).__module__.rpartition(".")[2]
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        try:
            size = 0 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            size = 0
        if size < 1:
            raise ValueError(
                f"{rung}.Config.{field.name} is {value!r}; it must be a positive integer"
            )
        object.__setattr__(config, field.name, size)


def scalar(problem: Problem, value: float) -> np.floating:
    """A number in the problem's accumulator precision, as kernels take it."""
    return np.dtype(problem.acc_dtype).type(value)
