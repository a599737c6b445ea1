"""Levels over packed documents: one kernel call a level, however many documents there are.

Documents of a row begin anywhere, so their rows are no affine views. The rows of a level are gathered instead, head by
head and segment by segment, into one long row of sequences for the varlen kernel; what comes back is folded onto the
rows it belongs to. Where they lie is worked out once for all layers of a step.

N positions of all documents, R rows of a level over all heads, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .flash import Sequences, VarlenFlash, to_device
from .pattern import DilationPattern

# Documents are taken together up to so many positions, which bounds what is gathered at a time.
CHUNK = 2**17


class LevelRows(NamedTuple):
    """Where a level's rows lie in (N * H, D), and their keys in (N * Hkv, D); None where it is all of them in order."""

    sequences: Sequences
    queries: Tensor | None
    keys: Tensor | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilationPattern, causal: bool, scale: float, borders: list[int]
) -> tuple[Tensor, Tensor]:
    plan = find_rows(pattern, tuple(borders), q.shape[2], k.shape[2], q.device)
    parts = [_forward(q[:, rows], k[:, rows], v[:, rows], levels, causal, scale) for rows, levels in plan]
    out, lse = _joined(parts)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pattern: DilationPattern, causal: bool, scale: float, borders: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = []
    for rows, levels in find_rows(pattern, tuple(borders), q.shape[2], k.shape[2], q.device):
        dout, queries, keys, values, known, known_lse = (x[:, rows] for x in (grad, q, k, v, out, lse))
        parts.append(_backward(dout, queries, keys, values, known, known_lse, levels, causal, scale))
    dq, dk, dv = _joined(parts)
    return dq, dk, dv


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(series, 1) for series in zip(*parts, strict=True))


def stretches(borders: Sequence[int]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Neighbouring documents of at most ``CHUNK`` positions together, or one: where they lie, and their own borders."""
    first = 0
    while first < len(borders) - 1:
        end = first + 1
        while end + 1 < len(borders) and borders[end + 1] - borders[first] <= CHUNK:
            end += 1
        begin = borders[first]
        yield slice(begin, borders[end]), tuple(border - begin for border in borders[first : end + 1])
        first = end


def _forward(
    q: Tensor, k: Tensor, v: Tensor, levels: Sequence[LevelRows], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = VarlenFlash()
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q[0].shape, dtype=dtype, device=q.device).flatten(0, 1)
    lse = torch.full((len(out),), -torch.inf, dtype=dtype, device=q.device)
    for number, rows in enumerate(levels):
        queries, keys, values = _take(q, rows.queries), _take(k, rows.keys), _take(v, rows.keys)
        level_out, level_lse = kernel.forward(queries, keys, values, rows.sequences, causal, scale)
        level_out, level_lse = level_out.flatten(0, 1).to(dtype), level_lse.flatten()
        if rows.queries is None and number == 0:
            out, lse = level_out, level_lse
            continue
        places = slice(None) if rows.queries is None else rows.queries
        known_lse = lse[places]
        # Where nothing is known yet its LSE is -inf, and the level's share is 1.
        out[places] = out[places].lerp(level_out, torch.sigmoid(level_lse - known_lse).unsqueeze(-1))
        lse[places] = torch.logaddexp(known_lse, level_lse)
    return out.to(q.dtype).view(q.shape), lse.view(q.shape[:-1])


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    levels: Sequence[LevelRows], causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel = VarlenFlash()
    dtype = torch.promote_types(q.dtype, torch.float32)
    totals = [torch.zeros(x[0].shape, dtype=dtype, device=x.device).flatten(0, 1) for x in (q, k, v)]
    for rows in levels:
        places = (rows.queries, rows.keys, rows.keys)
        grad_rows, q_rows, out_rows, lse_rows = (_take(x, rows.queries) for x in (grad, q, out, lse.unsqueeze(-1)))
        k_rows, v_rows = _take(k, rows.keys), _take(v, rows.keys)
        parts = kernel.backward(
            grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows.squeeze(-1), rows.sequences, causal, scale
        )
        for total, place, part in zip(totals, places, parts, strict=True):
            if place is None:
                total += part.flatten(0, 1)
            else:
                total.index_add_(0, place, part.flatten(0, 1).to(dtype))
    dq, dk, dv = (total.to(x.dtype).view(x.shape) for total, x in zip(totals, (q, k, v), strict=True))
    return dq, dk, dv


def _take(x: Tensor, places: Tensor | None) -> Tensor:
    """Of (1, N, H, D), or of anything shaped like it, all as (N, H, D), or some rows as of one head: (R, 1, D)."""
    return x[0] if places is None else x[0].reshape(-1, x.shape[-1]).index_select(0, places).unsqueeze(1)


# As many as a model has patterns, and few more: a step's documents are not seen again.
@lru_cache(maxsize=4)
def find_rows(
    pattern: DilationPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, device: torch.device
) -> list[tuple[slice, list[LevelRows]]]:
    """Stretches of documents, and the levels that have rows in them."""
    found = []
    for rows, own in stretches(borders):
        levels = (_level_rows(pattern, n, own, num_heads, num_kv_heads, device) for n in range(len(pattern.levels)))
        found.append((rows, [level for level in levels if level is not None]))
    return found


def _level_rows(
    pattern: DilationPattern, level: int, borders: tuple[int, ...], num_heads: int, num_kv_heads: int,
    device: torch.device,
) -> LevelRows | None:  # fmt: skip
    """Where the rows of a level lie; None where no head has any."""
    length, rate = pattern.levels[level]
    ends = torch.tensor(borders)
    moved = torch.arange(borders[-1]) - ends[:-1].repeat_interleave(ends.diff()) + pattern.shift
    # Segments numbered through all documents: a new one begins where a document or a segment does.
    begins = moved % length == 0
    begins[ends[:-1]] = True
    segment, phase = begins.cumsum(0) - 1, moved % length % rate

    def counts(rows: Tensor) -> list[int]:
        found: list[int] = segment[rows].bincount().tolist()
        return [count for count in found if count]

    if rate == 1 and pattern.heads == "all":
        return LevelRows(Sequences.of(counts(torch.arange(borders[-1])), device), None, None)
    phases = [(head, pattern.phase(level, head, num_heads)) for head in range(num_heads)]
    of_phase = {number: (phase == number).nonzero().squeeze(1) for _, number in phases if number is not None}
    used = [(head, number) for head, number in phases if number is not None and len(of_phase[number])]
    if not used:
        return None
    sizes = {number: counts(rows) for number, rows in of_phase.items()}
    sequences = Sequences.of([size for _, number in used for size in sizes[number]], device)
    on_device = {number: to_device(rows, device) for number, rows in of_phase.items()}
    group = num_heads // num_kv_heads
    queries = torch.cat([on_device[number] * num_heads + head for head, number in used])
    keys = torch.cat([on_device[number] * num_kv_heads + head // group for head, number in used])
    return LevelRows(sequences, queries, keys)
