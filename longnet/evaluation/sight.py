"""Who sees whom: an attention block as pictures, coverage by distance, and the receptive field by depth.

A picture of a long context has many pairs in each of its cells, so a cell says which share of its pairs is seen,
estimated from pairs drawn at random (always the same ones). The receptive field is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longnet.attention import DilationPattern, build_block
from longnet.attention.blocks import Dilated
from longnet.attention.masked import MaskedAttention, WindowMask

Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

CELLS = 64
PAIRS_A_CELL = 48
PAIRS_A_DISTANCE = 4096


@dataclass(frozen=True)
class Sight:
    """An attention block at a context.

    Attributes:
        text: the block, in words.
        heads: for each head a (cells, cells) share of the pairs seen; rows are queries, columns keys.
        union: the same for pairs that some head sees.
        distances: from a query to a key; each stands for those up to the next.
        coverage: for each of these ranges, the share of pairs that some head sees.
        keys: the most keys that a query sees in one head.
    """

    text: str
    heads: npt.NDArray[np.float64]
    union: npt.NDArray[np.float64]
    distances: list[int]
    coverage: list[float]
    keys: int


def draw_sight(spec: Mapping[str, Any], context: int, num_heads: int) -> Sight:
    """The pictures of a block of ``longnet.attention.BLOCKS``."""
    block = build_block(spec)
    cells = min(CELLS, context)
    draw = np.random.default_rng(0)
    edges = np.linspace(0, context, cells + 1)
    shape = (cells, cells, PAIRS_A_CELL)
    low, width = edges[:-1], np.diff(edges)
    n = (low[:, None, None] + width[:, None, None] * draw.random(shape)).astype(np.int64)
    m = (low[None, :, None] + width[None, :, None] * draw.random(shape)).astype(np.int64)
    possible = np.maximum((m <= n).sum(2), 1)
    heads, union = [], np.zeros(shape, bool)
    for head in range(num_heads):
        seen = sees(block, n, m, head, num_heads)
        union |= seen
        heads.append(seen.sum(2) / possible)
    # Ranges of distances, since which single ones are seen depends on what divides them.
    borders = sorted({min(round(2**power), context) for power in np.arange(0, np.log2(context) + 0.5, 0.5)} | {context})
    coverage = []
    for first, end in pairwise(borders):
        distance = draw.integers(first, end, PAIRS_A_DISTANCE)
        query = draw.integers(distance, context)
        pairs = (query, query - distance)
        coverage.append(float(np.any([sees(block, *pairs, head, num_heads) for head in range(num_heads)], 0).mean()))
    last = np.full(context, context - 1)
    keys = (
        block.pattern.max_keys(context)
        if isinstance(block, Dilated)
        else int(sees(block, last, np.arange(context), 0, num_heads).sum())
    )
    return Sight(describe(spec), np.stack(heads), union.sum(2) / possible, borders[:-1], coverage, keys)


def sees(block: Any, n: Positions, m: Positions, head: int, num_heads: int) -> Flags:
    """Whether queries at n see keys at m in a head; causal."""
    if isinstance(block, MaskedAttention):
        found: Flags = block.mask.sees(torch.from_numpy(n), torch.from_numpy(m)).numpy()
        return found & (m <= n)
    pattern: DilationPattern = block.pattern
    seen = np.zeros(np.broadcast_shapes(n.shape, m.shape), bool)
    for level, (length, rate) in enumerate(pattern.levels):
        phase = pattern.phase(level, head, num_heads)
        if phase is not None:
            query, key = n + pattern.shift, m + pattern.shift
            rows = (query % length % rate == phase) & (key % length % rate == phase)
            seen |= rows & (query // length == key // length)
    return seen & (m <= n)


def receptive_field(specs: Sequence[Mapping[str, Any]], layers: int, context: int, num_heads: int) -> list[float]:
    """After each layer, the share of all positions that the last one has heard of, in its own layer or before.

    Heads mix between layers, so what any head sees counts. The list of specs is cycled over the depth; information
    goes through the first layer first.
    """
    blocks = [build_block(specs[layer % len(specs)]) for layer in range(layers)]
    shares = []
    for depth in range(1, layers + 1):
        heard = np.zeros(context, bool)
        heard[-1] = True
        # From the top of the first `depth` layers down to the embedding.
        for block in reversed(blocks[:depth]):
            heard |= _heard_by(block, heard, num_heads)
        shares.append(float(heard.mean()))
    return shares


def _heard_by(block: Any, heard: Flags, num_heads: int) -> Flags:
    """The positions that one of the given ones sees."""
    context = len(heard)
    if isinstance(block, MaskedAttention):
        return _heard_by_mask(block, heard)
    pattern: DilationPattern = block.pattern
    found = np.zeros(context, bool)
    moved = np.arange(context) + pattern.shift
    for level, (length, rate) in enumerate(pattern.levels):
        for phase, _ in pattern.head_groups(level, num_heads):
            rows = np.flatnonzero(moved % length % rate == phase)
            segments = moved[rows] // length
            # In a segment, every row up to the last one that was heard of.
            latest = np.full(int(segments[-1]) + 1 if len(rows) else 1, -1)
            asked = heard[rows]
            np.maximum.at(latest, segments[asked], rows[asked])
            found[rows[rows <= latest[segments]]] = True
    return found


def _heard_by_mask(block: MaskedAttention, heard: Flags) -> Flags:
    context = len(heard)
    found = np.zeros(context, bool)
    if isinstance(block.mask, WindowMask):
        # Each covers the positions from its window's first to itself: a rise and a fall.
        steps = np.zeros(context + 1, np.int64)
        (positions,) = np.nonzero(heard)
        np.add.at(steps, np.maximum(positions - block.mask.window + 1, 0), 1)
        np.add.at(steps, positions + 1, -1)
        return np.cumsum(steps[:-1]) > 0
    (positions,) = np.nonzero(heard)
    # What a block of positions sees is the same for all of it, but for what is later than they are.
    size = int(getattr(block.mask, "block_size", 1))
    latest = {int(position) // size: int(position) for position in positions}
    keys = torch.arange(context)
    for position in latest.values():
        found |= (block.mask.sees(torch.tensor(position), keys) & (keys <= position)).numpy()
    return found


def describe(spec: Mapping[str, Any]) -> str:
    """A block in a few words."""
    if spec["name"] == "dilated":
        options = {name: spec[name] for name in ("heads", "shift") if name in spec}
        return f"dilated, {DilationPattern(tuple(spec['segment_lengths']), tuple(spec['dilation_rates']), **options)}"
    facts = ", ".join(f"{k} {v}" for k, v in spec.items() if k not in ("name", "backend", "dropout"))
    return f"{spec['name']}{f', {facts}' if facts else ''}".replace("_", " ")
