"""Models that begin from a checkpoint, and what training asks of a model that is not our own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longnet.config import resolve_attention
from longnet.config.schema import JobConfig
from longnet.data import Tokenizer
from longnet.data.pretrained import ensure_checkpoint
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.model.hf import import_checkpoint, read_config, set_pattern
from longnet.model.hf.families import longnet_fields
from longnet.model.hf.interface import NAME, pattern_of
from longnet.model.hf.weights import load_config, load_weights
from longnet.model.rope import document_positions
from longnet.model.rope_extension import extend_rope

# Keys of the model that say how to begin from a checkpoint; the others are its shape.
FROM_CHECKPOINT = ("pretrained", "keep_code", "rope_extension")


def load_pretrained(job: JobConfig, tokenizer: Tokenizer) -> PreTrainedModel:
    """The checkpoint of ``model.pretrained`` with the job's attention, context and dropout, in float32.

    Raises:
        ValueError: if it cannot be used, or does not fit the data's tokenizer.
    """
    assert job.model.pretrained is not None
    path = ensure_checkpoint(job.model.pretrained)
    config = read_config(path)
    specs = resolve_attention(job)
    changes = extend_rope(config, job.model.rope_extension, job.data.context_length, job.model.rope_theta)
    if job.model.keep_code:
        model = _load_decoder(path, specs[0], changes)
    else:
        model = import_checkpoint(path, attention=specs, dropout=job.model.dropout, dtype=torch.float32, **changes)
    vocab_size = model.config.get_text_config().vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"data.tokenizer={tokenizer.name} does not fit model.pretrained={job.model.pretrained}: it has "
            f"{tokenizer.vocab_size} ids, the model {vocab_size}; expected data.tokenizer={job.model.pretrained}"
        )
    return model.train()


def new_config(job: JobConfig, vocab_size: int, **options: Any) -> LongNetConfig:
    """The config of a model that begins from nothing; ``vocab_size`` is the tokenizer's, where the job sets none."""
    shape = {name: value for name, value in asdict(job.model).items() if name not in FROM_CHECKPOINT}
    shape["vocab_size"] = job.model.vocab_size or vocab_size
    context = job.data.context_length
    return LongNetConfig(**shape, attention=resolve_attention(job), max_position_embeddings=context, **options)


def pretrained_config(job: JobConfig) -> LongNetConfig:
    """The config that ``model.pretrained`` has once it is imported for the job; no weights are read."""
    assert job.model.pretrained is not None
    config = read_config(ensure_checkpoint(job.model.pretrained))
    changes = extend_rope(config, job.model.rope_extension, job.data.context_length, job.model.rope_theta)
    return LongNetConfig(**{**longnet_fields(config), "attention": resolve_attention(job), **changes})


def _load_decoder(path: Path, spec: dict[str, Any], changes: dict[str, Any]) -> PreTrainedModel:
    load_config(path)
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    if changes["rope_parameters"] != text.rope_parameters:
        text.rope_parameters = changes["rope_parameters"]
    text.max_position_embeddings = changes["max_position_embeddings"]
    levels = {"segment_lengths": [2**40], "dilation_rates": [1]} if spec["name"] == "dense" else spec
    pattern = {name: levels[name] for name in ("segment_lengths", "dilation_rates", "heads", "shift") if name in levels}
    set_pattern(config, **pattern)
    try:
        both: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, attn_implementation=NAME, dtype=torch.float32, use_safetensors=True,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except (SafetensorError, OSError):
        # Says which files are damaged, missing or pickles.
        load_weights(path)
        raise
    model: PreTrainedModel = both[0]
    _check_loaded(path, both[1])
    _check_head(model)
    return model


def _check_loaded(path: Path, loaded: dict[str, Any]) -> None:
    """Whether every tensor found its place: transformers only warns, and makes up what is missing."""
    problems = [f"{name} is missing" for name in sorted(loaded["missing_keys"])]
    problems += [f"{name} is left over" for name in sorted(loaded["unexpected_keys"])]
    problems += [
        f"{name} has shape {tuple(found)}, expected {tuple(expected)}"
        for name, found, expected in sorted(loaded["mismatched_keys"])
    ]
    if problems:
        raise ValueError(f"{path} does not fit its config:\n  " + "\n  ".join(problems))


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """The loss never forms the logits, and so must know that they are a linear map of the hidden states."""
    ids = torch.arange(4)[None]
    expected = linear(hidden_states(model.eval(), ids), head_weight(model))
    if not torch.allclose(model(ids).logits, expected, atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"model.keep_code=true: the logits of {type(model).__name__} are more than a linear map (a bias, a scale "
            "or a soft cap), which the loss does not know; expected a model without, or one that can be imported"
        )


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """What the head sees, (B, N, hidden): of a LongNet, or of any decoder of transformers."""
    if isinstance(model, LongNetForCausalLM):
        return model.hidden_states(input_ids, positions, cu_seqlens)
    if positions is None and cu_seqlens is not None:
        positions = document_positions(cu_seqlens.to(input_ids.device), input_ids.shape[1])
    decoder: Any = model.base_model
    result: Tensor = decoder(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
    return result


def head_weight(model: PreTrainedModel) -> Tensor:
    """The language-model head's matrix (V, hidden)."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def attention_flops(model: PreTrainedModel, seq_len: int) -> int:
    """Floating-point operations of all layers' attention over a row, forward."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if isinstance(model, LongNetForCausalLM):
        return sum(layer.self_attn.block.flops(seq_len, heads, head_dim) for layer in model.model.layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = min(getattr(config, "sliding_window", None) or seq_len, seq_len)
    pairs = heads * (window * seq_len - window * (window - 1) // 2)
    full = pattern_of(config).flops(seq_len, heads, head_dim)
    return sum(4 * head_dim * pairs if kind == "sliding_attention" else full for kind in kinds)
