"""What one rank of several does of a training step: its work, what it receives, and its workload for the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from longnet.attention import DilationPattern, build_block
from longnet.attention.blocks import Dilated
from longnet.parallel.communication import LevelTraffic, attention_traffic, held_bytes
from longnet.parallel.rows import Layout
from longnet.parallel.sharding import shard_length
from longnet.parallel.work import LevelWork, attention_work
from longnet.planning import RankShare, Workload


class RankLayer(NamedTuple):
    """One layer's attention, as one rank computes it."""

    layout: Layout
    work: list[LevelWork]
    traffic: list[LevelTraffic]

    @property
    def pattern(self) -> DilationPattern:
        return self.layout.pattern

    @property
    def touched(self) -> float:
        """Share of its rows that are rows of a segment which it shares, at most."""
        rates = {segment.segment.level: segment.rate for segment in self.layout.segments()}
        return min(1.0, sum(1 / rate for rate in rates.values()))

    @property
    def flops(self) -> int:
        """Forward."""
        return sum(level.own + level.others for level in self.work)

    @property
    def received(self) -> int:
        """Bytes, forward and backward."""
        return sum(level.forward.received + level.backward.received for level in self.traffic)


def rank_layers(whole: Workload, ranks: int, form: str) -> list[RankLayer]:
    """The layers as the last rank computes them, which has the most to attend.

    Args:
        whole: rows of full length.
        ranks: that share a row.
        form: "gather", "ring" or "ulysses".

    Raises:
        ValueError: if a block cannot be spread over ranks.
    """
    model = whole.model
    kinds = []
    for spec in model.attention[: model.num_hidden_layers]:
        block = build_block(spec)
        if not isinstance(block, Dilated):
            raise ValueError(f"{spec['name']} is not spread over ranks; use attention=dilated or attention=dense")
        heads = model.num_attention_heads, model.num_key_value_heads
        layout = Layout(block.pattern, ranks - 1, ranks, whole.context_length, *heads)
        work = attention_work(form, layout, model.head_dim, whole.batch_size)
        traffic = attention_traffic(form, layout, model.head_dim, whole.batch_size, whole.compute_bytes)
        kinds.append(RankLayer(layout, work, traffic))
    return [kinds[layer % len(kinds)] for layer in range(model.num_hidden_layers)]


def rank_workload(whole: Workload, ranks: int, form: str) -> Workload:
    """What the planner is to count for the last of so many ranks; for one, all of it."""
    if ranks == 1:
        return whole
    layers = rank_layers(whole, ranks, form)
    shard = replace(whole, context_length=shard_length(ranks, whole.context_length))
    flops = sum(layer.flops for layer in layers) / shard.tokens
    held = max(held_bytes(form, layer.traffic) for layer in layers)
    touched = 0.0 if form == "ulysses" else max(layer.touched for layer in layers)
    return replace(shard, share=RankShare(flops, held, touched))
