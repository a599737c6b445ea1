"""All levels' results folded together in one pass over memory.

The flash kernels leave one result a tile. Folding them one after the other would read and write the whole output once
for each; here every element of the output is written once, from the rows that hold it, wherever they lie.

A table says where: for each (level, head, phase, run of segments) the distance from a common base pointer to the first
row, and the strides to the next segment and the next row. The base pointer is any tensor's; distances between
allocations are as good as distances within one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..pattern import DilationPattern
from ..tiles import Tile

# No row of this level holds the element.
NOWHERE = -(2**62)
MAX_RUNS = 3
BLOCK_N = 64


@triton.jit
def _locate(n, head, level, levels, table, FIELDS: tl.constexpr):
    """Which entry of the table holds positions n of a head at a level, and the segment and row in it."""
    level_at = levels + level * 6
    first_entry = tl.load(level_at)
    length = tl.load(level_at + 1)
    rate = tl.load(level_at + 2)
    offset = tl.load(level_at + 3)
    first_end = tl.load(level_at + 4)
    whole_end = tl.load(level_at + 5)
    run = (n >= first_end).to(tl.int32) + (n >= whole_end).to(tl.int32)
    start = tl.where(run == 0, 0, tl.where(run == 1, first_end, whole_end))
    segment = (n - start) // length
    place = n - start - segment * length
    phase = (tl.where(run == 0, place + offset, place)) % rate
    entry = table + (first_entry + (head * rate + phase) * 3 + run) * FIELDS
    return entry, segment, place // rate


@triton.jit
def _distance(entry, segment, row):
    """How far from the base pointer the rows lie."""
    return tl.load(entry) + segment * tl.load(entry + 1) + row * tl.load(entry + 2)


@triton.jit
def _load_rows(base, entry, segment, row, held, d, D: tl.constexpr):
    """The (rows, D) values of a level; 0 where it holds none."""
    # Distances are in units of 8 elements, which tells the compiler that a thread may load 16 bytes at once.
    at = _distance(entry, segment, row)[:, None] * 8 + d[None, :]
    return tl.load(base + at, mask=held[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _merge_kernel(
    out, lse, levels, table, seq_len, stride_n, lse_stride_n,
    LEVELS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NOWHERE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = n < seq_len
    known = tl.minimum(n, seq_len - 1)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for level in tl.static_range(LEVELS):
        entry, segment, row = _locate(known, head, level, levels, table, 6)
        held = tl.load(entry) != NOWHERE
        level_lse = tl.load(lse + _distance(entry + 3, segment, row), mask=held, other=float("-inf"))
        higher = tl.maximum(top, level_lse)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        fading, weight = tl.exp(top - finite), tl.exp(level_lse - finite)
        total = total * fading + weight
        sums = sums * fading[:, None] + weight[:, None] * _load_rows(out, entry, segment, row, held, d, D)
        top = higher
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    merged = tl.where(seen, top + tl.log(total), float("-inf"))
    sums = sums / total[:, None]
    target = out + n[:, None].to(tl.int64) * stride_n + head * D + d[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    tl.store(lse + n.to(tl.int64) * lse_stride_n + head, merged, mask=inside)


@triton.jit
def _sum_kernel(
    out, levels, table, seq_len, stride_n,
    LEVELS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NOWHERE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = n < seq_len
    known = tl.minimum(n, seq_len - 1)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for level in tl.static_range(LEVELS):
        entry, segment, row = _locate(known, head, level, levels, table, 3)
        held = tl.load(entry) != NOWHERE
        sums += _load_rows(out, entry, segment, row, held, d, D)
    target = out + n[:, None].to(tl.int64) * stride_n + head * D + d[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


def merge_levels(
    out_NHD: Tensor,
    lse_NH: Tensor,
    pattern: DilationPattern,
    tiles: Sequence[Tile],
    results: list[tuple[Tensor, Tensor]],
) -> None:
    """Writes the merged output and LSE of the tiles' (out, LSE), each (S, L, heads, D) and (S, L, heads)."""
    seq_len, num_heads, head_dim = out_NHD.shape
    layout = _layout(pattern, tuple(tiles), seq_len, num_heads, keys=False)
    outs, lses = [out for out, _ in results], [lse for _, lse in results]
    table = np.concatenate((layout.entries(out_NHD, outs, unit=8), layout.entries(lse_NH, lses, unit=1)), axis=1)
    _merge_kernel[(triton.cdiv(seq_len, BLOCK_N), num_heads)](
        out_NHD, lse_NH, layout.levels_on(out_NHD.device), _to_device(table, out_NHD.device), seq_len,
        out_NHD.stride(0), lse_NH.stride(0),
        LEVELS=len(pattern.levels), D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_N=BLOCK_N,
        NOWHERE=NOWHERE,
    )  # fmt: skip


def sum_levels(
    out_NHD: Tensor, pattern: DilationPattern, tiles: Sequence[Tile], parts: Sequence[Tensor], keys: bool
) -> None:
    """Writes the sum over levels of the tiles' gradients, each (S, L, heads, D): of keys or of queries."""
    seq_len, num_heads, head_dim = out_NHD.shape
    layout = _layout(pattern, tuple(tiles), seq_len, num_heads, keys)
    table = layout.entries(out_NHD, parts, unit=8)
    _sum_kernel[(triton.cdiv(seq_len, BLOCK_N), num_heads)](
        out_NHD, layout.levels_on(out_NHD.device), _to_device(table, out_NHD.device), seq_len, out_NHD.stride(0),
        LEVELS=len(pattern.levels), D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_N=BLOCK_N,
        NOWHERE=NOWHERE,
    )  # fmt: skip


class _Layout:
    """Which tile, and which of its heads, holds each entry of the table."""

    def __init__(
        self, pattern: DilationPattern, tiles: tuple[Tile, ...], seq_len: int, num_heads: int, keys: bool
    ) -> None:
        first_entries = np.cumsum([0, *(num_heads * rate * MAX_RUNS for rate in pattern.dilation_rates)])
        self.tile_of = np.full(first_entries[-1], -1)
        self.head_of = np.zeros(first_entries[-1], dtype=np.int64)
        self._levels_on: dict[torch.device, Tensor] = {}
        rows = []
        for level, (length, rate) in enumerate(pattern.levels):
            offset = pattern.shift % length
            first_end = min(seq_len, length - offset) if offset else 0
            whole_end = first_end + (seq_len - first_end) // length * length
            rows.append((first_entries[level], min(length, seq_len), rate, offset, first_end, whole_end))
        self._levels = np.array(rows, dtype=np.int32)
        for index, tile in enumerate(tiles):
            _, _, rate, _, first_end, whole_end = rows[tile.level]
            run = int(tile.run.start >= first_end) + int(tile.run.start >= whole_end)
            phase = tile.first_row + tile.run.offset
            for place, head in enumerate(_heads_of(tile, keys)):
                own_phase = (phase + place if tile.diagonal else phase) % rate
                entry = first_entries[tile.level] + (head * rate + own_phase) * MAX_RUNS + run
                assert self.tile_of[entry] < 0, "an element of the output would have two rows at one level"
                self.tile_of[entry], self.head_of[entry] = index, place

    def entries(self, base: Tensor, parts: Sequence[Tensor], unit: int) -> np.ndarray:
        """(entries, 3): distance from the base pointer, stride of segments, stride of rows, in ``unit`` elements."""
        size, origin = base.element_size() * unit, base.data_ptr()
        numbers = [((x.data_ptr() - origin) // size, *(stride // unit for stride in x.stride()[:3])) for x in parts]
        numbers_by_tile = np.array([*numbers, (NOWHERE, 0, 0, 0)], dtype=np.int64)
        table = numbers_by_tile[self.tile_of, :3]
        table[:, 0] += numbers_by_tile[self.tile_of, 3] * self.head_of
        return table

    def levels_on(self, device: torch.device) -> Tensor:
        if device not in self._levels_on:
            self._levels_on[device] = _to_device(self._levels, device)
        return self._levels_on[device]


def _heads_of(tile: Tile, keys: bool) -> Sequence[int]:
    """The head that each place along a tile's head dimension belongs to."""
    if not keys:
        return tile.heads
    if tile.diagonal and len(tile.kv_heads) < len(tile.heads):
        return [tile.kv_heads[0]] * len(tile.heads)
    return tile.kv_heads


@lru_cache(maxsize=1024)
def _layout(pattern: DilationPattern, tiles: tuple[Tile, ...], seq_len: int, num_heads: int, keys: bool) -> _Layout:
    return _Layout(pattern, tiles, seq_len, num_heads, keys)


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
