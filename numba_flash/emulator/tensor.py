"""NumPy twins of the instructions that a lane or a warp executes.

`Tensor.handlers` gives the method for each description of `instructions`. All warps of a batch
run a matrix instruction together, as one product of stacked matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import instructions as isa
from .arithmetic import Value, strong
from .check import Checker
from .lanes import Lanes


class Tensor:
    """The twins for one batch of blocks."""

    def __init__(self, lanes: Lanes, checker: Checker):
        self.lanes = lanes
        self.checker = checker
        self.handlers: dict[type, Callable[..., Any]] = {isa.Elementwise: elementwise}


def elementwise(instruction: isa.Elementwise, *values: Value) -> Value:
    """A function of each lane's numbers."""
    result = instruction.twin(*map(strong, values))
    if isinstance(result, tuple):
        return tuple(np.asarray(part)[()] for part in result)
    return np.asarray(result)[()]
