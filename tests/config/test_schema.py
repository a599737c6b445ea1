"""The names that the schema admits are those that the library knows: it cannot import them, being light."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import get_args

from transformers.activations import ACT2FN

import longnet.attention
from longnet.config.attention import BLOCKS
from longnet.config.data import CAN_STREAM
from longnet.config.data import TASKS as KNOWN_TASKS
from longnet.config.schema import AttentionConfig, DataConfig, ModelConfig, OptimConfig
from longnet.config.typed import type_hints
from longnet.data import PACKINGS, SOURCES, TASKS, build_corpus
from longnet.data.build import SPEC_FIELDS
from longnet.model import LongNetConfig
from longnet.model.config import INITIALIZATIONS, NORMS, POSITION_EMBEDDINGS
from longnet.model.rope_extension import KINDS
from longnet.training.pretrained import FROM_CHECKPOINT
from longnet.training.schedule import SCHEDULES


def choices(schema: type, name: str) -> set[str]:
    return set(get_args(type_hints(schema)[name]))


def test_attention() -> None:
    assert set(BLOCKS) == set(longnet.attention.BLOCKS)
    assert choices(AttentionConfig, "backend") == {"auto", *longnet.attention.BACKENDS}


def test_data_and_schedule() -> None:
    assert choices(DataConfig, "source") == {*SOURCES, *TASKS, "prepared", "mixture"}
    assert set(CAN_STREAM) == set(SOURCES)
    assert set(KNOWN_TASKS) == set(TASKS)
    assert choices(DataConfig, "packing") == set(PACKINGS)
    options = set(signature(build_corpus).parameters) - {"seed", "options"}
    assert {field.name for field in fields(DataConfig)} - {"batch_size", "num_workers"} == options | SPEC_FIELDS
    assert choices(OptimConfig, "schedule") == set(SCHEDULES)


def test_model() -> None:
    assert choices(ModelConfig, "norm") == set(NORMS)
    assert choices(ModelConfig, "position_embedding") == set(POSITION_EMBEDDINGS)
    assert choices(ModelConfig, "initialization") == set(INITIALIZATIONS)
    assert choices(ModelConfig, "hidden_act") <= set(ACT2FN)
    assert choices(ModelConfig, "rope_extension") == set(KINDS)
    own = {field.name for field in fields(ModelConfig)} - {"rope_theta", *FROM_CHECKPOINT}
    assert own <= set(LongNetConfig().to_dict()) | {"vocab_size"}
