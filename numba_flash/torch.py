"""torch: its tensors as arrays, ``attention`` with gradients, and torch's own function by name.

The only module that imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from .arrays import ArrayLibrary
from .interface import attention
from .launch import current_emulation, resume_emulation
from .problem import Layout, check_bool

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


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, computed by ``attention``.

    Differentiable once, under ``torch.autocast`` in its dtype. Nothing here adds up in an order
    that varies, so torch's deterministic mode has nothing to switch.

    Parameters
    ----------
    query : Tensor, (..., heads, seqlen_q, head_dim)
        float16, bfloat16, float32 or float64. Any number of batch dimensions; heads may be missing.
    key : Tensor, (..., heads_kv, seqlen_k, head_dim)
    value : Tensor, (..., heads_kv, seqlen_k, head_dim_v)
        The dimensions before the last two broadcast: without a copy, unless several batch
        dimensions cannot be seen as one.
    attn_mask : Tensor of bool, optional
        True where a query may attend; broadcastable to (..., heads, seqlen_q, seqlen_k).
    dropout_p : float
        Must be 0.
    is_causal : bool
        Query i sees the keys 0 to i: the diagonal begins at the top left.
    scale : float, optional
        1/sqrt(head_dim) by default.
    enable_gqa : bool
        Let key and value have fewer heads: query head h reads key head h // group.

    Returns
    -------
    Tensor, (..., heads, seqlen_q, head_dim_v)
        A row that may attend to nothing is 0 and has zero gradients (NaN in some versions and
        backends of torch).

    Raises
    ------
    NotImplementedError
        For dropout and for a mask of floats.
    TypeError, ValueError
        For an argument that does not fit; the message says what would do.

    References
    ----------
    torch.nn.functional.scaled_dot_product_attention, the documentation of torch 2.13.
    """
    tensor = torch.Tensor
    if not (isinstance(query, tensor) and isinstance(key, tensor) and isinstance(value, tensor)):
        _refuse_other_arrays(query=query, key=key, value=value)
    if attn_mask is not None:
        _check_attn_mask(attn_mask, is_causal)
    if dropout_p != 0:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}; numba_flash has no dropout: pass 0.0, or call "
            f"torch.nn.functional.scaled_dot_product_attention, which has it"
        )
    if not (type(is_causal) is type(enable_gqa) is bool):
        check_bool("is_causal", is_causal)
        check_bool("enable_gqa", enable_gqa)
    device = "cuda" if query.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (_autocast(x, dtype) for x in (query, key, value))
    leading = None
    if not _has_batch_and_heads(query, key, value, enable_gqa):
        leading = _leading_shape(query, key, value, enable_gqa)
        query, key, value, attn_mask = _with_batch_and_heads(
            query, key, value, attn_mask, leading, enable_gqa
        )
    o = attention(
        query,
        key,
        value,
        causal=is_causal,
        align="top-left",
        softmax_scale=scale,
        mask=attn_mask,
    )
    return o if leading is None else o.reshape(*leading, *o.shape[2:])


def _refuse_other_arrays(**arrays: Any) -> None:
    for name, x in arrays.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch tensor")


def _check_attn_mask(attn_mask: Any, is_causal: Any) -> None:
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(
            f"attn_mask is a {type(attn_mask).__name__}; it must be a torch tensor of bool, True "
            f"where a query may attend, or None"
        )
    if attn_mask.is_floating_point():
        raise NotImplementedError(
            f"attn_mask has dtype {attn_mask.dtype}; numba_flash adds no mask to the scores: pass "
            f"attn_mask == 0 where it is 0 and -inf only, or call "
            f"torch.nn.functional.scaled_dot_product_attention, which adds it"
        )
    if is_causal:
        raise ValueError(
            "attn_mask and is_causal=True exclude each other, as in torch: pass "
            "attn_mask & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(), or call "
            'numba_flash.attention(..., mask=attn_mask, causal=True, align="top-left")'
        )


def _autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch's autocast does it: float64 stays."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _has_batch_and_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> bool:
    """Whether ``attention`` takes the tensors as they are, or says best what is wrong with them."""
    if query.is_nested or key.is_nested or value.is_nested:
        return True
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        return False
    return q[0] == k[0] == v[0] and k[1] == v[1] and (k[1] in (1, q[1]) or enable_gqa)


def _leading_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[int, ...]:
    """The output's dimensions before the last two."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    fewest = 3 if enable_gqa else 2
    if min(map(len, shapes)) < fewest:
        expected = "(..., heads, seqlen, head_dim)" if enable_gqa else "(..., seqlen, head_dim)"
        raise ValueError(
            f"query, key and value have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}; with "
            f"enable_gqa={enable_gqa} each must have at least {fewest} dimensions, {expected}"
        )
    heads = shapes[0][-3:-2] if enable_gqa else ()
    try:
        return *torch.broadcast_shapes(*(shape[:-fewest] for shape in shapes)), *heads
    except RuntimeError:
        raise ValueError(
            f"query, key and value have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}; their "
            f"dimensions before the last two must be equal or 1, except that with "
            f"enable_gqa=True key and value may have fewer heads"
        ) from None


def _with_batch_and_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    leading: tuple[int, ...],
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments in four dimensions, their batch dimensions seen as one."""
    batch, heads = leading[:-1], (leading[-1] if leading else 1)

    def four(x: torch.Tensor, heads: int) -> torch.Tensor:
        shape = heads, *x.shape[-2:]
        return x.expand(*batch, *shape).reshape(math.prod(batch), *shape)

    heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (key, value))
    if not enable_gqa and not heads_k == heads_v == 1:  # one key head serves any number of them
        heads_k = heads_v = heads
    if attn_mask is not None and attn_mask.dim() > 3:
        try:
            attn_mask = four(attn_mask, attn_mask.shape[-3])
        except RuntimeError:
            scores = *leading, query.shape[-2], key.shape[-2]
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}; it must be broadcastable to "
                f"(..., heads, seqlen_q, seqlen_k) = {scores}"
            ) from None
    return four(query, heads), four(key, heads_k), four(value, heads_v), attn_mask
