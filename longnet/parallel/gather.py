"""The `gather` form: the ranks of a segment collect its rows, and each attends its own queries to them.

What is collected does not grow with the sequence, only with w / r. All messages are on their way while the own shard
is computed. Backward collects them again, so that between the passes only the shard itself is kept, and sends the
gradients home by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import Work

from .group import SequenceGroup
from .own import Call
from .rows import SegmentRows
from .sharding import Shard, shared_segments


def forward(call: Call, group: SequenceGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    gathered = _gather(call, group, k, v)
    out, lse = call.attend_own(q, k, v)
    for rows, messages, work in gathered:
        work.wait()
        q_rows, out_rows, lse_rows = rows.pack_queries(q), out.rows(rows), lse.rows(rows)
        for ranks, keys, causal in _stretches(call, rows):
            message = _join(rows, messages, ranks)
            rows.attend_(q_rows, message, keys, out_rows, lse_rows, call.scale, call.kernels, causal)
        out.write_(rows, out_rows)
        lse.write_(rows, lse_rows)
    return out.finish(), lse.finish()


def backward(
    call: Call, group: SequenceGroup, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gathered = _gather(call, group, k, v)
    dq, dk, dv = call.attend_own_backward(grad, q, k, v, out, lse)
    home = []
    for rows, messages, work in gathered:
        work.wait()
        queries = tuple(rows.pack_queries(x) for x in (q, grad, out, lse))
        dtype = torch.promote_types(q.dtype, torch.float32)
        dq_rows = torch.zeros_like(queries[0], dtype=dtype)
        dmessages = torch.zeros_like(messages, dtype=dtype)
        for ranks, keys, causal in _stretches(call, rows):
            message = _join(rows, messages, ranks)
            dmessage = torch.zeros_like(message, dtype=dtype)
            rows.attend_backward_(queries, message, keys, dq_rows, dmessage, call.scale, call.kernels, causal)
            first = rows.segment.ranks.start
            dmessages[ranks.start - first : ranks.stop - first] = dmessage.unflatten(1, (len(ranks), -1)).transpose(
                0, 1
            )
        home.append((rows, *group.reduce_scatter(dmessages, rows.segment.ranks)))
        dq.add_(rows, dq_rows)
    for rows, dmessage, work in home:
        work.wait()
        dk.add_(rows, dmessage[:, :, 0])
        dv.add_(rows, dmessage[:, :, 1])
    return dq.finish(), dk.finish(), dv.finish()


def _gather(call: Call, group: SequenceGroup, k: Tensor, v: Tensor) -> list[tuple[SegmentRows, Tensor, Work]]:
    layout = call.layout
    group.create_parts(segment.ranks for segment in shared_segments(layout.pattern, layout.world, layout.seq_len))
    return [(rows, *group.all_gather(rows.pack_keys(k, v), rows.segment.ranks)) for rows in layout.segments()]


def _stretches(call: Call, rows: SegmentRows) -> Iterator[tuple[range, Shard, bool]]:
    """What this rank's queries see: (ranks, positions, whether of those only the earlier ones)."""
    yield from ((ranks, keys, False) for ranks, keys in rows.stretches[call.causal])
    rank = call.layout.rank
    if rows.spanning:
        yield range(rank, rank + 1), rows.part(rank), call.causal


def _join(rows: SegmentRows, messages: Tensor, ranks: range) -> Tensor:
    """The messages of neighbouring ranks as one; nothing is copied for a batch of one."""
    first = rows.segment.ranks.start
    return messages[ranks.start - first : ranks.stop - first].transpose(0, 1).flatten(1, 2)
