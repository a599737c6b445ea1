"""Whether a model finds again what stands far back: tasks over lengths and depths, and needles at awkward places.

A prompt is read once, through the bounded cache; the cache is then branched, once for each answer that is scored. An
answer is judged three ways: by its likelihood, by whether it is likelier than other answers (base models fail to
generate for reasons that are no matter of memory), and by greedy generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longnet.attention import DilationPattern
from longnet.data import Sample, Tokenizer, build_sample
from longnet.model import LongNetCache, LongNetForCausalLM
from longnet.model.config import LongNetConfig
from longnet.model.reading import read

from .intervals import mean_of_groups, share
from .losses import token_losses

Advance = Callable[[int], None]

# Wrong answers beside the right one, where a sample has none of its own: those of other samples of the same task.
RIVALS = 9
# Tokens of an answer that are generated, and longest answer that is compared with others.
GENERATED = 32
# Positions before a border, at it and after it, at which a needle is placed.
BORDER_OFFSETS = (-64, -32, -8, -1, 0, 1, 8, 32)
# Phases of the coarsest level that are tried.
PHASES = 16


@dataclass(frozen=True)
class Score:
    """How a model did on one sample.

    Attributes:
        losses: nats of the answer's tokens together.
        tokens: of the answer.
        right: tokens that were the likeliest, given the right ones before them.
        preferred: whether the answer is likelier than the others; None where they were not compared.
        generated: whether greedy generation gives it (its first ``GENERATED`` tokens).
    """

    losses: float
    tokens: int
    right: int
    preferred: bool | None
    generated: bool


@dataclass(frozen=True)
class RetrievalRow:
    """A task at a length and a depth, over several samples. Intervals are 95 % ones.

    ``loss`` is in nats a token of the answer, ``tokens_right`` a share of them, ``preferred`` and ``generated`` are
    shares of the samples (see ``Score``); ``preferred`` is NaN where answers are too long to be compared.
    """

    task: str
    length: int
    depth: float
    samples: int
    loss: float
    loss_low: float
    loss_high: float
    tokens_right: float
    preferred: float
    preferred_low: float
    preferred_high: float
    generated: float
    generated_low: float
    generated_high: float


@dataclass(frozen=True)
class PlacementRow:
    """A needle that begins at a chosen token: at an offset from a segment's border, or in a dilation's phase.

    ``preferred`` is a share of the samples whose answers were compared with others, NaN where none were.
    """

    task: str
    length: int
    place: str
    offset: int
    position: int
    samples: int
    loss: float
    preferred: float
    preferred_low: float
    preferred_high: float
    generated: float


def retrieval_grid(
    model: LongNetForCausalLM,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    samples: int,
    batch_tokens: int,
    seed: int = 0,
    advance: Advance = lambda tokens: None,
) -> list[RetrievalRow]:
    """Every task at every length and depth; `copy`, which has no needle, at depth 0 alone."""
    rows = []
    for task in tasks:
        for length in sorted(lengths):
            for depth in [0.0] if task == "copy" else sorted(depths):
                made = [
                    build_sample(task, tokenizer, length - 1, seed=seed, index=i, depth=depth) for i in range(samples)
                ]
                scores = score_samples(model, tokenizer, made, batch_tokens=batch_tokens, advance=advance)
                loss = mean_of_groups([s.losses for s in scores], [s.tokens for s in scores])
                right = sum(s.right for s in scores) / sum(s.tokens for s in scores)
                compared = [s.preferred for s in scores if s.preferred is not None]
                preferred = share(sum(compared), len(compared))
                generated = share(sum(s.generated for s in scores), samples)
                rows.append(RetrievalRow(
                    task, length, depth, samples, loss.value, loss.low, loss.high, right, preferred.value,
                    preferred.low, preferred.high, generated.value, generated.low, generated.high,
                ))  # fmt: skip
    return rows


def placement_sweep(
    model: LongNetForCausalLM,
    tokenizer: Tokenizer,
    length: int,
    *,
    task: str = "needle",
    samples: int,
    batch_tokens: int,
    seed: int = 0,
    advance: Advance = lambda tokens: None,
) -> list[PlacementRow]:
    """Needles on both sides of the borders of every segment length, and in every phase of the coarsest level.

    The questions of a place end at different tokens, over all phases of the coarsest level: what a query sees depends
    on its own as much as on the needle's.
    """
    rows = []
    coarsest = _coarsest(_dilated(model.config))
    for place, offset, position in awkward_places(model.config, length):
        try:
            # The first token of a row is the end of the text before it.
            made = [
                build_sample(task, tokenizer, length - 1 - i * coarsest // samples, seed=seed, index=i, at=position - 1)
                for i in range(samples)
            ]
        except ValueError:
            # Too near to an end for a needle.
            advance(samples * length)
            continue
        scores = score_samples(model, tokenizer, made, batch_tokens=batch_tokens, advance=advance)
        loss = mean_of_groups([s.losses for s in scores], [s.tokens for s in scores])
        compared = [s.preferred for s in scores if s.preferred is not None]
        preferred = share(sum(compared), len(compared))
        generated = sum(s.generated for s in scores) / samples
        rows.append(PlacementRow(
            task, length, place, offset, position, samples, loss.value, preferred.value, preferred.low, preferred.high,
            generated,
        ))  # fmt: skip
    return rows


def awkward_places(config: LongNetConfig, length: int) -> list[tuple[str, int, int]]:
    """Where a dilated pattern may be blind, as (what place it is, offset from it, position)."""
    patterns = _dilated(config)
    places: dict[tuple[str, int], int] = {}
    for pattern in patterns:
        for segment, _ in pattern.levels:
            # The border nearest to the middle.
            border = (length // 2 + pattern.shift) // segment * segment - pattern.shift
            if 0 < border < length:
                for offset in BORDER_OFFSETS:
                    places[f"border of {segment}", offset] = border + offset
    coarsest = _coarsest(patterns)
    if coarsest > 1:
        step = max(1, coarsest // PHASES)
        for phase in range(0, coarsest, step):
            places[f"phase of {coarsest}", phase] = length // 3 // coarsest * coarsest + phase
    return [(place, offset, position) for (place, offset), position in places.items() if 0 < position < length]


def _dilated(config: LongNetConfig) -> list[DilationPattern]:
    """The patterns of the layers that have one."""
    specs = [config.block_spec(layer) for layer in range(config.num_hidden_layers)]
    return [
        DilationPattern(tuple(spec["segment_lengths"]), tuple(spec["dilation_rates"]), shift=spec.get("shift", 0))
        for spec in specs
        if spec["name"] == "dilated"
    ]


def _coarsest(patterns: Sequence[DilationPattern]) -> int:
    return max((rate for pattern in patterns for rate in pattern.dilation_rates), default=1)


@torch.inference_mode()
def score_samples(
    model: LongNetForCausalLM,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    *,
    batch_tokens: int,
    advance: Advance = lambda tokens: None,
) -> list[Score]:
    """Judges samples, several at a time where their prompts have the same length; the scores keep their order."""
    answers = [sample.ids[sample.answer_start :].astype(np.int64) for sample in samples]
    scores: dict[int, Score] = {}
    for batch in _batches(samples, batch_tokens):
        prompts = np.stack([np.concatenate([[tokenizer.eos_id], samples[i].prompt]) for i in batch]).astype(np.int64)
        cache = LongNetCache(model.config)
        piece = max(1, batch_tokens // len(batch))
        hidden = read(model.model, torch.from_numpy(prompts).to(model.device), cache, keep=1, piece=piece)
        judged = [
            _judge(model, hidden[row : row + 1], cache.branch([row]), answers[i], _rivals(samples[i], answers))
            for row, i in enumerate(batch)
        ]
        generated = _generates(model, hidden, cache, [answers[index][:GENERATED] for index in batch])
        # Only here the host waits for the device.
        for index, (loss, right, best), same in zip(batch, torch.stack(judged).tolist(), generated, strict=True):
            preferred = None if isnan(best) else bool(best)
            scores[index] = Score(loss, len(answers[index]), int(right), preferred, same)
        advance(prompts.size)
    return [scores[index] for index in range(len(samples))]


def _batches(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of samples that are read together: of one length, since rows of different lengths are read one by one."""
    order = sorted(range(len(samples)), key=lambda index: samples[index].answer_start)
    for length, group in groupby(order, key=lambda index: samples[index].answer_start):
        members = list(group)
        at_once = max(1, batch_tokens // (length + 1))
        for begin in range(0, len(members), at_once):
            yield members[begin : begin + at_once]


def _rivals(sample: Sample, answers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The sample's own, or the answers of others; none where they are too long to be compared."""
    if sample.rivals:
        return [np.array([rival], np.int64) for rival in sample.rivals]
    answer = sample.ids[sample.answer_start :]
    if len(answer) > GENERATED:
        return []
    return [other for other in answers if len(other) <= GENERATED and not np.array_equal(other, answer)][:RIVALS]


def _judge(
    model: LongNetForCausalLM, hidden: Tensor, cache: LongNetCache, answer: np.ndarray, rivals: Sequence[np.ndarray]
) -> Tensor:
    """The loss of an answer, its tokens that were the likeliest, and whether it is likelier than its rivals.

    ``hidden`` (1, 1, C) is the state behind the prompt. The last is NaN where there are none.
    """
    candidates = [answer, *rivals]
    ids, inside = (made.to(model.device) for made in _padded(candidates))
    branched = cache.branch([0] * len(candidates))
    states = hidden.expand(len(candidates), 1, -1)
    if ids.shape[1] > 1:
        states = torch.cat((states, model.model(ids[:, :-1], past_key_values=branched)), 1)
    losses, likeliest = token_losses(model, states, ids)
    # Means over the tokens: otherwise the shorter answer would win.
    means = (losses * inside).sum(1) / inside.sum(1)
    # Also of a model that gives no numbers it is known: it prefers nothing.
    best = (means[0] < means[1:].min()).to(means.dtype) if rivals else torch.full_like(means[0], torch.nan)
    right = likeliest[0, : len(answer)].sum()
    return torch.stack((means[0] * len(answer), right.to(means.dtype), best))


def _generates(
    model: LongNetForCausalLM, hidden: Tensor, cache: LongNetCache, answers: Sequence[np.ndarray]
) -> list[bool]:
    """For each row, whether taking the likeliest token, again and again, gives its answer."""
    ids, inside = (made.to(model.device) for made in _padded(answers))
    same = torch.ones(len(answers), dtype=torch.bool, device=model.device)
    for place in range(ids.shape[1]):
        token = model.lm_head(hidden[:, -1]).float().argmax(-1)
        same &= (token == ids[:, place]) | ~inside[:, place]
        if place + 1 == ids.shape[1] or not same.any():
            break
        hidden = model.model(token[:, None], past_key_values=cache)
    found: list[bool] = same.tolist()
    return found


def _padded(answers: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Answers as rows of one length, and which places are theirs. What follows a shorter one is not counted."""
    rows = [torch.from_numpy(answer) for answer in answers]
    inside = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(inside, batch_first=True)
