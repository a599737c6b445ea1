"""The names that the schema admits are those that the library knows: it cannot import them, being light."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from transformers.activations import ACT2FN

import longnet.attention
from longnet.config.attention import BLOCKS
from longnet.config.schema import AttentionConfig, DataConfig, ModelConfig, OptimConfig
from longnet.config.typed import type_hints
from longnet.data import SOURCES, TOKENIZERS
from longnet.model import LongNetConfig
from longnet.model.config import INITIALIZATIONS, NORMS, POSITION_EMBEDDINGS
from longnet.training.schedule import SCHEDULES


def choices(schema: type, name: str) -> set[str]:
    return set(get_args(type_hints(schema)[name]))


def test_attention() -> None:
    assert set(BLOCKS) == set(longnet.attention.BLOCKS)
    assert choices(AttentionConfig, "backend") == {"auto", *longnet.attention.BACKENDS}


def test_data_and_schedule() -> None:
    assert choices(DataConfig, "source") == set(SOURCES)
    assert choices(DataConfig, "tokenizer") == set(TOKENIZERS)
    assert choices(OptimConfig, "schedule") == set(SCHEDULES)


def test_model() -> None:
    assert choices(ModelConfig, "norm") == set(NORMS)
    assert choices(ModelConfig, "position_embedding") == set(POSITION_EMBEDDINGS)
    assert choices(ModelConfig, "initialization") == set(INITIALIZATIONS)
    assert choices(ModelConfig, "hidden_act") <= set(ACT2FN)
    own = {field.name for field in fields(ModelConfig)} - {"rope_theta"}
    assert own <= set(LongNetConfig().to_dict()) | {"vocab_size"}
