"""The `ring` form: the rows of a segment travel from rank to rank, and never more than two parts are held.

While a part is attended, the next one is arriving. Causal rows travel upwards only, since nobody below sees them; in
backward the gradient of a part travels with it, one hop behind, and the last rank that saw the part sends it home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Work

from .group import SequenceGroup
from .own import Call
from .rows import SegmentRows, Totals


def forward(call: Call, group: SequenceGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    own: tuple[Totals, Totals] | None = None
    for rows in call.layout.segments():
        visits = circulate(group, rows.pack_keys(k, v), rows.segment.ranks, wrap=not call.causal)
        rank, message = next(visits)
        # The first part is on its way while the own shard is computed.
        own = own or call.attend_own(q, k, v)
        q_rows, out_rows, lse_rows = rows.pack_queries(q), *(total.rows(rows) for total in own)
        if rows.spanning:
            rows.attend_(q_rows, message, rows.part(rank), out_rows, lse_rows, call.scale, call.kernels, call.causal)
        for owner, message in visits:
            rows.attend_(q_rows, message, rows.part(owner), out_rows, lse_rows, call.scale, call.kernels)
        for total, part in zip(own, (out_rows, lse_rows), strict=True):
            total.write_(rows, part)
    out, lse = own or call.attend_own(q, k, v)
    return out.finish(), lse.finish()


def backward(
    call: Call, group: SequenceGroup, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = call.attend_own_backward(grad, q, k, v, out, lse)
    for rows in call.layout.segments():
        queries = tuple(rows.pack_queries(x) for x in (q, grad, out, lse))
        dq_rows = torch.zeros_like(queries[0], dtype=torch.promote_types(q.dtype, torch.float32))

        message = rows.pack_keys(k, v)
        differentiate = partial(_differentiate, call, rows, queries, dq_rows)
        home = circulate_gradients(
            group, message, rows.segment.ranks, wrap=not call.causal, differentiate=differentiate
        )
        own = differentiate(call.layout.rank, message, call.causal) if rows.spanning else None
        for dmessage in (home, own):
            if dmessage is not None:
                dk.add_(rows, dmessage[:, :, 0])
                dv.add_(rows, dmessage[:, :, 1])
        dq.add_(rows, dq_rows)
    return dq.finish(), dk.finish(), dv.finish()


def _differentiate(
    call: Call, rows: SegmentRows, queries: tuple[Tensor, ...], dq_rows: Tensor, owner: int, message: Tensor,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    dmessage = torch.zeros_like(message, dtype=dq_rows.dtype)
    rows.attend_backward_(queries, message, rows.part(owner), dq_rows, dmessage, call.scale, call.kernels, causal)
    return dmessage


class Circle:
    """Who sends what to whom at each hop, seen from one rank. Hop h brings the part of the rank h places below.

    With ``wrap`` parts travel all around; without, they stop at the last rank, and nothing comes from below the first.
    """

    def __init__(self, ranks: Sequence[int], rank: int, wrap: bool) -> None:
        self.ranks, self.wrap = ranks, wrap
        self.size, self.place = len(ranks), ranks.index(rank)
        self.above = ranks[(self.place + 1) % self.size]
        self.below = ranks[(self.place - 1) % self.size]

    def owner(self, hop: int) -> int:
        """Whose part this rank sees at a hop."""
        return self.ranks[(self.place - hop) % self.size]

    def receives(self, hop: int) -> bool:
        return 0 < hop < self.size and (self.wrap or self.place >= hop)

    def sends(self, hop: int) -> bool:
        """Whether at a hop it hands on what it saw at the hop before."""
        return 0 < hop < self.size and (self.wrap or (self.place >= hop - 1 and self.place + 1 < self.size))

    def last_to_see(self, hop: int) -> bool:
        """Whether the part seen at a hop has been everywhere by then."""
        return hop == self.size - 1 if self.wrap else self.place == self.size - 1

    def home_after(self, hop: int) -> int | None:
        """The rank that has, after a hop, the finished gradient of this rank's part."""
        if self.wrap:
            return self.below if hop == self.size - 1 else None
        last = self.size - 1
        return self.ranks[last] if self.place == last - hop else None


def circulate(group: SequenceGroup, own: Tensor, ranks: Sequence[int], wrap: bool) -> Iterator[tuple[int, Tensor]]:
    """Yields (owner, part): the own one first, then each that comes by, the next one already on its way."""
    circle = Circle(ranks, group.rank, wrap)
    part: Tensor | None = own
    for hop in range(1, circle.size + 1):
        arriving = torch.empty_like(own) if circle.receives(hop) else None
        works = _hop(group, circle, hop, part, arriving)
        if part is not None:
            yield circle.owner(hop - 1), part
        _wait(works)
        part = arriving


def circulate_gradients(
    group: SequenceGroup,
    own: Tensor,
    ranks: Sequence[int],
    wrap: bool,
    differentiate: Callable[[int, Tensor], Tensor],
) -> Tensor | None:
    """The gradient of the own part, to which all that saw it have added; None if nobody else sees it."""
    circle = Circle(ranks, group.rank, wrap)
    home: Tensor | None = None
    arrived: Tensor | None = None
    gradient_works: list[Work] = []
    in_flight: list[Tensor] = []
    visits = circulate(group, own, ranks, wrap)
    next(visits)
    for hop in range(1, circle.size):
        gradient = None
        if circle.receives(hop):
            owner, part = next(visits)
            gradient = differentiate(owner, part)
            del part
        _wait(gradient_works)
        in_flight.clear()
        if gradient is not None and arrived is not None:
            gradient += arrived
        dtype = torch.promote_types(own.dtype, torch.float32)
        sends, receives = [], []
        if gradient is not None:
            target = circle.owner(hop) if circle.last_to_see(hop) else circle.above
            sends.append((gradient, target))
            in_flight.append(gradient)
        # From hop 2 on, what arrives has been seen by the ranks in between.
        arrived = torch.empty_like(own, dtype=dtype) if circle.receives(hop + 1) else None
        if arrived is not None:
            receives.append((arrived, circle.below))
        if (source := circle.home_after(hop)) is not None:
            home = torch.empty_like(own, dtype=dtype)
            receives.append((home, source))
        gradient_works = group.exchange(sends, receives, tag=1)
    for _ in visits:
        raise AssertionError("a part came by that nobody differentiated")
    _wait(gradient_works)
    return home


def _hop(group: SequenceGroup, circle: Circle, hop: int, part: Tensor | None, arriving: Tensor | None) -> list[Work]:
    sends = [(part, circle.above)] if circle.sends(hop) and part is not None else []
    receives = [(arriving, circle.below)] if arriving is not None else []
    return group.exchange(sends, receives)


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()
