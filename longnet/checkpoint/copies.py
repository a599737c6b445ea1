"""Copies in host memory, for writing beside training: training waits for no more than to be told to make them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopies:
    """Copies tensors into host memory that is taken once and used again by the next copies of the same names.

    Fresh memory costs more than the copy: the system hands it over page by page and, for a GPU, has to pin it. What is
    copied from a GPU comes in the order of its stream, so the steps that are given to it next cannot change it.
    """

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begins to copy; the copies of before are gone."""
        self._places = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor, non_blocking=tensor.is_cuda)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return self._places

    def wait(self) -> None:
        """Waits until the copies are there."""
        for event in self._events:
            event.synchronize()

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        place = self._places.get(name)
        if place is not None and place.shape == tensor.shape and place.dtype == tensor.dtype:
            return place
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
