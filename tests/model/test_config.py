from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from longnet.config.schema import ModelConfig
from longnet.model import LongNetConfig

from .models import HYBRID, PAPER, small_config


def test_takes_the_schema_as_it_is() -> None:
    section = ModelConfig(vocab_size=100, rope_theta=5e5, num_key_value_heads=4)
    config = LongNetConfig(**asdict(section), max_position_embeddings=512, attention=["dense"])
    for field in fields(section):
        if field.name not in ("rope_theta", "head_dim"):
            assert getattr(config, field.name) == getattr(section, field.name)
    assert config.head_dim == section.hidden_size // section.num_attention_heads
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("changes", [{}, PAPER, {"attention": HYBRID}, {"rope_theta": 7.0, "head_dim": 16}])
def test_survives_json(changes: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(**changes)
    config.save_pretrained(tmp_path)
    again = LongNetConfig.from_pretrained(tmp_path)
    # The version is written by saving.
    assert again.to_dict() == {**config.to_dict(), "transformers_version": again.transformers_version}
    assert again.attention == config.attention


def test_the_default_attention_reaches_the_whole_context() -> None:
    config = LongNetConfig(max_position_embeddings=10000)
    (block,) = config.attention
    assert block["name"] == "dilated"
    assert max(block["segment_lengths"]) >= 10000
    assert block["dilation_rates"][0] == 1


def test_blocks_are_cycled_over_the_depth() -> None:
    config = small_config(attention=[HYBRID[0], "dense", HYBRID[2]], num_hidden_layers=5)
    assert [config.block_spec(layer)["name"] for layer in range(5)] == [
        "dilated", "dense", "sliding_window", "dilated", "dense",
    ]  # fmt: skip


def test_one_block_needs_no_list() -> None:
    assert small_config(attention="dense").attention == [{"name": "dense"}]
    assert small_config(attention={"name": "dense", "dropout": 0.1}).attention == [{"name": "dense", "dropout": 0.1}]


def test_the_callers_own_mappings_stay() -> None:
    rope, block = {"rope_type": "linear", "factor": 2.0}, {"name": "dense"}
    small_config(rope_parameters=rope, attention=[block]).attention[0]["dropout"] = 0.5
    assert rope == {"rope_type": "linear", "factor": 2.0}
    assert block == {"name": "dense"}


def test_xpos_base_grows_with_the_context_once_512_would_overflow() -> None:
    def base(context: int) -> float | None:
        return small_config(position_embedding="xpos", max_position_embeddings=context).xpos_scale_base

    assert (base(2048), base(32768), base(2**20)) == (512, 512, 2**14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 7}, r"num_attention_heads=7 .*hidden_size=32.* nearest is 8"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: .*num_attention_heads=4; the nearest is 2"),
        ({"head_dim": 7}, r"head_dim=7: expected an even number.* nearest is 8"),
        ({"hidden_act": "sliu"}, r"hidden_act='sliu': .*did you mean 'silu'"),
        ({"norm": "layer_norm"}, r"norm='layer_norm': .*did you mean 'layernorm'"),
        ({"position_embedding": "rotary"}, r"position_embedding='rotary': expected one of \['rope', 'xpos'\]"),
        ({"initialization": "magnet"}, r"initialization='magnet': .*did you mean 'magneto'"),
        ({"attention": ["dense", {"name": "dilate"}]}, r"attention\[1\]\['name'\]='dilate': .*did you mean 'dilated'"),
        ({"attention": []}, r"attention=\[\]: expected at least one block"),
        ({"rope_parameters": {"rope_type": "yarm"}}, r"rope_type'\]='yarm': .*did you mean 'yarn'"),
        ({"vocab_size": None}, r"vocab_size=None: .*tokenizer"),
        ({"hidden_size": 0}, r"hidden_size=0: expected an integer >= 1"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers=2.0: expected an integer"),
        ({"dropout": 1.0}, r"dropout=1.0: expected 0 <= dropout < 1"),
        ({"no_rope_layers": [1]}, r"no_rope_layers has 1 entries: expected one a layer, 2"),
        (
            {"position_embedding": "xpos", "xpos_scale_base": 100, "max_position_embeddings": 12800},
            r"xpos_scale_base=100 .*max_position_embeddings=12800: .*nearest is 200",
        ),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**changes)
