"""A second opinion on types: what Numba's own compiler gives the variables of a kernel."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from .bind import python_function

ANY_CARD = SimpleNamespace(compute_capability=(9, 0))
"""The device that type inference is told about where there is none; types are the same on all."""


class Float64Variable(NamedTuple):
    """A variable that the compiler types as float64; temporaries have no name.

    Attributes
    ----------
    name : str
    line : int
        Where it is assigned first.
    """

    name: str
    line: int


def float64_variables(kernel: Any, *arguments: Any) -> list[Float64Variable]:
    """The variables and intermediate results of a kernel that Numba types as float64.

    Asks the type inference of the numba-cuda package, which needs no GPU. What the kernel's device
    functions do within themselves does not show.

    Parameters
    ----------
    kernel : dispatcher or function
    *arguments
        What it would be launched with.

    Returns
    -------
    list of Float64Variable
        In the order of their lines.

    Raises
    ------
    ImportError
        If numba-cuda is not installed.
    numba.core.errors.NumbaError
        If Numba cannot compile the kernel for these arguments.
    """
    try:
        from numba import typeof, types
        from numba.cuda.compiler import compile_cuda
        from numba.cuda.dispatcher import get_current_device  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "float64_variables() asks the compiler of the numba-cuda package, which is not "
            "installed"
        ) from error
    function = python_function(kernel)
    signature = tuple(map(typeof, arguments))
    with some_device() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compile_cuda(function, types.void, signature, cc=device.compute_capability)
    found: dict[str, int] = {}
    annotation = result.type_annotation
    for block in annotation.blocks.values():
        for statement in block.body:
            name = getattr(getattr(statement, "target", None), "name", None)
            if name is not None and str(annotation.typemap.get(name)) == "float64":
                found.setdefault(name.split(".")[0], statement.loc.line)
    return sorted(
        (
            Float64Variable("" if name.startswith("$") else name, line)
            for name, line in found.items()
        ),
        key=lambda variable: variable.line,
    )


@contextlib.contextmanager
def some_device() -> Iterator[Any]:
    """The current device; where there is none, the compiler is made to believe in one."""
    from numba import cuda
    from numba.cuda import dispatcher

    if cuda.is_available():
        yield cuda.get_current_device()
        return
    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: ANY_CARD
    try:
        yield ANY_CARD
    finally:
        dispatcher.get_current_device = real
