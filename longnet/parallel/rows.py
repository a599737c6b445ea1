"""The rows of a segment that a rank sends, receives and attends.

Rows lie on a grid of blocks (r positions, hence one row per phase) times streams, so that what several ranks hold of a
segment fits together whatever the borders between them are. A block that a border cuts belongs to two ranks, for
different phases; the entries that a rank does not hold are padding, which no kernel is ever given.

B batch, R blocks, P streams, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from longnet.attention.flash import FlashKernel, Math, choose_kernel
from longnet.attention.levels import merge_
from longnet.attention.pattern import DilationPattern

from .sharding import (
    Grid,
    Shard,
    SharedSegment,
    Stream,
    grid,
    lanes,
    merged_parts,
    shard,
    shared_segments,
    spanning_levels,
    streams,
)


@dataclass(frozen=True)
class Layout:
    """How one call is spread: the pattern, the shards and the heads."""

    pattern: DilationPattern
    rank: int
    world: int
    seq_len: int
    num_heads: int
    num_kv_heads: int

    @property
    def own(self) -> Shard:
        return shard(self.rank, self.world, self.seq_len)

    def segments(self) -> tuple[SegmentRows, ...]:
        """The segments that this rank shares with others."""
        return _segments(self)


class Kernels:
    """Which kernel serves a block; with dropout, each block of a pass gets the next seed."""

    def __init__(self, dropout_p: float, seed: Tensor | None) -> None:
        self.dropout_p = dropout_p
        # Far from the seeds that the blocks of the own shard count up from.
        self.seed = 0 if seed is None else int(seed) + 2**32

    def choose(self, q: Tensor, k: Tensor) -> FlashKernel:
        if self.dropout_p == 0.0:
            return choose_kernel(q, k)
        self.seed += 1
        return Math(self.dropout_p, self.seed)


@dataclass(frozen=True)
class SegmentRows:
    """One rank's rows of a segment that it shares."""

    layout: Layout
    segment: SharedSegment

    def part(self, rank: int) -> Shard:
        return self.segment.part(rank, self.layout.world, self.layout.seq_len)

    @cached_property
    def rate(self) -> int:
        return self.layout.pattern.dilation_rates[self.segment.level]

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        return streams(self.layout.pattern, self.segment.level, self.layout.num_heads, self.layout.num_kv_heads)

    @cached_property
    def blocks(self) -> int:
        """Blocks of a message: as many as any of the ranks touches, so that all messages are of one size."""
        return max(self._grid(self.part(rank)).blocks for rank in self.segment.ranks)

    def sources(self, causal: bool) -> list[int]:
        """The other ranks whose keys this rank's queries see."""
        own = self.layout.rank
        return [rank for rank in self.segment.ranks if rank < own or (rank > own and not causal)]

    @cached_property
    def stretches(self) -> dict[bool, tuple[tuple[range, Shard], ...]]:
        """What this rank's queries see of others, causal or not: (ranks, positions), dense in their messages."""
        layout, own = self.layout, self.part(self.layout.rank)

        def seen(causal: bool) -> Iterator[tuple[range, Shard]]:
            sources = self.sources(causal)
            for ranks, keys in merged_parts(
                self.segment, sources, layout.world, layout.seq_len, self.rate, self.blocks
            ):
                # A rate above a shard's length leaves most of them without rows.
                if lanes(self.streams, self.segment.origin, self.rate, own, keys):
                    yield ranks, keys

        return {causal: tuple(seen(causal)) for causal in (True, False)}

    @cached_property
    def spanning(self) -> bool:
        """Whether what its queries see of its own keys is left to the packed rows."""
        layout = self.layout
        return self.segment.level in spanning_levels(layout.pattern, layout.rank, layout.world, layout.seq_len)

    def pack_keys(self, k: Tensor, v: Tensor) -> Tensor:
        """The (B, R, 2, P, D) message: K and V together."""
        return torch.stack([self._pack(x, *self._key_heads, self.blocks) for x in (k, v)], dim=2)

    def pack_queries(self, x: Tensor) -> Tensor:
        """The (B, R, H, D) rows of q or of anything shaped like it, heads in the streams' order."""
        return self._pack(x, *self._query_heads, self._grid(self.part(self.layout.rank)).blocks)

    def width(self, keys: bool) -> int:
        """Rows of a block: the streams of a message, or the heads of packed queries."""
        return len((self._key_heads if keys else self._query_heads)[0])

    def table(self, keys: bool, device: torch.device) -> _Table:
        """Where the rows of a message, or of packed queries, lie in the shard."""
        layout = self.layout
        if keys:
            return self._table(*self._key_heads, layout.num_kv_heads, self.blocks, device)
        return self._table(*self._query_heads, layout.num_heads, self._grid(self.part(layout.rank)).blocks, device)

    def attend_(
        self, q: Tensor, message: Tensor, keys: Shard, out: Tensor, lse: Tensor, scale: float, kernels: Kernels,
        causal: bool = False,
    ) -> None:  # fmt: skip
        """Folds what packed queries see of the ``keys`` in a message into packed (out, LSE).

        Other shards' keys are seen by all queries or by none; causal are only the own ones.
        """
        for q_rows, k_rows, v_rows, out_rows, lse_rows in self._blocks(keys, (q, out, lse), message):
            o, block_lse = kernels.choose(q_rows, k_rows).forward(q_rows, k_rows, v_rows, causal, scale)
            merge_(out_rows, lse_rows.squeeze(-1), o, block_lse, first=False)

    def attend_backward_(
        self, queries: tuple[Tensor, ...], message: Tensor, keys: Shard, dq: Tensor, dmessage: Tensor,
        scale: float, kernels: Kernels, causal: bool = False,
    ) -> None:  # fmt: skip
        """Adds the gradients of ``attend_``, fed with the merged (out, LSE); ``queries`` are (q, grad, out, LSE)."""
        views = zip(self._blocks(keys, (*queries, dq), message), self._blocks(keys, (dq,), dmessage), strict=True)
        for (q, k, v, grad, out, lse, dq_rows), (_, dk_rows, dv_rows) in views:
            grads = kernels.choose(q, k).backward(grad, q, k, v, out, lse.squeeze(-1), causal, scale)
            for rows, part in zip((dq_rows, dk_rows, dv_rows), grads, strict=True):
                rows.add_(part)

    def _blocks(self, keys: Shard, query_like: tuple[Tensor, ...], message: Tensor) -> Iterator[list[Tensor]]:
        """Views (first query-like, K, V, other query-like ...) for each kernel call: every row sees every key."""
        own = self.part(self.layout.rank)
        first_query, first_key = self._grid(own).begin, self._grid(keys).begin
        for lane in lanes(self.streams, self.segment.origin, self.rate, own, keys):
            query_rows = slice(lane.queries.begin - first_query, lane.queries.end - first_query)
            key_rows = slice(lane.keys.begin - first_key, lane.keys.end - first_key)
            first, *rest = (x[:, query_rows, lane.heads] for x in query_like)
            yield [first, *(message[:, key_rows, kind, lane.streams] for kind in (0, 1)), *rest]

    def _grid(self, part: Shard) -> Grid:
        return grid(part, self.segment.origin, self.rate)

    @cached_property
    def _key_heads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(stream.kv_head for stream in self.streams), tuple(stream.phase for stream in self.streams)

    @cached_property
    def _query_heads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pairs = [(head, stream.phase) for stream in self.streams for head in stream.heads]
        return tuple(head for head, _ in pairs), tuple(phase for _, phase in pairs)

    def _pack(self, x: Tensor, heads: tuple[int, ...], phases: tuple[int, ...], blocks: int) -> Tensor:
        table = self._table(heads, phases, x.shape[2], blocks, x.device)
        rows = x.reshape(x.shape[0], -1, x.shape[3]).index_select(1, table.clamped)
        return rows.unflatten(1, (blocks, len(heads)))

    def _table(
        self, heads: tuple[int, ...], phases: tuple[int, ...], num_heads: int, blocks: int, device: torch.device
    ) -> _Table:
        own, part = self.layout.own, self.part(self.layout.rank)
        return _table(heads, phases, num_heads, part, own, self.segment.origin, self.rate, blocks, device)


class Totals:
    """A shard's (B, N, H, D) result, to be changed by what other shards add to some of its rows.

    Those rows are held apart in float32, so that they are rounded once, and the rest stays as and where it is.

    Args:
        x: the result so far; it is changed by ``finish``.
        layout: how the call is spread.
        keys: whether the rows are those of keys and values; else those of queries.
    """

    def __init__(self, x: Tensor, layout: Layout, keys: bool = False) -> None:
        self._x, self._keys = x.contiguous(), keys
        self._index = _touched(layout, keys, x.device)
        self._rows = self._flat().index_select(1, self._index).to(torch.promote_types(x.dtype, torch.float32))

    def rows(self, segment: SegmentRows) -> Tensor:
        """The rows of a segment, packed; what its padding holds means nothing."""
        places = self._places(segment)
        return self._rows.index_select(1, places.clamped).unflatten(1, (-1, segment.width(self._keys)))

    def write_(self, segment: SegmentRows, rows: Tensor) -> None:
        places = self._places(segment)
        self._rows.index_copy_(1, places.clamped[places.held], rows.flatten(1, 2)[:, places.held])

    def add_(self, segment: SegmentRows, rows: Tensor) -> None:
        places = self._places(segment)
        self._rows.index_add_(1, places.clamped[places.held], rows.flatten(1, 2)[:, places.held])

    def finish(self) -> Tensor:
        """The whole result, with the rows back in it."""
        self._flat().index_copy_(1, self._index, self._rows.to(self._x.dtype))
        return self._x

    def _flat(self) -> Tensor:
        return self._x.view(self._x.shape[0], -1, self._x.shape[3])

    def _places(self, segment: SegmentRows) -> _Table:
        return _places(segment, self._keys, self._x.device)


# Of 1,024 ranks, finding out who holds what takes longer than the attention; all calls of a layer ask the same.
@lru_cache(maxsize=256)
def _segments(layout: Layout) -> tuple[SegmentRows, ...]:
    shared = shared_segments(layout.pattern, layout.world, layout.seq_len)
    return tuple(SegmentRows(layout, segment) for segment in shared if layout.rank in segment.ranks)


@dataclass(frozen=True)
class _Table:
    """Where the entries of a grid lie in a shard's flattened (position, head); padding points anywhere inside.

    ``held`` are the entries that are no padding.
    """

    clamped: Tensor
    held: Tensor


@lru_cache(maxsize=256)
def _table(
    heads: tuple[int, ...], phases: tuple[int, ...], num_heads: int, part: Shard, own: Shard, origin: int, rate: int,
    blocks: int, device: torch.device,
) -> _Table:  # fmt: skip
    block = torch.arange(blocks, device=device)[:, None] + grid(part, origin, rate).begin
    position = origin + block * rate + torch.tensor(phases, device=device)
    held = (position >= part.begin) & (position < part.end)
    local = (position - own.begin).clamp(0, own.length - 1)
    index = local * num_heads + torch.tensor(heads, device=device)
    return _Table(index.flatten(), held.flatten().nonzero().flatten())


@lru_cache(maxsize=256)
def _touched(layout: Layout, keys: bool, device: torch.device) -> Tensor:
    """All entries of a shard's flattened (position, head) that are rows of a shared segment, in their order."""
    tables = [segment.table(keys, device) for segment in layout.segments()]
    entries = [table.clamped[table.held] for table in tables]
    # One that is there in any case, for the padding of a segment to point to.
    first = torch.zeros(min(1, layout.own.length), dtype=torch.int64, device=device)
    return torch.cat([first, *entries]).unique()


@lru_cache(maxsize=256)
def _places(segment: SegmentRows, keys: bool, device: torch.device) -> _Table:
    """A segment's table, with places among the touched entries in place of those in the shard."""
    touched, table = _touched(segment.layout, keys, device), segment.table(keys, device)
    return _Table(torch.searchsorted(touched, table.clamped).clamp(max=len(touched) - 1), table.held)
