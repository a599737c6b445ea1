"""Reading a sequence of any length in one context, piece by piece, in memory that the pattern bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .cache import LongNetCache

# On a GPU long enough to fill it and to make one launch a small part of the work; a power of two, so that pieces line
# up with segments of the usual lengths and go through the operator's fastest path.
PIECE = 65536

Decoder = Callable[..., Tensor]


def read(
    decoder: Decoder,
    input_ids: Tensor,
    cache: LongNetCache,
    keep: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    piece: int = PIECE,
) -> Tensor:
    """Reads tokens behind what the cache holds, and gives the hidden states of the last ``keep`` positions (0: all).

    Args:
        decoder: a ``LongNetModel``.
        input_ids: (B, N).
        cache: what was read before; the tokens are added to it.
        keep: how many hidden states are wanted. Only so many are held, whatever N is.
        attention_mask: as in ``LongNetModel.forward``.
        position_ids: as in ``LongNetModel.forward``.
        piece: tokens read at once; the result does not depend on it.

    Returns:
        (B, keep or N, hidden).
    """
    length, columns = input_ids.shape[1], cache.columns
    if attention_mask is not None:
        attention_mask = attention_mask[:, -length:]
    kept: list[Tensor] = []
    for begin, end in _pieces(columns, length, piece):
        part = slice(begin, end)
        hidden = decoder(
            input_ids[:, part],
            position_ids=None if position_ids is None else position_ids[:, part],
            past_key_values=cache,
            attention_mask=None if attention_mask is None else attention_mask[:, part],
        )
        # A copy, since a view of the last states would hold all of the piece's.
        kept = [torch.cat((*kept, hidden), 1)[:, -keep:].clone()] if keep else [*kept, hidden]
    return torch.cat(kept, 1)


def read_stream(decoder: Decoder, pieces: Iterable[Tensor], cache: LongNetCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads tokens as they come and yields (input_ids, hidden states) of every piece: for losses over any length.

    Args:
        decoder: a ``LongNetModel``.
        pieces: token ids (B, n), one piece behind the other; multiples of ``PIECE`` are read fastest.
        cache: holds what the next piece can see, and nothing else.
    """
    for input_ids in pieces:
        yield input_ids, decoder(input_ids, past_key_values=cache)


def _pieces(columns: int, length: int, piece: int) -> Iterator[tuple[int, int]]:
    """Cuts the columns [columns, columns + length) at the multiples of ``piece``, counted from the first of them."""
    begin = 0
    while begin < length:
        end = min(length, begin + piece - (columns + begin) % piece)
        yield begin, end
        begin = end
