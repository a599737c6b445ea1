"""Who holds what: pure functions of (rank, world, length), the same on every rank.

A sequence of N positions is cut into contiguous shards of L = ceil(N / p). Where p does not divide N the last shards
are short, or even empty; all ranks hold L positions nevertheless, and those past N are padding that nothing attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from longnet.attention.pattern import DilationPattern


class Shard(NamedTuple):
    """Positions [begin, end) of the sequence."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def shard_length(world: int, seq_len: int) -> int:
    """Positions that every rank holds, padding included."""
    return -(-seq_len // world)


def shard(rank: int, world: int, seq_len: int) -> Shard:
    """The positions of a rank, without padding."""
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank}: expected 0 <= rank < world={world}; nearest: {min(max(rank, 0), world - 1)}")
    length = shard_length(world, seq_len)
    return Shard(min(rank * length, seq_len), min((rank + 1) * length, seq_len))


def spread(rank: int, world: int, number: int) -> range:
    """A rank's share of so many items: contiguous, the first ``number mod world`` shares one larger."""
    size, larger = divmod(number, world)
    first = rank * size + min(rank, larger)
    return range(first, first + size + (rank < larger))


@dataclass(frozen=True)
class SharedSegment:
    """A segment of a level that several ranks hold parts of.

    Attributes:
        level: its level.
        begin: its first position.
        end: one past its last position.
        origin: where it would begin if neither the shift nor the sequence's ends cut it; rows are counted from here.
        ranks: those that hold parts of it.
    """

    level: int
    begin: int
    end: int
    origin: int
    ranks: range

    def part(self, rank: int, world: int, seq_len: int) -> Shard:
        """The positions of this segment that a rank holds."""
        own = shard(rank, world, seq_len)
        return Shard(max(own.begin, self.begin), min(own.end, self.end))


@lru_cache(maxsize=1024)
def shared_segments(pattern: DilationPattern, world: int, seq_len: int) -> tuple[SharedSegment, ...]:
    """The segments that a border between shards cuts, level by level and from left to right.

    Every rank walks through them in this order, so that no two wait for each other.
    """
    length = shard_length(world, seq_len)
    found = []
    for level, segment_length in enumerate(pattern.segment_lengths):
        last_end = 0
        for border in range(length, seq_len, length):
            origin = (border + pattern.shift) // segment_length * segment_length - pattern.shift
            begin, end = max(origin, 0), min(origin + segment_length, seq_len)
            # A long segment is cut by many borders and counts once.
            if begin < border and end > last_end:
                ranks = range(begin // length, (end - 1) // length + 1)
                found.append(SharedSegment(level, begin, end, origin, ranks))
                last_end = end
    return tuple(found)


@lru_cache(maxsize=1024)
def spanning_levels(pattern: DilationPattern, rank: int, world: int, seq_len: int) -> frozenset[int]:
    """Levels of which a rank packs all of its rows, since one segment that it shares holds the whole shard.

    What its queries see of its own keys there is computed on the packed rows as well: the rest of the pattern is then
    the same for any number of ranks. A level with all positions has nothing to pack, and one level has to stay.
    """
    own = shard(rank, world, seq_len)
    found = frozenset(
        segment.level
        for segment in shared_segments(pattern, world, seq_len)
        if segment.begin <= own.begin and own.end <= segment.end and pattern.dilation_rates[segment.level] > 1
    )
    return found if own.length and pattern.heads == "all" and len(found) < len(pattern.levels) else frozenset()


@lru_cache(maxsize=1024)
def local_pattern(pattern: DilationPattern, rank: int, world: int, seq_len: int) -> DilationPattern:
    """``own_pattern`` without the spanning levels."""
    spanning = spanning_levels(pattern, rank, world, seq_len)
    kept = [level for number, level in enumerate(pattern.levels) if number not in spanning]
    lengths, rates = zip(*kept, strict=True)
    rest = replace(pattern, segment_lengths=lengths, dilation_rates=rates)
    return own_pattern(rest, shard(rank, world, seq_len))


@lru_cache(maxsize=1024)
def own_pattern(pattern: DilationPattern, own: Shard) -> DilationPattern:
    """The pattern over a shard alone: what its queries see of its own keys."""
    shift = pattern.shift + own.begin
    offsets = [shift % w for w in pattern.segment_lengths]
    plain = all(
        offset == 0 or (offset % r == 0 and offset + own.length <= w)
        for offset, (w, r) in zip(offsets, pattern.levels, strict=True)
    )
    if plain and pattern.heads == "all" and max(pattern.dilation_rates) <= own.length:
        # Without a shift and with nothing longer than the shard, the kernels fold levels in smaller chunks.
        return replace(pattern, segment_lengths=tuple(min(w, own.length) for w in pattern.segment_lengths), shift=0)
    return replace(pattern, shift=shift)


class Stream(NamedTuple):
    """The rows that one KV head gives to the query heads that read it in one phase."""

    kv_head: int
    phase: int
    heads: tuple[int, ...]


@lru_cache(maxsize=1024)
def streams(pattern: DilationPattern, level: int, num_heads: int, num_kv_heads: int) -> tuple[Stream, ...]:
    """All streams of a level, those with equally many query heads next to each other, and then by phase."""
    group = num_heads // num_kv_heads
    found = []
    for phase, heads in pattern.head_groups(level, num_heads):
        for kv_head, members in groupby(heads, key=lambda head: head // group):
            found.append(Stream(kv_head, phase, tuple(members)))
    return tuple(sorted(found, key=lambda stream: (len(stream.heads), stream.phase, stream.kv_head)))


class Grid(NamedTuple):
    """Blocks [begin, end) of r positions each, counted from the segment's origin: one row per phase and block."""

    begin: int
    end: int

    @property
    def blocks(self) -> int:
        return self.end - self.begin


def grid(part: Shard, origin: int, rate: int) -> Grid:
    """The blocks that a part of a segment touches; the outer ones it may hold for some phases only."""
    if part.end <= part.begin:
        return Grid(0, 0)
    return Grid((part.begin - origin) // rate, -(-(part.end - origin) // rate))


def rows_of_phase(part: Shard, origin: int, rate: int, phase: int) -> Grid:
    """The blocks whose row of this phase lies in the part."""
    begin, end = (-(-(position - origin - phase) // rate) for position in part)
    return Grid(begin, max(begin, end))


class Lane(NamedTuple):
    """Neighbouring streams whose query rows and key rows begin and end in the same blocks."""

    streams: slice
    heads: slice
    queries: Grid
    keys: Grid


@lru_cache(maxsize=4096)
def lanes(found: tuple[Stream, ...], origin: int, rate: int, queries: Shard, keys: Shard) -> tuple[Lane, ...]:
    """The streams cut into as few dense blocks (all query rows x all key rows) as possible."""
    cut: list[Lane] = []
    first_head = 0

    def place(index: int) -> tuple[int, Grid, Grid]:
        stream = found[index]
        rows = (rows_of_phase(part, origin, rate, stream.phase) for part in (queries, keys))
        return len(stream.heads), *rows  # type: ignore[return-value]

    for (number, query_rows, key_rows), members in groupby(range(len(found)), key=place):
        indices = list(members)
        heads = slice(first_head, first_head + number * len(indices))
        first_head = heads.stop
        if query_rows.blocks and key_rows.blocks:
            cut.append(Lane(slice(indices[0], indices[-1] + 1), heads, query_rows, key_rows))
    return tuple(cut)


def merged_parts(
    segment: SharedSegment, ranks: Sequence[int], world: int, seq_len: int, rate: int, blocks: int
) -> Iterator[tuple[range, Shard]]:
    """Neighbouring ranks whose messages of ``blocks`` blocks, one behind the other, are one dense stretch."""
    run: list[int] = []
    for rank in ranks:
        here = grid(segment.part(rank, world, seq_len), segment.origin, rate)
        if run:
            before = grid(segment.part(run[-1], world, seq_len), segment.origin, rate)
            if rank != run[-1] + 1 or before.blocks != blocks or here.begin != before.end:
                yield range(run[0], run[-1] + 1), _joined(segment, run, world, seq_len)
                run = []
        run.append(rank)
    if run:
        yield range(run[0], run[-1] + 1), _joined(segment, run, world, seq_len)


def _joined(segment: SharedSegment, ranks: Sequence[int], world: int, seq_len: int) -> Shard:
    return Shard(segment.part(ranks[0], world, seq_len).begin, segment.part(ranks[-1], world, seq_len).end)
