"""Attention over a sequence that is read piece by piece: new rows, and what is kept of the old ones.

A piece of several tokens goes through the block's own fast operator, and then sees the kept rows of the segments that
were open before it, one flash call a level, merged by LSE. A single token, as in decoding, sees all its keys in one
masked call whose cost and launches do not depend on the position. Both give what the whole sequence at once gives.

B batch, N new positions, K KV heads, G query heads a KV head, C blocks of S slots, D head dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .blocks import Dilated
from .dilated import autocast, dilated_attention
from .flash import choose_kernel
from .lanes import BLOCK, FEWEST_SLOTS, capacities_for, lanes_for, piece_of, tables_for
from .levels import merge_
from .masked import MaskedAttention, WindowMask
from .pattern import DilationPattern


@dataclass
class Turn:
    """The tokens that are read now, the same for all layers.

    Attributes:
        begins: for each sequence, the position of its first new token.
        skips: for each sequence, how many columns of padding stand before that token.
        positions: ``begins`` as a tensor (B,) on the device, so that a step copies nothing to it.
        plans: what layers with the same layout share in a step.
    """

    begins: list[int]
    skips: list[int]
    positions: Tensor
    plans: dict[Any, Any] = field(default_factory=dict)


class AttentionState(ABC):
    """What a layer keeps of the tokens that were read: keys and values, as ``store`` (2, B, K, T, D)."""

    def __init__(self) -> None:
        self.store: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        """The block's output (B, N, H, D) for new rows, which are then kept as far as later ones can see them."""
        if torch.is_grad_enabled() and q.requires_grad:
            raise ValueError("past_key_values is given while gradients are wanted: read under torch.no_grad()")
        q, k, v = autocast(q, k, v)
        length = q.shape[1]
        store = self._reserve(q, k, max(turn.begins) + length)
        if length == 1 and not any(turn.skips):
            return self._step(store, q[:, 0], k[:, 0], v[:, 0], turn)[:, None]
        if not any(turn.skips) and len(set(turn.begins)) == 1:
            return self._extend(store, q, k, v, turn.begins[0])
        # Sequences of different lengths: each by itself, so that its segments and phases are its own.
        out = torch.zeros_like(q)
        for row, (begin, skip) in enumerate(zip(turn.begins, turn.skips, strict=True)):
            if skip < length:
                one_q, one_k, one_v = (x[row : row + 1, skip:] for x in (q, k, v))
                out[row : row + 1, skip:] = self._extend(store[:, row : row + 1], one_q, one_k, one_v, begin)
        return out

    @abstractmethod
    def _reserve(self, q: Tensor, k: Tensor, seq_len: int) -> Tensor:
        """The store, with room for what has to be kept of so many positions."""

    @abstractmethod
    def _step(self, store: Tensor, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        """One new row (B, H, D) for each sequence, at positions of their own."""

    @abstractmethod
    def _extend(self, store: Tensor, q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        """New rows (B, N, H, D) of sequences that all go on at position ``begin``."""


class Past(NamedTuple):
    """What a layer keeps of earlier tokens, and the tokens that are read now."""

    state: AttentionState
    turn: Turn

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state.attend(q, k, v, self.turn)


def open_state(block: nn.Module) -> AttentionState:
    """An empty state for a block of ``longnet.attention.BLOCKS``."""
    if isinstance(block, Dilated):
        return LevelState(block)
    if isinstance(block, MaskedAttention):
        return HistoryState(block)
    raise ValueError(f"block={block}: expected one of longnet.attention.BLOCKS, which know what a later token sees")


class LevelState(AttentionState):
    """The rows of the open segments of a pattern's levels."""

    def __init__(self, block: Dilated) -> None:
        super().__init__()
        self.pattern = block.pattern
        self.backend = block.backend
        self.capacities: tuple[int, ...] = ()

    def _reserve(self, q: Tensor, k: Tensor, seq_len: int) -> Tensor:
        wanted = capacities_for(self.pattern, seq_len)
        if self.store is not None and all(a <= b for a, b in zip(wanted, self.capacities, strict=True)):
            return self.store
        batch, _, num_kv_heads, head_dim = k.shape
        lanes = lanes_for(self.pattern, q.shape[2], num_kv_heads, wanted)
        # Zeros, since a weight of 0 does not undo a NaN that lies in fresh memory.
        store = k.new_zeros(2, batch, num_kv_heads, lanes.num_slots, head_dim)
        if self.store is not None:
            before = lanes_for(self.pattern, q.shape[2], num_kv_heads, self.capacities)
            for head, (old, new) in enumerate(zip(before.of_head, lanes.of_head, strict=True)):
                for a, b in zip(old, new, strict=True):
                    size = self.capacities[a.level]
                    store[:, :, head, b.start : b.start + size] = self.store[:, :, head, a.start : a.start + size]
        self.store, self.capacities = store, wanted
        return store

    def _step(self, store: Tensor, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        lanes = lanes_for(self.pattern, q.shape[1], k.shape[1], self.capacities)
        if lanes not in turn.plans:
            tables = tables_for(lanes, q.device)
            shift = self.pattern.shift
            moved = (turn.positions + shift)[:, None, None]
            row = (moved % tables.lane_length) % tables.lane_rate == tables.lane_phase
            slot = tables.lane_start + (moved % tables.lane_length) // tables.lane_rate
            moved = moved[..., None, None]
            within = moved % tables.length
            low = torch.where(moved // tables.length == shift // tables.length, shift % tables.length, 0)
            seen = ((within - tables.place) % tables.rate == 0) & (tables.place <= within) & (tables.place >= low)
            turn.plans[lanes] = torch.where(row, slot, lanes.num_slots - 1), seen & tables.used_by
        slots_BKL, seen = turn.plans[lanes]
        new = torch.stack((k, v))[:, :, :, None]
        index = slots_BKL[None, ..., None].expand(2, -1, -1, -1, k.shape[2])
        store.scatter_(3, index, new.expand(index.shape))
        return _attend_seen(q, store, seen)

    def _extend(self, store: Tensor, q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        length, num_heads, head_dim = q.shape[1:]
        scale = head_dim**-0.5
        lanes = lanes_for(self.pattern, num_heads, k.shape[2], self.capacities)
        piece = piece_of(lanes, begin, length)
        here = pattern_from(self.pattern, begin, length)
        result = dilated_attention(q, k, v, here, return_lse=True, backend=self.backend)
        # In the first level's own precision: each merge would otherwise round once more.
        out, lse = result[0].to(result[1].dtype) if piece.seeing else result[0], result[1]
        for tile, heads, queries, view in piece.seeing:
            q_rows, out_rows, lse_rows = (tile.queries(x)[:, 0, :, queries] for x in (q, out, lse.unsqueeze(-1)))
            keys, values = (view.cut(x, heads) for x in store)
            o, level_lse = choose_kernel(q_rows, keys, once=True).forward(q_rows, keys, values, False, scale)
            merge_(out_rows, lse_rows.squeeze(-1), o, level_lse, first=False)
        for tile, heads, _, view in piece.kept:
            for target, rows in zip(store, (k, v), strict=True):
                view.cut(target, heads).copy_(tile.keys(rows)[:, 0, :, heads])
        return out.to(q.dtype)


class HistoryState(AttentionState):
    """The latest rows, as many as a window reaches back, or all of them where a mask reaches the beginning."""

    def __init__(self, block: MaskedAttention) -> None:
        super().__init__()
        self.block = block
        self.window = block.mask.window if isinstance(block.mask, WindowMask) else None
        self.capacity = 0

    def _reserve(self, q: Tensor, k: Tensor, seq_len: int) -> Tensor:
        wanted = max(FEWEST_SLOTS, 1 << (seq_len - 1).bit_length())
        wanted = wanted if self.window is None else min(wanted, self.window)
        if self.store is None or wanted > self.capacity:
            batch, _, num_kv_heads, head_dim = k.shape
            store = k.new_zeros(2, batch, num_kv_heads, -(-wanted // BLOCK) * BLOCK, head_dim)
            if self.store is not None:
                # No position has come round to the first slot again as long as there is room to grow.
                store[:, :, :, : self.capacity] = self.store[:, :, :, : self.capacity]
            self.store, self.capacity = store, wanted
        return self.store

    def _step(self, store: Tensor, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        key = (self.block.mask, self.capacity)
        slots = turn.positions % self.capacity
        if key not in turn.plans:
            position = turn.positions[:, None]
            slot = torch.arange(store.shape[3], device=q.device)
            places = position - (position - slot) % self.capacity
            seen = self.block.mask.sees(position, places) & (places >= 0) & (slot < self.capacity)
            turn.plans[key] = seen.unflatten(1, (1, -1, 1, BLOCK))
        index = slots[None, :, None, None, None].expand(2, -1, k.shape[1], 1, k.shape[2])
        store.scatter_(3, index, torch.stack((k, v))[:, :, :, None])
        return _attend_seen(q, store, turn.plans[key])

    def _extend(self, store: Tensor, q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        reach = begin if self.window is None else min(begin, self.window - 1)
        earlier = torch.arange(begin - reach, begin, device=q.device) % self.capacity
        # The block sees the kept rows in front of the new ones; what it says about them is dropped.
        old_k, old_v = store.index_select(3, earlier).transpose(2, 3)
        padded = torch.cat((q.new_zeros(q.shape[0], reach, *q.shape[2:]), q), 1)
        out: Tensor = self.block(padded, torch.cat((old_k, k), 1), torch.cat((old_v, v), 1))[:, reach:]
        number = min(q.shape[1], self.capacity)
        end = begin + q.shape[1]
        slots = torch.arange(end - number, end, device=q.device) % self.capacity
        new = torch.stack((k[:, -number:], v[:, -number:])).transpose(2, 3)
        store.index_copy_(3, slots, new)
        return out


def pattern_from(pattern: DilationPattern, begin: int, length: int) -> DilationPattern:
    """The pattern as positions [begin, begin + length) have it among themselves, counted from 0.

    Where they line up with the segments it has no shift, and is the same for every such piece: what is computed once
    for a pattern is then found again.
    """
    moved = begin + pattern.shift
    if pattern.heads == "all" and all(
        moved % w == 0 or (moved % w % r == 0 and moved % w + length <= w) for w, r in pattern.levels
    ):
        lengths = tuple(w if w < length else max(length, r) for w, r in pattern.levels)
        return replace(pattern, segment_lengths=lengths, shift=0)
    return replace(pattern, shift=moved % math.lcm(*pattern.segment_lengths))


def _attend_seen(q_BHD: Tensor, store: Tensor, seen_BKCGS: Tensor) -> Tensor:
    """One query a sequence against the slots that it sees; 0 where it sees none."""
    exact = torch.promote_types(q_BHD.dtype, torch.float32)
    k, v = store.unflatten(3, (-1, BLOCK))
    q = q_BHD.unflatten(1, (k.shape[1], 1, -1)).expand(-1, -1, k.shape[2], -1, -1)
    scores = _product(q, k.mT, exact) * q_BHD.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen_BKCGS, -torch.inf)
    top = scores.amax((2, 4), keepdim=True).clamp(min=torch.finfo(exact).min)
    weights = torch.exp(scores - top)
    total = weights.sum((2, 4)).unsqueeze(-1)
    out = _product(weights.to(v.dtype), v, exact).sum(2)
    return torch.where(total > 0, out / total, 0.0).flatten(1, 2).to(q_BHD.dtype)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A batched product, added up and given in ``dtype``."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        flat = torch.bmm(left.flatten(0, 2), right.flatten(0, 2), out_dtype=dtype)
        return flat.unflatten(0, left.shape[:3])
    return left.to(dtype) @ right.to(dtype)
