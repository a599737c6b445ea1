"""Attention through a block mask: sliding windows and block-sparse patterns.

What is seen is said once, as a FlexAttention ``mask_mod``. On a GPU FlexAttention compiles it, and FlashAttention takes
the windows that it serves. On a CPU FlexAttention has no backward pass: there the same blocks go through SDPA, a row of
blocks at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from .window import flash_serves, window_attention

BLOCK = 128


class Mask(Protocol):
    """Which keys a query sees. Equal masks share what is computed of them, so a mask is immutable and hashable."""

    def sees(self, n: Tensor, m: Tensor) -> Tensor:
        """Whether query positions n see key positions m."""

    def __hash__(self) -> int: ...


class MaskedAttention(nn.Module):
    """Causal attention through a mask; blocks of positions that hold nothing seen are skipped."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def extra_repr(self) -> str:
        return str(self.mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is None:
            return self._attend(q, k, v)
        borders = cu_seqlens.tolist()
        parts = [self._attend(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(borders)]
        return torch.cat(parts, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # FlexAttention has another kernel for less than a block, which refuses masks made by hand.
        if q.is_cuda and q.shape[1] >= BLOCK:
            mask = _flex_mask(self.mask, q.shape[1], q.device)
            return _flex(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)
        parts = []
        for row, columns in enumerate(_block_map(self.mask, q.shape[1], q.device)[0].tolist()):
            rows = slice(row * BLOCK, min((row + 1) * BLOCK, q.shape[1]))
            runs = _runs(columns, q.shape[1])
            keys, values, places = (
                torch.cat([x.narrow(dim, a, b - a) for a, b in runs], dim) if len(runs) > 1
                else x.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
                for x, dim in ((k, 1), (v, 1), (torch.arange(q.shape[1], device=q.device), 0))
            )  # fmt: skip
            mask = self.mask.sees(torch.arange(rows.start, rows.stop, device=q.device)[:, None], places[None, :])
            parts.append(
                scaled_dot_product_attention(
                    q[:, rows].transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask, enable_gqa=True
                ).transpose(1, 2)
            )
        return torch.cat(parts, 1)

    def flops(self, seq_len: int, num_heads: int, head_dim: int) -> int:
        """Floating-point operations of the two matrix products, forward, over the pairs that are seen."""
        return 4 * head_dim * num_heads * _block_map(self.mask, seq_len, torch.device("cpu"))[2]


@dataclass(frozen=True)
class WindowMask:
    window: int

    def __str__(self) -> str:
        return f"window {self.window}"

    def sees(self, n: Tensor, m: Tensor) -> Tensor:
        return (m <= n) & (n - m < self.window)


class SlidingWindow(MaskedAttention):
    """Each query sees the ``window`` latest positions, its own included."""

    def __init__(self, window: int) -> None:
        super().__init__(WindowMask(_at_least_one("window", window)))
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        if flash_serves(q):
            return window_attention(q, k, v, self.window, cu_seqlens)
        return super().forward(q, k, v, cu_seqlens)


@dataclass(frozen=True)
class BlockSparseMask:
    block_size: int
    local_blocks: int
    stride: int
    global_blocks: int

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_size}: {self.local_blocks} latest, every {self.stride}th back, "
            f"{self.global_blocks} first"
        )

    def sees(self, n: Tensor, m: Tensor) -> Tensor:
        query_block, key_block = n // self.block_size, m // self.block_size
        distance = query_block - key_block
        near = distance < self.local_blocks
        return (m <= n) & (near | (distance % self.stride == 0) | (key_block < self.global_blocks))


class BlockSparse(MaskedAttention):
    """Blocks of positions: the ``local_blocks`` latest, every ``stride``-th back, the first ``global_blocks``."""

    def __init__(self, block_size: int = BLOCK, local_blocks: int = 4, stride: int = 8, global_blocks: int = 1) -> None:
        for name, value in (("block_size", block_size), ("local_blocks", local_blocks), ("stride", stride)):
            _at_least_one(name, value)
        super().__init__(BlockSparseMask(block_size, local_blocks, stride, global_blocks))


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer >= 1; the nearest is 1")
    return value


@lru_cache(maxsize=64)
def _block_map(mask: Mask, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Which blocks hold a seen pair, which hold only seen pairs, and how many pairs are seen.

    Evaluated one row of blocks at a time, so that it needs O(N) memory and not O(N^2).
    """
    positions = torch.arange(seq_len, device=device)
    some, every, total = [], [], 0
    for begin in range(0, seq_len, BLOCK):
        seen = mask.sees(positions[begin : begin + BLOCK, None], positions[None, :])
        total += int(seen.sum())
        # A block cut by the end of the sequence is not full, because its missing part must stay unseen.
        padded = seen.new_zeros(BLOCK, -(-seq_len // BLOCK) * BLOCK)
        padded[: seen.shape[0], :seq_len] = seen
        blocks = padded.unflatten(1, (-1, BLOCK))
        some.append(blocks.any(2).any(0))
        every.append(blocks.all(2).all(0))
    return torch.stack(some), torch.stack(every), total


@torch.compiler.disable
def _flex_mask(mask: Mask, seq_len: int, device: torch.device) -> BlockMask:
    return _cached_flex_mask(mask, seq_len, device)


@lru_cache(maxsize=64)
def _cached_flex_mask(mask: Mask, seq_len: int, device: torch.device) -> BlockMask:
    some, every, _ = _block_map(mask, seq_len, device)

    def mask_mod(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return mask.sees(n, m)

    return BlockMask.from_kv_blocks(
        *_indices(some & ~every), *_indices(every), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(seq_len, seq_len)
    )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of blocks has, and which: those first, as BlockMask wants them."""
    number = blocks.sum(-1, dtype=torch.int32)
    indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True).to(torch.int32)
    return number[None, None], indices[None, None]


def _runs(columns: list[bool], seq_len: int) -> list[tuple[int, int]]:
    """Neighbouring blocks joined, as (begin, end) positions."""
    runs: list[tuple[int, int]] = []
    for column, wanted in enumerate(columns):
        if not wanted:
            continue
        begin, end = column * BLOCK, min((column + 1) * BLOCK, seq_len)
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    # Uncompiled it would form all N^2 scores, so it is compiled even where the model's code is not to be.
    if torch.compiler.is_compiling():
        return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)
    with torch.compiler.set_stance("default"):
        return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
