"""Synthetic tasks as rows to train on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from longnet.data.packing import IGNORE_INDEX, Row
from longnet.data.synthetic import Sample, build_sample
from longnet.data.tokenizer import Tokenizer


class SyntheticRows(Dataset[Row]):
    """Samples of a task as rows, made when they are read: `eos prompt answer`, predicting `prompt answer eos`.

    A row is one sample that fills it, or as many of one length as it holds: row i takes the i-th length, cyclically.

    Args:
        task: A name in `TASKS`.
        tokenizer: Makes the ids.
        context_length: Tokens in a row.
        num_rows: Rows.
        seed: Chooses the samples, with their numbers.
        first: The number of the first row, so that training and validation share none.
        answer_only: Whether only the answer is to be predicted: all other labels are -100.
        isolated: Whether rows say where samples end, as those of isolated documents do.
        sample_lengths: Tokens of the samples in a row, with the `eos` before them; None is `context_length`.
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
        sample_lengths: Sequence[int] | None = None,
    ) -> None:
        lengths = [context_length] if sample_lengths is None else list(sample_lengths)
        if not lengths or not all(0 < length <= context_length for length in lengths):
            raise ValueError(
                f"sample_lengths={lengths}: expected lengths from 1 to context_length={context_length}, or None"
            )
        self.task = task
        self.context_length = context_length
        self.num_tokens = num_rows * context_length
        self.tokenizer = tokenizer
        self._num_rows = self._num_samples = num_rows
        self._seed = seed
        self._first = first
        self._answer_only = answer_only
        self._isolated = isolated
        self._lengths = lengths
        # A length that cannot hold the task is to be known before the first step.
        for index in range(len(lengths)):
            self.samples(index)

    def __len__(self) -> int:
        return self._num_rows

    def samples(self, index: int) -> list[Sample]:
        """The samples of a row, with the places of their answers."""
        row = self._first + index
        length = self._lengths[row % len(self._lengths)]
        # Numbers that no other row has.
        begin = row * (self.context_length // min(self._lengths))
        numbers = range(begin, begin + self.context_length // length)
        return [build_sample(self.task, self.tokenizer, length - 1, seed=self._seed, index=i) for i in numbers]

    def __getitem__(self, index: int) -> Row:
        index = range(self._num_rows)[index]
        input_ids = torch.full((self.context_length,), self.tokenizer.pad_id, dtype=torch.int64)
        labels = torch.full((self.context_length,), IGNORE_INDEX, dtype=torch.int64)
        used = [0]
        for sample in self.samples(index) if index < self._num_samples else ():
            ids = torch.from_numpy(sample.ids.astype(np.int64))
            begin = used[-1]
            end = begin + len(ids)
            input_ids[begin] = self.tokenizer.eos_id
            input_ids[begin + 1 : end + 1] = ids
            first = sample.answer_start if self._answer_only else 0
            labels[begin + first : end] = ids[first:]
            also = torch.tensor(sample.also, dtype=torch.int64)
            labels[begin + also] = ids[also]
            if not self._answer_only:
                labels[end] = self.tokenizer.eos_id
            used.append(end + 1)
        row: Row = {"input_ids": input_ids, "labels": labels}
        if self._isolated:
            borders = sorted({*used, self.context_length})
            row["lengths"] = [end - begin for begin, end in pairwise(borders)]
        return row

    def piece(self, index: int, number: int, of: int) -> Row:
        """Give one of so many shorter rows in the place of one, with samples that fit: cut ones would be riddles."""
        shorter = copy.copy(self)
        shorter.context_length //= of
        shorter._lengths = [min(length, shorter.context_length) for length in self._lengths]
        shorter._first, shorter._num_rows, shorter._num_samples = (
            of * rows for rows in (self._first, self._num_rows, self._num_samples)
        )
        return shorter[of * index + number]

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
