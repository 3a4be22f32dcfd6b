"""``attention`` and ``attention_backward``: arrays in, arrays out.

A call is prepared once for each combination of layouts and keywords (check the arguments, pick a
rung, compile) and remembered; the next call of the same kind allocates its outputs and launches.
What is remembered depends on nothing but the layouts and keywords it is found by.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from .arrays import ArrayLibrary, adopt
from .kernels import LADDER, choose
from .launch import (
    EMULATOR,
    STORAGE,
    Emulation,
    Program,
    contiguous_layout,
    current_emulation,
    gpu,
    gpu_count,
    run_emulated,
)
from .plan import Plan
from .problem import Device, Layout, Problem, check_backward, make_problem

MAX_REMEMBERED_CALLS = 1024
NO_MASK = Layout((1, 1, 1, 1), (0, 0, 0, 0), "bool")
"""What a kernel without a mask gets in its place; it is never read."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    mask: Any = None,
    return_lse: bool = False,
    kernel: str = "auto",
    config: Any = None,
) -> Any:
    """Scaled dot-product attention, ``softmax(softmax_scale * q k^T) v``, tile by tile.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
        NumPy, torch, CuPy, or an object with DLPack or ``__cuda_array_interface__``; float16,
        bfloat16, float32 or float64. Host arrays run on the GPU if there is one, else on the
        emulator. Any strides.
    k : array, (batch, heads_kv, seqlen_k, head_dim)
        ``heads`` is a multiple of ``heads_kv``; query head h reads key head h // group.
    v : array, (batch, heads_kv, seqlen_k, head_dim_v)
    causal : bool
        A query sees no key after its own position.
    align : {"bottom-right", "top-left"}
        Where the diagonal of ``causal`` and ``window`` lies when seqlen_q != seqlen_k.
    window : (left, right), optional
        Keys before and after its own position that a query sees, inclusive; None is unbounded.
    softmax_scale : float, optional
        1/sqrt(head_dim) by default.
    mask : array of bool, optional
        True where a query may attend; broadcastable to (batch, heads, seqlen_q, seqlen_k).
    return_lse : bool
        Also return the log-sum-exp of the scaled scores (natural logarithm).
    kernel : str
        A rung of ``numba_flash.LADDER`` by name; "auto" takes the highest that supports the call.
    config : Config or dict, optional
        Tile sizes of that rung, instead of its default.

    Returns
    -------
    o : array, (batch, heads, seqlen_q, head_dim_v)
        Of the library and dtype of ``q``. A row that may attend to nothing is 0.
    lse : array, (batch, heads, seqlen_q), if ``return_lse``
        float32 (float64 for float64 inputs); -inf for a row that may attend to nothing.

    Raises
    ------
    TypeError, ValueError
        For an argument that does not fit; the message says what would do.
    RuntimeError
        If the emulator would need more than about a minute (see ``emulation``).

    References
    ----------
    Dao et al., "FlashAttention", arXiv 2205.14135; Dao, "FlashAttention-2", arXiv 2307.08691.
    """
    library, arrays = _adopt_all({"q": q, "k": k, "v": v, "mask": mask})
    options = make_options(causal, align, window, softmax_scale, kernel, config)
    if library.wants_gradient(arrays["q"], arrays["k"], arrays["v"]):
        result = library.differentiable_attention(arrays, options)
    else:
        result = run(library, arrays, options)
    return result if return_lse else result[0]


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    mask: Any = None,
    kernel: str = "auto",
    config: Any = None,
) -> tuple[Any, Any, Any]:
    """The gradients of ``attention`` with respect to q, k and v.

    Parameters
    ----------
    do : array, (batch, heads, seqlen_q, head_dim_v)
        Gradient of the loss with respect to ``o``.
    q, k, v : array
        The forward's inputs.
    o, lse : array
        The forward's outputs, with ``return_lse=True``.
    causal, align, window, softmax_scale, mask, kernel, config
        As in the forward.

    Returns
    -------
    dq, dk, dv : array
        Shaped like q, k and v. With grouped heads dk and dv are summed over the group.

    Raises
    ------
    TypeError, ValueError
        For an argument that does not fit; the message says what would do.

    References
    ----------
    Dao et al., "FlashAttention", arXiv 2205.14135, Algorithm 4 and appendix B.
    """
    library, arrays = _adopt_all(
        {"q": q, "k": k, "v": v, "mask": mask, "do": do, "o": o, "lse": lse}
    )
    options = make_options(causal, align, window, softmax_scale, kernel, config)
    return run(library, arrays, options)


class Options(NamedTuple):
    """The keywords that a prepared call depends on, all of them hashable."""

    causal: bool
    align: str
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    kernel: str
    config: Any


def make_options(
    causal: Any, align: Any, window: Any, softmax_scale: Any, kernel: Any, config: Any
) -> Options:
    """The keywords of a call in a form that a dictionary can hold."""
    if isinstance(window, list):
        window = tuple(window)
    if isinstance(config, Mapping):
        config = tuple(sorted(config.items()))
    return Options(causal, align, window, softmax_scale, kernel, config)


def run(library: ArrayLibrary, arrays: dict[str, Any], options: Options) -> tuple[Any, ...]:
    """Run the forward, or the backward if ``arrays`` has a "do".

    Returns
    -------
    (o, lse) or (dq, dk, dv)
    """
    emulated = current_emulation()
    try:
        key = (
            library,
            options,
            tuple(map(type, options)),  # True and 1 are the same key, but not the same argument
            emulated is None,
            *[None if array is None else library.key(array) for array in arrays.values()],
        )
        call = _calls.get(key)
    except TypeError:  # something unhashable; preparing the call will say what is wrong with it
        key = call = None
    if call is None:
        call = _Call(library, arrays, options, emulated is not None)
        if key is not None:
            while len(_calls) >= MAX_REMEMBERED_CALLS:
                _calls.pop(next(iter(_calls)), None)
            _calls[key] = call
    return call(arrays, emulated)


class _Call:
    """A checked call: its problem, its plan, and the program of a GPU if one runs it."""

    def __init__(
        self, library: ArrayLibrary, arrays: dict[str, Any], options: Options, emulated: bool
    ):
        layouts = {
            name: library.layout(array) for name, array in arrays.items() if array is not None
        }
        mask = layouts.pop("mask", None)
        self.problem = make_problem(
            layouts["q"],
            layouts["k"],
            layouts["v"],
            causal=options.causal,
            align=options.align,
            window=options.window,
            softmax_scale=options.softmax_scale,
            mask=mask,
        )
        backward = "do" in arrays
        if backward:
            check_backward(self.problem, layouts["do"], layouts["o"], layouts["lse"])
        self.library = library
        self.inputs = list(layouts)
        self.outputs = _outputs(self.problem, backward)
        ordinal = _same_device(library, arrays)
        self.on_host = ordinal is None
        self.ordinal = None if emulated else ordinal
        if self.on_host and not emulated and gpu_count():
            self.ordinal = 0
        device = EMULATOR if self.ordinal is None else gpu(self.ordinal)
        self.plan = _make_plan(self.problem, device, options, backward)
        self.program = None
        if self.ordinal is not None:
            if self.on_host:
                layouts = {n: contiguous_layout(a.shape, a.dtype) for n, a in layouts.items()}
                mask = mask and contiguous_layout(mask.shape, "bool")
            layouts |= {n: contiguous_layout(*spec) for n, spec in self.outputs.items()}
            layouts["mask"] = _broadcast(mask, self.problem)
            self.program = Program(self.plan, layouts, self.ordinal)

    def __call__(self, arrays: dict[str, Any], emulated: Emulation | None) -> tuple[Any, ...]:
        if self.program is None:
            return self._emulate(arrays, emulated or _fallback())
        if self.on_host:
            return self._copy_to_gpu_and_back(arrays)
        library, like = self.library, arrays["q"]
        outputs = {n: library.empty(*spec, like) for n, spec in self.outputs.items()}
        workspaces = {n: library.empty(*spec, like) for n, spec in self.plan.workspaces.items()}
        pointer = library.pointer
        pointers = {n: pointer(arrays[n]) for n in self.inputs}
        pointers |= {n: pointer(a) for n, a in outputs.items()}
        pointers |= {n: pointer(a) for n, a in workspaces.items()}
        mask = arrays["mask"]
        pointers["mask"] = 0 if mask is None else pointer(mask)
        self.program.launch(pointers, library.stream(self.ordinal))
        return tuple(outputs.values())

    def _copy_to_gpu_and_back(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        with cuda.gpus[self.ordinal]:
            host = {n: self.library.to_host(a) for n, a in arrays.items() if a is not None}
            host |= {n: _storage_empty(*spec) for n, spec in self.outputs.items()}
            held = {n: _to_gpu(a) for n, a in host.items()}
            held |= {n: _to_gpu(_storage_empty(*s)) for n, s in self.plan.workspaces.items()}
            pointers = {n: _address(a) for n, a in held.items()}
            self.program.launch({"mask": 0} | pointers, 0)
            for name in self.outputs:
                if host[name].size:
                    held[name].copy_to_host(host[name])
        return self._results(host, arrays["q"])

    def _emulate(self, arrays: dict[str, Any], emulated: Emulation) -> tuple[Any, ...]:
        host = {n: self.library.to_host(a) for n, a in arrays.items() if a is not None}
        mask = host.pop("mask", None)
        shape = _broadcast_shape(self.problem)
        host["mask"] = np.zeros((1, 1, 1, 1), np.uint8)
        if mask is not None:
            host["mask"] = np.broadcast_to(mask, shape)
        host |= {n: _storage_empty(*spec) for n, spec in self.outputs.items()}
        run_emulated(self.plan, host, emulated)
        return self._results(host, arrays["q"])

    def _results(self, host: dict[str, np.ndarray], like: Any) -> tuple[Any, ...]:
        return tuple(
            self.library.from_host(host[name], dtype, like)
            for name, (_, dtype) in self.outputs.items()
        )


_calls: dict[Any, _Call] = {}
_said_emulated = False


def _adopt_all(arguments: dict[str, Any]) -> tuple[ArrayLibrary, dict[str, Any]]:
    """All arguments as arrays of one library, the library of q."""
    library, q = adopt(arguments["q"], "q")
    arrays = {"q": q}
    for name, array in arguments.items():
        if name == "q":
            continue
        if name == "mask" and array is None:
            arrays[name] = None
            continue
        other, arrays[name] = adopt(array, name)
        if other is not library and type(other) is not type(library):
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__} and q is a "
                f"{type(q).__module__}.{type(q).__qualname__}; convert one to the other's library"
            )
    return library, arrays


def _same_device(library: ArrayLibrary, arrays: dict[str, Any]) -> int | None:
    ordinal = library.device(arrays["q"])
    for name, array in arrays.items():
        if array is not None and library.device(array) != ordinal:
            there, here = library.device(array), ordinal
            raise ValueError(
                f"{name} is on {_place(there)} and q is on {_place(here)}; "
                f"move them to the same device"
            )
    return ordinal


def _place(ordinal: int | None) -> str:
    return "the CPU" if ordinal is None else f"CUDA device {ordinal}"


def _make_plan(problem: Problem, device: Device, options: Options, backward: bool) -> Plan:
    names = [rung.name for rung in LADDER]
    if options.kernel == "auto":
        rung = choose(["fa2"] if device is EMULATOR else names, problem, device)
    elif options.kernel in names:
        rung = choose([options.kernel], problem, device)
    else:
        raise ValueError(
            f"kernel is {options.kernel!r}; it must be 'auto' or one of "
            f"{', '.join(map(repr, names))}"
        )
    config = dict(options.config) if type(options.config) is tuple else options.config
    config = rung.resolve_config(problem, device, config, backward)
    return (rung.backward if backward else rung.forward)(problem, config)


def _outputs(problem: Problem, backward: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    p = problem
    if not backward:
        return {"o": (p.o_shape, p.dtype), "lse": (p.lse_shape, p.acc_dtype)}
    return {
        "dq": (p.q_shape, p.dtype),
        "dk": ((p.batch, p.num_heads_kv, p.seqlen_k, p.head_dim), p.dtype),
        "dv": ((p.batch, p.num_heads_kv, p.seqlen_k, p.head_dim_v), p.dtype),
    }


def _broadcast_shape(problem: Problem) -> tuple[int, int, int, int]:
    return problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k


def _broadcast(mask: Layout | None, problem: Problem) -> Layout:
    """A mask's layout seen as (batch, heads, seqlen_q, seqlen_k): repeated axes have stride 0."""
    if mask is None:
        return NO_MASK
    missing = 4 - len(mask.shape)
    shape = (1,) * missing + mask.shape
    strides = (0,) * missing + mask.strides
    return Layout(
        _broadcast_shape(problem),
        tuple(0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)),
        "bool",
    )


def _storage_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.empty(shape, np.dtype(str(STORAGE[dtype])))


def _to_gpu(array: np.ndarray) -> Any:
    return cuda.to_device(np.ascontiguousarray(array)) if array.size else None


def _address(array: Any) -> int:
    return 0 if array is None else array.__cuda_array_interface__["data"][0]


def _fallback() -> Emulation:
    """The emulator settings of a call outside ``emulation()``, on a machine without a GPU."""
    global _said_emulated
    if not _said_emulated:
        _said_emulated = True
        warnings.warn(
            "no CUDA GPU here: numba_flash runs its kernels on the CPU emulator, which is meant "
            "for small inputs (`numba-flash doctor` says more)",
            stacklevel=5,
        )
    return Emulation(checks=False)
