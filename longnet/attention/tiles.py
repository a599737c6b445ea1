"""Where the rows of a level lie: strided views that a flash kernel can read in place.

The rows of one phase are every r-th position of a segment and every r-th head, so slicing finds them and nothing is
copied. Where r is large, taking the phases together along a diagonal (position p with head p) gives fewer and larger
calls; both are views of the same memory.

B batch, S segments, N positions, L rows, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    for each head the rows of its own phase, the first head's being ``first_row``.
    """

    run: SegmentRun
    rate: int
    first_row: int
    heads: range
    kv_heads: range
    diagonal: bool
    level: int

    def queries(self, x_BNHD: Tensor) -> Tensor:
        """This tile's (B, S, L, heads, D) view of q, or of anything shaped like it."""
        return self._rows(x_BNHD, self.heads)

    def keys(self, x_BNHD: Tensor) -> Tensor:
        """This tile's (B, S, L, kv_heads, D) view of k or v."""
        return self._rows(x_BNHD, self.kv_heads)

    def _rows(self, x_BNHD: Tensor, heads: range) -> Tensor:
        run = self.run
        x_BSNHD = x_BNHD.narrow(1, run.start, run.number * run.length).unflatten(1, (run.number, run.length))
        if not self.diagonal:
            return x_BSNHD[:, :, self.first_row :: self.rate, heads.start : heads.stop : heads.step]
        x_BSLrHD = x_BSNHD.unflatten(2, (-1, self.rate))
        phases = slice(self.first_row, self.first_row + len(self.heads))
        if len(heads) < len(self.heads):
            return x_BSLrHD[:, :, :, phases, heads.start]
        return x_BSLrHD[:, :, :, phases, heads.start : heads.stop].diagonal(dim1=3, dim2=4).movedim(-1, 3)


@lru_cache(maxsize=4096)
def tiles(pattern: DilationPattern, seq_len: int, num_heads: int, num_kv_heads: int) -> tuple[Tile, ...]:
    """The fewest tiles that hold all rows of all levels over ``seq_len`` positions."""
    group = num_heads // num_kv_heads
    found: list[Tile] = []
    for level in range(len(pattern.levels)):
        for run in pattern.segments(level, seq_len):
            slices = list(_slice_tiles(pattern, level, run, num_heads, group))
            diagonals = list(_diagonal_tiles(pattern, level, run, num_heads, group))
            found += diagonals if diagonals and len(diagonals) < len(slices) else slices
    return tuple(found)


def _slice_tiles(pattern: DilationPattern, level: int, run: SegmentRun, num_heads: int, group: int) -> Iterator[Tile]:
    rate = pattern.dilation_rates[level]
    for phase, heads in pattern.head_groups(level, num_heads):
        first_row = pattern.first_row(level, phase, run)
        if first_row < run.length:
            for part, kv_heads in shared_kv(heads, group):
                yield Tile(run, rate, first_row, part, kv_heads, False, level)


def _diagonal_tiles(
    pattern: DilationPattern, level: int, run: SegmentRun, num_heads: int, group: int
) -> Iterator[Tile]:
    rate = pattern.dilation_rates[level]
    if pattern.heads != "all" or run.length % rate or run.offset % rate:
        return
    for turn in range(0, num_heads, rate):
        last = min(turn + rate, num_heads)
        # Without sharing, keys lie on the same diagonal as queries; with it, only the heads of one KV head go together.
        step = rate if group == 1 else group
        borders = sorted({turn, last, *range(-(-turn // step) * step, last, step)})
        for begin, end in pairwise(borders):
            kv_heads = range(begin, end) if group == 1 else range(begin // group, begin // group + 1)
            yield Tile(run, rate, begin - turn, range(begin, end), kv_heads, True, level)


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
