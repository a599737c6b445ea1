"""Optimiser states by the names of their parameters, as checkpoints keep them, and by their place, as torch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longnet.checkpoint import Contents

# The module's name for the language model.
PREFIX = "model."


def export_weights(path: Path, target: Path) -> None:
    """The language model's weights of a checkpoint as one safetensors file."""
    with Contents(path) as contents:
        state = contents.get("state_dict")
    weights = {name.removeprefix(PREFIX): x.contiguous() for name, x in state.items() if name.startswith(PREFIX)}
    # A head that is the embedding is one tensor with two names, which the format has no word for.
    if "lm_head.weight" in weights and torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        del weights["lm_head.weight"]
    save_file(weights, target, metadata={"format": "pt"})


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimiser's state by the names of its parameters, given in the optimiser's order."""
    groups = [{**group, "params": [names[place] for place in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[place]: value for place, value in state["state"].items()}, "param_groups": groups}


def by_place(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state by the places of its parameters."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    places = {name: place for place, name in enumerate(names)}
    groups = [{**group, "params": [places[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {places[name]: value for name, value in state["state"].items()}, "param_groups": groups}
