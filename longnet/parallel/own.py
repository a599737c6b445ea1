"""A call of sequence-parallel attention: its options, and what a rank computes of its own shard.

The queries of a shard see the keys of the same shard by the plain operator, with the pattern shifted to where the shard
begins. What is left, the keys of other shards, is dense: all of them are earlier (or all are seen), so no mask is
needed, only rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longnet.attention import levels

from .rows import Kernels, Layout
from .sharding import own_pattern


@dataclass(frozen=True)
class Call:
    """One pass, forward or backward. LSE is (B, N, H, 1) here, so that rows are taken from it as from the others."""

    layout: Layout
    causal: bool
    scale: float
    dropout_p: float = 0.0
    seed: Tensor | None = None

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.dropout_p, self.seed)

    def attend_own(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, LSE) over the own shard, ready to be merged with others: in float32 at least."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        if not self.layout.own.length:
            return q.new_zeros(q.shape, dtype=dtype), q.new_zeros((*q.shape[:3], 1), dtype=dtype)
        pattern = own_pattern(self.layout.pattern, self.layout.own)
        out, lse = levels.forward(q, k, v, pattern, self.causal, self.scale, None, self.dropout_p, self.seed)
        return out.to(dtype), lse.unsqueeze(-1)

    def attend_own_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        if not self.layout.own.length:
            dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
            return dq, dk, dv
        pattern = own_pattern(self.layout.pattern, self.layout.own)
        grads = levels.backward(
            grad, q, k, v, out, lse.squeeze(-1), pattern, self.causal, self.scale, None, self.dropout_p, self.seed
        )
        dq, dk, dv = (x.to(dtype).contiguous() for x in grads)
        return dq, dk, dv
