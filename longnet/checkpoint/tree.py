"""Nested state as JSON and named tensors, and back. What is neither is refused, so that nothing can hide in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

# Marks what JSON has no word for.
TENSOR, TUPLE, ITEMS = "$tensor", "$tuple", "$items"


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state with a name in the place of each tensor, and the tensors by those names."""
    tensors: dict[str, Tensor] = {}
    seen: dict[Any, str] = {}
    return _flatten(state, "", tensors, seen), tensors


def restore(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The state of which ``tree`` was made; ``tensor`` gives a tensor by its name."""
    if isinstance(tree, list):
        return [restore(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"$tensor": name}:
            return tensor(name)
        case {"$tuple": items}:
            return tuple(restore(item, tensor) for item in items)
        case {"$items": items}:
            return {key: restore(value, tensor) for key, value in items}
    return {key: restore(value, tensor) for key, value in tree.items()}


def _flatten(value: Any, place: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    if isinstance(value, Tensor):
        return {TENSOR: _add(value, place, tensors, seen)}
    if isinstance(value, Mapping):
        inside = f"{place}/" if place else ""
        items = [(key, _flatten(item, f"{inside}{key}", tensors, seen)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        for key, _ in items:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{place}: a key of type {type(key).__name__} cannot be saved")
        return {ITEMS: [[key, item] for key, item in items]}
    if isinstance(value, (list, tuple)):
        flat = [_flatten(item, f"{place}/{index}", tensors, seen) for index, item in enumerate(value)]
        return {TUPLE: flat} if isinstance(value, tuple) else flat
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{place}: a {type(value).__name__} cannot be saved; expected tensors, numbers, text, lists, dicts")


def _add(tensor: Tensor, place: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Weights that are tied are one tensor under two names; they are saved once.
    key = (local.data_ptr(), tuple(tensor.shape), tensor.dtype, local.stride()) if local.numel() else place
    if key not in seen:
        seen[key] = place
        tensors[place] = tensor
    return seen[key]
