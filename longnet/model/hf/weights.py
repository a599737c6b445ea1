"""Weights from files, read as data only: nothing in a checkpoint is ever executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Buffers that older checkpoints carry and every model computes anew.
COMPUTED = ("rotary_emb.inv_freq",)


def load_config(path: Path) -> PretrainedConfig:
    """The config of a checkpoint's directory.

    Raises:
        ValueError: if it is missing, no JSON, or of an architecture that transformers does not know.
    """
    if not path.exists():
        raise ValueError(
            f"path={str(path)!r}: no such directory; expected a local checkpoint, for example one that "
            "`hf download NAME --local-dir DIR` made"
        )
    if path.is_file():
        what = "a pickle, which runs code when it is read" if path.suffix in PICKLES else "a single file"
        raise ValueError(
            f"path={str(path)!r} is {what}: expected a directory with config.json and safetensors, or a .gguf file"
        )
    try:
        found = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"path={str(path)!r} has no config.json: expected the directory of a checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / 'config.json'} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path / 'config.json'} is damaged: expected an object, not a {type(found).__name__}")
    try:
        # Never with trust_remote_code: a config must not bring code along.
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
    except Exception as error:
        # Fields of the wrong type have errors of their own, one kind for each.
        message = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ValueError(
            f"{path / 'config.json'}: model_type={found.get('model_type')!r} cannot be read by transformers: {message}"
        ) from error
    return config


def load_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors.

    Raises:
        ValueError: if there are none, or with every file that is missing or damaged.
    """
    files = _files(path)
    problems, tensors = [], {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[name] = opened.get_tensor(name)
        except FileNotFoundError:
            problems.append(f"{file.name} is missing")
        except (SafetensorError, OSError, ValueError) as error:
            problems.append(f"{file.name} is no safetensors file, or is damaged or cut short ({error})")
    if problems:
        raise ValueError(f"{path} cannot be read:\n  " + "\n  ".join(problems))
    return tensors


def load_gguf(path: Path) -> PreTrainedModel:
    """A GGUF file, dequantised by transformers.

    Raises:
        ValueError: if it is damaged, or the packages that read it are missing.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"path={str(path)!r} is no GGUF file, or is damaged: it does not begin with 'GGUF'")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    except ImportError as error:
        message = str(error).strip().splitlines()[0]
        raise ValueError(f"path={str(path)!r}: {message}; pip install gguf accelerate") from None
    except Exception as error:
        # The reader fails in its own ways on every kind of damage: by index, by shape, by memory map.
        raise ValueError(f"path={str(path)!r} is damaged or of an unknown architecture ({error!r})") from error
    # Dequantised weights are plain ones; with this mark on it the model could not be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def match_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], tied: bool, where: str) -> Any:
    """The tensors that the model takes, after a check of all of them.

    Args:
        tensors: what the checkpoint has.
        expected: what the model has; only the shapes are looked at.
        tied: the head is the embedding, and may be left out or there twice.
        where: the checkpoint, for the message.

    Raises:
        ValueError: with every tensor that is missing, left over, or of another shape.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED)}
    problems = []
    if tied:
        own_head = found.pop(head, None)
        if own_head is not None and not torch.equal(own_head, found.get(embedding, own_head)):
            problems.append(f"{head} differs from {embedding}, but tie_word_embeddings is true")
    wanted = {name: tensor for name, tensor in expected.items() if not (tied and name == head)}
    problems += [f"{name} is missing, {tuple(wanted[name].shape)}" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is left over, {tuple(found[name].shape)}" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, expected {tuple(wanted[name].shape)}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name].shape != wanted[name].shape
    ]
    if problems:
        raise ValueError(f"{where} does not fit its config:\n  " + "\n  ".join(problems))
    return found


def _files(path: Path) -> list[Path]:
    # In transformers' order: a directory that is written again keeps its old index, and some hold the weights twice.
    whole, index = path / "model.safetensors", path / INDEX
    if whole.exists():
        return [whole]
    if index.exists():
        try:
            return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"{index} is damaged ({error!r})") from None
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"path={str(path)!r} holds {pickles}: pickles run code when they are read, and are refused; expected "
                "safetensors, which transformers writes by save_pretrained"
            )
        raise ValueError(f"path={str(path)!r} holds no *.safetensors")
    return files
