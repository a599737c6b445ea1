"""Batches for Lightning: whole optimiser steps for training, equally many batches on every process for validation."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from longnet.data import Corpus, StepBatchSampler, validation_batches
from longnet.data.documents import Split


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
        world_size: how many processes read different rows.
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
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        self.num_workers = num_workers
        self.world_size = world_size
        rows_at_once = batch_size * world_size
        self.train_rows = min(len(corpus.train), overfit_batches * rows_at_once or len(corpus.train))
        # What is to be learnt by heart is also what says whether it was.
        self._validated: Split = "train" if overfit_batches else "validation"
        validation_rows = self.train_rows if overfit_batches else len(corpus.validation)
        batches = -(-validation_rows // rows_at_once)
        self._val_batches = batches if val_batches is None else min(batches, val_batches)
        self._validation = getattr(corpus, self._validated).padded_to_multiple(rows_at_once)
        self.validation_rows = min(self._val_batches * rows_at_once, validation_rows)
        self.validation_bytes = len(self.validation_content())

    def validation_content(self) -> bytes:
        """The bytes that validation predicts, for measuring something else on the same ones."""
        return self.corpus.content(self._validated, self.validation_rows)

    @property
    def rank(self) -> int:
        """This process among those that read different rows; processes that share a sequence read the same."""
        assert self.trainer is not None
        sequence = getattr(self.trainer.strategy, "sequence", None)
        return self.trainer.global_rank if sequence is None else sequence.shape.data_rank(self.trainer.global_rank)

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        assert self.trainer is not None
        sampler = StepBatchSampler(
            self.train_rows,
            self.batch_size * self.accumulate,
            rank=self.rank,
            world=self.world_size,
            seed=self.seed,
            start_step=self.trainer.global_step,
        )
        return self._loader(self.corpus.train, sampler)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        assert self.trainer is not None
        batches = validation_batches(len(self._validation), self.batch_size, self.rank, self.world_size)
        return self._loader(self._validation, batches[: self._val_batches])

    def _loader(self, rows: Any, batches: Any) -> DataLoader[dict[str, torch.Tensor]]:
        assert self.trainer is not None
        return DataLoader(
            rows,
            batch_sampler=batches,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
            # Its own generator: starting an iterator must not advance the global random state.
            generator=torch.Generator().manual_seed(self.seed + self.rank),
        )
