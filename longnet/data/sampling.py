"""Which rows make a batch: pure functions of (seed, step, rank, world), so a run resumes anywhere without replay.

Training reads one endless sequence of rows, a fresh permutation of all of them for each epoch, and a batch is the
next stretch of it. How a stretch is cut up (ranks, accumulation, workers) does not change its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler


@lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[Any]:
    # Sorting raw random words, not Generator.permutation: numpy promises the same words in every version, but not
    # the same permutation, and a run may be resumed after an upgrade.
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def batch_rows(
    step: int, *, num_rows: int, batch_size: int, rank: int = 0, world: int = 1, seed: int = 0, shuffle: bool = True
) -> list[int]:
    """Give the rows of one rank's batch at one step.

    Args:
        step: The micro-batch step, counted from 0 over the whole training.
        num_rows: Rows in the training set; an epoch is each of them once, and a batch may span epochs.
        batch_size: Rows a rank takes at a step.
        rank: Index among the ranks that read different data (not among all processes).
        world: How many such ranks there are; together they take `world * batch_size` consecutive rows.
        seed: Chooses the permutations.
        shuffle: Keep the rows in order when False.
    """
    start = (step * world + rank) * batch_size
    rows: list[int] = []
    while len(rows) < batch_size:
        epoch, offset = divmod(start + len(rows), num_rows)
        end = min(num_rows, offset + batch_size - len(rows))
        rows += _permutation(num_rows, seed, epoch)[offset:end].tolist() if shuffle else range(offset, end)
    return rows


class StepBatchSampler(Sampler[list[int]]):
    """One rank's training batches for ever, as a `batch_sampler` for a DataLoader; see `batch_rows`.

    Args:
        num_rows: Rows in the training set.
        batch_size: Rows a rank takes at a step.
        rank: Index among the ranks that read different data.
        world: How many such ranks there are.
        seed: Chooses the permutations.
        start_step: The micro-batch step to begin with, at no cost however large.
        shuffle: Keep the rows in order when False.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        start_step: int = 0,
        shuffle: bool = True,
    ) -> None:
        _check_layout(num_rows, batch_size, rank, world)
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative; {-seed} would do")
        if start_step < 0:
            raise ValueError(f"start_step={start_step} must not be negative; 0 is the beginning")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.rank = rank
        self.world = world
        self.seed = seed
        self.start_step = start_step
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_step
        while True:
            yield batch_rows(
                step,
                num_rows=self.num_rows,
                batch_size=self.batch_size,
                rank=self.rank,
                world=self.world,
                seed=self.seed,
                shuffle=self.shuffle,
            )
            step += 1


def validation_batches(num_rows: int, batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """Give one rank's validation batches, to be used as a `batch_sampler`.

    All ranks have equally many, and the first n batches of all ranks together are the first `n * world * batch_size`
    rows, each once.

    Raises:
        ValueError: If the rows do not divide evenly; `PackedRows.padded_to_multiple` adds empty ones.
    """
    _check_layout(num_rows, batch_size, rank, world)
    per_step = world * batch_size
    if num_rows % per_step:
        raise ValueError(
            f"num_rows={num_rows} must be a multiple of world * batch_size = {per_step}; "
            f"take rows.padded_to_multiple({per_step}), which has {-(-num_rows // per_step) * per_step}"
        )
    starts = range(rank * batch_size, num_rows, per_step)
    return [list(range(start, start + batch_size)) for start in starts]


def _check_layout(num_rows: int, batch_size: int, rank: int, world: int) -> None:
    for name, value in (("num_rows", num_rows), ("batch_size", batch_size), ("world", world)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} must be from 0 to world - 1 = {world - 1}")
