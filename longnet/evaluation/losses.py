"""The loss of every token of sequences of any length, in memory that does not grow with them.

Sequences are read piece by piece through the bounded cache. Where a layer is dense its keys stay, as they must.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longnet.model import LongNetCache, LongNetForCausalLM
from longnet.model.reading import PIECE

# Logits held at a time: 256 MiB in float32.
LOGITS = 2**26


def read_losses(
    model: LongNetForCausalLM, ids: Tensor, *, first: int = 1, piece: int = PIECE, cache: LongNetCache | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Reads (B, N) token ids and yields, piece by piece, what it cost to predict them.

    Args:
        model: the language model.
        ids: (B, N) on any device; a piece at a time is moved to the model's.
        first: the first position to predict, at least 1.
        piece: tokens of a row read at once; the losses do not depend on it.
        cache: what was read before these ids; an empty one by default.

    Yields:
        (position of the first of them, their losses in nats (B, n) in float32, whether each was the likeliest token).
    """
    cache = LongNetCache(model.config) if cache is None else cache
    length = ids.shape[1]
    for begin in range(0, length - 1, piece):
        # The last token is only predicted.
        end = min(begin + piece, length - 1)
        hidden = model.model(ids[:, begin:end].to(model.device), past_key_values=cache)
        wanted = max(first, begin + 1)
        if wanted <= end:
            labels = ids[:, wanted : end + 1].to(model.device)
            yield wanted, *token_losses(model, hidden[:, wanted - 1 - begin :], labels)


def token_losses(model: LongNetForCausalLM, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each label (B, n) given the hidden states (B, n, C) before it, and whether it was the likeliest."""
    states, wanted = hidden.flatten(0, 1), labels.flatten()
    losses, likeliest = [], []
    rows = max(1, LOGITS // model.config.vocab_size)
    for part, label in zip(states.split(rows), wanted.split(rows), strict=True):
        logits = model.lm_head(part).float()
        losses.append(torch.nn.functional.cross_entropy(logits, label, reduction="none"))
        likeliest.append(logits.argmax(-1) == label)
    return torch.cat(losses).view_as(labels), torch.cat(likeliest).view_as(labels)
