"""All levels' results folded together in one pass over memory.

The flash kernels leave one result a tile. Folding them one after the other would read and write the whole output once
for each; here every element of the output is written once, from the rows that hold it, wherever they lie.

Two tables say where. The first, which depends on the pattern alone and stays on the device: for each (head, level,
phase, run of segments) the tile that holds those rows, and the place of the head in it. The second, new in each call:
for each tile, how far it lies from a common base pointer, and its strides. The base pointer is any tensor's; distances
between allocations are as good as distances within one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..flash import to_device
from ..pattern import DilationPattern
from ..tiles import Tile, tiles

# Elements of a program's block: with twice as many a thread runs out of registers.
BLOCK = 4096
# Distances are counted in units of 8 elements, which tells the compiler that a thread may load 16 bytes at once.
UNIT = 8
PLACE_BITS = 12


@triton.jit
def _locate(
    n, start, head, places, levels, level, rate, before, PHASES: tl.constexpr, RUNS: tl.constexpr,
    PLACE_BITS: tl.constexpr,
):  # fmt: skip
    """Whether a level holds positions n of a head; where the tile's numbers stand, the head's place, segment, row."""
    length = tl.load(levels + level * 6)
    if RUNS == 1:
        # All segments are alike and as long as whole blocks: a block lies in one of them.
        run = 0
        segment = start // length
        position = n - segment * length
        phase = position % rate
    else:
        offset = tl.load(levels + level * 6 + 1)
        first_end = tl.load(levels + level * 6 + 2)
        whole_end = tl.load(levels + level * 6 + 3)
        run = (n >= first_end).to(tl.int32) + (n >= whole_end).to(tl.int32)
        run_start = tl.where(run == 0, 0, tl.where(run == 1, first_end, whole_end))
        segment = (n - run_start) // length
        position = n - run_start - segment * length
        phase = tl.where(run == 0, position + offset, position) % rate
    found = tl.load(places + (head * PHASES + before + phase) * RUNS + run)
    held = found >= 0
    tile = tl.where(held, found >> PLACE_BITS, 0)
    return held, tile * 4, found & ((1 << PLACE_BITS) - 1), segment, position // rate


@triton.jit
def _distance(tile, place, segment, row):
    """How far from the base pointer the rows lie."""
    return tl.load(tile) + segment * tl.load(tile + 1) + row * tl.load(tile + 2) + place * tl.load(tile + 3)


@triton.jit
def _merge_kernel(
    out, lse, places, own_level, levels, numbers, lse_numbers, seq_len, stride_n, lse_stride_n,
    RATES: tl.constexpr, BEFORE: tl.constexpr, PHASES: tl.constexpr, RUNS: tl.constexpr, SINGLE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PLACE_BITS: tl.constexpr, UNIT: tl.constexpr,
    STEP: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start = tl.program_id(0) * BLOCK_N * STEP
    n = start + tl.arange(0, BLOCK_N) * STEP + head % STEP
    d = tl.arange(0, BLOCK_D)
    known = tl.minimum(n, seq_len - 1)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    touched = n < 0
    for index in tl.static_range(1 if SINGLE else len(RATES)):
        if SINGLE:
            level = tl.load(own_level + head)
            rate, before = tl.load(levels + level * 6 + 4), tl.load(levels + level * 6 + 5)
            held, tile, place, segment, row = _locate(
                known, start, head, places, levels, level, rate, before, PHASES, RUNS, PLACE_BITS
            )
        else:
            held, tile, place, segment, row = _locate(
                known, start, head, places, levels, index, RATES[index], BEFORE[index], PHASES, RUNS, PLACE_BITS
            )
        level_lse = tl.load(lse + _distance(lse_numbers + tile, place, segment, row), mask=held, other=float("-inf"))
        at = _distance(numbers + tile, place, segment, row)[:, None] * UNIT + d[None, :]
        values = tl.load(out + at, mask=held[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        higher = tl.maximum(top, level_lse)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        fading, weight = tl.exp(top - finite), tl.exp(level_lse - finite)
        total = total * fading + weight
        sums = sums * fading[:, None] + weight[:, None] * values
        top = higher
        touched = touched | held
    written = (n < seq_len) & touched if ONTO else n < seq_len
    target = out + n[:, None].to(tl.int64) * stride_n + head * D + d[None, :]
    lse_target = lse + n.to(tl.int64) * lse_stride_n + head
    if ONTO:
        level_lse = tl.load(lse_target, mask=written, other=float("-inf"))
        values = tl.load(target, mask=written[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        higher = tl.maximum(top, level_lse)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        fading, weight = tl.exp(top - finite), tl.exp(level_lse - finite)
        total = total * fading + weight
        sums = sums * fading[:, None] + weight[:, None] * values
        top = higher
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    merged = tl.where(seen, top + tl.log(total), float("-inf"))
    sums = sums / total[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=written[:, None] & (d < D)[None, :])
    tl.store(lse_target, merged, mask=written)


@triton.jit
def _sum_kernel(
    base, places, own_level, levels, numbers, targets, seq_len, num_heads, num_kv_heads,
    RATES: tl.constexpr, BEFORE: tl.constexpr, PHASES: tl.constexpr, RUNS: tl.constexpr, SINGLE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PLACE_BITS: tl.constexpr, UNIT: tl.constexpr,
    STEP: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    # dq, dk and dv in one launch: their heads one after the other.
    head = tl.program_id(1)
    of_keys = (head >= num_heads).to(tl.int32)
    of_values = (head >= num_heads + num_kv_heads).to(tl.int32)
    own_head = head - of_keys * num_heads - of_values * num_kv_heads
    start = tl.program_id(0) * BLOCK_N * STEP
    n = start + tl.arange(0, BLOCK_N) * STEP + own_head % STEP
    d = tl.arange(0, BLOCK_D)
    known = tl.minimum(n, seq_len - 1)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    touched = n < 0
    for index in tl.static_range(1 if SINGLE else len(RATES)):
        if SINGLE:
            level = tl.load(own_level + head)
            rate, before = tl.load(levels + level * 6 + 4), tl.load(levels + level * 6 + 5)
            held, tile, place, segment, row = _locate(
                known, start, head, places, levels, level, rate, before, PHASES, RUNS, PLACE_BITS
            )
        else:
            held, tile, place, segment, row = _locate(
                known, start, head, places, levels, index, RATES[index], BEFORE[index], PHASES, RUNS, PLACE_BITS
            )
        at = _distance(numbers + tile, place, segment, row)[:, None] * UNIT + d[None, :]
        sums += tl.load(base + at, mask=held[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        touched = touched | held
    written = (n < seq_len) & touched if ONTO else n < seq_len
    at = _distance(targets + (of_keys + of_values) * 4, own_head, 0, n)
    pointers = base + at[:, None] * UNIT + d[None, :]
    mask = written[:, None] & (d < D)[None, :]
    if ONTO:
        sums += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, sums.to(base.dtype.element_ty), mask=mask)


def merge_levels(
    out_NHD: Tensor,
    lse_NH: Tensor,
    pattern: DilationPattern,
    num_kv_heads: int,
    results: Sequence[tuple[Tensor, Tensor]],
    onto: bool,
) -> None:
    """Writes the merged output and LSE of the tiles' (out, LSE), each (S, L, heads, D) and (S, L, heads).

    Args:
        out_NHD: the output; ``onto``, with what it already holds merged in.
        lse_NH: its LSE.
        pattern: the levels that the results belong to.
        num_kv_heads: heads of the keys; with the shapes above it says which tiles there are.
        results: each tile's.
        onto: whether the output already holds a result.
    """
    seq_len, num_heads, head_dim = out_NHD.shape
    layout = _layout(pattern, seq_len, num_heads, num_kv_heads, head_dim)
    device = out_NHD.device
    outs, lses = zip(*results, strict=True)
    table = _to_device(np.stack((_distances(out_NHD, outs, UNIT), _distances(lse_NH, lses, 1))), device)
    constants = layout.constants("queries", onto)
    _merge_kernel[(triton.cdiv(seq_len, constants["BLOCK_N"] * constants["STEP"]), num_heads)](
        out_NHD, lse_NH, *layout.on(device, "queries"), table[0], table[1],
        seq_len, out_NHD.stride(0), lse_NH.stride(0), **constants,
    )  # fmt: skip


def sum_levels(
    totals_NHD: tuple[Tensor, Tensor, Tensor],
    pattern: DilationPattern,
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    onto: bool,
) -> None:
    """Writes dq, dk and dv, the sums of the tiles' ones, each (S, L, heads, D); ``onto`` adds to what is there."""
    dq, dk, _ = totals_NHD
    seq_len, num_heads, head_dim = dq.shape
    num_kv_heads = dk.shape[1]
    layout = _layout(pattern, seq_len, num_heads, num_kv_heads, head_dim)
    numbers = _distances(dq, [x for series in zip(*parts, strict=True) for x in series], UNIT)
    # A total is one long segment.
    targets = _distances(dq, [x.unsqueeze(0) for x in totals_NHD], UNIT)
    table = _to_device(np.concatenate((numbers, targets)), dq.device)
    constants = layout.constants("gradients", onto)
    blocks = triton.cdiv(seq_len, constants["BLOCK_N"] * constants["STEP"])
    _sum_kernel[(blocks, num_heads + 2 * num_kv_heads)](
        dq, *layout.on(dq.device, "gradients"), table, table[len(numbers) :],
        seq_len, num_heads, num_kv_heads, **constants,
    )  # fmt: skip


class _Layout:
    """Which tile, and which of its heads, holds each (head, phase of a level, run of segments)."""

    def __init__(
        self, pattern: DilationPattern, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self._head_dim, self._block_d = head_dim, triton.next_power_of_2(head_dim)
        self._block_n = min(64, BLOCK // self._block_d)
        self.rates = pattern.dilation_rates
        self._before = tuple(accumulate((0, *self.rates[:-1])))
        self._tiles = tiles(pattern, seq_len, num_heads, num_kv_heads)
        self._on: dict[tuple[torch.device, str], tuple[Tensor, ...]] = {}
        self._rows = []
        for (length, rate), before in zip(pattern.levels, self._before, strict=True):
            offset = pattern.shift % length
            first_end = min(seq_len, length - offset) if offset else 0
            whole_end = first_end + (seq_len - first_end) // length * length
            self._rows.append((min(length, seq_len), offset, first_end, whole_end, rate, before))
        step = math.gcd(*self.rates) if pattern.heads == "all" else 1
        if (pattern.phase(0, 0, num_heads) or 0) % step:
            # The kernels count phases from head 0, which is not so over some of the heads only.
            step = 1
        alike = all(
            not offset and seq_len % length == 0 and length % (step * self._block_n) == 0
            for length, offset, *_ in self._rows
        )
        self.runs = 1 if alike else 3
        # Where all rates are multiples of a step, a head's rows are every step-th: the others need not be looked at.
        step = step if alike else 1
        self._steps = {"queries": step, "gradients": step if num_heads == num_kv_heads else 1}
        queries, keys = self._places(num_heads, keys=False), self._places(num_kv_heads, keys=True)
        # The tiles' dq come first in the table, then their dk, then their dv.
        later = [np.where(keys < 0, -1, keys + (step * len(self._tiles) << PLACE_BITS)) for step in (1, 2)]
        self._tables = {"queries": queries, "gradients": np.concatenate((queries, *later)).astype(np.int32)}
        used = {
            name: np.logical_or.reduceat((table >= 0).any(-1), self._before, axis=1)
            for name, table in self._tables.items()
        }
        self._own_level = {name: levels.argmax(1).astype(np.int32) for name, levels in used.items()}
        self._single = {name: bool((levels.sum(1) <= 1).all()) for name, levels in used.items()}

    def _places(self, heads: int, keys: bool) -> np.ndarray:
        places = np.full((heads, sum(self.rates), self.runs), -1, dtype=np.int32)
        for index, tile in enumerate(self._tiles):
            _, _, first_end, whole_end, *_ = self._rows[tile.level]
            run = int(tile.run.start >= first_end) + int(tile.run.start >= whole_end) if self.runs > 1 else 0
            phase = tile.first_row + tile.run.offset
            for place, head in enumerate(_heads_of(tile, keys)):
                own_phase = (phase + place if tile.diagonal else phase) % tile.rate
                entry = head, self._before[tile.level] + own_phase, run
                assert places[entry] < 0, "an element of the output would have two rows at one level"
                assert place < 1 << PLACE_BITS
                places[entry] = index << PLACE_BITS | place
        return places

    def constants(self, name: str, onto: bool) -> dict[str, Any]:
        return {
            "RATES": self.rates, "BEFORE": self._before, "PHASES": sum(self.rates), "RUNS": self.runs,
            "SINGLE": self._single[name], "D": self._head_dim, "BLOCK_D": self._block_d,
            "BLOCK_N": self._block_n, "PLACE_BITS": PLACE_BITS, "UNIT": UNIT, "STEP": self._steps[name] if onto else 1,
            "ONTO": onto,
        }  # fmt: skip

    def on(self, device: torch.device, name: str) -> tuple[Tensor, ...]:
        """The places, each head's level where it has but one, and the levels."""
        if (device, name) not in self._on:
            arrays = self._tables[name], self._own_level[name], np.array(self._rows, dtype=np.int32)
            self._on[device, name] = tuple(_to_device(array, device) for array in arrays)
        return self._on[device, name]


def _heads_of(tile: Tile, keys: bool) -> Sequence[int]:
    """The head that each place along a tile's head dimension belongs to."""
    if not keys:
        return tile.heads
    if tile.diagonal and len(tile.kv_heads) < len(tile.heads):
        return [tile.kv_heads[0]] * len(tile.heads)
    return tile.kv_heads


_layout = lru_cache(maxsize=1024)(_Layout)


def _distances(base: Tensor, parts: Sequence[Tensor], unit: int) -> np.ndarray:
    """(parts, 4): distance from the base pointer, strides of segments, rows and heads, in ``unit`` elements."""
    size, origin = base.element_size() * unit, base.data_ptr()
    return np.array(
        [((x.data_ptr() - origin) // size, *(stride // unit for stride in x.stride()[:3])) for x in parts],
        dtype=np.int64,
    )


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)
