"""The ladder: one file a rung, forward and backward in each.

Every rung answers a ``Problem`` with a ``Plan``; the next rung up is the same algorithm with one
idea more.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..problem import Device, Problem
from . import fa2, minimal, naive, register_tiled
from .rung import Rung

LADDER: tuple[Rung, ...] = (naive.RUNG, minimal.RUNG, fa2.RUNG, register_tiled.RUNG)
"""Every rung, slowest first."""


def choose(names: Iterable[str], problem: Problem, device: Device) -> Rung:
    """The highest rung that supports the problem, among those named.

    Raises
    ------
    ValueError
        If none does; the message gives each rung's reason.
    """
    refusals = []
    for rung in reversed(LADDER):
        if rung.name in names:
            reason = rung.supports(problem, device)
            if reason is None:
                return rung
            refusals.append(f"{rung.name}: {reason}")
    raise ValueError("no kernel supports this problem. " + "; ".join(refusals))
