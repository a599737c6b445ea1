"""Synthetic tasks as rows to train on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from longnet.data.packing import IGNORE_INDEX, Row
from longnet.data.synthetic import Sample, build_sample
from longnet.data.tokenizer import Tokenizer


class SyntheticRows(Dataset[Row]):
    """Row i is sample i of a task, made when it is read: `eos prompt answer`, predicting `prompt answer eos`.

    Args:
        task: A name in `TASKS`.
        tokenizer: Makes the ids.
        context_length: Tokens in a row.
        num_rows: Samples.
        seed: Chooses the samples, with their numbers.
        first: The number of the first sample, so that training and validation share none.
        answer_only: Whether only the answer is to be predicted: all other labels are -100.
        isolated: Whether rows say where they end, as those of isolated documents do.
    """

    def __init__(
        self,
        task: str,
        tokenizer: Tokenizer,
        context_length: int,
        num_rows: int,
        seed: int = 0,
        first: int = 0,
        answer_only: bool = False,
        isolated: bool = False,
    ) -> None:
        self.task = task
        self.context_length = context_length
        self.num_tokens = num_rows * context_length
        self._tokenizer = tokenizer
        self._num_rows = self._num_samples = num_rows
        self._seed = seed
        self._first = first
        self._answer_only = answer_only
        self._isolated = isolated
        # A context that cannot hold the task is to be known before the first step.
        self.sample(0)

    def __len__(self) -> int:
        return self._num_rows

    def sample(self, index: int) -> Sample:
        """The sample of a row, with the place of its answer."""
        length = self.context_length - 1
        return build_sample(self.task, self._tokenizer, length, seed=self._seed, index=self._first + index)

    def __getitem__(self, index: int) -> Row:
        index = range(self._num_rows)[index]
        input_ids = torch.full((self.context_length,), self._tokenizer.pad_id, dtype=torch.int64)
        labels = torch.full((self.context_length,), IGNORE_INDEX, dtype=torch.int64)
        used = 0
        if index < self._num_samples:
            sample = self.sample(index)
            ids = torch.from_numpy(sample.ids.astype(np.int64))
            used = len(ids) + 1
            input_ids[0] = self._tokenizer.eos_id
            input_ids[1:used] = ids
            first = sample.answer_start if self._answer_only else 0
            labels[first : len(ids)] = ids[first:]
            if not self._answer_only:
                labels[len(ids)] = self._tokenizer.eos_id
        row: Row = {"input_ids": input_ids, "labels": labels}
        if self._isolated:
            row["lengths"] = [length for length in (used, self.context_length - used) if length]
        return row

    def predicted(self, rows: int | None = None) -> npt.NDArray[Any]:
        """Give the labels of the first rows, or of all, without padding."""
        labels = [self[index]["labels"].numpy() for index in range(len(self) if rows is None else rows)]
        joined = np.concatenate([np.empty(0, np.int64), *labels])
        return joined[joined != IGNORE_INDEX]

    def padded_to_multiple(self, multiple: int) -> SyntheticRows:
        """Give the same rows, followed by empty ones up to a multiple."""
        padded = copy.copy(self)
        padded._num_rows = -(-self._num_rows // multiple) * multiple
        return padded
