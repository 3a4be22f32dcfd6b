"""The demo: every rung, forward and backward, on a real layer, judged by float64 and by the model.

The gradient that the backward starts from is dO = O, that of the loss ½‖O‖².
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from .data import Sample
from .interface import attention, attention_backward
from .kernels import Rung
from .launch import EMULATOR, current_emulation, gpu, gpu_count
from .passes import Direction, pass_bytes
from .problem import Device, Layout, Problem, make_problem
from .reference import naive_backward, naive_forward

LEAST_BOUND = 1e-6
"""Relative error that float32 arithmetic may always have: some ten roundings."""

ALLOWANCE: dict[Direction, int] = {"forward": 2, "backward": 3}
"""How many times the error of the plain formula in float32 a rung may have."""

WARM_CALLS = 5


@dataclass(frozen=True)
class Result:
    """One rung in one direction.

    Attributes
    ----------
    rung, direction : str
    error, bound : float
        ||x - x64|| / ||x64||, of the worst of dQ, dK and dV for the backward, and what it may be.
    model_error, model_bound : float or None
        The same against the model's own output, which has an error too; forward only.
    bytes : int
        Global memory by the formulas of `numba_flash.passes`.
    seconds : float
        Wall time of a call, copies to a GPU and back included.
    where : str
        Name of the device.
    """

    rung: str
    direction: Direction
    error: float
    bound: float
    model_error: float | None
    model_bound: float | None
    bytes: int
    seconds: float
    where: str

    @property
    def ok(self) -> bool:
        """Whether each error keeps its bound."""
        if self.model_error is not None and self.model_bound is not None:
            return self.error <= self.bound and self.model_error <= self.model_bound
        return self.error <= self.bound


class Judge:
    """What the formula gives in float64, and how far from it a float32 result may be.

    The bounds are the error rule of the tests: a rung may have twice the error (gradients three
    times) that the plain formula has in float32, and ten roundings in any case.
    """

    def __init__(self, sample: Sample):
        self.exact = _formula(sample, np.float64)
        plain = _formula(sample, np.float32)
        self.bounds = {
            direction: max(LEAST_BOUND, times * self.error(direction, plain[direction]))
            for direction, times in ALLOWANCE.items()
        }
        self.model_bound = self.bounds["forward"] + self.error("forward", (sample.o,))

    def error(self, direction: Direction, outputs: Sequence[np.ndarray]) -> float:
        """The worst relative error among the outputs."""
        pairs = zip(outputs, self.exact[direction], strict=True)
        return max(relative_error(x, exact) for x, exact in pairs)


def relative_error(x: np.ndarray, exact: np.ndarray) -> float:
    """||x - exact|| / ||exact||; infinite if x has a NaN or an infinity."""
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def sample_problem(sample: Sample) -> Problem:
    """The sample's sizes and dtype."""
    q, k, v = (Layout(x.shape, x.strides, str(x.dtype)) for x in (sample.q, sample.k, sample.v))
    return make_problem(q, k, v)


def current_device() -> Device:
    """What a call with NumPy arrays runs on, here and now."""
    return gpu(0) if gpu_count() and current_emulation() is None else EMULATOR


def run_rung(rung: Rung, sample: Sample, judge: Judge) -> Iterator[Result]:
    """Run one rung on the sample.

    Yields
    ------
    Result
        Of the forward, then of the backward, each when it is done.
    """
    q, k, v, do = sample.q, sample.k, sample.v, sample.o
    (o, lse), seconds = timed(attention, q, k, v, kernel=rung.name, return_lse=True)
    yield _judged(rung, "forward", (o,), seconds, sample, judge)
    gradients, seconds = timed(attention_backward, do, q, k, v, o, lse, kernel=rung.name)
    yield _judged(rung, "backward", gradients, seconds, sample, judge)


def timed(function: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, float]:
    """The result of a call and its wall time.

    On a GPU the first call compiles and is not timed; the fastest of the next few counts. On the
    emulator the one call counts.
    """
    start = time.perf_counter()
    result = function(*args, **keywords)
    seconds = [time.perf_counter() - start]
    if current_device() is not EMULATOR:
        seconds.clear()
        for _ in range(WARM_CALLS):
            start = time.perf_counter()
            result = function(*args, **keywords)
            seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def attention_probabilities(sample: Sample) -> np.ndarray:
    """P of every head, (heads, tokens, tokens): softmax(Q Kᵀ / √d) by rows."""
    S = sample.q[0] @ sample.k[0].swapaxes(-1, -2) / np.sqrt(sample.q.shape[-1])
    P = np.exp(S - S.max(-1, keepdims=True))
    return P / P.sum(-1, keepdims=True)


def make_table(results: Sequence[Result]) -> Table:
    """The results: the forwards, what they may be, the backwards, what they may be."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("direction")
    table.add_column("rung", no_wrap=True)
    for name in ("error", "from model", "moved", "time"):
        table.add_column(name, justify="right")
    table.add_column("where")
    table.add_column("")
    for direction in ALLOWANCE:
        rows = [r for r in results if r.direction == direction]
        for r in rows:
            table.add_row(
                direction if r is rows[0] else "",
                r.rung,
                f"{r.error:.1e}",
                _number(r.model_error),
                f"{r.bytes / 1e6:.2f} MB",
                f"{r.seconds:.2f} s" if r.seconds >= 0.1 else f"{r.seconds * 1e3:.2f} ms",
                r.where.removeprefix("the "),
                "[green]ok[/]" if r.ok else "[bold red]too far[/]",
            )
        for r in rows[:1]:
            bounds = (f"{r.bound:.1e}", _number(r.model_bound))
            table.add_row("", "at most", *bounds, style="dim", end_section=True)
    return table


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"


def _judged(
    rung: Rung,
    direction: Direction,
    outputs: Sequence[np.ndarray],
    seconds: float,
    sample: Sample,
    judge: Judge,
) -> Result:
    problem, device = sample_problem(sample), current_device()
    config = rung.default_config(problem, device, direction == "backward")
    forward = direction == "forward"
    return Result(
        rung=rung.name,
        direction=direction,
        error=judge.error(direction, outputs),
        bound=judge.bounds[direction],
        model_error=relative_error(outputs[0], sample.o.astype(np.float64)) if forward else None,
        model_bound=judge.model_bound if forward else None,
        bytes=pass_bytes(rung.name, direction, problem, config.tile_m, config.tile_n),
        seconds=seconds,
        where=device.name,
    )


def _formula(sample: Sample, dtype: Any) -> dict[Direction, tuple[np.ndarray, ...]]:
    q, k, v = sample.q.astype(dtype), sample.k.astype(dtype), sample.v.astype(dtype)
    o, lse = naive_forward(q, k, v)
    gradients = naive_backward(sample.o.astype(dtype), q, k, v, o, lse)
    return {"forward": (o,), "backward": gradients}
