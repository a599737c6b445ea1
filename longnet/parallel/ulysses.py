"""The `ulysses` form: from shards of positions to shards of heads and back, by all-to-all.

Between the two exchanges each rank has whole sequences of some heads, and the plain operator serves them. Phases go by
the head's global index, so the pattern is told which heads these are.

B batch, N positions, L positions of a shard, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from longnet.attention import levels
from longnet.attention.pattern import DilationPattern

from .group import SequenceGroup
from .own import Call
from .sharding import spread


@dataclass(frozen=True)
class HeadShard(DilationPattern):
    """A pattern over some of the heads: local head 0 is head ``first_head`` of ``total_heads``."""

    first_head: int = 0
    total_heads: int = 0

    def head_groups(self, level: int, num_heads: int) -> Iterator[tuple[int, range]]:
        own = range(self.first_head, self.first_head + num_heads)
        for phase, heads in super().head_groups(level, self.total_heads):
            inside = [head - self.first_head for head in heads if head in own]
            if inside:
                yield phase, range(inside[0], inside[-1] + 1, heads.step)

    @classmethod
    def of(cls, pattern: DilationPattern, heads: range, total_heads: int) -> HeadShard:
        return cls(
            pattern.segment_lengths, pattern.dilation_rates, pattern.heads, pattern.shift, heads.start, total_heads
        )


@dataclass(frozen=True)
class HeadPlan:
    """The query heads that a rank computes, and the KV heads that it is sent for them."""

    heads: range
    kv_heads: tuple[int, ...]

    def cut(self, q: Tensor, *kv: Tensor) -> Tensor:
        """Its heads of the tensors, together along the heads, flat."""
        parts = [q[:, :, self.heads.start : self.heads.stop], *(x[:, :, list(self.kv_heads)] for x in kv)]
        return torch.cat(parts, 2).flatten()

    @property
    def qkv(self) -> list[int]:
        return [len(self.heads), len(self.kv_heads), len(self.kv_heads)]


def head_plan(rank: int, world: int, num_heads: int, num_kv_heads: int) -> HeadPlan:
    """Which heads go to a rank. A KV head goes to all ranks that need it, so there may be fewer of them than ranks."""
    if num_heads < world:
        raise ValueError(
            f"form='ulysses' gives each rank at least one of q's {num_heads} heads, but the group has {world} ranks; "
            f"the nearest sequence-parallel size that works is {num_heads}"
        )
    heads = spread(rank, world, num_heads)
    needed = [head // (num_heads // num_kv_heads) for head in heads]
    distinct = sorted(set(needed))
    number, rest = divmod(len(needed), len(distinct))
    # The kernels want every KV head to serve equally many query heads; otherwise each query head gets its own copy.
    even = rest == 0 and needed == [kv for kv in distinct for _ in range(number)]
    return HeadPlan(heads, tuple(distinct if even else needed))


def forward(call: Call, group: SequenceGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output for this rank's shard; then, for its heads, q, k and v together, the output and the LSE."""
    plans = _plans(call)
    own = plans[group.rank]
    qkv_heads = _to_heads(group, torch.cat([plan.cut(q, k, v) for plan in plans]), [sum(p.qkv) for p in plans], q, call)
    pattern = HeadShard.of(call.layout.pattern, own.heads, call.layout.num_heads)
    q_heads, k_heads, v_heads = qkv_heads.split(own.qkv, 2)
    out_heads, lse_heads = levels.forward(
        q_heads, k_heads, v_heads, pattern, call.causal, call.scale, None, call.dropout_p, call.seed
    )
    out = torch.cat(_to_shards(group, out_heads, [len(plan.heads) for plan in plans], q.shape[1]), 2)
    return out, qkv_heads, out_heads, lse_heads


def backward(
    call: Call, group: SequenceGroup, grad: Tensor, qkv_heads: Tensor, out_heads: Tensor, lse_heads: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    plans = _plans(call)
    own = plans[group.rank]
    grad_heads = _to_heads(
        group, torch.cat([plan.cut(grad) for plan in plans]), [len(p.heads) for p in plans], grad, call
    )
    pattern = HeadShard.of(call.layout.pattern, own.heads, call.layout.num_heads)
    q_heads, k_heads, v_heads = qkv_heads.split(own.qkv, 2)
    grads = levels.backward(
        grad_heads, q_heads, k_heads, v_heads, out_heads, lse_heads, pattern, call.causal, call.scale, None,
        call.dropout_p, call.seed,
    )  # fmt: skip
    parts = _to_shards(group, torch.cat(grads, 2), [sum(plan.qkv) for plan in plans], grad.shape[1])
    batch, length, _, head_dim = grad.shape
    exact = torch.promote_types(grad.dtype, torch.float32)
    dk, dv = (grad.new_zeros(batch, length, call.layout.num_kv_heads, head_dim, dtype=exact) for _ in range(2))
    dq = []
    for plan, part in zip(plans, parts, strict=True):
        dq_part, dk_part, dv_part = part.split(plan.qkv, 2)
        dq.append(dq_part)
        index = torch.tensor(plan.kv_heads, device=grad.device)
        dk.index_add_(2, index, dk_part.to(exact))
        dv.index_add_(2, index, dv_part.to(exact))
    return torch.cat(dq, 2), dk.to(grad.dtype), dv.to(grad.dtype)


def _plans(call: Call) -> list[HeadPlan]:
    layout = call.layout
    return [head_plan(rank, layout.world, layout.num_heads, layout.num_kv_heads) for rank in range(layout.world)]


def _to_heads(group: SequenceGroup, messages: Tensor, heads: list[int], like: Tensor, call: Call) -> Tensor:
    """Flat (B, L, heads, D) for each rank become (B, N, own heads, D)."""
    batch, length, _, head_dim = like.shape
    own = batch * length * heads[group.rank] * head_dim
    got = group.all_to_all(messages, [batch * length * number * head_dim for number in heads], [own] * group.size)
    # For a batch of one this is a view.
    whole = got.view(group.size, batch, length, -1, head_dim).transpose(0, 1).flatten(1, 2)
    return whole[:, : call.layout.seq_len]


def _to_shards(group: SequenceGroup, x: Tensor, heads: list[int], length: int) -> list[Tensor]:
    """(B, N, own heads, D) become (B, L, heads, D) from each rank."""
    if missing := length * group.size - x.shape[1]:
        x = pad(x, (0, 0, 0, 0, 0, missing))
    messages = x.unflatten(1, (group.size, length)).transpose(0, 1).flatten()
    sizes = [x.shape[0] * length * number * x.shape[3] for number in heads]
    got = group.all_to_all(messages, [messages.numel() // group.size] * group.size, sizes).split(sizes)
    return [part.view(x.shape[0], length, number, x.shape[3]) for part, number in zip(got, heads, strict=True)]
