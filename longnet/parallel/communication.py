"""What a rank receives from others for one attention, counted before anything runs.

Bytes are those that arrive at one rank; over a call, as many leave the ranks together. Gradients travel in float32, or
float64 for float64 inputs, whatever the dtype of the activations is. With activation checkpointing that computes the
attention again, the forward traffic comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from . import zigzag
from .ring import Circle
from .rows import Layout, SegmentRows
from .sharding import shard_length
from .ulysses import head_plan


@dataclass(frozen=True)
class Traffic:
    """Messages (a collective counts once) and the bytes that they bring."""

    messages: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.received + other.received)


class LevelTraffic(NamedTuple):
    """The traffic of a level, or, with ``level=None``, of all of them together."""

    level: int | None
    forward: Traffic
    backward: Traffic


def attention_traffic(
    form: str, layout: Layout, head_dim: int, batch: int = 1, element_size: int = 2, causal: bool = True
) -> list[LevelTraffic]:
    """What ``layout.rank`` receives for one attention, level by level; levels without traffic are left out.

    Args:
        form: "gather", "ring" or "ulysses".
        layout: pattern, rank, world, sequence length and heads.
        head_dim: width of a head.
        batch: rows at once.
        element_size: bytes of an element of q, k and v.
        causal: as in the operator.
    """
    gradient_size = max(4, element_size)
    if layout.world == 1:
        return []
    if form == "ulysses":
        return [_ulysses(layout, batch * head_dim * element_size)]
    if form == "ring" and causal and zigzag.is_dense(layout.pattern, layout.seq_len):
        return [_zigzag(layout, batch, head_dim, element_size, gradient_size)]
    count = _gather if form == "gather" else _ring
    by_level: dict[int, LevelTraffic] = {}
    for rows in layout.segments():
        elements = batch * rows.blocks * 2 * len(rows.streams) * head_dim
        forward, backward = count(rows, elements * element_size, elements * gradient_size, causal)
        level = rows.segment.level
        before = by_level.get(level, LevelTraffic(level, Traffic(), Traffic()))
        by_level[level] = LevelTraffic(level, before.forward + forward, before.backward + backward)
    return list(by_level.values())


def held_bytes(form: str, levels: list[LevelTraffic]) -> int:
    """About what a rank holds of others at a time in backward.

    `gather` has all levels' keys and values, and one level's gradients twice; `ring` two parts and two gradients;
    `ulysses` has other heads in the place of its own.
    """
    gradients = [level.backward.received - level.forward.received for level in levels]
    if form == "gather":
        return sum(level.forward.received for level in levels) + 2 * max(gradients, default=0)
    if form == "ring":
        return 2 * max((level.backward.received // max(1, level.forward.messages) for level in levels), default=0)
    return 0


def gradient_bytes(parameters: int, world: int, sharded: bool = False) -> int:
    """What a rank receives in a step for the weights' gradients: in float32, by a reduce-scatter and an all-gather.

    With ``sharded`` weights (FSDP2), these are gathered forward and again backward.
    """
    return (3 if sharded else 2) * 4 * parameters * (world - 1) // world


def _gather(rows: SegmentRows, message: int, gradient: int, causal: bool) -> tuple[Traffic, Traffic]:
    others = len(rows.segment.ranks) - 1
    gathered = Traffic(1, others * message)
    return gathered, gathered + Traffic(1, others * gradient)


def _ring(rows: SegmentRows, message: int, gradient: int, causal: bool) -> tuple[Traffic, Traffic]:
    return _around(Circle(rows.segment.ranks, rows.layout.rank, wrap=not causal), message, gradient)


def _around(circle: Circle, message: int, gradient: int) -> tuple[Traffic, Traffic]:
    hops = range(1, circle.size)
    parts = sum(circle.receives(hop) for hop in hops)
    # The gradient of a part follows it from its second hop on, and comes home from the last rank that saw it.
    gradients = sum(circle.receives(hop + 1) + (circle.home_after(hop) is not None) for hop in hops)
    forward = Traffic(parts, parts * message)
    return forward, forward + Traffic(gradients, gradients * gradient)


def _zigzag(layout: Layout, batch: int, head_dim: int, element_size: int, gradient_size: int) -> LevelTraffic:
    world, seq_len, rank = layout.world, layout.seq_len, layout.rank
    size = max(sum(zigzag.own_halves(other, world, seq_len)) for other in range(world))
    elements = batch * size * 2 * layout.num_kv_heads * head_dim
    around = _around(Circle(range(world), rank, wrap=True), elements * element_size, elements * gradient_size)

    workers = {half: zigzag.owner_of_half(half, world) for half in range(2 * world)}
    lengths = {half: zigzag.half_length(half, world, seq_len) for half in range(2 * world)}
    inward = [lengths[half] for half, worker in workers.items() if worker == rank != half // 2 and lengths[half]]
    outward = [lengths[half] for half, worker in workers.items() if worker != rank == half // 2 and lengths[half]]

    def moved(halves: list[int], per_position: int) -> Traffic:
        return Traffic(len(halves), sum(halves) * batch * per_position)

    qkv = (layout.num_heads + 2 * layout.num_kv_heads) * head_dim * element_size
    heads = layout.num_heads * head_dim * element_size
    lse = layout.num_heads * gradient_size
    forward = moved(inward, qkv) + moved(outward, heads) + moved(outward, lse)
    backward = moved(inward, qkv + 2 * heads) + moved(inward, lse) + moved(outward, qkv)
    return LevelTraffic(0, around[0] + forward, around[1] + backward)


def _ulysses(layout: Layout, element: int) -> LevelTraffic:
    length = shard_length(layout.world, layout.seq_len)
    plans = [head_plan(rank, layout.world, layout.num_heads, layout.num_kv_heads) for rank in range(layout.world)]
    own = plans[layout.rank]
    others = [plan for rank, plan in enumerate(plans) if rank != layout.rank]
    heads_in, heads_out = len(own.heads) * len(others), sum(len(plan.heads) for plan in others)
    qkv_in, qkv_out = sum(own.qkv) * len(others), sum(sum(plan.qkv) for plan in others)
    return LevelTraffic(
        None,
        Traffic(2, (qkv_in + heads_out) * length * element),
        Traffic(2, (heads_in + qkv_out) * length * element),
    )
