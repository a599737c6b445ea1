"""Activations that wait for backward in host memory, copied on a stream of their own while the device computes."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Torch's allocator of pinned memory rounds up to a power of two, which blocks of one size never pay for. Large enough
# to copy at full speed.
BLOCK_BYTES = 2**28


class Kept:
    """One tensor's place in host memory, and its copy on the device while there is one."""

    def __init__(self, tensor: Tensor, blocks: list[Tensor]) -> None:
        self.blocks = blocks
        self.tensor: Tensor | None = tensor
        self.copied: torch.cuda.Event | None = None
        self.like = torch.empty_like(tensor, device="meta")
        self.device = tensor.device


class HostStore:
    """Keeps tensors in host memory between a forward and a backward pass, last in, first out.

    A tensor leaves while the next one is computed: the device holds no more than the newest. Taking one back starts
    the copy of the one before it, so it arrives while the first is worked on. Host memory is pinned, which is slow, so
    it is allocated once and used again. On a CPU the copies are plain ones.

    Streams are ordered by events alone: a tensor's memory is given up only after the computing stream has waited for
    the copy, so the allocator may reuse it at once.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._free: list[Tensor] = []
        self._allocated = 0
        self._order: list[weakref.ref[Kept]] = []
        self._stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        # A copied model trains on its own.
        return HostStore(self.block_bytes)

    @property
    def host_bytes(self) -> int:
        """What has been allocated so far, in use or waiting to be used again."""
        return self._allocated * self.block_bytes

    def put(self, tensor: Tensor) -> Kept:
        """Starts to copy a tensor to the host. It must not change before it is got back."""
        self._let_newest_go()
        tensor = tensor.contiguous()
        blocks = [self._block(pinned=tensor.is_cuda) for _ in range(-(-tensor.nbytes // self.block_bytes))]
        kept = Kept(tensor, blocks)
        # Blocks come back when nothing refers to the tensor any more, also where backward never ran.
        weakref.finalize(kept, self._free.extend, blocks)
        self._copy(kept, to_host=True)
        self._order.append(weakref.ref(kept))
        return kept

    def get(self, kept: Kept) -> Tensor:
        """The tensor, on its device; the one that was put before it starts to come."""
        if kept.tensor is None:
            self._fetch(kept)
        tensor = self._let_go(kept)
        before = self._before(kept)
        if before is not None and before.tensor is None:
            self._fetch(before)
        return tensor

    def _fetch(self, kept: Kept) -> None:
        kept.tensor = torch.empty_like(kept.like, device=kept.device)
        self._copy(kept, to_host=False)

    def _copy(self, kept: Kept, to_host: bool) -> None:
        assert kept.tensor is not None
        flat = kept.tensor.view(-1).view(torch.uint8)
        with self._copying(kept.device):
            for block, part in zip(kept.blocks, flat.split(self.block_bytes), strict=True):
                source, target = (part, block[: len(part)]) if to_host else (block[: len(part)], part)
                target.copy_(source, non_blocking=True)
            if self._stream is not None:
                kept.copied = self._stream.record_event()

    def _copying(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # What is copied was written, and what is copied over was last read, by the stream that computes.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def _let_go(self, kept: Kept) -> Tensor:
        if kept.copied is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.copied)
        tensor, kept.tensor = kept.tensor, None
        assert tensor is not None
        return tensor

    def _let_newest_go(self) -> None:
        newest = self._order[-1]() if self._order else None
        if newest is not None and newest.tensor is not None:
            self._let_go(newest)

    def _before(self, kept: Kept) -> Kept | None:
        alive = [ref for ref in self._order if ref() is not None]
        known = [ref() for ref in alive]
        self._order = alive[: known.index(kept)] if kept in known else alive
        return self._order[-1]() if self._order else None

    def _block(self, pinned: bool) -> Tensor:
        if self._free:
            return self._free.pop()
        self._allocated += 1
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=pinned)
