"""A call of sequence-parallel attention: its options, and what a rank computes of its own shard.

The queries of a shard see the keys of the same shard by the plain operator, with the pattern shifted to where the shard
begins. What is left, the keys of other shards, is dense: all of them are earlier (or all are seen), so no mask is
needed, only rows. Levels whose segment holds the whole shard are left to those rows too, own keys included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longnet.attention import DilationPattern, levels

from .rows import Kernels, Layout, Totals
from .sharding import local_pattern


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

    @property
    def pattern(self) -> DilationPattern:
        """Of the own shard."""
        layout = self.layout
        return local_pattern(layout.pattern, layout.rank, layout.world, layout.seq_len)

    def attend_own(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Totals, Totals]:
        """(out, LSE) over the own shard, ready to be merged with others."""
        if not self.layout.own.length:
            out, lse = q.new_zeros(q.shape), q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        else:
            out, lse = levels.forward(q, k, v, self.pattern, self.causal, self.scale, None, self.dropout_p, self.seed)
        return Totals(out, self.layout), Totals(lse.unsqueeze(-1), self.layout)

    def attend_own_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Totals, Totals, Totals]:
        if not self.layout.own.length:
            dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        else:
            dq, dk, dv = levels.backward(
                grad, q, k, v, out, lse.squeeze(-1), self.pattern, self.causal, self.scale, None, self.dropout_p,
                self.seed,
            )  # fmt: skip
        return Totals(dq, self.layout), Totals(dk, self.layout, keys=True), Totals(dv, self.layout, keys=True)
