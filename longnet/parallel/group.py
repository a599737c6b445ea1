"""The ranks that share a sequence, and the smaller groups of those that share a segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# torch 2.13 renamed these two, and warns at each call of the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SequenceGroup:
    """A process group whose ranks hold the shards of one sequence, in the order of their ranks.

    Several of them may lie side by side, each with a sequence of its own; all processes of the job are in one of them
    and call the same operators. All communication of sequence parallelism goes through here. Make it with
    ``SequenceGroup.of``: there is one for each process group, and an operator finds it by its name.

    Args:
        group: the process group; None for all processes.
        timeout: how long a peer may take to answer in the smaller groups made from this one.
    """

    _known: dict[str, SequenceGroup] = {}  # noqa: RUF012

    def __init__(self, group: ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        whole = group or dist.group.WORLD
        assert whole is not None
        self.group: ProcessGroup = whole
        self.timeout = timeout
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.name: str = self.group.group_name
        self._parts: dict[range, ProcessGroup] = {}
        if dist.get_backend(self.group) == "nccl":
            # NCCL connects a group at its first call, which all ranks must make; a ring's first message is between two.
            dist.barrier(self.group, device_ids=[torch.cuda.current_device()])

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self

    @classmethod
    def of(cls, group: ProcessGroup | None = None, timeout: timedelta | None = None) -> SequenceGroup:
        """The one of a process group."""
        group = group or dist.group.WORLD
        assert group is not None
        known = cls._known.get(group.group_name)
        if known is None or known.group is not group:
            known = cls._known[group.group_name] = cls(group, timeout)
        return known

    @classmethod
    def named(cls, name: str) -> SequenceGroup:
        return cls._known[name]

    def create_parts(self, parts: Iterable[range]) -> None:
        """Makes a process group of each of these sets of ranks, once. All ranks call this with the same sets."""
        for part in parts:
            if part not in self._parts:
                whole = len(part) == self.size
                self._parts[part] = self.group if whole else self._create(part)

    def _create(self, part: range) -> ProcessGroup:
        # torch wants every process of the job to take part in making a group, also one that others will use.
        made = [
            dist.new_group([ranks[place] for place in part], timeout=self.timeout, backend=dist.get_backend(self.group))
            for ranks in self._everyone()
        ]
        (own,) = (group for ranks, group in zip(self._everyone(), made, strict=True) if ranks == self.ranks)
        return own

    @cache  # noqa: B019
    def _everyone(self) -> list[list[int]]:
        """The ranks of all groups like this one in the job: each holds another sequence."""
        if self.size == dist.get_world_size():
            return [self.ranks]
        groups: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(groups, self.ranks)
        return sorted(map(list, {tuple(ranks) for ranks in groups}))

    def all_gather(self, message: Tensor, part: range) -> tuple[Tensor, Work]:
        """Begins to collect the messages of some ranks, as (ranks, ...)."""
        gathered = message.new_empty(len(part), *message.shape)
        work = _all_gather(gathered.view(-1), message.view(-1), group=self._parts[part], async_op=True)
        assert work is not None
        return gathered, work

    def reduce_scatter(self, messages: Tensor, part: range) -> tuple[Tensor, Work]:
        """Begins to add up, over some ranks, the message (ranks, ...) that each has for this one."""
        own = torch.empty_like(messages[0])
        work = _reduce_scatter(own.view(-1), messages.view(-1), group=self._parts[part], async_op=True)
        assert work is not None
        return own, work

    def all_to_all(self, messages: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends ``sent[t]`` elements of flat messages to each rank t; gets ``received[t]`` from it, one by one."""
        got = messages.new_empty(sum(received))
        dist.all_to_all_single(got, messages, list(received), list(sent), group=self.group)
        return got

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> list[Work]:
        """Begins to send and receive, all at once; the tensors must stay as they are until the works are done."""
        operations = [dist.P2POp(dist.irecv, x, self.ranks[peer], self.group, tag) for x, peer in receives]
        operations += [dist.P2POp(dist.isend, x, self.ranks[peer], self.group, tag) for x, peer in sends]
        return dist.batch_isend_irecv(operations) if operations else []
