"""Optimiser states by the names of their parameters, as checkpoints keep them, and by their place, as torch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longnet.checkpoint import Contents, DamagedError, steps_of, verify

# The module's name for the language model.
PREFIX = "model."


def export_weights(path: Path, target: Path) -> None:
    """The language model's weights of a checkpoint as one safetensors file, every byte of it checked before.

    Raises:
        ValueError: if it is no checkpoint, damaged, or of a run that trains adapters.
    """
    if not target.absolute().parent.is_dir():
        raise ValueError(f"target={target}: there is no directory {target.parent}; make it, or choose another place")
    try:
        verify(path)
        with Contents(path) as contents:
            state = contents.get("state_dict")
    except DamagedError as error:
        there = [*steps_of(path), *steps_of(path / "checkpoints"), *steps_of(path.parent)]
        others = [other for other in there if other != path]
        raise ValueError(f"{error}" + (f"; for example {others[-1]}" if others else "")) from None
    if any(".lora_" in name for name in state):
        run = path.absolute().parents[1]
        raise ValueError(
            f"{path} holds adapters beside the weights that they change: take {run / 'model'}, in which the finished "
            f"run has added them up, or {run / 'adapter'}, the adapters alone"
        )
    weights = {name.removeprefix(PREFIX): x.contiguous() for name, x in state.items() if name.startswith(PREFIX)}
    # A head that is the embedding is one tensor with two names, which the format has no word for.
    head = weights.pop("lm_head.weight", None)
    if head is not None and not any(torch.equal(head, weight) for weight in weights.values()):
        weights["lm_head.weight"] = head
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
