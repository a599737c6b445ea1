"""The `sdpa` backend: level by level through a library flash kernel, merged by LSE.

Forward keeps one running output and LSE and folds each level's into them. Backward runs the same kernels' backward on
the *merged* output and LSE and sums the gradients, which is exact and needs nothing stored per level. Both are
registered as custom ops, so that torch.compile, activation checkpointing and memory planning see one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import fused, packed
from .flash import FlashKernel, Math, choose_kernel
from .pattern import DilationPattern
from .tiles import causal_parts, tiles

# Mean length of packed documents from which on each is computed by itself.
LONG_DOCUMENT = 12288


def attend_by_levels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilationPattern,
    causal: bool,
    scale: float,
    dropout_p: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    # Drawn here, outside the op, so that activation checkpointing replays the same dropout.
    seed = torch.randint(2**62, (1,)) if dropout_p > 0.0 else None
    return dilated_forward(
        q, k, v, pattern.segment_lengths, pattern.dilation_rates, pattern.heads, pattern.shift,
        causal, scale, cu_seqlens, dropout_p, seed,
    )  # fmt: skip


# Ops take plain values; checking them again in every call would cost more than some kernels do.
_pattern = lru_cache(DilationPattern)


@torch.library.custom_op("longnet::dilated_forward", mutates_args=())
def dilated_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    shift: int,
    causal: bool,
    scale: float,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    pattern = _pattern(tuple(segment_lengths), tuple(dilation_rates), heads, shift)
    return forward(q, k, v, pattern, causal, scale, cu_seqlens, dropout_p, seed)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilationPattern,
    causal: bool,
    scale: float,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The op itself, for those that hold a pattern and do their own differentiation."""
    if dropout_p == 0.0 and fused.unsupported(q) is None:
        if documents := _many_documents(q, pattern, cu_seqlens):
            out, lse = packed.forward(_one_row(q), _one_row(k), _one_row(v), pattern, causal, scale, documents)
            return out.view(q.shape), lse.view(q.shape[:-1])
        return fused.forward(q, k, v, pattern, causal, scale, _borders(q, cu_seqlens))
    dtype = torch.promote_types(q.dtype, torch.float32)
    if _covers_everything(pattern):
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    else:
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    for call in _calls(pattern, causal, (q, out, lse.unsqueeze(-1)), (k, v), cu_seqlens, dropout_p, seed):
        q_rows, out_rows, lse_rows = call.queries
        o, call_lse = call.kernel.forward(q_rows, call.keys[0], call.keys[1], call.causal, scale)
        merge_(out_rows, lse_rows.squeeze(-1), o, call_lse, call.first)
    return out.to(q.dtype), lse


@dilated_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=lse_dtype, device=q.device)


@torch.library.custom_op("longnet::dilated_backward", mutates_args=())
def dilated_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    shift: int,
    causal: bool,
    scale: float,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = _pattern(tuple(segment_lengths), tuple(dilation_rates), heads, shift)
    return backward(grad, q, k, v, out, lse, pattern, causal, scale, cu_seqlens, dropout_p, seed)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: DilationPattern,
    causal: bool,
    scale: float,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the edges of ``pattern``, where (out, LSE) may have been merged with those of others."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    if dropout_p == 0.0 and fused.unsupported(q) is None:
        if documents := _many_documents(q, pattern, cu_seqlens):
            dq, dk, dv = packed.backward(
                _one_row(grad), _one_row(q), _one_row(k), _one_row(v), _one_row(out), _one_row(lse),
                pattern, causal, scale, documents,
            )  # fmt: skip
            return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
        return fused.backward(grad, q, k, v, out, lse, pattern, causal, scale, _borders(q, cu_seqlens))
    dtype = torch.promote_types(q.dtype, torch.float32)
    complete = _covers_everything(pattern)
    allocate = torch.empty if complete else torch.zeros
    dq, dk, dv = (allocate(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    query_like, key_like = (q, grad, out, lse.unsqueeze(-1), dq), (k, v, dk, dv)
    for call in _calls(pattern, causal, query_like, key_like, cu_seqlens, dropout_p, seed):
        q_rows, grad_rows, out_rows, lse_rows, dq_rows = call.queries
        k_rows, v_rows, *dkv_rows = call.keys
        grads = call.kernel.backward(
            grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows.squeeze(-1), call.causal, scale
        )
        for rows, part in zip((dq_rows, *dkv_rows), grads, strict=True):
            if complete and call.first:
                rows.copy_(part)
            else:
                rows.add_(part)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dilated_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *pattern, causal, scale, cu_seqlens, dropout_p, seed = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, seed)
    ctx.pattern, ctx.causal, ctx.scale, ctx.dropout_p = tuple(pattern), causal, scale, dropout_p
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens, seed = ctx.saved_tensors
    dq = dk = dv = None
    if grad_out is not None:
        dq, dk, dv = dilated_backward(
            grad_out, q, k, v, out, lse, *ctx.pattern, ctx.causal, ctx.scale, cu_seqlens, ctx.dropout_p, seed
        )
    if grad_lse is not None:
        dq_lse, dk_lse = _lse_backward(ctx, grad_lse, q, k, lse, cu_seqlens)
        dq = dq_lse if dq is None else dq + dq_lse
        dk = dk_lse if dk is None else dk + dk_lse
    return dq, dk, dv, *(None,) * 9


def _lse_backward(
    ctx: Any, grad_lse: Tensor, q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of the LSE: its derivative by a score is the weight, so two attentions over K itself give it."""
    options = (*ctx.pattern, ctx.causal, ctx.scale, cu_seqlens, 0.0, None)
    grad_lse = torch.where(lse == -torch.inf, 0.0, grad_lse * ctx.scale).unsqueeze(-1)
    mean_key, _ = dilated_forward(q, k, k, *options)
    weighted_q = (grad_lse * q).to(q.dtype)
    _, _, dk = dilated_backward(weighted_q, q, k, k, mean_key, lse, *options)
    return (grad_lse * mean_key).to(q.dtype), dk


dilated_forward.register_autograd(_backward, setup_context=_setup_context)


class Call(NamedTuple):
    """One kernel call: its views of the query-like and of the key-like tensors.

    ``first`` says that no earlier call has written these rows of the output.
    """

    kernel: FlashKernel
    causal: bool
    first: bool
    queries: list[Tensor]
    keys: list[Tensor]


def _calls(
    pattern: DilationPattern,
    causal: bool,
    query_like: tuple[Tensor, ...],
    key_like: tuple[Tensor, ...],
    cu_seqlens: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Iterator[Call]:
    q, k = query_like[0], key_like[0]
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    borders = _borders(q, cu_seqlens)
    call_seed = 0 if seed is None else int(seed)
    for begin, end in pairwise(borders):
        for tile in tiles(pattern, end - begin, num_heads, num_kv_heads):
            first = tile.level == 0 or pattern.heads == "grouped"
            views = [tile.queries(x[:, begin:end]) for x in query_like] + [tile.keys(x[:, begin:end]) for x in key_like]
            for part in _one_batch_dimension(views):
                queries, keys = part[: len(query_like)], part[len(query_like) :]
                if dropout_p > 0.0:
                    call_seed += 1
                    yield Call(Math(dropout_p, call_seed), causal, first, queries, keys)
                    continue
                kernel = choose_kernel(queries[0], keys[0])
                if causal and kernel.causal_block:
                    yield from _causal_calls(kernel, kernel.causal_block, first, queries, keys)
                else:
                    yield Call(kernel, causal, first, queries, keys)


def _covers_everything(pattern: DilationPattern) -> bool:
    """Whether the first level holds every row of every head once, so that its results need nothing to be added to."""
    return pattern.heads == "all" and pattern.dilation_rates[0] == 1


def _borders(q: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    return [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()


def _many_documents(q: Tensor, pattern: DilationPattern, cu_seqlens: Tensor | None) -> list[int] | None:
    """The borders of documents whose rows cost less to gather than a set of kernel calls for each document.

    The rows of a batch are such documents, too, unless they can be taken as one long row.
    """
    batch, seq_len = q.shape[:2]
    borders = _borders(q, cu_seqlens)
    if batch > 1 and not fused.joins_rows(pattern, seq_len):
        borders = list(range(0, batch * seq_len + 1, seq_len))
    return borders if len(borders) > 2 and borders[-1] < LONG_DOCUMENT * (len(borders) - 1) else None


def _one_row(x: Tensor) -> Tensor:
    """(B, N, ...) as (1, B * N, ...)."""
    return x.flatten(0, 1).unsqueeze(0)


def _causal_calls(
    kernel: FlashKernel, block: int, first: bool, queries: list[Tensor], keys: list[Tensor]
) -> Iterator[Call]:
    for part in causal_parts(queries[0].shape[1], block):
        views = [part.cut(x, part.queries) for x in queries] + [part.cut(x, part.keys) for x in keys]
        for cut in _one_batch_dimension(views):
            yield Call(kernel, part.triangle, first and part.triangle, cut[: len(queries)], cut[len(queries) :])


def _one_batch_dimension(views: list[Tensor]) -> Iterator[list[Tensor]]:
    """(B, S, L, H, D) views as (B * S, L, H, D) ones; batch by batch where their strides do not allow it."""
    batch, segments = views[0].shape[:2]
    if batch == 1 or segments == 1 or all(x.stride(0) == segments * x.stride(1) for x in views):
        yield [x.flatten(0, 1) for x in views]
    else:
        for row in range(batch):
            yield [x[row] for x in views]


def merge_(out: Tensor, lse: Tensor, o: Tensor, level_lse: Tensor, first: bool) -> None:
    """Folds one call's rows into the running output and LSE, in place."""
    if first:
        out.copy_(o)
        lse.copy_(level_lse)
    else:
        out.lerp_(o.to(out.dtype), torch.sigmoid(level_lse - lse).unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, level_lse))
