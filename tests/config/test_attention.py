from __future__ import annotations

from typing import Any

import pytest

from longnet.config import ConfigError, JobConfig, resolve_attention
from longnet.config.attention import BLOCKS
from longnet.config.schema import AttentionConfig

from .conftest import load_with, problems_with


def test_every_block_can_be_built_from_what_is_resolved() -> None:
    from longnet.attention import build_block

    for spec in resolve_attention(load_with(attention__layers=list(BLOCKS))):
        assert build_block(spec) is not None


def test_a_geometric_pattern_is_written_out_for_the_context() -> None:
    (spec,) = resolve_attention(load_with(data__context_length=8192, attention__dilated__base=2048))
    assert spec == {
        "name": "dilated",
        "segment_lengths": [2048, 4096, 8192],
        "dilation_rates": [1, 2, 4],
        "heads": "all",
        "shift": 0,
        "backend": "auto",
        "dropout": 0.0,
    }


def test_an_entry_may_have_options_of_its_own() -> None:
    layers = ["dilated", {"name": "dilated", "shift": 1024, "dropout": 0.1}, {"name": "sliding_window", "window": 64}]
    plain, shifted, window = resolve_attention(load_with(attention__layers=layers))
    assert (plain["shift"], shifted["shift"]) == (0, 1024)
    assert (plain["dropout"], shifted["dropout"]) == (0.0, 0.1)
    assert window == {"name": "sliding_window", "window": 64}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"layers": []}, "attention.layers=[]: expected at least one block"),
        ({"layers": ["dilatd"]}, "attention.layers[0]='dilatd': expected one of dense, dilated"),
        ({"layers": [3]}, "attention.layers[0]=3: expected a block's name"),
        ({"layers": ["dense", {"shift": 3}]}, "attention.layers[1]=null: expected one of"),
        ({"layers": [{"name": "dilated", "shfit": 3}]}, "attention.layers[0].shfit: unknown key; did you mean"),
        ({"layers": [{"name": "dilated", "shift": "x"}]}, "attention.layers[0].shift='x': expected an integer"),
        ({"layers": [{"name": "dense", "window": 3}]}, "attention.layers[0].window: unknown option; dense has"),
        ({"layers": ["block_sparse"], "dropout": 0.1}, "attention.dropout=0.1: block_sparse has none"),
        ({"dilated__segment_lengths": [2048]}, "attention.dilated.dilation_rates=null, but the other list is [2048]"),
        (
            {"dilated__segment_lengths": [1024, 2048], "dilated__dilation_rates": [1]},
            "has 2 levels but dilation_rates=(1,) has 1",
        ),
        (
            {"dilated__segment_lengths": [4, 2048], "dilated__dilation_rates": [8, 8]},
            "the nearest rate that works is 4",
        ),
        (
            {"dilated__segment_lengths": [256, 512], "dilated__dilation_rates": [1, 2]},
            "the pattern reaches 512 positions, but data.context_length=2048, and nothing would ever cross a border; "
            "add the level 2048 with dilation rate 8",
        ),
        (
            {"dilated__heads": "grouped", "dilated__base": 8},
            "expected a head for each of the 9 levels, but model.num_attention_heads=8",
        ),
    ],
)
def test_what_does_not_fit_is_named(values: dict[str, Any], expected: str) -> None:
    (problem,) = problems_with(**{f"attention__{key}": value for key, value in values.items()})
    assert expected in problem


def test_short_segments_are_fine_where_something_crosses_their_borders() -> None:
    short = {"attention__dilated__segment_lengths": [256], "attention__dilated__dilation_rates": [1]}
    load_with(**short, attention__layers=["dilated", "dense"])
    load_with(**short, attention__layers=["dilated", {"name": "dilated", "shift": 128}])


def test_resolving_an_unsound_job_raises() -> None:
    with pytest.raises(ConfigError, match="dens"):
        resolve_attention(JobConfig(attention=AttentionConfig(layers=["dens"])))
