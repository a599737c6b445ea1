"""How well text is predicted: by how much of it is seen, and by how far into it a token stands."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longnet.data import Tokenizer
from longnet.data.packing import TokenStream
from longnet.model import LongNetForCausalLM

from .intervals import Estimate, mean_of_groups
from .losses import read_losses

Tokens = npt.NDArray[Any]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class ContextRow:
    """The loss with a window of so many tokens, on the same targets for every window.

    Attributes:
        context: tokens of a window.
        read: tokens really read at once: the context, or the trained length where the window slides beyond it; a
            target sees at least ``read - targets of a block`` of them.
        tokens: targets.
        loss: nats a token, over all targets.
        low: lower end of the loss's 95 % interval.
        high: upper end.
        perplexity: e to the loss.
        bits_per_byte: of the targets' own bytes.
        gain: by how much the loss is lower than with the shortest window; blocks are compared with themselves, so
            its interval is narrower than those of the losses.
        gain_low: lower end of the gain's 95 % interval.
        gain_high: upper end.
    """

    context: int
    read: int
    tokens: int
    loss: float
    low: float
    high: float
    perplexity: float
    bits_per_byte: float
    gain: float
    gain_low: float
    gain_high: float


@dataclass(frozen=True)
class PositionRow:
    """The loss of the tokens that stand at positions ``begin`` to ``end - 1`` of what was read."""

    begin: int
    end: int
    tokens: int
    loss: float
    low: float
    high: float
    perplexity: float


@dataclass(frozen=True)
class Blocks:
    """Targets: stretches of ``size`` tokens of a stream that end at ``ends``."""

    ends: tuple[int, ...]
    size: int


def choose_blocks(
    stretches: Sequence[tuple[int, int]], contexts: Sequence[int], max_tokens: int, trained: int | None = None
) -> Blocks:
    """Targets, evenly spread over stretches of a stream, that every context can be measured on.

    A block has half as many tokens as are read of the shortest window, and lies where the longest one fits into its
    stretch.

    Args:
        stretches: first and last index of each: the whole stream, or its documents.
        contexts: the windows' lengths.
        max_tokens: targets at most.
        trained: windows longer than this slide, as in `loss_by_context`; None reads them whole.
    """
    longest = max(contexts)
    size = max(1, min(*contexts, trained or longest) // 2)
    available = max((last - first + 1 for first, last in stretches), default=0)
    if available <= longest:
        raise ValueError(
            f"contexts={list(contexts)}: the longest window and one token need {longest + 1} tokens of text, there are "
            f"{available}; expected at most {available - 1}, or more text"
        )
    rooms = [range(first + longest + 1, last + 2, size) for first, last in stretches]
    before = list(accumulate(map(len, rooms), initial=0))
    count = max(1, min(before[-1], max_tokens // size))
    chosen = [round(i * (before[-1] - 1) / max(count - 1, 1)) for i in range(count)]
    holders = [bisect_right(before, index) - 1 for index in chosen]
    return Blocks(tuple(rooms[at][index - before[at]] for at, index in zip(holders, chosen, strict=True)), size)


@torch.inference_mode()
def loss_by_context(
    model: LongNetForCausalLM,
    stream: TokenStream,
    contexts: Sequence[int],
    tokenizer: Tokenizer,
    *,
    blocks: Blocks,
    batch_tokens: int,
    trained: int | None = None,
    advance: Advance = lambda tokens: None,
) -> list[ContextRow]:
    """The loss of the same targets for windows of several lengths.

    Args:
        model: the language model, in eval mode.
        stream: token ids; may be a memory map.
        contexts: the windows' lengths.
        tokenizer: tells how many bytes the targets stand for.
        blocks: the targets, as `choose_blocks` gives them.
        batch_tokens: tokens read at once.
        trained: windows longer than this slide: each target sees the latest so many tokens. None reads them whole,
            at positions that training may never have had.
        advance: told of the tokens that were read.

    Raises:
        ValueError: if blocks are longer than what is read: not all of their targets would be predicted.
    """
    contexts = sorted(set(contexts))
    num_bytes = sum(len(tokenizer.decode(stream[end - blocks.size : end])) for end in blocks.ends)
    tokens = len(blocks.ends) * blocks.size
    rows: list[ContextRow] = []
    sums: dict[int, list[float]] = {}
    for context in contexts:
        read = min(context, trained or context)
        if read not in sums:
            sums[read] = _block_sums(model, stream, blocks, read, batch_tokens, advance)
        counts = [blocks.size] * len(blocks.ends)
        loss = mean_of_groups(sums[read], counts)
        shortest = sums[min(sums)]
        gain = mean_of_groups([a - b for a, b in zip(shortest, sums[read], strict=True)], counts)
        bits = sum(sums[read]) / math.log(2) / max(num_bytes, 1)
        rows.append(ContextRow(
            context, read, tokens, loss.value, loss.low, loss.high, _perplexity(loss), bits, gain.value, gain.low,
            gain.high,
        ))  # fmt: skip
    return rows


def _block_sums(
    model: LongNetForCausalLM, stream: TokenStream, blocks: Blocks, window: int, batch_tokens: int, advance: Advance
) -> list[float]:
    if blocks.size > window:
        raise ValueError(
            f"blocks of {blocks.size} tokens: expected at most the {window} that are read, as choose_blocks gives them "
            f"for the same contexts and trained={window}"
        )
    sums: list[float] = []
    at_once = max(1, batch_tokens // window)
    for begin in range(0, len(blocks.ends), at_once):
        ends = blocks.ends[begin : begin + at_once]
        # One more than is read, to predict the last.
        ids = np.stack([np.asarray(stream[end - window - 1 : end], dtype=np.int64) for end in ends])
        total = torch.zeros(len(ends), dtype=torch.float64)
        first = window + 1 - blocks.size
        for _, losses, _ in read_losses(model, torch.from_numpy(ids), first=first, piece=batch_tokens):
            total += losses.double().sum(1).cpu()
        sums += total.tolist()
        advance(len(ends) * window)
    return sums


@torch.inference_mode()
def loss_by_position(
    model: LongNetForCausalLM,
    sequences: Iterable[Tokens],
    *,
    batch_tokens: int,
    advance: Advance = lambda tokens: None,
) -> list[PositionRow]:
    """The loss of all tokens but the first of sequences of any length, by position: 1-63, 64-127, 128-255 and so on.

    A sequence is read whole, in one context, piece by piece: memory does not grow with its length.
    """
    sums: list[dict[int, float]] = []
    counts: list[dict[int, int]] = []
    for sequence in sequences:
        ids = torch.from_numpy(np.asarray(sequence, dtype=np.int64))[None]
        total: dict[int, float] = {}
        number: dict[int, int] = {}
        done = 0
        for begin, losses, _ in read_losses(model, ids, piece=batch_tokens):
            values = losses[0].double().cpu().numpy()
            buckets = bucket_of(np.arange(begin, begin + len(values)))
            for bucket in np.unique(buckets).tolist():
                inside = values[buckets == bucket]
                total[bucket] = total.get(bucket, 0.0) + float(inside.sum())
                number[bucket] = number.get(bucket, 0) + len(inside)
            advance(begin + len(values) - 1 - done)
            done = begin + len(values) - 1
        sums.append(total)
        counts.append(number)
    rows = []
    for bucket in sorted({bucket for number in counts for bucket in number}):
        loss = mean_of_groups([s.get(bucket, 0.0) for s in sums], [c.get(bucket, 0) for c in counts])
        tokens = sum(c.get(bucket, 0) for c in counts)
        begin, end = bucket_range(bucket)
        rows.append(PositionRow(begin, end, tokens, loss.value, loss.low, loss.high, _perplexity(loss)))
    return rows


FIRST_BUCKET = 64


def bucket_of(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 for the first 64 positions, 1 for the next 64, and from there each as long as all before it."""
    return np.ceil(np.log2(np.maximum(positions + 1, FIRST_BUCKET) / FIRST_BUCKET)).astype(np.int64)


def bucket_range(bucket: int) -> tuple[int, int]:
    """The positions [begin, end) of a bucket."""
    return (0 if bucket == 0 else FIRST_BUCKET << (bucket - 1)), FIRST_BUCKET << bucket


def _perplexity(loss: Estimate) -> float:
    # A model that is far off is to be told as such, not to stop the evaluation.
    return math.exp(loss.value) if loss.value < 700 else math.inf
