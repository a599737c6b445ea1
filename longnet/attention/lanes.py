"""Where a cache keeps the rows that a later query can still see.

A later query sees, of each level, only rows of the segment that is still open. The rows of one level and one phase lie
in a *lane*, in the order of their positions: the row at place p of its segment has slot ``p // r``. A KV head has a
lane for each (level, phase) that one of its query heads uses, one behind the other; the next segment writes over the
last. So the lanes of a head hold at most ``ceil(w / r)`` rows a level and phase, however long the sequence is.

B batch, K KV heads, G query heads a KV head, C blocks of S slots, T = C * S slots, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .pattern import DilationPattern
from .tiles import Tile, run_tiles

# Slots are attended in blocks, so that one query's keys fill a GPU.
BLOCK = 128
FEWEST_SLOTS = 64


class Lane(NamedTuple):
    level: int
    phase: int
    start: int


@dataclass(frozen=True)
class Lanes:
    """The lanes of every KV head, for levels of so many slots (``capacities``).

    Attributes:
        of_head: the lanes of each KV head.
        starts: where a lane begins, by (KV head, level, phase).
        num_slots: slots of a KV head; the last one holds nothing that is ever seen.
    """

    pattern: DilationPattern
    num_heads: int
    num_kv_heads: int
    capacities: tuple[int, ...]
    of_head: tuple[tuple[Lane, ...], ...] = field(init=False, compare=False, repr=False)
    starts: dict[tuple[int, int, int], int] = field(init=False, compare=False, repr=False)
    num_slots: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        group = self.num_heads // self.num_kv_heads
        of_head: list[tuple[Lane, ...]] = []
        longest = 0
        for kv_head in range(self.num_kv_heads):
            lanes: dict[tuple[int, int], Lane] = {}
            end = 0
            for level in range(len(self.capacities)):
                for head in range(kv_head * group, (kv_head + 1) * group):
                    phase = self.pattern.phase(level, head, self.num_heads)
                    if phase is not None and (level, phase) not in lanes:
                        lanes[level, phase] = Lane(level, phase, end)
                        end += self.capacities[level]
            of_head.append(tuple(lanes.values()))
            longest = max(longest, end)
        starts = {(head, lane.level, lane.phase): lane.start for head, lanes in enumerate(of_head) for lane in lanes}
        object.__setattr__(self, "of_head", tuple(of_head))
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "num_slots", -(-(longest + 1) // BLOCK) * BLOCK)

    def views(self, tile: Tile, low: int, high: int) -> Iterator[RowsInSlots]:
        """Where the rows of a tile lie whose places in the segment are in [low, high).

        Each of what is yielded has as many heads as one strided view can hold.
        """
        group = self.num_heads // self.num_kv_heads
        first = tile.run.offset + tile.first_row
        # The keys of a diagonal tile belong to query heads, each with a phase of its own.
        kv_heads = [head // group for head in tile.heads] if tile.diagonal else list(tile.kv_heads)
        found: list[tuple[int, int]] = []
        for number, kv_head in enumerate(kv_heads):
            phase = (first + (number if tile.diagonal else 0)) % tile.rate
            begin, end = (max(0, -(-(place - phase) // tile.rate)) for place in (low, high))
            start = self.starts[kv_head, tile.level, phase]
            found.append((kv_head * self.num_slots + start + begin, end - begin))
        shared = len(tile.heads) // len(kv_heads)
        begin = 0
        while begin < len(found):
            address, size = found[begin]
            step = found[begin + 1][0] - address if begin + 1 < len(found) else 0
            end = begin + 1
            while end < len(found) and found[end] == (address + (end - begin) * step, size):
                end += 1
            if size > 0:
                heads, queries = slice(begin, end), slice(begin * shared, end * shared)
                yield RowsInSlots(tile, heads, queries, SlotView(address, size, step))
            begin = end


class SlotView(NamedTuple):
    """``size`` slots from ``address`` on, for heads whose slots lie ``step`` apart."""

    address: int
    size: int
    step: int = 0

    def cut(self, store_BKTD: Tensor, heads: slice) -> Tensor:
        """The (B, size, heads, D) view of the slots."""
        stride_B, _, stride_T, stride_D = store_BKTD.stride()
        return store_BKTD.as_strided(
            (store_BKTD.shape[0], self.size, heads.stop - heads.start, store_BKTD.shape[3]),
            (stride_B, stride_T, self.step * stride_T, stride_D),
            store_BKTD.storage_offset() + self.address * stride_T,
        )


class RowsInSlots(NamedTuple):
    """Rows of a tile and the slots that keep keys for them: ``heads`` of its key heads, ``queries`` of its heads."""

    tile: Tile
    heads: slice
    queries: slice
    view: SlotView


@lru_cache(maxsize=256)
def lanes_for(pattern: DilationPattern, num_heads: int, num_kv_heads: int, capacities: tuple[int, ...]) -> Lanes:
    return Lanes(pattern, num_heads, num_kv_heads, capacities)


def capacities_for(pattern: DilationPattern, seq_len: int) -> tuple[int, ...]:
    """Slots that each level needs for so many positions: growing in doublings, and never beyond a whole segment."""
    sizes = []
    for length, rate in pattern.levels:
        needed = -(-min(length, pattern.shift % length + seq_len) // rate)
        sizes.append(min(-(-length // rate), max(FEWEST_SLOTS, 1 << (needed - 1).bit_length())))
    return tuple(sizes)


class OpenSegment(NamedTuple):
    """A segment that was begun before some position and is not yet complete there.

    Its rows lie at the places [low, high) of the segment; low is not 0 only where a shift cut the first segment.
    """

    low: int
    high: int


def open_segment(pattern: DilationPattern, level: int, position: int) -> OpenSegment | None:
    """The segment of a level that positions before and from ``position`` on share; None where a new one begins."""
    length = pattern.segment_lengths[level]
    moved = position + pattern.shift
    low = pattern.shift % length if moved // length == pattern.shift // length else 0
    high = moved % length
    return OpenSegment(low, high) if high > low else None


class Piece(NamedTuple):
    """Of positions that are read at once: the rows that see kept ones, and the rows that are to be kept."""

    seeing: list[RowsInSlots]
    kept: list[RowsInSlots]


@lru_cache(maxsize=64)
def piece_of(lanes: Lanes, begin: int, length: int) -> Piece:
    """What is kept for the positions [begin, begin + length), and of them; the same for all layers of a pattern."""
    pattern, group = lanes.pattern, lanes.num_heads // lanes.num_kv_heads
    moved = replace(pattern, shift=pattern.shift + begin)
    piece = Piece([], [])
    for level, (segment_length, _) in enumerate(pattern.levels):
        runs = list(moved.segments(level, length))
        if opened := open_segment(pattern, level, begin):
            for tile in run_tiles(pattern, level, runs[0], lanes.num_heads, group):
                piece.seeing.extend(lanes.views(tile, *opened))
        # A segment that is complete at the end is seen no more.
        if (begin + length + pattern.shift) % segment_length:
            low = runs[-1].offset
            for tile in run_tiles(pattern, level, runs[-1], lanes.num_heads, group):
                piece.kept.extend(lanes.views(tile, low, low + runs[-1].length))
    return piece


class Tables(NamedTuple):
    """What a step looks up, on the device: for each slot (K, C, 1, S) and for each lane (K, lanes) of a KV head."""

    length: Tensor
    rate: Tensor
    place: Tensor
    used_by: Tensor
    lane_start: Tensor
    lane_length: Tensor
    lane_rate: Tensor
    lane_phase: Tensor


@lru_cache(maxsize=64)
def tables_for(lanes: Lanes, device: torch.device) -> Tables:
    pattern, group = lanes.pattern, lanes.num_heads // lanes.num_kv_heads
    shape = (lanes.num_kv_heads, lanes.num_slots)
    length, rate = torch.ones(shape, dtype=torch.long), torch.ones(shape, dtype=torch.long)
    place = torch.zeros(shape, dtype=torch.long)
    used_by = torch.zeros(lanes.num_kv_heads, group, lanes.num_slots, dtype=torch.bool)
    most = max(map(len, lanes.of_head))
    by_lane = torch.ones(4, lanes.num_kv_heads, most, dtype=torch.long)
    # A lane that a head does not have: no place has phase -1.
    by_lane[3] = -1
    for kv_head, of_head in enumerate(lanes.of_head):
        for number, (level, phase, start) in enumerate(of_head):
            w, r = pattern.levels[level]
            slots = slice(start, start + lanes.capacities[level])
            length[kv_head, slots], rate[kv_head, slots] = w, r
            place[kv_head, slots] = torch.arange(lanes.capacities[level]) * r + phase
            by_lane[:, kv_head, number] = torch.tensor([start, w, r, phase])
            for member in range(group):
                head = kv_head * group + member
                used_by[kv_head, member, slots] = pattern.phase(level, head, lanes.num_heads) == phase
    blocks = [x.unflatten(1, (-1, 1, BLOCK)) for x in (length, rate, place)]
    owners = used_by.unflatten(2, (-1, BLOCK)).transpose(1, 2)
    return Tables(*(x.to(device) for x in (*blocks, owners, *by_lane)))
