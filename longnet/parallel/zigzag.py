"""Dense causal attention around the ring, with equal work for every rank.

In contiguous shards the last rank would see everything and the first almost nothing. So each shard is cut in two, and
rank s works on the halves s and 2p - 1 - s of all 2p: an early one that sees little and a late one that sees much. Of
any other rank's keys it sees either the early half with all its queries, or both halves with its late queries: dense
blocks of the same size. The halves are exchanged on the way in and out, so callers keep contiguous shards.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longnet.attention import levels
from longnet.attention.levels import merge_
from longnet.attention.pattern import DilationPattern

from .group import SequenceGroup
from .own import Call
from .ring import circulate, circulate_gradients
from .sharding import shard, shard_length

DENSE = DilationPattern.dense()


def is_dense(pattern: DilationPattern, seq_len: int) -> bool:
    """Whether a pattern is ordinary attention over so many positions."""
    (length, rate), *others = pattern.levels
    return not others and rate == 1 and pattern.shift % length + seq_len <= length


def owner_of_half(half: int, world: int) -> int:
    """The rank that works on a half."""
    return half if half < world else 2 * world - 1 - half


def half_length(half: int, world: int, seq_len: int) -> int:
    """Positions of a half, without padding."""
    first = -(-shard_length(world, seq_len) // 2)
    held = shard(half // 2, world, seq_len).length
    return max(0, held - first) if half % 2 else min(held, first)


def own_halves(rank: int, world: int, seq_len: int) -> tuple[int, int]:
    """How many positions a rank's early and late half have."""
    return half_length(rank, world, seq_len), half_length(2 * world - 1 - rank, world, seq_len)


def forward(call: Call, group: SequenceGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    layout = call.layout
    q, k, v = _split(_to_halves(group, torch.cat((q, k, v), 2), layout.seq_len), q, k, v)
    visits = circulate(group, _message(call, k, v), range(layout.world), wrap=True)
    next(visits)
    out, lse = _attend_own(call, q, k, v)
    early, _ = own_halves(layout.rank, layout.world, layout.seq_len)
    for owner, message in visits:
        queries, keys = _seen(call, owner, early)
        q_rows, k_rows, v_rows = q[:, queries], message[:, keys, 0], message[:, keys, 1]
        if q_rows.shape[1] and k_rows.shape[1]:
            o, block_lse = call.kernels.choose(q_rows, k_rows).forward(q_rows, k_rows, v_rows, False, call.scale)
            merge_(out[:, queries], lse[:, queries].squeeze(-1), o, block_lse, first=False)
    return _to_shards(group, out.to(q.dtype), layout.seq_len), _to_shards(group, lse, layout.seq_len)


def backward(
    call: Call, group: SequenceGroup, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    layout = call.layout
    like = (q, k, v, grad, out.to(q.dtype))
    q, k, v, grad, out = _split(_to_halves(group, torch.cat(like, 2), layout.seq_len), *like)
    lse = _to_halves(group, lse, layout.seq_len)
    if q.shape[1]:
        grads = levels.backward(
            grad, q, k, v, out, lse.squeeze(-1), DENSE, True, call.scale, None, call.dropout_p, call.seed
        )
        dq, dk, dv = (x.to(lse.dtype) for x in grads)
    else:
        dq, dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    early, _ = own_halves(layout.rank, layout.world, layout.seq_len)
    home = circulate_gradients(
        group, _message(call, k, v), range(layout.world), wrap=True,
        differentiate=partial(_differentiate, call, early, (grad, q), (out, lse), dq),
    )  # fmt: skip
    if home is not None:
        dk += home[:, : dk.shape[1], 0]
        dv += home[:, : dv.shape[1], 1]
    dqkv = _to_shards(group, torch.cat((dq, dk, dv), 2).to(q.dtype), layout.seq_len)
    dq, dk, dv = _split(dqkv, dq, dk, dv)
    return dq, dk, dv


def _differentiate(
    call: Call, early: int, inputs: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor], dq: Tensor,
    owner: int, message: Tensor,
) -> Tensor:  # fmt: skip
    queries, keys = _seen(call, owner, early)
    dmessage = torch.zeros_like(message, dtype=dq.dtype)
    (grad, q, out, lse), k, v = (x[:, queries] for x in (*inputs, *results)), message[:, keys, 0], message[:, keys, 1]
    if q.shape[1] and k.shape[1]:
        kernel = call.kernels.choose(q, k)
        dq_part, dk_part, dv_part = kernel.backward(grad, q, k, v, out, lse.squeeze(-1), False, call.scale)
        dq[:, queries] += dq_part
        dmessage[:, keys, 0] = dk_part.to(dq.dtype)
        dmessage[:, keys, 1] = dv_part.to(dq.dtype)
    return dmessage


def _seen(call: Call, owner: int, early: int) -> tuple[slice, slice]:
    """The queries that see a part, and the keys of it that they see."""
    layout = call.layout
    their_early, their_late = own_halves(owner, layout.world, layout.seq_len)
    if owner < layout.rank:
        return slice(None), slice(0, their_early)
    return slice(early, None), slice(0, their_early + their_late)


def _attend_own(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    if not q.shape[1]:
        return q.new_zeros(q.shape, dtype=dtype), q.new_zeros((*q.shape[:3], 1), dtype=dtype)
    # The early half lies wholly before the late one, so causal over the two together is causal.
    out, lse = levels.forward(q, k, v, DENSE, True, call.scale, None, call.dropout_p, call.seed)
    return out.to(dtype), lse.unsqueeze(-1)


def _message(call: Call, k: Tensor, v: Tensor) -> Tensor:
    """Both halves one behind the other, of one size on all ranks."""
    layout = call.layout
    size = max(sum(own_halves(rank, layout.world, layout.seq_len)) for rank in range(layout.world))
    message = k.new_zeros(k.shape[0], size, 2, *k.shape[2:])
    message[:, : k.shape[1], 0], message[:, : k.shape[1], 1] = k, v
    return message


def _split(x: Tensor, *like: Tensor) -> list[Tensor]:
    return list(x.split([part.shape[2] for part in like], dim=2))


def _to_halves(group: SequenceGroup, x: Tensor, seq_len: int) -> Tensor:
    """From this rank's shard to its two halves, one behind the other."""
    first = half_length(2 * group.rank, group.size, seq_len)
    held = {2 * group.rank: x[:, :first], 2 * group.rank + 1: x[:, first:]}
    wanted = (group.rank, 2 * group.size - 1 - group.rank)
    lengths = own_halves(group.rank, group.size, seq_len)
    return _move(group, held, dict(zip(wanted, lengths, strict=True)), x, to_shards=False)


def _to_shards(group: SequenceGroup, x: Tensor, seq_len: int) -> Tensor:
    """The reverse of ``_to_halves``."""
    early, _ = own_halves(group.rank, group.size, seq_len)
    held = {group.rank: x[:, :early], 2 * group.size - 1 - group.rank: x[:, early:]}
    wanted = {half: half_length(half, group.size, seq_len) for half in (2 * group.rank, 2 * group.rank + 1)}
    return _move(group, held, wanted, x, to_shards=True)


def _move(group: SequenceGroup, held: dict[int, Tensor], wanted: dict[int, int], x: Tensor, to_shards: bool) -> Tensor:
    def worker(half: int) -> int:
        return owner_of_half(half, group.size)

    def holder(half: int) -> int:
        return half // 2

    target, source = (holder, worker) if to_shards else (worker, holder)
    got: dict[int, Tensor] = {}
    sends, receives = [], []
    for half, part in sorted(held.items()):
        if target(half) == group.rank:
            got[half] = part
        elif part.shape[1]:
            sends.append((part.contiguous(), target(half)))
    for half, length in sorted(wanted.items()):
        if source(half) != group.rank:
            got[half] = x.new_empty(x.shape[0], length, *x.shape[2:])
            if length:
                receives.append((got[half], source(half)))
    for work in group.exchange(sends, receives):
        work.wait()
    return torch.cat([got[half] for half in sorted(wanted)], 1)
