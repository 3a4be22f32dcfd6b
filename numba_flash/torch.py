"""torch: its tensors as arrays, and ``attention`` as a differentiable function.

The only module that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from .arrays import ArrayLibrary
from .launch import current_emulation, resume_emulation
from .problem import Layout

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {torch.bool: "bool"}
_STORAGE = {torch.float16: torch.uint16, torch.bfloat16: torch.uint16, torch.bool: torch.uint8}


class TorchLibrary(ArrayLibrary):
    """torch tensors: their device, torch's current stream, torch's allocator."""

    def key(self, arrays: Iterable[torch.Tensor | None]) -> Hashable:
        return tuple(
            [
                None if a is None else (a.shape, a.stride(), a.dtype, a.get_device(), a.is_neg())
                for a in arrays
            ]
        )

    def layout(self, array: torch.Tensor) -> Layout:
        if array.layout is not torch.strided or array.is_nested or array.is_neg():
            kind = "nested" if array.is_nested else "negated" if array.is_neg() else "sparse"
            raise TypeError(
                f"a tensor is {kind}, and numba_flash takes dense tensors: pass x.resolve_neg(), "
                f"x.to_dense() or a padded tensor with mask="
            )
        itemsize = array.element_size()
        name = _NAMES.get(array.dtype, str(array.dtype))
        return Layout(tuple(array.shape), tuple(s * itemsize for s in array.stride()), name)

    def device(self, array: torch.Tensor) -> int | None:
        if array.device.type == "cpu":
            return None
        if array.device.type != "cuda":
            raise ValueError(
                f"a tensor is on device {array.device}; numba_flash takes CPU and CUDA tensors: "
                f"move it with .cuda() or .cpu()"
            )
        return array.device.index

    def pointers(self, arrays: Iterable[torch.Tensor | None]) -> list[int]:
        return [0 if array is None else array.data_ptr() for array in arrays]

    def stream(self, ordinal: int) -> int:
        return torch._C._cuda_getCurrentRawStream(ordinal)

    def empty(self, shape: tuple[int, ...], dtype: str, like: torch.Tensor) -> torch.Tensor:
        torch_dtype = _DTYPES[dtype]
        if like.shape == shape and like.dtype is torch_dtype and like.is_contiguous():
            return torch.empty_like(like)  # two thirds of the time that torch.empty takes
        return torch.empty(shape, dtype=torch_dtype, device=like.device)

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        array = array.detach()
        stored = _STORAGE.get(array.dtype)
        return (array if stored is None else array.view(stored)).cpu().numpy()

    def from_host(self, array: np.ndarray, dtype: str, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).view(_DTYPES[dtype]).to(like.device)

    def wants_gradient(self, arrays: tuple[Any, ...]) -> bool:
        q, k, v, _ = arrays
        if forward_ad._current_level >= 0:
            _refuse_tangents(arrays)
        needed = q.requires_grad or k.requires_grad or v.requires_grad
        return needed and torch.is_grad_enabled()

    def differentiable_attention(
        self, run: Callable[..., tuple[Any, ...]], arrays: tuple[Any, ...], options: Any
    ) -> tuple[torch.Tensor, ...]:
        """``(o, lse)``; a gradient flows through ``o``, none through ``lse``."""
        return _Attention.apply(*arrays, run, options)


LIBRARY = TorchLibrary()


def _refuse_tangents(arrays: tuple[Any, ...]) -> None:
    """A tangent of forward-mode differentiation would be lost without a word."""
    for array in arrays:
        if array is not None and forward_ad.unpack_dual(array).tangent is not None:
            raise NotImplementedError(
                "numba_flash.attention has no forward-mode derivative: differentiate backward, or "
                "use an attention written in plain torch operations"
            )


class _Attention(torch.autograd.Function):
    """Saves q, k, v, o and lse: memory linear in the sequence length."""

    @staticmethod
    def forward(ctx, q, k, v, mask, run, options):
        o, lse = run(LIBRARY, (q, k, v, mask), options)
        ctx.save_for_backward(q, k, v, mask, o, lse)
        ctx.run, ctx.options = run, options
        ctx.emulation = current_emulation()
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _dlse):
        # The caller's tiles were chosen for the forward; the backward has its own.
        options = ctx.options._replace(config=None)
        with resume_emulation(ctx.emulation):  # autograd may be calling from a thread of its own
            gradients = _Gradients.apply(do, *ctx.saved_tensors, ctx.run, options)
        return *gradients, None, None, None


class _Gradients(torch.autograd.Function):
    """dq, dk and dv; a Function only to say that it has no derivative."""

    @staticmethod
    def forward(ctx, do, q, k, v, mask, o, lse, run, options):
        return run(LIBRARY, (q, k, v, mask, do, o, lse), options)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "the gradients of numba_flash.attention are not differentiable themselves: a double "
            "backward needs an attention written in plain torch operations"
        )
