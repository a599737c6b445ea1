"""Reading a checkpoint: whole, or the parts of it that a process holds, whatever the processes that wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .manifest import DamagedError, read_manifest
from .tree import restore
from .writing import PARTS, STATE


class Contents:
    """An open checkpoint, whose files were verified before. Tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        # Of each tensor its shape, and of each of its parts the file, its start and its shape.
        self._shapes: dict[str, list[int]] = {}
        self._parts: dict[str, list[tuple[Any, list[int], list[int]]]] = {}
        try:
            self._open(read_manifest(path).files)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            self._stack.close()
            if isinstance(error, DamagedError):
                raise
            raise DamagedError(f"{path} is damaged ({type(error).__name__}: {error})") from None

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def state(self, *leave_out: str) -> dict[str, Any]:
        """Everything, as it was given to be saved, but for the top-level keys to leave out."""
        return {key: self.get(key) for key in self._tree if key not in leave_out}

    def get(self, *place: str | int) -> Any:
        """What was saved in a place."""
        return restore(self._at(place), self.tensor)

    def fill_all(self, target: Mapping[str, Any], *place: str | int) -> None:
        """Copies what was saved in a place into the tensors of the same names, down to any depth."""
        tree = self._at(place)
        for name, value in target.items():
            if isinstance(value, Tensor):
                self.fill(value, tree[name]["$tensor"])
            elif isinstance(value, Mapping):
                self.fill_all(value, *place, name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        parts = self._find(name)
        if len(parts) == 1:
            return parts[0][0].get_tensor(name)
        return self.region(name, [0] * len(self._shapes[name]), self._shapes[name])

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A block of a tensor, put together from the parts that reach into it."""
        parts = self._find(name)
        block: Tensor | None = None
        filled = 0
        for file, start, size in parts:
            low = [max(a, b) for a, b in zip(offset, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, start, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            source = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            piece = file.get_slice(name)[source] if source else file.get_tensor(name)
            block = torch.empty(tuple(shape), dtype=piece.dtype) if block is None else block
            block[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = piece
            filled += piece.numel()
        if block is None:
            return parts[0][0].get_slice(name)[tuple(slice(0, 0) for _ in shape)].reshape(tuple(shape))
        if filled != prod(shape):
            raise DamagedError(f"{self.path}: parts of {name} are missing")
        return block

    def fill(self, target: Tensor, name: str) -> None:
        """Copies a tensor, or this process's part of it, into one that is in use."""
        if not isinstance(target, DTensor):
            target.copy_(self.tensor(name))
            return
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        if prod(shape):
            target.to_local().copy_(self.region(name, offset, shape))

    def _at(self, place: Sequence[str | int]) -> Any:
        tree: Any = self._tree
        for key in place:
            tree = tree[key]
        return tree

    def _find(self, name: str) -> list[tuple[Any, list[int], list[int]]]:
        if name not in self._parts:
            raise DamagedError(f"{self.path} has no tensor {name}")
        return self._parts[name]

    def _open(self, files: Mapping[str, Any]) -> None:
        for file in sorted(name for name in files if name.endswith(".safetensors")):
            handle = self._stack.enter_context(safe_open(self.path / file, framework="pt"))
            for name, place in json.loads(handle.metadata()[PARTS]).items():
                self._shapes[name] = place["shape"]
                self._parts.setdefault(name, []).append((handle, place["offset"], handle.get_slice(name).get_shape()))
        self._tree = json.loads((self.path / STATE).read_bytes())
        if not isinstance(self._tree, dict):
            raise DamagedError(f"{self.path / STATE} holds no state")


def read_whole(path: Path) -> dict[str, Any]:
    """A checkpoint as if one process had saved it."""
    with Contents(path) as contents:
        return contents.state()
