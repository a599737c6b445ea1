"""Rows of several corpora, one behind the other."""

from __future__ import annotations

import copy
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from longnet.data.packing import PackedRows, Row
from longnet.data.synthetic_rows import SyntheticRows

Rows = PackedRows | SyntheticRows


class MixedRows(Dataset[Row]):
    """The rows of several parts, numbered through.

    Args:
        parts: Rows of one context length.
    """

    def __init__(self, parts: list[Rows]) -> None:
        self.parts = parts
        self.context_length = parts[0].context_length
        self.num_tokens = sum(part.num_tokens for part in parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, row = self._find(index)
        return part[row]

    def piece(self, index: int, number: int, of: int) -> Row:
        """Give one of the equal parts of a row."""
        part, row = self._find(index)
        return part.piece(row, number, of)

    def _find(self, index: int) -> tuple[Rows, int]:
        index = range(len(self))[index]
        part = bisect_right(self._ends, index)
        return self.parts[part], index - (self._ends[part - 1] if part else 0)

    def predicted(self, rows: int | None = None) -> npt.NDArray[Any]:
        """Give the labels of the first rows, or of all, without padding."""
        left = len(self) if rows is None else rows
        found = []
        for part in self.parts:
            found.append(part.predicted(min(left, len(part))).astype(np.int64))
            left = max(left - len(part), 0)
        return np.concatenate(found)

    def padded_to_multiple(self, multiple: int) -> MixedRows:
        """Give the same rows, followed by empty ones up to a multiple."""
        missing = -len(self) % multiple
        padded = copy.copy(self)
        last = copy.copy(self.parts[-1])
        last._num_rows += missing
        padded.parts = [*self.parts[:-1], last]
        padded._ends = [*self._ends[:-1], self._ends[-1] + missing]
        return padded
