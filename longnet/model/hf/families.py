"""The decoders that become a LongNet: how their configs say what ours says. Their weights have the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ..config import LongNetConfig

ORIGIN_LEFT_OUT = ("quantization_config", "transformers_version", "_name_or_path", "dtype", "longnet")

# What does not change the logits, or is compared elsewhere; xpos_scale_base goes with position_embedding.
NOT_COMPARED = ("attention", "origin", "dropout", "initialization", "use_cache", "xpos_scale_base")

# What each family has beside the common shape: fields of LongNetConfig from its config.
FAMILIES: dict[str, Callable[[PretrainedConfig], dict[str, Any]]] = {
    "llama": lambda theirs: {"attention_bias": theirs.attention_bias, "mlp_bias": theirs.mlp_bias},
    "mistral": lambda theirs: {},
    "qwen2": lambda theirs: {"attention_bias": True, "attention_output_bias": False},
    "qwen3": lambda theirs: {"attention_bias": theirs.attention_bias, "query_key_norm": True},
    "smollm3": lambda theirs: {
        "attention_bias": theirs.attention_bias,
        "mlp_bias": theirs.mlp_bias,
        "no_rope_layers": list(theirs.no_rope_layers),
    },
}


def longnet_fields(theirs: PretrainedConfig) -> dict[str, Any]:
    """The fields of ``LongNetConfig`` that describe a decoder of transformers, its own attention included.

    Raises:
        ValueError: if the architecture is none of ``FAMILIES``.
    """
    if isinstance(theirs, LongNetConfig):
        return {name: getattr(theirs, name) for name in LongNetConfig.__annotations__ if name != "model_type"}
    if theirs.model_type not in FAMILIES:
        raise ValueError(
            f"model_type={theirs.model_type!r} cannot be imported: expected one of {sorted(FAMILIES)} (SmolLM and "
            "SmolLM2 are llama). Any other decoder keeps its own code and takes the operator instead: "
            "AutoModelForCausalLM.from_pretrained(path, attn_implementation='longnet') after import longnet, or "
            "model=hf in a training job"
        )
    return {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None),
        "hidden_act": theirs.hidden_act,
        "norm_eps": theirs.rms_norm_eps,
        "rope_parameters": family_rope(theirs),
        "max_position_embeddings": theirs.max_position_embeddings,
        "tie_word_embeddings": theirs.tie_word_embeddings,
        "initializer_range": theirs.initializer_range,
        "pad_token_id": theirs.pad_token_id,
        "bos_token_id": theirs.bos_token_id,
        "eos_token_id": theirs.eos_token_id,
        "attention": own_attention(theirs),
        "origin": {key: value for key, value in theirs.to_dict().items() if key not in ORIGIN_LEFT_OUT},
        **FAMILIES[theirs.model_type](theirs),
    }


def family_rope(theirs: PretrainedConfig) -> dict[str, Any]:
    """The rope parameters that a family computes with.

    Raises:
        ValueError: if it cannot compute with them.
    """
    rope = dict(theirs.rope_parameters)
    part, kind = rope.get("partial_rotary_factor", 1.0), rope.get("rope_type", "default")
    if part == 1.0 or kind == "proportional":
        return rope
    if kind != "default":
        raise ValueError(
            f"rope_parameters: partial_rotary_factor={part} with rope_type={kind!r} fails in {theirs.model_type}'s own "
            "code; expected 1.0, or rope_type='default', where that code ignores it"
        )
    # No family's own code looks at it, and turns whole heads; ours would turn a part.
    del rope["partial_rotary_factor"]
    return rope


def own_attention(theirs: PretrainedConfig) -> list[dict[str, Any]]:
    """The blocks that stand for a decoder's own attention, one a layer where they differ."""
    dense: dict[str, Any] = {"name": "dense", **attention_dropout(theirs)}
    window = getattr(theirs, "sliding_window", None)
    if window is None:
        return [dense]
    sliding = {"name": "sliding_window", "window": window}
    kinds = getattr(theirs, "layer_types", None)
    return [sliding] if kinds is None else [sliding if kind == "sliding_attention" else dense for kind in kinds]


def attention_dropout(theirs: PretrainedConfig) -> dict[str, float]:
    dropout = float(getattr(theirs, "attention_dropout", 0.0) or 0.0)
    return {"dropout": dropout} if dropout else {}


def family_config(ours: LongNetConfig) -> PretrainedConfig:
    """The config of the family that a LongNet came from, or of the one that its shape fits, for export.

    Raises:
        ValueError: with all that no family has.
    """
    fields = {**(ours.origin or _fitting_family(ours))}
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rope_parameters", "max_position_embeddings",
        "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
    ):  # fmt: skip
        fields[name] = getattr(ours, name)
    if ours.origin is not None and "head_dim" not in ours.origin:
        # Some families compute it, and would carry a stray field.
        del fields["head_dim"]
    fields["rms_norm_eps"] = ours.norm_eps
    theirs: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    # Imported again it must be what it was: a family leaves out what it does not know without a word.
    back = LongNetConfig(**longnet_fields(theirs))
    names = [name for name in LongNetConfig.__annotations__ if name not in NOT_COMPARED]
    wrong = [f"{name}={getattr(ours, name)!r}" for name in names if getattr(ours, name) != getattr(back, name)]
    if wrong:
        raise ValueError(
            f"no family of transformers has {', '.join(wrong)} and all the rest, {theirs.model_type} comes nearest: "
            "export it as a LongNet directory instead"
        )
    return theirs


def _fitting_family(ours: LongNetConfig) -> dict[str, Any]:
    if ours.no_rope_layers is not None:
        return {"model_type": "smollm3", "no_rope_layers": ours.no_rope_layers, **_biases(ours)}
    if ours.query_key_norm:
        return {"model_type": "qwen3", "attention_bias": ours.attention_bias}
    if ours.attention_bias and not ours.attention_output_bias:
        return {"model_type": "qwen2"}
    return {"model_type": "llama", **_biases(ours)}


def _biases(ours: LongNetConfig) -> dict[str, bool]:
    return {"attention_bias": ours.attention_bias, "mlp_bias": ours.mlp_bias}
