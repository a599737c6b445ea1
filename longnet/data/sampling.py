"""Which rows make a batch: pure functions of (seed, step, rank, world), so a run resumes anywhere without replay.

Training reads one endless sequence of rows, and a batch is the next stretch of it. How a stretch is cut up (ranks,
accumulation, workers) does not change its rows. Ranks here are data ranks: those that read different rows. Processes
that share a row, as those of a sequence-parallel group do, have the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

# Rows over which a mixture keeps its weights exactly.
MIXTURE_PERIOD = 1000


class Order(Hashable, Protocol):
    """An endless sequence of rows."""

    @property
    def num_rows(self) -> int: ...
    def take(self, start: int, count: int) -> list[int]:
        """Give the rows at the places from `start` on."""


@dataclass(frozen=True)
class EpochOrder:
    """Every row once, in a fresh permutation for each epoch.

    Attributes:
        num_rows: Rows in the training set.
        seed: Chooses the permutations.
        shuffle: Keep the rows in order when False.
        part: Tells the permutations of one seed apart that serve different parts of a mixture.
    """

    num_rows: int
    seed: int = 0
    shuffle: bool = True
    part: int | None = None

    def take(self, start: int, count: int) -> list[int]:
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(start + len(rows), self.num_rows)
            end = min(self.num_rows, offset + count - len(rows))
            if self.shuffle:
                key = (epoch,) if self.part is None else (epoch, self.part)
                rows += permutation(self.num_rows, self.seed, key)[offset:end].tolist()
            else:
                rows += range(offset, end)
        return rows


@dataclass(frozen=True)
class MixtureOrder:
    """Rows of several parts by weight: exactly so over each thousand, nearly so anywhere, drawn anew for each.

    Within a part it is the part's own epochs: each of its rows once before any comes again. Rows are numbered through
    all parts, one part behind the other.

    Attributes:
        sizes: Rows of each part.
        weights: Share of each part; they need not add up to 1, and are kept to the thousandth.
        seed: Chooses all orders.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        for weight, count in zip(self.weights, self._counts, strict=True):
            if not weight > 0 or not count:
                least = sum(self.weights) / MIXTURE_PERIOD
                raise ValueError(
                    f"weights={list(self.weights)}: {weight} is less than a thousandth of their sum; expected at least "
                    f"{least:g}, or leave the part out"
                )

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def _counts(self) -> tuple[int, ...]:
        return _apportion(self.weights, MIXTURE_PERIOD)

    def take(self, start: int, count: int) -> list[int]:
        rows = []
        for place in range(start, start + count):
            period, offset = divmod(place, MIXTURE_PERIOD)
            parts, before = _period(self._counts, self.seed, period)
            part = int(parts[offset])
            taken = period * self._counts[part] + int(before[offset])
            (row,) = EpochOrder(self.sizes[part], self.seed, part=part).take(taken, 1)
            rows.append(sum(self.sizes[:part]) + row)
        return rows

    def counts(self, places: int) -> list[int]:
        """How many of the first so many places each part has."""
        period, offset = divmod(places, MIXTURE_PERIOD)
        inside = np.bincount(_period(self._counts, self.seed, period)[0][:offset], minlength=len(self.sizes))
        return [period * count + int(more) for count, more in zip(self._counts, inside, strict=True)]


class Piece(NamedTuple):
    """The `number`-th of the `of` equal parts of a row."""

    row: int
    number: int
    of: int


# What is read at a place of an order: a row, or pieces that are put together to be one.
Index = int | tuple[Piece, ...]


class Stage(NamedTuple):
    """Up to a place of an order, its rows are cut into so many pieces."""

    end: int
    pieces: int


@dataclass(frozen=True)
class GrowingOrder:
    """An order whose rows are put together anew, from pieces from everywhere, while training wants no longer ones.

    Pieces of one row are of one text: a batch of them teaches less than one of as many texts. Each stage has the pieces
    of exactly those rows that it would have whole, so that no text comes more often than it would.

    Attributes:
        order: The whole rows.
        stages: With rising ends; behind the last one rows are whole.
        seed: Chooses the permutations.
        together: Pieces that are shuffled among each other at most.
    """

    order: Order
    stages: tuple[Stage, ...]
    seed: int = 0
    together: int = 2**18

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    def take(self, start: int, count: int) -> Sequence[Index]:
        """Give what is read at the places from `start` on: a row, or the pieces to be put together."""
        if not self.stages or start >= self.stages[-1].end:
            return self.order.take(start, count)
        return [self._at(place) for place in range(start, start + count)]

    def _at(self, place: int) -> Index:
        begin = 0
        for end, pieces in self.stages:
            if place < end:
                # As many rows as are shuffled together, fewer at the end of the stage.
                most = max(self.together // pieces, 1)
                first = place - (place - begin) % most
                rows, shuffled = _shuffled_pieces(self.order, first, min(most, end - first), pieces, self.seed)
                own = shuffled[(place - first) * pieces : (place - first + 1) * pieces].tolist()
                return tuple(Piece(rows[piece // pieces], piece % pieces, pieces) for piece in own)
            begin = end
        (row,) = self.order.take(place, 1)
        return row


# A few, since a batch may lie in two.
@lru_cache(maxsize=4)
def _shuffled_pieces(
    order: Order, first: int, count: int, pieces: int, seed: int
) -> tuple[list[int], npt.NDArray[Any]]:
    """Rows at the places from `first` on, and the order of all their pieces."""
    # A key of four, so that nothing else is drawn from the same words.
    return order.take(first, count), permutation(count * pieces, seed, (first, pieces, 0, 0))


@lru_cache(maxsize=16)
def permutation(num_rows: int, seed: int, key: tuple[int, ...]) -> npt.NDArray[Any]:
    """A permutation of `range(num_rows)` that is the same wherever and whenever it is drawn."""
    # Sorting raw random words, not Generator.permutation: numpy promises the same words in every version, but not
    # the same permutation, and a run may be resumed after an upgrade.
    return np.argsort(_raw_words(num_rows, seed, key), kind="stable")


def _raw_words(count: int, seed: int, key: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)


def batch_rows(
    step: int,
    *,
    order: Order | GrowingOrder,
    batch_size: int,
    data_rank: int = 0,
    data_world: int = 1,
) -> Sequence[Index]:
    """Give the rows of one rank's batch at one step.

    Args:
        step: The micro-batch step, counted from 0 over the whole training.
        order: The sequence of rows; a batch may span epochs.
        batch_size: Rows a rank takes at a step.
        data_rank: Index among the ranks that read different data (not among all processes).
        data_world: How many such ranks there are; together they take `data_world * batch_size` consecutive rows.
    """
    return order.take((step * data_world + data_rank) * batch_size, batch_size)


class StepBatchSampler(Sampler[Sequence[Index]]):
    """One rank's training batches for ever, as a `batch_sampler` for a DataLoader; see `batch_rows`.

    Args:
        order: The sequence of rows, or the number of rows for epochs of all of them.
        batch_size: Rows a rank takes at a step.
        data_rank: Index among the ranks that read different data.
        data_world: How many such ranks there are.
        seed: Chooses the permutations, where `order` is a number.
        start_step: The micro-batch step to begin with, at no cost however large.
        shuffle: Keep the rows in order when False, where `order` is a number.
    """

    def __init__(
        self,
        order: Order | GrowingOrder | int,
        batch_size: int,
        data_rank: int = 0,
        data_world: int = 1,
        seed: int = 0,
        start_step: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.order = EpochOrder(order, seed, shuffle) if isinstance(order, int) else order
        _check_layout(self.order.num_rows, batch_size, data_rank, data_world)
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative; {-seed} would do")
        if start_step < 0:
            raise ValueError(f"start_step={start_step} must not be negative; 0 is the beginning")
        self.batch_size = batch_size
        self.data_rank = data_rank
        self.data_world = data_world
        self.start_step = start_step

    def __iter__(self) -> Iterator[Sequence[Index]]:
        step = self.start_step
        while True:
            yield batch_rows(
                step,
                order=self.order,
                batch_size=self.batch_size,
                data_rank=self.data_rank,
                data_world=self.data_world,
            )
            step += 1


def validation_batches(num_rows: int, batch_size: int, data_rank: int = 0, data_world: int = 1) -> list[list[int]]:
    """Give one rank's validation batches, to be used as a `batch_sampler`.

    All ranks have equally many, and the first n batches of all ranks together are the first
    `n * data_world * batch_size` rows, each once.

    Raises:
        ValueError: If the rows do not divide evenly; `PackedRows.padded_to_multiple` adds empty ones.
    """
    _check_layout(num_rows, batch_size, data_rank, data_world)
    per_step = data_world * batch_size
    if num_rows % per_step:
        raise ValueError(
            f"num_rows={num_rows} must be a multiple of data_world * batch_size = {per_step}; "
            f"take rows.padded_to_multiple({per_step}), which has {-(-num_rows // per_step) * per_step}"
        )
    starts = range(data_rank * batch_size, num_rows, per_step)
    return [list(range(start, start + batch_size)) for start in starts]


@lru_cache(maxsize=4)
def _period(counts: tuple[int, ...], seed: int, period: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The part of each place of a period, and how many places of that part come before it."""
    # A key of three, so that no part's epoch is drawn from the same words.
    draws = _raw_words(MIXTURE_PERIOD, seed, (period, 0, 0)) / 2**64
    # Of a part's n places, each is drawn from its own n-th of the period: the weights hold nearly everywhere in it.
    number = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((number + draws) / np.repeat(counts, counts), kind="stable")
    return np.repeat(np.arange(len(counts)), counts)[order], number[order]


@lru_cache(maxsize=4)
def _apportion(weights: tuple[float, ...], places: int) -> tuple[int, ...]:
    """Whole numbers of places in proportion to the weights, by largest remainders."""
    exact = [weight / sum(weights) * places for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: counts[part] - exact[part])
    for part in by_remainder[: places - sum(counts)]:
        counts[part] += 1
    return tuple(counts)


def _check_layout(num_rows: int, batch_size: int, data_rank: int, data_world: int) -> None:
    for name, value in (("num_rows", num_rows), ("batch_size", batch_size), ("data_world", data_world)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not 0 <= data_rank < data_world:
        raise ValueError(f"data_rank={data_rank} must be from 0 to data_world - 1 = {data_world - 1}")
