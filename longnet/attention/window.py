"""Sliding windows through FlashAttention, for rows and for packed documents alike."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .flash import Sequences, VarlenFlash


def flash_serves(q: Tensor) -> bool:
    """Whether FlashAttention takes such tensors. Asked in compiled code, so of plain facts alone."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256
        and torch.cuda.get_device_properties(q.device).major >= 8
    )


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Causal attention of q (B, N, H, D) to the latest ``window`` positions, its own included.

    Args:
        q: queries.
        k: keys (B, N, Hkv, D).
        v: values.
        window: how many positions a query sees.
        cu_seqlens: borders (documents + 1,) of the documents in the single row of the batch; None has a row be one.
    """
    out: Tensor = window_forward(q, k, v, window, cu_seqlens)[0]
    return out


@torch.library.custom_op("longnet::window_forward", mutates_args=())
def window_forward(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    kernel, sequences = VarlenFlash(window), _sequences(q, cu_seqlens)
    out, lse = kernel.forward(q_rows, k_rows, v_rows, sequences, True, q.shape[-1] ** -0.5)
    return out.contiguous().view(q.shape), lse.contiguous().view(q.shape[:-1])


@window_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("longnet::window_backward", mutates_args=())
def window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows = (
        x.flatten(0, 1) for x in (grad.contiguous(), q, k, v, out, lse)
    )
    kernel, sequences = VarlenFlash(window), _sequences(q, cu_seqlens)
    grads = kernel.backward(grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows, sequences, True, q.shape[-1] ** -0.5)
    dq, dk, dv = (part.contiguous().view(x.shape) for part, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@window_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    return *window_backward(grad, q, k, v, out, lse, ctx.window, cu_seqlens), None, None


window_forward.register_autograd(_backward, setup_context=_setup_context)


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    batch, length = q.shape[:2]
    lengths = (length,) * batch if cu_seqlens is None else tuple(b - a for a, b in pairwise(cu_seqlens.tolist()))
    return _cached_sequences(lengths, q.device)


# The documents of a step are those of all its layers.
@lru_cache(maxsize=8)
def _cached_sequences(lengths: tuple[int, ...], device: torch.device) -> Sequences:
    return Sequences.of(lengths, device)
