"""A dense checkpoint becomes a LongNet, and a LongNet that is dense again becomes a plain checkpoint."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from longnet.attention import DilationPattern

from ..config import LongNetConfig
from ..rope import LongNetRotaryEmbedding
from .families import FAMILIES, attention_dropout, family_config, family_rope, longnet_fields, own_attention
from .weights import load_config, load_gguf, load_weights, match_weights

if TYPE_CHECKING:
    from ..decoder import LongNetForCausalLM

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def import_checkpoint(
    path_or_model: str | os.PathLike[str] | PreTrainedModel,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    heads: str | None = None,
    shift: int | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> LongNetForCausalLM:
    """A decoder of transformers as a LongNet with the same weights.

    Args:
        path_or_model: a directory with config.json and safetensors (a LongNet's too), a .gguf file, or a model.
        segment_lengths: of the pattern that every layer gets; None leaves the model its own attention.
        dilation_rates: of the pattern, one for each segment length.
        heads: as in ``DilationPattern``; "all" by default.
        shift: as in ``DilationPattern``; 0 by default.
        dtype: of the weights; as the checkpoint has them by default.
        changes: fields of ``LongNetConfig`` that are to differ, such as ``max_position_embeddings``,
            ``rope_parameters`` or ``attention``.

    Raises:
        ValueError: for an architecture that is not supported, for options that would be lost, and for files that are
            refused, damaged or do not fit, with all that is wrong.
    """
    if isinstance(path_or_model, PreTrainedModel):
        theirs, where = path_or_model, f"the {type(path_or_model).__name__}"
    elif Path(path_or_model).is_file() and Path(path_or_model).suffix == ".gguf":
        theirs, where = load_gguf(Path(path_or_model)), str(path_or_model)
    else:
        theirs, where = None, str(path_or_model)
    config = theirs.config if theirs is not None else load_config(Path(os.fspath(path_or_model)))  # type: ignore[arg-type]
    fields = longnet_fields(config)
    if segment_lengths is not None or dilation_rates is not None:
        pattern = DilationPattern(
            tuple(segment_lengths or ()), tuple(dilation_rates or ()), heads or "all", shift or 0
        ).to_config()
        fields["attention"] = [{"name": "dilated", **pattern, **dropout} for dropout in _dropouts(config)]
    elif heads is not None or shift is not None:
        raise ValueError(
            f"heads={heads!r}, shift={shift!r}: parts of a pattern; expected segment_lengths and dilation_rates beside"
        )
    windows = any(spec["name"] == "sliding_window" for spec in fields["attention"])
    if windows and attention_dropout(config) and "attention" not in changes:
        raise ValueError(
            f"attention_dropout={config.attention_dropout}: sliding_window has none; expected 0 in the checkpoint's "
            "config, or a pattern"
        )
    ours = LongNetConfig(**{**fields, **changes})
    if theirs is not None:
        generation, tensors = theirs.generation_config, theirs.state_dict()
    else:
        path = Path(os.fspath(path_or_model))  # type: ignore[arg-type]
        generation, tensors = _generation_config(path, ours), load_weights(path)
    model = _build(ours, tensors, where, dtype)
    model.generation_config = _saveable(generation)
    return model


def _dropouts(config: PretrainedConfig) -> list[dict[str, float]]:
    """The dropout of each attention block, one for all where they agree."""
    if not isinstance(config, LongNetConfig):
        return [attention_dropout(config)]
    assert config.attention is not None
    found = [{"dropout": spec["dropout"]} if spec.get("dropout") else {} for spec in config.attention]
    return found[:1] if all(dropout == found[0] for dropout in found) else found


def _build(
    config: LongNetConfig, tensors: Mapping[str, Tensor], where: str, dtype: torch.dtype | None
) -> LongNetForCausalLM:
    from ..decoder import LongNetForCausalLM

    with torch.device("meta"):
        model = LongNetForCausalLM(config)
    found = match_weights(tensors, model.state_dict(), config.tie_word_embeddings, where)
    # Copies, so that training one model does not change the other, and a file's memory is let go.
    found = {name: tensor.detach().to(dtype or tensor.dtype, copy=True) for name, tensor in found.items()}
    # Buffers are no weights: they are computed, which a model on the meta device has not done.
    model.model.rotary_emb = LongNetRotaryEmbedding(config)
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    config.dtype = next(model.parameters()).dtype
    return model.eval()


def _generation_config(path: Path, config: LongNetConfig) -> GenerationConfig:
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(config)


def _saveable(config: GenerationConfig) -> GenerationConfig:
    """A copy that transformers writes: it reads fields that have no effect with only a warning, and then keeps them."""
    config = copy.deepcopy(config)
    if _is_valid(config):
        return config
    if config.num_beams in (None, 1):
        config.early_stopping = config.length_penalty = None
    if not _is_valid(config) and config.do_sample is None:
        # Nobody sets a temperature for greedy decoding.
        config.do_sample = True
    elif not _is_valid(config):
        for name in SAMPLING:
            setattr(config, name, None)
    return config


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def read_config(path: str | os.PathLike[str]) -> PretrainedConfig:
    """The config of a checkpoint, a directory's or a GGUF file's; see ``import_checkpoint`` for what is refused."""
    if Path(path).is_file() and Path(path).suffix == ".gguf":
        config: PretrainedConfig = AutoConfig.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    else:
        config = load_config(Path(path))
    if config.model_type in FAMILIES:
        # Who extends it must begin from what is computed.
        config.rope_parameters = family_rope(config)
    return config


def load_checkpoint(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> tuple[LongNetForCausalLM, PreTrainedTokenizerBase]:
    """A LongNet and its tokenizer, from a LongNet's directory or from one that ``import_checkpoint`` takes.

    Raises:
        ValueError: as ``import_checkpoint``, or if there is no tokenizer or it does not fit.
    """
    # First what is quick to read: a config or a tokenizer that cannot be used need not wait for the weights.
    read_config(path)
    tokenizer = find_tokenizer(Path(path))
    if tokenizer is None:
        raise ValueError(f"path={str(path)!r} has no tokenizer: expected tokenizer.json beside config.json")
    model = import_checkpoint(path, dtype=dtype)
    check_tokenizer(tokenizer, model.config)
    return model, tokenizer


def is_dense_equivalent(config: LongNetConfig) -> bool:
    """Whether every layer attends as the original family does, up to the model's context."""
    context = config.max_position_embeddings
    original = own_attention(family_config(config))
    for layer in range(config.num_hidden_layers):
        spec, theirs = dict(config.block_spec(layer)), original[layer % len(original)]
        if theirs["name"] == "sliding_window":
            if (spec["name"], spec.get("window")) != ("sliding_window", theirs["window"]):
                return False
        elif spec["name"] == "dilated":
            # Two levels would count the keys that they share twice.
            if list(spec["dilation_rates"]) != [1] or spec["segment_lengths"][0] < context + spec.get("shift", 0):
                return False
        elif spec["name"] != "dense":
            return False
    return True


def export_checkpoint(
    model: LongNetForCausalLM,
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    dense: bool | None = None,
) -> str:
    """Writes a model for others: as its original family where it attends as that does, else as a LongNet.

    A directory of the original family loads in plain transformers; a LongNet's does after ``import longnet``.

    Args:
        model: what to write.
        path: a directory that does not exist yet, or is empty. It appears whole or not at all.
        tokenizer: written beside it.
        dense: True insists on the original family, False on a LongNet.

    Returns:
        The model type that was written.

    Raises:
        ValueError: if the directory is in use, the tokenizer does not fit, or the family cannot express the model.
    """
    target = Path(path)
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise ValueError(f"path={str(path)!r} is there and not empty: choose another directory")
    check_tokenizer(tokenizer, model.config)
    plain: PreTrainedModel = model
    if dense is not False and _exportable(model.config, insist=bool(dense)):
        config = family_config(model.config)
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(model.state_dict(), strict=True, assign=True)
        plain.tie_weights()
        plain.config.dtype = next(plain.parameters()).dtype
        plain.generation_config = model.generation_config
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        plain.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return str(plain.config.model_type)


def _exportable(config: LongNetConfig, insist: bool) -> bool:
    try:
        dense = is_dense_equivalent(config)
    except ValueError:
        if insist:
            raise
        return False
    if insist and not dense:
        raise ValueError(
            f"dense=True: attention={config.attention} is not what the original family computes; expected one level "
            f"with dilation rate 1 and a segment length of at least {config.max_position_embeddings}, or dense=False"
        )
    return dense


def find_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint; None where it has none.

    Raises:
        ValueError: if its files are damaged.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    try:
        if path.is_file():
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(path) if any((path / name).exists() for name in names) else None
    except Exception as error:
        # The readers fail in their own ways on every kind of damage.
        raise ValueError(f"the tokenizer of {path} is damaged, or of an unknown kind ({error!r})") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, config: LongNetConfig) -> None:
    """Raises ``ValueError`` if a tokenizer has ids that the model has no embedding for."""
    if tokenizer is None:
        return
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer does not fit: its largest id is {largest}, but the model has vocab_size="
            f"{config.vocab_size}; expected the tokenizer of the same checkpoint"
        )
