"""Padded batches without a cache: packed into one row of documents, so that each row is as if alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Rows of different lengths as one row.

    Attributes:
        mask: (B, N) bool, where the tokens are.
        cu_seqlens: the rows' borders in the packed row, on the CPU.
    """

    mask: Tensor
    cu_seqlens: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """(B, N, ...) without its padding, as (1, tokens, ...)."""
        return x[self.mask][None]

    def unpack(self, packed: Tensor) -> Tensor:
        """(1, tokens, ...) as (B, N, ...), with 0 where there is padding."""
        out = packed.new_zeros(*self.mask.shape, *packed.shape[2:])
        out[self.mask] = packed[0]
        return out


def find_padding(attention_mask: Tensor | None) -> Packing | None:
    """How to pack a batch, or None where nothing is padded.

    Raises:
        ValueError: if a row has a gap, or no token at all.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected (batch, positions), since the pattern "
            "says what sees what"
        )
    mask = attention_mask != 0
    if bool(mask.all()):
        return None
    rows = mask.sum(1)
    edges = mask.to(torch.int8).diff(dim=1, prepend=torch.zeros_like(mask[:, :1], dtype=torch.int8))
    if bool((rows == 0).any()) or bool(((edges == 1).sum(1) > 1).any()):
        raise ValueError(
            "attention_mask has a row with a gap or without a token: expected ones in one stretch a row, with padding "
            "on the left or the right"
        )
    return Packing(mask, torch.nn.functional.pad(rows.cumsum(0), (1, 0)).to("cpu"))


def find_packing(position_ids: Tensor | None) -> Tensor | None:
    """The borders (documents + 1,) of a row whose positions (1, N) begin anew within it; None where they do not."""
    starts = [] if position_ids is None else (position_ids[0, 1:] == 0).nonzero().flatten().tolist()
    if position_ids is None or not starts:
        return None
    return torch.tensor([0, *(start + 1 for start in starts), position_ids.shape[1]])
