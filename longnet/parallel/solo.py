"""One rank of many by itself, at its real shapes and with nobody to talk to, to measure what a rank does and holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import Work

from .group import SequenceGroup


class _Done:
    def wait(self) -> None: ...


class SoloGroup(SequenceGroup):
    """Stands in for a group of ``size`` ranks. What others would send arrives at once, as constants."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ranks = list(range(size))
        self.name = f"solo {rank} of {size}"
        SequenceGroup._known[self.name] = self

    def create_parts(self, parts: Iterable[range]) -> None: ...

    def all_gather(self, message: Tensor, part: range) -> tuple[Tensor, Work]:
        gathered = message.new_full((len(part), *message.shape), 0.5)
        gathered[part.index(self.rank)] = message
        return gathered, _done()

    def reduce_scatter(self, messages: Tensor, part: range) -> tuple[Tensor, Work]:
        return messages[part.index(self.rank)].clone(), _done()

    def all_to_all(self, messages: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return messages.new_full((sum(received),), 0.5)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> list[Work]:
        for arriving, _ in receives:
            arriving.fill_(0.5)
        return []


def _done() -> Any:
    return _Done()
