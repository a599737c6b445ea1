"""The key-value cache: bounded by the pattern, whatever the length of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache

from longnet.attention import build_block
from longnet.attention.incremental import Turn, open_state

from .config import LongNetConfig


class LongNetCache(Cache):
    """Keeps, layer by layer, the rows that a later token can still see, and nothing else.

    A dilated layer keeps at most ``ceil(w / r)`` rows a level and head, a sliding window its window; a dense or
    block-sparse layer can see everything and keeps it. ``generate`` makes one by itself. Sequences of a batch may begin
    at different columns (left padding): each has its own positions, segments and phases, as if it were alone.

    Args:
        config: the model's.
    """

    def __init__(self, config: LongNetConfig) -> None:
        states = [open_state(build_block(config.block_spec(layer))) for layer in range(config.num_hidden_layers)]
        # transformers' own layers only store; these attend too, and are reached by the names of this class alone.
        super().__init__(layers=cast(Any, states))
        self.states = states
        self.columns = 0
        self.lengths: list[int] | None = None
        self._positions: Tensor | None = None

    def begin(self, input_ids: Tensor, attention_mask: Tensor | None) -> Turn:
        """What is read in the next forward pass: for the layers, and for ``finish``.

        Args:
            input_ids: the new columns (B, N).
            attention_mask: (B, columns so far + N) or (B, N), with zeros only before a sequence's first token.
        """
        batch, length = input_ids.shape
        if self.lengths is None or self._positions is None:
            self.lengths = [0] * batch
            self._positions = torch.zeros(batch, dtype=torch.long, device=input_ids.device)
        elif len(self.lengths) != batch:
            raise ValueError(f"input_ids has {batch} rows: past_key_values holds {len(self.lengths)} sequences")
        skips = [0] * batch
        # Looking at the mask waits for the device; once every sequence has begun, a step has nothing to look for.
        if attention_mask is not None and (length > 1 or 0 in self.lengths):
            skips = self._padding(attention_mask[:, -length:])
        return Turn(list(self.lengths), skips, self._positions)

    def finish(self, turn: Turn, length: int) -> None:
        """Counts the columns that the layers have read."""
        self.columns += length
        self.lengths = [begin + length - skip for begin, skip in zip(turn.begins, turn.skips, strict=True)]
        added: int | Tensor = length
        if any(turn.skips):
            added = torch.tensor([length - skip for skip in turn.skips], device=turn.positions.device)
        self._positions = turn.positions + added

    def _padding(self, mask: Tensor) -> list[int]:
        assert self.lengths is not None
        skips = (mask == 0).sum(1).tolist()
        begun = (mask != 0).to(torch.int8)
        if bool((begun.diff(dim=1) < 0).any()) or any(s and n for s, n in zip(skips, self.lengths, strict=True)):
            raise ValueError(
                "attention_mask has zeros behind a sequence's first token: expected padding on the left only; set "
                "tokenizer.padding_side='left'"
            )
        return skips

    @property
    def num_bytes(self) -> int:
        """What the rows take, over all layers."""
        stores = (state.store for state in self.states)
        return sum(store.numel() * store.element_size() for store in stores if store is not None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, padding included."""
        return self.columns

    def get_max_length(self, *_: Any) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.states)

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *_: Any) -> None:
        raise ValueError("past_key_values cannot be cut back: rows that no later token sees are gone; read again")

    def reset(self) -> None:
        """Forgets everything."""
        self.columns, self.lengths, self._positions = 0, None, None
        for state in self.states:
            state.store = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the sequences of these rows, in this order."""
        if self.lengths is None or self._positions is None:
            return
        self.lengths = [self.lengths[row] for row in beam_idx.tolist()]
        self._positions = self._positions.index_select(0, beam_idx.to(self._positions.device))
        for state in self.states:
            if state.store is not None:
                state.store = state.store.index_select(1, beam_idx.to(state.store.device))

    def branch(self, rows: Sequence[int]) -> LongNetCache:
        """A copy of these sequences, which can be read on from without changing the original."""
        branch = copy(self)
        branch.states = [copy(state) for state in self.states]
        branch.layers = cast(Any, branch.states)
        branch.reorder_cache(torch.tensor(rows))
        return branch

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.lengths is not None:
            self.reorder_cache(torch.arange(len(self.lengths)).repeat_interleave(repeats))
