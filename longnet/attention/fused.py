"""Levels on a GPU: the library's flash kernels on strided rows, folded together in one pass.

Where the first level holds every row, its result is where the others are added to, so that it is never copied. The
others are worked through in chunks that no segment crosses: their results are never held for more than a chunk, however
long the sequence is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from .flash import CudaFlash, choose_kernel
from .pattern import DilationPattern
from .tiles import Tile, chunks, tiles

# The coarser levels' results are held for a chunk of positions at a time: as many as take no more memory than the first
# level's own kernel needs over the whole sequence (its dq in float32), and at least enough to fill a GPU.
CHUNK = 65536
# Of a longer sequence that kernel's memory counts too: every level goes through in chunks.
LONGEST = 2**20
LONG_CHUNK = 2**18

Result = TypeVar("Result")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def unsupported(q: Tensor) -> str | None:
    """Why the levels of these tensors cannot be folded in one pass; None when they can."""
    # What FlashAttention serves, every tile can be computed in, and comes back in q's own dtype.
    if reason := CudaFlash().unsupported(q, q):
        return reason
    return None if _has_triton() else "needs Triton, which is not installed"


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilationPattern, causal: bool, scale: float, borders: list[int]
) -> tuple[Tensor, Tensor]:
    from .kernels.combine import merge_levels

    def attend(qkv: Sequence[Tensor], tile: Tile) -> tuple[Tensor, Tensor]:
        q_rows, k_rows, v_rows = tile.queries(qkv[0]), tile.keys(qkv[1]), tile.keys(qkv[2])
        return choose_kernel(q_rows, k_rows).forward(q_rows, k_rows, v_rows, causal, scale)

    first, rest = _split(pattern, len(borders) > 2, *q.shape[:3], k.shape[2])
    if first:
        out, lse = attend(_joined(q, k, v), first)
        out, lse = out.reshape(q.shape).contiguous(), lse.reshape(q.shape[:-1]).contiguous()
    else:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if rest is not None:
        for part, (*qkv, out_part, lse_part) in _chunks(rest, borders, (q, k, v, out, lse.unsqueeze(-1)), share=1):
            found = tiles(part, out_part.shape[0], q.shape[2], k.shape[2])
            results = _side_by_side(partial(attend, qkv), found, q.device)
            merge_levels(out_part, lse_part.squeeze(-1), part, k.shape[2], results, onto=first is not None)
            del results
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pattern: DilationPattern, causal: bool, scale: float, borders: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from .kernels.combine import sum_levels

    def attend(known: Sequence[Tensor], tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        k_rows, v_rows = tile.keys(known[0]), tile.keys(known[1])
        q_rows, grad_rows, out_rows, lse_rows = (tile.queries(x) for x in known[2:])
        kernel = choose_kernel(q_rows, k_rows)
        return kernel.backward(grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows.squeeze(-1), causal, scale)

    known = (k, v, q, grad, out, lse.unsqueeze(-1))
    first, rest = _split(pattern, len(borders) > 2, *q.shape[:3], k.shape[2])
    if first:
        grads = attend(_joined(*known), first)
        dq, dk, dv = (part.reshape(x.shape).contiguous() for part, x in zip(grads, (q, k, v), strict=True))
    else:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if rest is not None:
        for part, views in _chunks(rest, borders, (*known, dq, dk, dv), share=2):
            inputs, (dq_part, dk_part, dv_part) = views[:6], views[6:]
            found = tiles(part, dq_part.shape[0], q.shape[2], k.shape[2])
            results = _side_by_side(partial(attend, inputs), found, q.device)
            sum_levels((dq_part, dk_part, dv_part), part, results, onto=first is not None)
            # They must not live on while the next chunk's are made.
            del results
    return dq, dk, dv


@lru_cache
def _split(
    pattern: DilationPattern, packed: bool, batch: int, seq_len: int, num_heads: int, num_kv_heads: int
) -> tuple[Tile | None, DilationPattern | None]:
    """The first level as one tile, where one tile holds every row of every head, and the pattern of the others."""
    if pattern.heads != "all" or pattern.dilation_rates[0] != 1 or packed or batch * seq_len > LONGEST:
        return None, pattern
    clamped = _clamp(pattern, seq_len)
    first = replace(clamped, segment_lengths=clamped.segment_lengths[:1], dilation_rates=(1,))
    if batch > 1 and (first.shift or seq_len % first.segment_lengths[0]):
        return None, pattern
    found = tiles(first, batch * seq_len, num_heads, num_kv_heads)
    if len(found) > 1:
        return None, pattern
    if len(pattern.levels) == 1:
        return found[0], None
    others = replace(pattern, segment_lengths=pattern.segment_lengths[1:], dilation_rates=pattern.dilation_rates[1:])
    return found[0], others


def _side_by_side(call: Callable[[Tile], Result], found: Sequence[Tile], device: torch.device) -> list[Result]:
    """The call's results for the tiles; on a GPU over two streams, so that one call's last blocks overlap the next one.

    Results made on the second stream go back to it when they are freed, and it waits for the first one before it takes
    their memory again.
    """
    if device.type != "cuda" or len(found) == 1:
        return [call(tile) for tile in found]
    stream, beside = torch.cuda.current_stream(device), _second_stream(device)
    beside.wait_stream(stream)
    results = [call(tile) for tile in found[::2]]
    with torch.cuda.stream(beside):
        for place, tile in enumerate(found[1::2]):
            results.insert(2 * place + 1, call(tile))
    stream.wait_stream(beside)
    return results


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _chunks(
    pattern: DilationPattern, borders: list[int], whole: tuple[Tensor, ...], share: int
) -> Iterator[tuple[DilationPattern, tuple[Tensor, ...]]]:
    """Stretches (N', ...) that attend only among themselves, no shorter than their share, and the pattern over them."""
    batch, seq_len = whole[0].shape[:2]
    if len(borders) == 2 and joins_rows(pattern, seq_len):
        rows = [(_clamp(pattern, seq_len), [0, batch * seq_len], _joined(*whole))]
    else:
        rows = [(pattern, borders, tuple(x[row] for x in whole)) for row in range(batch)]
    extent = batch * seq_len if batch * seq_len <= LONGEST else LONG_CHUNK
    for part, ends, row in rows:
        for begin, end in chunks(part, ends, max(CHUNK, extent // share)):
            yield part, tuple(x[begin:end] for x in row) if end - begin < len(row[0]) else row


def joins_rows(pattern: DilationPattern, seq_len: int) -> bool:
    """Whether no segment would cross from one row of a batch into the next if they were one long row."""
    return not pattern.shift and all(seq_len % w == 0 for w in _clamp(pattern, seq_len).segment_lengths)


def _joined(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, N, ...) as (B * N, ...)."""
    return tuple(x[0] if x.shape[0] == 1 else x.flatten(0, 1) for x in tensors)


@lru_cache
def _clamp(pattern: DilationPattern, seq_len: int) -> DilationPattern:
    """The same pattern over so many positions, with no segment longer than they are."""
    # With a shift, a segment that holds all of them does not begin with the first.
    if pattern.shift or max(pattern.dilation_rates) > seq_len:
        return pattern
    clamped = replace(pattern, segment_lengths=tuple(min(w, seq_len) for w in pattern.segment_lengths))
    # Levels are kept sorted, and a group of heads has the level of its place.
    return pattern if pattern.heads == "grouped" and clamped.dilation_rates != pattern.dilation_rates else clamped
