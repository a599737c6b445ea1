"""Checkpoints that every process writes its part of: directories, which any number of processes can read.

Optimiser states are kept by the names of their parameters in a directory, and by their place in the optimiser in a
checkpoint of one file, as torch has them; both turn into each other here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# Beside the shards: what is no tensor. Lightning's own name for it.
FACTS = "meta.pt"
# The module's name for the language model.
PREFIX = "model."


def is_sharded(path: Path) -> bool:
    return (path / FACTS).is_file()


def read_whole(path: Path) -> dict[str, Any]:
    """A sharded checkpoint as if one process had saved it."""
    checkpoint: dict[str, Any] = torch.load(path / FACTS, map_location="cpu", weights_only=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # Memory-mapped, and unlinked once it is: on disk until it is used.
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(path, whole)
        tensors = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
    checkpoint["state_dict"] = tensors["state_dict"]
    states = [tensors[key] for key in sorted(tensors) if key.startswith("optimizer_")]
    checkpoint["optimizer_states"] = [_by_place(state) for state in states]
    return checkpoint


def export_weights(path: Path, target: Path) -> None:
    """The language model's weights of a checkpoint, sharded or not, as one safetensors file."""
    whole = read_whole(path) if is_sharded(path) else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    weights = {
        name.removeprefix(PREFIX): x.contiguous() for name, x in whole["state_dict"].items() if name.startswith(PREFIX)
    }
    # A head that is the embedding is one tensor with two names, which the format has no word for.
    if "lm_head.weight" in weights and torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        del weights["lm_head.weight"]
    save_file(weights, target, metadata={"format": "pt"})


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimiser's state by the names of its parameters, given in the optimiser's order."""
    groups = [{**group, "params": [names[place] for place in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[place]: value for place, value in state["state"].items()}, "param_groups": groups}


def _by_place(state: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for group in state["param_groups"] for name in group["params"]]
    places = {name: place for place, name in enumerate(names)}
    groups = [{**group, "params": [places[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {places[name]: value for name, value in state["state"].items()}, "param_groups": groups}
