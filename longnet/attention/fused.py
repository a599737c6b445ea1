"""Levels on a GPU: the library's flash kernels on strided rows, folded together in one pass.

The sequence is worked through in chunks that no segment crosses, so that the levels' own results are never held for
more than a chunk, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from .flash import CudaFlash, choose_kernel
from .pattern import DilationPattern
from .tiles import chunks, tiles

# Enough rows to fill a GPU with the coarsest level of a chunk, few enough that its results stay small. On an H200 at
# 128K tokens (H = 16, D = 64) chunks of 32K took 15.8 ms, of 64K 14.2 ms; of 128K they gained 3 % for 0.7 GiB more.
CHUNK = 65536


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

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for part, (q_part, k_part, v_part, out_part, lse_part) in _chunks(
        pattern, borders, (q, k, v, out, lse.unsqueeze(-1))
    ):
        found = tiles(part, q_part.shape[1], q_part.shape[2], k_part.shape[2])
        results = []
        for tile in found:
            q_rows, k_rows, v_rows = tile.queries(q_part)[0], tile.keys(k_part)[0], tile.keys(v_part)[0]
            results.append(choose_kernel(q_rows, k_rows).forward(q_rows, k_rows, v_rows, causal, scale))
        merge_levels(out_part[0], lse_part[0].squeeze(-1), part, found, results)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pattern: DilationPattern, causal: bool, scale: float, borders: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from .kernels.combine import sum_levels

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    whole = (q, k, v, grad, out, lse.unsqueeze(-1), dq, dk, dv)
    for part, (q_part, k_part, v_part, *query_like, dq_part, dk_part, dv_part) in _chunks(pattern, borders, whole):
        found = tiles(part, q_part.shape[1], q_part.shape[2], k_part.shape[2])
        results = []
        for tile in found:
            q_rows, k_rows, v_rows = tile.queries(q_part)[0], tile.keys(k_part)[0], tile.keys(v_part)[0]
            grad_rows, out_rows, lse_rows = (tile.queries(x)[0] for x in query_like)
            kernel = choose_kernel(q_rows, k_rows)
            results.append(
                kernel.backward(grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows.squeeze(-1), causal, scale)
            )
        for index, (total, keys) in enumerate(((dq_part, False), (dk_part, True), (dv_part, True))):
            sum_levels(total[0], part, found, [grads[index] for grads in results], keys)
    return dq, dk, dv


def _chunks(
    pattern: DilationPattern, borders: list[int], whole: tuple[Tensor, ...]
) -> Iterator[tuple[DilationPattern, tuple[Tensor, ...]]]:
    """Stretches of one row (1, N', ...) that attend only among themselves, and the pattern over them."""
    batch, seq_len = whole[0].shape[:2]
    clamped = _clamp(pattern, seq_len)
    if len(borders) == 2 and not clamped.shift and all(seq_len % w == 0 for w in clamped.segment_lengths):
        pattern = clamped
        if batch > 1 and all(x.stride(0) == seq_len * x.stride(1) for x in whole):
            # No segment crosses from one row of the batch into the next, so they may as well be one long row.
            whole = tuple(x.flatten(0, 1).unsqueeze(0) for x in whole)
            batch, seq_len = 1, batch * seq_len
            borders = [0, seq_len]
    for row in range(batch):
        for begin, end in chunks(pattern, borders, CHUNK):
            yield pattern, tuple(x[row : row + 1, begin:end] for x in whole)


def _clamp(pattern: DilationPattern, seq_len: int) -> DilationPattern:
    """The same pattern over so many positions, with no segment longer than they are."""
    if pattern.heads != "all" or max(pattern.dilation_rates) > seq_len:
        return pattern
    return replace(pattern, segment_lengths=tuple(min(w, seq_len) for w in pattern.segment_lengths))
