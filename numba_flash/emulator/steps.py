"""The steps of a trace, as `Report.trace` has them and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .report import Coordinates

BARRIER, ITERATION = "barrier", "iteration"


@dataclass(frozen=True)
class Step:
    """The traced names of one block at one moment.

    Attributes
    ----------
    block : (x, y, z)
    step : int
        Counts from 0 in each block.
    line : int
        Line of the barrier, or the first line of the loop.
    kind : {"barrier", "iteration"}
        At a barrier, when the threads arrive there; at the end of an iteration of the outermost
        loop.
    threads : range
        The threads of the block whose step it is: all of them, or one group of a kernel whose
        warps run on their own.
    values : dict of str to ndarray
        (threads,) of a variable, (threads, *shape) of a local array, (threads, n) of a tuple, the
        array's own shape of a shared or global array. NaN where nothing was written; an array of
        integers is float64 then. A name that has no value yet is left out.
    """

    block: Coordinates
    step: int
    line: int
    kind: str
    threads: range
    values: dict[str, np.ndarray]


def to_json(steps: list[Step]) -> str:
    """Steps as strict JSON: NaN is null, the infinities are "Infinity" and "-Infinity"."""
    return json.dumps(
        [
            {
                "block": list(step.block),
                "step": step.step,
                "line": step.line,
                "kind": step.kind,
                "threads": [step.threads.start, step.threads.stop],
                "values": {name: plain(value) for name, value in step.values.items()},
            }
            for step in steps
        ],
        allow_nan=False,
    )


def plain(values: np.ndarray) -> Any:
    """An array as nested lists of what JSON knows."""
    if values.dtype.kind != "f":
        return values.tolist()
    out = np.empty(values.size, object)
    # By way of text, a float32 0.1 is 0.1 and not 0.10000000149.
    out[:] = [number(float(text)) for text in values.reshape(-1).astype(str)]
    return out.reshape(values.shape).tolist()


def number(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
