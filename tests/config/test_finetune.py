"""Checks of jobs that begin from a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest

from .conftest import load_with, problems_with


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model__pretrained": "no/where"}, "model.pretrained='no/where': no such directory; expected a checkpoint's"),
        ({"model__keep_code": True}, "model.keep_code=true: needs a checkpoint to begin from"),
        ({"model__rope_extension": "yarn"}, "model.rope_extension='yarn': needs a checkpoint to begin from"),
        ({"finetune__train": "lora"}, "finetune.train='lora': needs a checkpoint to begin from"),
        ({"finetune__context_growth": [7]}, "finetune.context_growth=[7]: expected pairs"),
        ({"finetune__context_growth": [[100, 0.5]]}, "finetune.context_growth has 100: expected a divisor"),
        ({"finetune__context_growth": [[math.inf, 0.5]]}, "finetune.context_growth has inf: expected a divisor"),
        ({"finetune__context_growth": [[math.nan, 0.5]]}, "finetune.context_growth has nan: expected a divisor"),
        ({"finetune__context_growth": [[512, 1.5]]}, "finetune.context_growth has 1.5: expected a share of the steps"),
        ({"finetune__context_growth": [[512, 0.5], [1024, 0.2]]}, "expected rising shares"),
        ({"finetune__lora_rank": 0}, "finetune.lora_rank=0: expected at least 1"),
        ({"finetune__train": "lora", "finetune__lora_targets": []}, "finetune.lora_targets=[]: expected at least one"),
    ],
)
def test_each_misfit_is_named(values: dict[str, Any], problem: str) -> None:
    assert any(problem in line for line in problems_with(**values))


def test_processes_that_share_sequences_take_neither_own_code_nor_a_growing_context() -> None:
    lines = problems_with(
        model__pretrained="data/smollm2-135m-instruct",
        model__keep_code=True,
        finetune__context_growth=[[512, 0.5]],
        strategy__sequence_parallel_size=2,
    )
    assert any("model.keep_code=true: strategy.sequence_parallel_size=2 needs our own layers" in line for line in lines)
    assert any("finetune.context_growth=[[512, 0.5]]: with strategy.sequence_parallel_size=2" in line for line in lines)


def test_own_code_takes_one_pattern() -> None:
    fetched = "data/smollm2-135m-instruct"
    load_with(model__pretrained=fetched, model__keep_code=True)
    lines = problems_with(
        model__pretrained=fetched,
        model__keep_code=True,
        attention__layers=["dilated", "dense"],
        trainer__activation_checkpointing={"kind": "selective", "every": 1},
    )
    assert len(lines) == 2
    assert "model.keep_code=true takes one pattern for all layers; expected [dilated] or [dense]" in lines[0]
    assert "expected none or full, and no tiles" in lines[1]


@pytest.mark.parametrize("layers", [[1], [None, "dense"], [["dense"]]])
def test_a_layer_that_is_no_block_is_named_with_own_code_too(layers: list[Any]) -> None:
    lines = problems_with(
        model__pretrained="data/smollm2-135m-instruct", model__keep_code=True, attention__layers=layers
    )
    assert len(lines) == 1
    assert lines[0].startswith("attention.layers[0]=")
    assert "expected a block's name, or a mapping" in lines[0]


def test_no_targets_are_needed_without_adapters() -> None:
    load_with(finetune__lora_targets=[])
