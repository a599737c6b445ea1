"""Attention over a sequence that several ranks hold, equal to that of one: value and gradient.

The forms are registered as custom ops, as the plain operator is, so that torch.compile, activation checkpointing and
memory planning see one operation with its communication inside.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longnet.attention.dilated import checked_inputs, dilated_attention
from longnet.attention.pattern import DilationPattern

from . import gather, ring, ulysses, zigzag
from .group import SequenceGroup
from .own import Call
from .rows import Layout
from .sharding import shard_length

FORMS = ("gather", "ring", "ulysses")


def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilationPattern,
    form: str = "gather",
    group: ProcessGroup | None = None,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seq_len: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``dilated_attention`` over a sequence whose shards lie on the ranks of a group. All of them call this together.

    Args:
        q: this rank's shard (B, L, H, D) of contiguous positions, in the order of the ranks; L is the same on all.
        k: (B, L, Hkv, D) with H a multiple of Hkv.
        v: like k.
        pattern: which keys a query sees, over the whole sequence.
        form: "gather" (the ranks of a segment collect its rows), "ring" (they pass them on; at most two shards' rows
            are held) or "ulysses" (whole sequences of some heads, by all-to-all).
        group: the ranks that share the sequence; None for all processes. With one rank this is the plain operator.
        causal: no query sees a later key.
        scale: of the scores; 1/sqrt(D) by default.
        dropout_p: probability of dropping an attention weight; give 0 outside of training.
        seq_len: positions of the whole sequence where the ranks do not divide it: L is ceil(seq_len / ranks), and the
            rest of the last shards is padding, which nothing attends and whose output and gradient are 0.
        cu_seqlens: not supported with more than one rank.
        backend: as in ``dilated_attention``; with more than one rank "auto" or "sdpa".

    Returns:
        The output for this rank's shard, (B, L, H, D).
    """
    if form not in FORMS:
        nearest = difflib.get_close_matches(str(form), FORMS, n=1, cutoff=0.0)[0]
        raise ValueError(f"form={form!r}: expected one of {list(FORMS)}; did you mean {nearest!r}?")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if seq_len is not None and seq_len != q.shape[1]:
            raise ValueError(f"seq_len={seq_len}: a single rank holds all positions; expected q's {q.shape[1]}")
        out = dilated_attention(q, k, v, pattern, causal, scale, dropout_p, cu_seqlens, backend)
        assert isinstance(out, Tensor)
        return out

    operator = ShardedOperator(form, SequenceGroup.of(group))
    return operator(q, k, v, pattern, causal, scale, dropout_p, cu_seqlens, backend, seq_len)


class ShardedOperator:
    """``sequence_parallel_attention`` over one group of several ranks, for the place of ``dilated_attention``."""

    def __init__(self, form: str, group: SequenceGroup) -> None:
        self.form = form
        # Plain values, which a compiler can read.
        self.group, self.size = group.name, group.size

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: DilationPattern,
        causal: bool = True,
        scale: float | None = None,
        dropout_p: float = 0.0,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        seq_len: int | None = None,
    ) -> Tensor:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens is given: packed documents are not supported over several ranks; give one a row"
            )
        if backend not in ("auto", "sdpa"):
            raise ValueError(f"backend={backend!r}: expected 'auto' or 'sdpa' over several ranks; nearest: 'sdpa'")
        q, k, v = checked_inputs(q, k, v, pattern, dropout_p, scale)
        length = q.shape[1]
        if seq_len is None:
            seq_len = length * self.size
        elif seq_len < 1 or shard_length(self.size, seq_len) != length:
            low, high = (length - 1) * self.size + 1, length * self.size
            raise ValueError(
                f"seq_len={seq_len}: q has {length} positions on each of {self.size} ranks, which fits {low} to "
                f"{high}; the nearest is {min(max(seq_len, low), high)}"
            )
        if self.form == "ulysses":
            ulysses.head_plan(0, self.size, q.shape[2], k.shape[2])
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        # Drawn here, outside the op, so that activation checkpointing replays the same dropout.
        seed = torch.randint(2**62, (1,)) if dropout_p > 0.0 else None
        levels = (pattern.segment_lengths, pattern.dilation_rates, pattern.heads, pattern.shift)
        op = ulysses_forward if self.form == "ulysses" else sharded_forward
        out: Tensor = op(q, k, v, *levels, causal, scale, dropout_p, seed, self.form, self.group, seq_len)[0]
        return out


def _call(
    q: Tensor, k: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: str, shift: int,
    causal: bool, scale: float, dropout_p: float, seed: Tensor | None, form: str, group: str, seq_len: int,
) -> tuple[SequenceGroup, Call]:  # fmt: skip
    ranks = SequenceGroup.named(group)
    pattern = DilationPattern(tuple(segment_lengths), tuple(dilation_rates), heads, shift)
    layout = Layout(pattern, ranks.rank, ranks.size, seq_len, q.shape[2], k.shape[2])
    return ranks, Call(layout, causal, scale, dropout_p, seed)


def _form(name: str, call: Call) -> Any:
    if name == "ring" and call.causal and zigzag.is_dense(call.layout.pattern, call.layout.seq_len):
        return zigzag
    return {"gather": gather, "ring": ring}[name]


@torch.library.custom_op("longnet::sequence_parallel_forward", mutates_args=())
def sharded_forward(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: str,
    shift: int, causal: bool, scale: float, dropout_p: float, seed: Tensor | None, form: str, group: str, seq_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks, call = _call(
        q, k, segment_lengths, dilation_rates, heads, shift, causal, scale, dropout_p, seed, form, group, seq_len
    )
    held = call.layout.own.length
    out, lse = _form(form, call).forward(call, ranks, *(x[:, :held] for x in (q, k, v)))
    padding = q.shape[1] - held
    out, lse = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in (out, lse))
    return out.to(q.dtype), lse


@sharded_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((*q.shape[:-1], 1), dtype=lse_dtype, device=q.device)


@torch.library.custom_op("longnet::sequence_parallel_backward", mutates_args=())
def sharded_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], heads: str, shift: int, causal: bool, scale: float, dropout_p: float,
    seed: Tensor | None, form: str, group: str, seq_len: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ranks, call = _call(
        q, k, segment_lengths, dilation_rates, heads, shift, causal, scale, dropout_p, seed, form, group, seq_len
    )
    held = call.layout.own.length
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grads = _form(form, call).backward(call, ranks, *(x[:, :held] for x in (grad, q, k, v, out, lse)))
    padding = q.shape[1] - held
    padded = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in grads)
    dq, dk, dv = (x.to(like.dtype).contiguous() for x, like in zip(padded, (q, k, v), strict=True))
    return dq, dk, dv


@sharded_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


@torch.library.custom_op("longnet::ulysses_forward", mutates_args=())
def ulysses_forward(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: str,
    shift: int, causal: bool, scale: float, dropout_p: float, seed: Tensor | None, form: str, group: str, seq_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ranks, call = _call(
        q, k, segment_lengths, dilation_rates, heads, shift, causal, scale, dropout_p, seed, form, group, seq_len
    )
    return ulysses.forward(call, ranks, q, k, v)


@ulysses_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, group, seq_len = options
    ranks = SequenceGroup.named(group)
    plan = ulysses.head_plan(ranks.rank, ranks.size, q.shape[2], k.shape[2])
    row = (q.shape[0], seq_len)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty(q.shape),
        q.new_empty((*row, sum(plan.qkv), q.shape[3])),
        q.new_empty((*row, len(plan.heads), q.shape[3])),
        q.new_empty((*row, len(plan.heads)), dtype=lse_dtype),
    )


@torch.library.custom_op("longnet::ulysses_backward", mutates_args=())
def ulysses_backward(
    grad: Tensor, qkv_heads: Tensor, out_heads: Tensor, lse_heads: Tensor, num_kv_heads: int,
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: str, shift: int, causal: bool, scale: float,
    dropout_p: float, seed: Tensor | None, form: str, group: str, seq_len: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    k_like = grad[:, :, :num_kv_heads]
    ranks, call = _call(
        grad, k_like, segment_lengths, dilation_rates, heads, shift, causal, scale, dropout_p, seed, form, group,
        seq_len,
    )  # fmt: skip
    return ulysses.backward(call, ranks, grad, qkv_heads, out_heads, lse_heads)


@ulysses_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, num_kv_heads: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*grad.shape[:2], num_kv_heads, grad.shape[3])
    return grad.new_empty(grad.shape), grad.new_empty(shape), grad.new_empty(shape)


def _without_seed(options: Sequence[Any]) -> tuple[list[Any], Tensor | None]:
    """Tensors are kept by autograd, the rest by the context."""
    *first, seed, form, group, seq_len = options
    return [*first, None, form, group, seq_len], seed


def _with_seed(options: Sequence[Any], seed: Tensor | None) -> list[Any]:
    *first, _, form, group, seq_len = options
    return [*first, seed, form, group, seq_len]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.options, seed = _without_seed(options)
    ctx.save_for_backward(q, k, v, *output, seed)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (3 + len(ctx.options))
    *saved, seed = ctx.saved_tensors
    grads = sharded_backward(grad, *saved, *_with_seed(ctx.options, seed))
    return *grads, *(None,) * len(ctx.options)


def _ulysses_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, k, _, *options = inputs
    ctx.options, seed = _without_seed(options)
    ctx.save_for_backward(*output[1:], seed)
    ctx.num_kv_heads = k.shape[2]
    ctx.set_materialize_grads(False)


def _ulysses_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (3 + len(ctx.options))
    *saved, seed = ctx.saved_tensors
    grads = ulysses_backward(grad, *saved, ctx.num_kv_heads, *_with_seed(ctx.options, seed))
    return *grads, *(None,) * len(ctx.options)


sharded_forward.register_autograd(_backward, setup_context=_setup_context)
ulysses_forward.register_autograd(_ulysses_backward, setup_context=_ulysses_setup_context)
