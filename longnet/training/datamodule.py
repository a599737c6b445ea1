"""Batches for Lightning: whole optimiser steps for training, equally many batches on every process for validation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from longnet.data import Corpus, StepBatchSampler, validation_batches
from longnet.data.documents import Split
from longnet.data.growing import GrowingRows
from longnet.data.mixture import MixedRows, Rows
from longnet.data.packing import Row, collate
from longnet.data.sampling import GrowingOrder, Index, MixtureOrder, Stage, batch_rows
from longnet.data.stream import RowStream, StreamBatches
from longnet.parallel import MeshShape

from .growth import ContextGrowth

# Rows and documents that a message names.
SHOWN = 32


class TextDataModule(LightningDataModule):
    """Serves a corpus; training begins at the trainer's step, so a resumed run reads on where it stopped.

    Args:
        corpus: the rows.
        batch_size: rows per forward pass and process.
        accumulate: forward passes per optimiser step; a training batch holds the rows of all of them.
        seed: fixes the order of the rows.
        num_workers: processes that prepare rows.
        val_batches: validation batches per process; None for all.
        overfit_batches: train and validate on the first so many batches of the training rows; 0 for all.
        data_world: how many groups of processes read different rows. Processes of one group, which are neighbours in
            rank, share each row.
        data_rank: this process's group; by its rank when None.
        growth: rows are cut before the steps at which their contexts grow, and put together from pieces of many. A run
            that goes on keeps the steps it began with.
    """

    def __init__(
        self,
        corpus: Corpus,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        val_batches: int | None = None,
        overfit_batches: int = 0,
        data_world: int = 1,
        data_rank: int | None = None,
        growth: ContextGrowth | None = None,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        self.num_workers = num_workers
        self.data_world = data_world
        self._data_rank = data_rank
        self._loader: TimedLoader | None = None
        self._start: dict[str, int] | None = None
        # Data left out for good: [step, batches]: before that step, so many batches are passed over.
        self.left_out: list[list[int]] = []
        self._decided: list[list[int]] | None = None
        self.growth = growth or ContextGrowth([], 0)
        rows_at_once = batch_size * data_world
        self.rows_per_step = rows_at_once * accumulate
        if isinstance(corpus.train, RowStream):
            if overfit_batches:
                raise ValueError(
                    f"trainer.overfit_batches={overfit_batches}: a stream has no first batches to come back to; use 0, "
                    "or data.streaming=false"
                )
            self.train_rows: int | None = None
        else:
            self.train_rows = min(len(corpus.train), overfit_batches * rows_at_once or len(corpus.train))
            self._order = corpus.order(seed, self.train_rows if overfit_batches else None)
            _check_pieces(corpus.train, self._growing)
        # What is to be learnt by heart is also what says whether it was.
        self._validated: Split = "train" if overfit_batches else "validation"
        validation_rows = self.train_rows if overfit_batches and self.train_rows else len(corpus.validation)
        batches = -(-validation_rows // rows_at_once)
        self._val_batches = batches if val_batches is None else min(batches, val_batches)
        self._validation = getattr(corpus, self._validated).padded_to_multiple(rows_at_once)
        self.validation_rows = min(self._val_batches * rows_at_once, validation_rows)
        self.validation_bytes = len(self.validation_content())

    @property
    def data_rank(self) -> int:
        """The group of processes that this one reads rows with."""
        if self._data_rank is not None:
            return self._data_rank
        assert self.trainer is not None
        sharing = max(self.trainer.world_size // self.data_world, 1)
        return MeshShape(self.data_world, sharing).data_rank(self.trainer.global_rank)

    @property
    def _growing(self) -> GrowingOrder:
        context = self.corpus.train.context_length
        stages = tuple(Stage(end * self.rows_per_step, context // size) for size, end in self.growth.stages)
        return GrowingOrder(self._order, stages, self.seed)

    def context_of(self, step: int) -> int | None:
        """The context that the rows of a step are cut to; None where they are whole."""
        return self.growth.context(self.batch_of(step))

    def validation_content(self) -> bytes:
        """The bytes that validation predicts, for measuring something else on the same ones."""
        return self.corpus.content(self._validated, self.validation_rows)

    def train_dataloader(self) -> TimedLoader:
        assert self.trainer is not None
        layout = (self.batch_size * self.accumulate, self.data_rank, self.data_world)
        if isinstance(self.corpus.train, RowStream):
            passed = sum(batches for step, batches in self.left_out if step == self.trainer.global_step)
            rows: Any = StreamBatches(self.corpus.train, *layout, state=self._start, passed=passed)
            # A second worker would read everything a second time.
            options = {"batch_size": None, **self._options(min(self.num_workers, 1))}
        else:
            rows = GrowingRows(self.corpus.train)
            sampler = StepBatchSampler(self._growing, *layout, start_step=self.batch_of(self.trainer.global_step))
            options = {"batch_sampler": sampler, "collate_fn": collate, **self._options(self.num_workers)}
        self._loader = TimedLoader(rows, self.trainer.global_step, self._start, **options)
        return self._loader

    def val_dataloader(self) -> DataLoader[Row]:
        batches = validation_batches(len(self._validation), self.batch_size, self.data_rank, self.data_world)
        sampler = batches[: self._val_batches]
        return DataLoader(
            self._validation, batch_sampler=sampler, collate_fn=collate, **self._options(self.num_workers)
        )

    def batch_of(self, step: int) -> int:
        """The number of the batch that a step trains on."""
        return step + sum(batches for start, batches in self.left_out if start <= step)

    def leave_out(self, step: int, batches: int) -> None:
        """Passes over what so many steps from ``step`` on were trained on, where a run is about to go on from."""
        known = [[start, passed] for start, passed in self.left_out if start <= step]
        more = self.batch_of(step + batches) - step - sum(passed for _, passed in known)
        # The checkpoint of that step need not know all of it: some may have been decided since.
        self._decided = self.left_out = [*known, [step, more]]
        self._start = self._loader = None

    def describe_batch(self, step: int) -> str:
        """What this process trains on in a step, in words: rows, and the documents in them."""
        if self.corpus.is_stream:
            assert self._loader is not None
            return f"its rows lie before {self._loader.states.get(step + 1)} in the stream"
        size = self.batch_size * self.accumulate
        layout = {"batch_size": size, "data_rank": self.data_rank, "data_world": self.data_world}
        read = batch_rows(self.batch_of(step), order=self._growing, **layout)
        pieces = "" if all(isinstance(index, int) for index in read) else "pieces of "
        rows = sorted({row for index in read for row in _rows_of(index)})
        documents = self.corpus.documents_of(rows[:SHOWN])
        named = f", with documents {_shorten(documents)}," if documents else ""
        return f"its batch is {pieces}rows {_shorten(rows)}{named} of the training data"

    def take_wait(self) -> float:
        """Seconds that training has waited for batches since the last call."""
        return self._loader.take_wait() if self._loader is not None else 0.0

    def part_rows(self, step: int) -> dict[str, int]:
        """How many rows each part of a mixture has given in the first so many steps; of pieces, as many on average."""
        order = None if self.corpus.is_stream else self._order
        if not isinstance(order, MixtureOrder):
            return {}
        return dict(zip(self.corpus.weights, order.counts(self.batch_of(step) * self.rows_per_step), strict=True))

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        step = self.trainer.global_step
        place = self._loader.states.get(step) if self._loader is not None else self._start
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "step": step,
            "rows_per_step": self.rows_per_step,
            "left_out": self.left_out,
            "growth": self.growth.stages,
            "stream": place if self.corpus.is_stream else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        here = {"fingerprint": self.corpus.fingerprint, "seed": self.seed, "rows_per_step": self.rows_per_step}
        there = {key: state_dict[key] for key in here}
        if differing := [f"{key} is {here[key]}, was {there[key]}" for key in here if here[key] != there[key]]:
            raise ValueError(
                f"the checkpoint's data cannot be gone on with: {'; '.join(differing)}. The next batch would not be "
                "the one that would have come; keep the data, the seed, and the rows of a step, which are "
                "data.batch_size x trainer.accumulate x data ranks"
            )
        self._start = state_dict["stream"]
        self.left_out = state_dict["left_out"] if self._decided is None else self._decided
        self._decided = None
        # Not by the steps of this run, which may have another end: the same pieces would come again.
        self.growth.stages = [(context, end) for context, end in state_dict.get("growth", self.growth.stages)]

    def _options(self, num_workers: int) -> dict[str, Any]:
        assert self.trainer is not None
        return {
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "pin_memory": self.trainer.strategy.root_device.type == "cuda",
            # Its own generator: starting an iterator must not advance the global random state.
            "generator": torch.Generator().manual_seed(self.seed),
        }


def _rows_of(index: Index) -> list[int]:
    return [index] if isinstance(index, int) else [piece.row for piece in index]


def _shorten(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return shown if len(numbers) <= SHOWN else f"{shown} and {len(numbers) - SHOWN} more"


def _check_pieces(rows: Rows | MixedRows, growing: GrowingOrder) -> None:
    """Reads a piece of each kind: a task may need longer ones."""
    for _, pieces in growing.stages:
        for part in rows.parts if isinstance(rows, MixedRows) else [rows]:
            try:
                part.piece(0, 0, pieces)
            except ValueError as error:
                raise ValueError(f"finetune.context_growth has {rows.context_length // pieces}: {error}") from error


class TimedLoader(DataLoader[Row]):
    """A loader that knows how long its batches were waited for and, for a stream, where each of them begins.

    Args:
        rows: what it reads.
        step: the step of the first batch.
        state: the place in the stream before it, where it is a stream.
        options: of the loader.
    """

    def __init__(self, rows: Any, step: int, state: dict[str, int] | None, **options: Any) -> None:
        super().__init__(rows, **options)
        # The place before each step from the last few on: batches are fetched before they are trained on.
        self.states = {step: state}
        self._first_step = step
        self._waited = 0.0

    def __iter__(self) -> Iterator[Row]:  # type: ignore[override]
        batches = super().__iter__()
        for step in count(self._first_step + 1):
            start = time.perf_counter()
            batch = next(batches)
            self._waited += time.perf_counter() - start
            if "state" in batch:
                self.states[step] = batch.pop("state")
                # Lightning holds one batch ahead of the one in training.
                self.states.pop(step - 4, None)
            yield batch

    def take_wait(self) -> float:
        """Seconds waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited
