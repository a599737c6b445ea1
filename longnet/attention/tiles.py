"""Where the rows of a level lie: strided views that a flash kernel can read in place.

The rows of one phase are every r-th position of a segment and every r-th head: an affine view, so nothing is copied.
Where r is large, taking the phases together along a diagonal (the next head with the next position) gives fewer and
larger calls; that is an affine view too.

B batch, S segments, N positions, L rows, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

from .pattern import DilationPattern, SegmentRun


@dataclass(frozen=True)
class Tile:
    """Rows of one level that one call of a dense kernel can attend among themselves.

    A slice tile takes the rows ``first_row, first_row + rate, ...`` of every head in ``heads``. A diagonal tile takes
    for each head the rows of its own phase: the first head's begin at ``first_row``, the next one's a position later.
    """

    level: int
    run: SegmentRun
    rate: int
    first_row: int
    num_rows: int
    heads: range
    kv_heads: range
    diagonal: bool

    def queries(self, x: Tensor) -> Tensor:
        """This tile's (..., S, L, heads, D) view of q (..., N, H, D), or of anything shaped like it."""
        return self._rows(x, self.heads)

    def keys(self, x: Tensor) -> Tensor:
        """This tile's (..., S, L, kv_heads, D) view of k or v; a diagonal one has keys for each query head."""
        return self._rows(x, self.kv_heads)

    def _rows(self, x: Tensor, heads: range) -> Tensor:
        # One as_strided in the place of a chain of slices: the calls are many, and each view costs the host time.
        *stride_batch, stride_N, stride_H, stride_D = x.stride()
        number, stride_head = len(heads), heads.step * stride_H
        if self.diagonal:
            stride_head = stride_N + (stride_H if len(heads) == len(self.heads) else 0)
            number = len(self.heads)
        return x.as_strided(
            (*x.shape[:-3], self.run.number, self.num_rows, number, x.shape[-1]),
            (*stride_batch, self.run.length * stride_N, self.rate * stride_N, stride_head, stride_D),
            x.storage_offset() + (self.run.start + self.first_row) * stride_N + heads.start * stride_H,
        )


@lru_cache(maxsize=4096)
def tiles(pattern: DilationPattern, seq_len: int, num_heads: int, num_kv_heads: int) -> tuple[Tile, ...]:
    """The fewest tiles that hold all rows of all levels over ``seq_len`` positions."""
    group = num_heads // num_kv_heads
    found: list[Tile] = []
    for level in range(len(pattern.levels)):
        for run in pattern.segments(level, seq_len):
            found += run_tiles(pattern, level, run, num_heads, group)
    return tuple(found)


def run_tiles(pattern: DilationPattern, level: int, run: SegmentRun, num_heads: int, group: int) -> list[Tile]:
    """The fewest tiles that hold all rows of a level in a run of segments; ``group`` query heads share a KV head."""
    slices = list(_slice_tiles(pattern, level, run, num_heads, group))
    diagonals = list(_diagonal_tiles(pattern, level, run, num_heads, group))
    return diagonals if diagonals and len(diagonals) < len(slices) else slices


def _slice_tiles(pattern: DilationPattern, level: int, run: SegmentRun, num_heads: int, group: int) -> Iterator[Tile]:
    rate = pattern.dilation_rates[level]
    for phase, heads in pattern.head_groups(level, num_heads):
        first_row = pattern.first_row(level, phase, run)
        num_rows = len(range(first_row, run.length, rate))
        if num_rows:
            for part, kv_heads in shared_kv(heads, group):
                yield Tile(level, run, rate, first_row, num_rows, part, kv_heads, diagonal=False)


def _diagonal_tiles(
    pattern: DilationPattern, level: int, run: SegmentRun, num_heads: int, group: int
) -> Iterator[Tile]:
    rate = pattern.dilation_rates[level]
    # Heads that share both their keys and their phase belong into one slice.
    if pattern.heads != "all" or group > rate:
        return

    def place(head: int) -> tuple[int, ...]:
        """Equal for heads that can go together: as many rows, on one diagonal, and one KV head where it is shared."""
        phase = pattern.phase(level, head, num_heads)
        assert phase is not None
        first_row = pattern.first_row(level, phase, run)
        num_rows = len(range(first_row, run.length, rate))
        return num_rows, head - first_row, head // group if group > 1 else 0

    for (num_rows, diagonal, kv_head), members in groupby(range(num_heads), key=place):
        first, *rest = members
        heads = range(first, (rest[-1] if rest else first) + 1)
        kv_heads = range(kv_head, kv_head + 1) if group > 1 else heads
        if num_rows:
            yield Tile(level, run, rate, first - diagonal, num_rows, heads, kv_heads, diagonal=True)


def shared_kv(heads: range, group: int) -> Iterator[tuple[range, range]]:
    """Split query heads so that in each part every KV head serves equally many, and KV heads are evenly spaced.

    Query head h reads KV head ``h // group``; the parts are as long as possible.
    """
    served = [(kv, list(members)) for kv, members in groupby(heads, key=lambda head: head // group)]
    while served:
        (first_kv, members), rest = served[0], served[1:]
        spacing = rest[0][0] - first_kv if rest else 1
        size = 1
        while (
            size < len(served) and len(served[size][1]) == len(members) and served[size][0] == first_kv + size * spacing
        ):
            size += 1
        last = served[size - 1][1][-1]
        yield range(members[0], last + 1, heads.step), range(first_kv, first_kv + (size - 1) * spacing + 1, spacing)
        served = served[size:]


def chunks(pattern: DilationPattern, borders: Sequence[int], at_least: int) -> Iterator[tuple[int, int]]:
    """Stretches (begin, end) between the borders that no segment crosses, the shortest of ``at_least`` positions.

    Working through them one by one gives the same result, with temporary results no larger than a stretch.
    """
    longest = pattern.reach
    nested = not pattern.shift and all(longest % w == 0 for w in pattern.segment_lengths)
    for begin, end in pairwise(borders):
        step = longest * -(-at_least // longest) if nested else end - begin
        for start in range(begin, end, step):
            yield start, min(start + step, end)


class CausalPart(NamedTuple):
    """``number`` neighbouring stretches of ``size`` rows from ``start``; in each, ``queries`` attend ``keys``."""

    start: int
    number: int
    size: int
    queries: slice
    keys: slice
    triangle: bool

    def cut(self, x_BLHD: Tensor, rows: slice) -> Tensor:
        """The (B, number, rows, H, D) view of this part."""
        stretches = x_BLHD.narrow(1, self.start, self.number * self.size).unflatten(1, (self.number, self.size))
        return stretches[:, :, rows]


def causal_parts(length: int, block: int) -> Iterator[CausalPart]:
    """A causal triangle as small triangles on the diagonal, then ever larger rectangles below it."""
    whole, rest = divmod(length, block)
    if whole:
        yield CausalPart(0, whole, block, slice(0, block), slice(0, block), True)
    if rest:
        yield CausalPart(whole * block, 1, rest, slice(0, rest), slice(0, rest), True)
    side = block
    while side < length:
        whole, rest = divmod(length, 2 * side)
        if whole:
            yield CausalPart(0, whole, 2 * side, slice(side, 2 * side), slice(0, side), False)
        if rest > side:
            yield CausalPart(whole * 2 * side, 1, rest, slice(side, rest), slice(0, side), False)
        side *= 2
