"""What a rank computes of one attention, counted before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from . import zigzag
from .rows import Layout
from .sharding import lanes
from .ulysses import HeadShard, head_plan


class LevelWork(NamedTuple):
    """FLOPs of a level, forward: over keys of the rank's own shard, and over those that it got from others."""

    level: int
    own: int
    others: int


def attention_work(form: str, layout: Layout, head_dim: int, batch: int = 1, causal: bool = True) -> list[LevelWork]:
    """What ``layout.rank`` computes forward, level by level; backward takes 2.5 times as much.

    Args:
        form: "gather", "ring" or "ulysses".
        layout: pattern, rank, world, sequence length and heads.
        head_dim: width of a head.
        batch: rows at once.
        causal: as in the operator.
    """
    pair = 4 * head_dim * batch
    if form == "ulysses":
        return [LevelWork(level, pair * edges, 0) for level, edges in enumerate(_of_heads(layout, causal))]
    if form == "ring" and causal and layout.world > 1 and zigzag.is_dense(layout.pattern, layout.seq_len):
        return [LevelWork(0, pair * layout.num_heads * _of_halves(layout), 0)]
    own = layout.own
    # Not cut to the shard's length, which may change the order of the levels.
    inside = replace(layout.pattern, shift=layout.pattern.shift + own.begin)
    others = [0] * len(layout.pattern.levels)
    for rows in layout.segments():
        queries = rows.part(layout.rank)
        for _, keys in rows.stretches[causal]:
            for lane in lanes(rows.streams, rows.segment.origin, rows.rate, queries, keys):
                heads = lane.heads.stop - lane.heads.start
                others[rows.segment.level] += heads * lane.queries.blocks * lane.keys.blocks
    return [
        LevelWork(level, pair * inside.level_edges(level, own.length, layout.num_heads, causal), pair * edges)
        for level, edges in enumerate(others)
    ]


def _of_heads(layout: Layout, causal: bool) -> list[int]:
    heads = head_plan(layout.rank, layout.world, layout.num_heads, layout.num_kv_heads).heads
    pattern = HeadShard.of(layout.pattern, heads, layout.num_heads)
    return [pattern.level_edges(level, layout.seq_len, len(heads), causal) for level in range(len(pattern.levels))]


def _of_halves(layout: Layout) -> int:
    """Pairs of a head: a half sees all before it, and itself."""
    pairs, begin = 0, 0
    for half in range(2 * layout.world):
        length = zigzag.half_length(half, layout.world, layout.seq_len)
        if zigzag.owner_of_half(half, layout.world) == layout.rank:
            pairs += length * begin + length * (length + 1) // 2
        begin += length
    return pairs
