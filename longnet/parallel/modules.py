"""Dilated attention over several ranks, as modules: the plain ones with a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longnet.attention import DilatedAttention, MultiheadDilatedAttention

from .attention import sequence_parallel_attention


class RingDilatedAttention(DilatedAttention):
    """``DilatedAttention`` over a sequence whose contiguous shards lie on the ranks of a group.

    Args:
        segment_lengths: w of each level, over the whole sequence.
        dilation_rates: r of each level.
        ring_size: ranks that share a sequence: 1, which is the plain operator, or all of the group (the default).
        group: the process group; None for all processes.
        form: "gather", "ring" or "ulysses", see ``sequence_parallel_attention``.
        options: of ``DilatedAttention``.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        ring_size: int | None = None,
        group: ProcessGroup | None = None,
        form: str = "ring",
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, **options)
        if ring_size != 1:
            size = dist.get_world_size(group) if dist.is_initialized() else 1
            if ring_size not in (None, size):
                raise ValueError(
                    f"ring_size={ring_size}: expected 1 or the group's {size} ranks; for a part of the processes "
                    "give their process group"
                )
            ring_size = size
        self.ring_size = ring_size
        self.group = group
        self.form = form

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        if self.ring_size == 1:
            return super().forward(q, k, v, is_causal, cu_seqlens)
        return sequence_parallel_attention(
            q,
            k,
            v,
            self.pattern,
            form=self.form,
            group=self.group,
            causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """``MultiheadDilatedAttention`` over a sequence whose contiguous shards lie on the ranks of a group.

    The parameters are whole on every rank; their gradients are those of the rank's own shard, to be summed by the
    training strategy.

    Args:
        embed_dim: width of the model.
        num_heads: number of attention heads.
        segment_lengths: w of each level, over the whole sequence.
        dilation_rates: r of each level.
        ring_size: see ``RingDilatedAttention``.
        group: see ``RingDilatedAttention``.
        form: see ``RingDilatedAttention``.
        options: of ``MultiheadDilatedAttention``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        ring_size: int | None = None,
        group: ProcessGroup | None = None,
        form: str = "ring",
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **options)
        plain = self.attention
        self.attention = RingDilatedAttention(
            segment_lengths,
            dilation_rates,
            ring_size=ring_size,
            group=group,
            form=form,
            attention_dropout=plain.attention_dropout,
            heads=plain.pattern.heads,
            shift=plain.pattern.shift,
            backend=plain.backend,
        )
