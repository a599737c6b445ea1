"""Small models for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longnet.model import LongNetConfig, LongNetForCausalLM

DILATED = {"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 2]}
SHIFTED = {**DILATED, "shift": 4}
WINDOW = {"name": "sliding_window", "window": 5}
BLOCK_SPARSE = {"name": "block_sparse", "block_size": 4, "local_blocks": 2, "stride": 3, "global_blocks": 1}
HYBRID = [DILATED, SHIFTED, WINDOW, BLOCK_SPARSE, "dense"]

PAPER = {
    "norm": "layernorm",
    "sub_layernorm": True,
    "position_embedding": "xpos",
    "initialization": "magneto",
    "gated_mlp": False,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
}


def small_config(**changes: Any) -> LongNetConfig:
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention": [DILATED],
        # Larger than one would train with, so that every part of the model shows in the logits.
        "initializer_range": 0.2,
    }
    return LongNetConfig(**{**settings, **changes})


def small_model(**changes: Any) -> LongNetForCausalLM:
    torch.manual_seed(0)
    return LongNetForCausalLM(small_config(**changes)).eval()


def some_tokens(batch: int = 2, length: int = 40, vocab_size: int = 61) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
