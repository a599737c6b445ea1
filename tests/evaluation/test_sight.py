"""Pictures of patterns against the definition of what is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longnet.attention import DilationPattern, build_block
from longnet.evaluation.sight import draw_sight, receptive_field, sees

HEADS = 4
SPECS = [
    {"name": "dense"},
    {"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]},
    {"name": "dilated", "segment_lengths": [6, 20], "dilation_rates": [2, 3], "shift": 5},
    {"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4], "heads": "grouped"},
    {"name": "sliding_window", "window": 7},
    {"name": "block_sparse", "block_size": 4, "local_blocks": 2, "stride": 3, "global_blocks": 1},
]
specs = pytest.mark.parametrize("spec", SPECS, ids=str)


def truth(spec, context):
    """Who sees whom (heads, queries, keys), from what the attention itself is defined by."""
    block = build_block(spec)
    if hasattr(block, "pattern"):
        return torch.stack([block.pattern.counts(context, head, HEADS) > 0 for head in range(HEADS)]).numpy()
    n = torch.arange(context)
    return block.mask.sees(n[:, None], n[None, :]).expand(HEADS, -1, -1).numpy()


@specs
def test_sees_is_the_definition(spec):
    seen = truth(spec, 50)
    n, m = np.meshgrid(np.arange(50), np.arange(50), indexing="ij")
    for head in range(HEADS):
        assert np.array_equal(sees(build_block(spec), n, m, head, HEADS), seen[head])


@specs
def test_the_receptive_field_is_what_the_layers_reach(spec):
    union = truth(spec, 50).any(0) | np.eye(50, dtype=bool)
    reached, expected = np.eye(50, dtype=bool)[-1:], []
    for _ in range(3):
        reached = reached @ union
        expected.append(reached.mean())
    assert receptive_field([spec], 3, 50, HEADS) == pytest.approx(expected)


def test_layers_are_cycled_and_the_first_comes_first():
    near, far = {"name": "sliding_window", "window": 3}, {"name": "dense"}
    assert receptive_field([near, far], 2, 10, 1) == [0.3, 1.0]


@specs
def test_pictures_hold_the_shares_of_their_cells(spec):
    sight = draw_sight(spec, 64, HEADS)
    seen = truth(spec, 64)
    assert sight.union.shape == (64, 64)
    # With a position a cell, the picture is the pattern.
    assert np.array_equal(sight.heads > 0, seen)
    assert np.array_equal(sight.union > 0, seen.any(0))
    for first, end, share in zip(sight.distances, [*sight.distances[1:], 64], sight.coverage, strict=True):
        of_each = [np.diagonal(seen.any(0), -distance).mean() for distance in range(first, end)]
        assert share == pytest.approx(np.mean(of_each), abs=0.05)
    assert sight.keys >= seen.sum(2).max()


def test_a_long_context_is_drawn_in_shares():
    pattern = DilationPattern.geometric(4096, base=512, ratio=4)
    spec = {"name": "dilated", **pattern.to_config()}
    sight = draw_sight(spec, 4096, 4)
    # Far below the diagonal one level of rate 16 is left: a head sees 1 of 16 x 16 pairs.
    assert sight.heads[:, 40:, :8].mean() == pytest.approx(1 / 256, rel=0.3)
    assert sight.union[2, 0] == 1.0
    assert "512/1" in sight.text
