"""``attention`` and ``attention_backward``: arrays in, arrays out.

A call is prepared once for each combination of layouts and keywords (check the arguments, pick a
rung, compile) and remembered; the next call of the same kind allocates its outputs and launches.
What is remembered depends on nothing but the layouts and keywords it is found by.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from .arrays import ArrayLibrary, adopt, known_library
from .kernels import LADDER, choose
from .launch import (
    EMULATOR,
    STORAGE,
    Emulation,
    Program,
    contiguous_layout,
    current_emulation,
    emulated_empty,
    gpu,
    gpu_count,
    refuse_long_emulation,
    run_emulated,
)
from .plan import Plan
from .problem import Device, Layout, Problem, check_backward, check_bool, make_problem

MAX_REMEMBERED_CALLS = 1024
FORWARD_INPUTS = ("q", "k", "v", "mask")
BACKWARD_INPUTS = (*FORWARD_INPUTS, "do", "o", "lse")
NO_MASK = Layout((1, 1, 1, 1), (0, 0, 0, 0), "bool")
"""What a kernel without a mask gets in its place; it is never read."""
NO_LSE = (0, 0, 0)
"""The shape by which a kernel knows that nobody wants the LSE."""


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
    options = (causal, align, window, softmax_scale, kernel, config, return_lse)
    library, arrays = _adopt_all((q, k, v, mask))
    if library.wants_gradient(arrays):
        wanted = Options(*options)._replace(return_lse=True)
        results = library.differentiable_attention(run, arrays, wanted)
    else:
        results = run(library, arrays, options)
    return results if return_lse else results[0]


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
    options = (causal, align, window, softmax_scale, kernel, config, True)
    library, arrays = _adopt_all((q, k, v, mask, do, o, lse))
    return run(library, arrays, options)


class Options(NamedTuple):
    """The keywords that a prepared call depends on; a plain tuple of them is quicker to make."""

    causal: bool
    align: str
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    kernel: str
    config: Any
    return_lse: bool


def run(
    library: ArrayLibrary, arrays: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run the forward on (q, k, v, mask), the backward on (q, k, v, mask, do, o, lse).

    Returns
    -------
    (o, lse), or (o,) without ``return_lse``; (dq, dk, dv)
    """
    emulated = current_emulation()
    key: Any
    try:
        key = (
            library,
            library.key(arrays),
            options,
            # True, 1 and 1.0 are the same key, but not the same argument.
            type(options[0]),
            options[2] and tuple(map(type, options[2])),
            type(options[3]),
            type(options[6]),
            emulated is None,
        )
        call = _calls.get(key)
    except Exception:  # unhashable or no array: preparing the call says what is wrong with it
        key, call = None, None
    if call is None:
        call = _Call(library, arrays, Options(*options), emulated is not None)
        if key is not None:
            while len(_calls) >= MAX_REMEMBERED_CALLS:
                _calls.pop(next(iter(_calls)), None)
            _calls[key] = call
    return call(arrays, emulated)


class _Call:
    """A checked call: its problem, its plan, and the program of a GPU if one runs it."""

    def __init__(
        self, library: ArrayLibrary, arrays: tuple[Any, ...], options: Options, emulated: bool
    ):
        backward = len(arrays) > len(FORWARD_INPUTS)
        self.names = BACKWARD_INPUTS if backward else FORWARD_INPUTS
        layouts = {
            name: library.layout(array)
            for name, array in zip(self.names, arrays, strict=True)
            if array is not None
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
        if backward:
            check_backward(self.problem, layouts["do"], layouts["o"], layouts["lse"])
        check_bool("return_lse", options.return_lse)
        self.library = library
        outputs = _outputs(self.problem, backward, options.return_lse)
        self.outputs = list(outputs.values())
        self.output_names = list(outputs)
        ordinal = _same_device(library, self.names, arrays)
        self.on_host = ordinal is None
        self.program: Program | None = None
        if emulated or (self.on_host and not gpu_count()):
            self.plan = _make_plan(self.problem, EMULATOR, options, backward)
            return
        self.ordinal = ordinal or 0
        self.plan = _make_plan(self.problem, gpu(self.ordinal), options, backward)
        self.workspaces = list(self.plan.workspaces.values())
        if self.on_host:
            layouts = {n: contiguous_layout(a.shape, a.dtype) for n, a in layouts.items()}
            mask = mask and contiguous_layout(mask.shape, "bool")
        layouts |= {n: contiguous_layout(*spec) for n, spec in outputs.items()}
        layouts["mask"] = _broadcast(mask, self.problem)
        order = [*self.names, *self.output_names, *self.plan.workspaces]
        if "lse" not in layouts:
            layouts["lse"] = contiguous_layout(NO_LSE, self.problem.acc_dtype)
            order.append("lse")
        self.program = Program(self.plan, layouts, order, self.ordinal)

    def __call__(self, arrays: tuple[Any, ...], emulated: Emulation | None) -> tuple[Any, ...]:
        if self.program is None:
            return self._emulate(arrays, emulated or _fallback())
        if self.on_host:
            return self._copy_to_gpu_and_back(self.program, arrays)
        library, like = self.library, arrays[0]
        outputs = tuple([library.empty(shape, dtype, like) for shape, dtype in self.outputs])
        workspaces = [library.empty(shape, dtype, like) for shape, dtype in self.workspaces]
        addresses = library.pointers((*arrays, *outputs, *workspaces, None))
        self.program.launch(addresses, library.stream(self.ordinal))
        return outputs

    def _copy_to_gpu_and_back(self, program: Program, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        with cuda.gpus[self.ordinal]:
            host = [None if a is None else self.library.to_host(a) for a in arrays]
            results = [_storage_empty(*spec) for spec in self.outputs]
            workspaces = [_storage_empty(*spec) for spec in self.workspaces]
            held = [_to_gpu(a) for a in (*host, *results, *workspaces)]
            program.launch([_address(a) for a in (*held, None)], 0)
            for result, on_gpu in zip(results, held[len(host) :], strict=False):
                if on_gpu is not None:
                    on_gpu.copy_to_host(result)
        return self._from_host(results, arrays[0])

    def _emulate(self, arrays: tuple[Any, ...], emulated: Emulation) -> tuple[Any, ...]:
        refuse_long_emulation(self.plan, emulated)
        host = {
            name: self.library.to_host(array)
            for name, array in zip(self.names, arrays, strict=True)
            if array is not None
        }
        mask = host.get("mask")
        host["mask"] = (
            np.zeros(NO_MASK.shape, np.uint8)
            if mask is None
            else np.broadcast_to(mask, _broadcast_shape(self.problem))
        )
        results = [emulated_empty(*spec) for spec in self.outputs]
        host |= dict(zip(self.output_names, results, strict=True))
        host.setdefault("lse", emulated_empty(NO_LSE, self.problem.acc_dtype))
        run_emulated(self.plan, host, emulated)
        return self._from_host(results, arrays[0])

    def _from_host(self, results: list[np.ndarray], like: Any) -> tuple[Any, ...]:
        return tuple(
            self.library.from_host(result, dtype, like)
            for result, (_, dtype) in zip(results, self.outputs, strict=True)
        )


_calls: dict[Any, _Call] = {}
_said_emulated = False


def _adopt_all(arrays: tuple[Any, ...]) -> tuple[ArrayLibrary, tuple[Any, ...]]:
    """The library of q, and all arguments as arrays of it."""
    library = known_library(arrays[0])
    if library is not None:
        mask = arrays[3]
        others = arrays[1:] if mask is not None else arrays[1:3] + arrays[4:]
        for array in others:
            if known_library(array) is not library:
                break
        else:
            return library, arrays
    names = BACKWARD_INPUTS if len(arrays) > len(FORWARD_INPUTS) else FORWARD_INPUTS
    library, q = adopt(arrays[0], "q")
    adopted = [q]
    for name, array in zip(names[1:], arrays[1:], strict=True):
        if name == "mask" and array is None:
            adopted.append(None)
            continue
        other, same = adopt(array, name)
        adopted.append(same)
        if other is not library:
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__} and q is a "
                f"{type(q).__module__}.{type(q).__qualname__}; convert one to the other's library"
            )
    return library, tuple(adopted)


def _same_device(
    library: ArrayLibrary, names: tuple[str, ...], arrays: tuple[Any, ...]
) -> int | None:
    ordinal = library.device(arrays[0])
    for name, array in zip(names, arrays, strict=True):
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
    kernel = options.kernel if isinstance(options.kernel, str) else None
    if kernel == "auto":
        # The rungs above fa2 are built for what hardware does fast, which the emulator does not.
        upto = names.index("fa2") + 1 if device is EMULATOR else len(names)
        rung = choose(names[:upto], problem, device)
    elif kernel in names:
        rung = choose([kernel], problem, device)
    else:
        raise ValueError(
            f"kernel is {options.kernel!r}; it must be 'auto' or one of "
            f"{', '.join(map(repr, names))}"
        )
    config = rung.resolve_config(problem, device, options.config, backward)
    return (rung.backward if backward else rung.forward)(problem, config)


def _outputs(
    problem: Problem, backward: bool, return_lse: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    p = problem
    if not backward:
        outputs: dict[str, tuple[tuple[int, ...], str]] = {"o": (p.o_shape, p.dtype)}
        if return_lse:
            outputs["lse"] = (p.lse_shape, p.acc_dtype)
        return outputs
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


def _to_gpu(array: np.ndarray | None) -> Any:
    if array is None or not array.size:
        return None
    return cuda.to_device(np.ascontiguousarray(array))


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
