"""Counts the bytes of all tensors that are alive, operation by operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """What is made inside, as storages; kernels' own workspaces are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta]
        made = [storage for leaf in outputs if id(storage := leaf.untyped_storage()) not in given]
        self._alive |= {id(storage): weakref.ref(storage) for storage in made}
        if made:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        alive = {key: storage for key, ref in self._alive.items() if (storage := ref()) is not None}
        self._alive = {key: self._alive[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())
