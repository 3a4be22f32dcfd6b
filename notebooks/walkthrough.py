"""What notebooks 03 and 04 share: run the kernels of rung `minimal`, show their source."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from types import SimpleNamespace

import numpy as np
from IPython.display import Markdown

from numba_flash import emulate
from numba_flash.kernels import minimal
from numba_flash.launch import gpu_count
from numba_flash.problem import Layout, Problem, make_problem

ON_GPU = gpu_count() > 0

if ON_GPU:
    from numba import cuda
    from numba.core.errors import NumbaWarning

    # Numba warns about grids too small to fill a GPU; the grids of a walkthrough always are.
    warnings.simplefilter("ignore", NumbaWarning)


def excerpt(kernel, first: str, last: str | None = None) -> Markdown:
    """The kernel's own source, from the line with ``first`` up to the line with ``last``."""
    lines = inspect.getsource(kernel.py_func).splitlines()
    start = _line_with(first, lines, 0)
    stop = len(lines) if last is None else _line_with(last, lines, start + 1)
    code = textwrap.dedent("\n".join(lines[start:stop])).rstrip()
    return Markdown(f"```python\n{code}\n```")


def forward(q, k, v, config: minimal.Config, softmax_scale: float) -> SimpleNamespace:
    """Run the forward kernel; O, l, m and LSE as it left them in global memory."""
    problem = _problem(q, k, v, softmax_scale)
    rows = np.float32, problem.lse_shape
    arrays = {"q": q, "k": k, "v": v, "o": _unset(np.float32, problem.o_shape)}
    arrays |= {name: _unset(*rows) for name in ("l", "m", "lse")}
    _run(minimal.forward(problem, config), arrays)
    return SimpleNamespace(O=arrays["o"], l=arrays["l"], m=arrays["m"], lse=arrays["lse"])


def backward(do, q, k, v, o, lse, config: minimal.Config, softmax_scale: float) -> SimpleNamespace:
    """Run the backward kernel; dQ, dK and dV as it left them in global memory."""
    problem = _problem(q, k, v, softmax_scale)
    arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    arrays |= {f"d{name}": _unset(np.float32, arrays[name].shape) for name in "qkv"}
    _run(minimal.backward(problem, config), arrays)
    return SimpleNamespace(dQ=arrays["dq"], dK=arrays["dk"], dV=arrays["dv"])


def difference(kernel_value, numpy_value) -> float:
    """Largest difference, divided by the largest number if that is above 1.

    Equal infinities count as zero. The kernel computes in float32, which keeps 24 bits: a value
    that is 1e-4 away is not rounded but wrong, and raises.
    """
    kernel_value, numpy_value = np.broadcast_arrays(kernel_value, numpy_value)
    far = np.zeros(numpy_value.shape)
    apart = kernel_value != numpy_value
    far[apart] = np.abs(kernel_value[apart] - numpy_value[apart])
    finite = np.abs(numpy_value[np.isfinite(numpy_value)])
    worst = far.max(initial=0.0) / max(1.0, finite.max(initial=0.0))
    if not worst < 1e-4:
        raise ValueError(f"The kernel's value is {worst:.1e} away from NumPy's.")
    return worst


def compare(name: str, kernel_value, numpy_value) -> None:
    """Print the first numbers of both, and the largest difference by the largest number."""
    shown = [
        "  ".join(f"{x:8.4f}" for x in np.ravel(value)[:4]) for value in (kernel_value, numpy_value)
    ]
    print(f"{name:<28} kernel {shown[0]} ...")
    print(f"{np.shape(numpy_value)!s:<28} NumPy  {shown[1]} ...")
    print(f"{'':<28} largest relative difference {difference(kernel_value, numpy_value):.1e}\n")


def _line_with(text: str, lines: list[str], start: int) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"The kernel has no line with {text!r} after line {start}.")


def _problem(q, k, v, softmax_scale: float) -> Problem:
    layouts = (Layout(x.shape, x.strides, x.dtype.name) for x in (q, k, v))
    return make_problem(*layouts, softmax_scale=softmax_scale)


def _unset(dtype, shape) -> np.ndarray:
    """An output full of NaN: what the kernel does not write cannot look right."""
    return np.full(shape, np.nan, dtype)


def _run(plan, arrays: dict[str, np.ndarray]) -> None:
    """Carry out a plan on NumPy arrays, in place."""
    arrays = {"mask": np.ones((1, 1, 1, 1), np.uint8), **arrays}
    if ON_GPU:
        on_device = {name: cuda.to_device(np.ascontiguousarray(x)) for name, x in arrays.items()}
        for step in plan.steps:
            step.kernel[step.grid, step.block](*_arguments(step, on_device))
        for name, x in arrays.items():
            x[...] = on_device[name].copy_to_host()
        return
    for step in plan.steps:
        report = emulate(step.kernel)[step.grid, step.block](*_arguments(step, arrays))
        if not report.ok:
            raise RuntimeError("\n".join(fault.message for fault in report.faults))


def _arguments(step, arrays) -> list:
    return [arrays[arg] if isinstance(arg, str) else arg for arg in step.args]
