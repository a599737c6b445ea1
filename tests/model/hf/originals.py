"""Small random models of the families that can be imported."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 2.0, 3.0],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                                "max_position_embeddings": 32}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_size": 24, "head_dim": 8,
                          "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {**YARN}}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
}  # fmt: skip


def original(name: str, **changes: Any) -> PreTrainedModel:
    """A random model whose biases and norms matter too."""
    family, fields = FAMILIES[name]
    settings = {**SHAPE, **fields, **changes}
    if family in ("qwen2", "smollm3"):
        settings.pop("head_dim")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()
