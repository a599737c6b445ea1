"""Packing: documents become one stream of tokens, and the stream becomes rows of one context each.

The stream is `eos document eos document eos ...`. An eos is what the first token of the next document is predicted from
and what ends the one before, so a document's inputs are its leading eos and its tokens, and its labels are its tokens
and the eos behind them. Whatever the packing, every token after the first eos is the label of exactly one position.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from longnet.data.fit import best_fit

IGNORE_INDEX = -100
Row = dict[str, Any]


class TokenStream(Protocol):
    """Token ids that can be sliced: an array, or a file of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> npt.NDArray[Any]: ...


class PackedRows(Dataset[Row]):
    """Rows of a token stream such that every token after the first is predicted exactly once.

    Row i reads `stream[i*L : (i+1)*L]` and predicts `stream[i*L+1 : (i+1)*L+1]`, L being the context length. What the
    stream does not fill is pad ids with labels of -100. The stream may be a memory map.

    Args:
        stream: Token ids, with one leading token that is only read.
        context_length: L.
        pad_id: The id that fills up the last row.
        num_rows: How many rows to present; as many as the stream fills when None.
    """

    def __init__(self, stream: TokenStream, context_length: int, pad_id: int = 0, num_rows: int | None = None) -> None:
        if context_length < 1:
            raise ValueError(f"context_length={context_length} must be at least 1")
        self.stream = stream
        self.context_length = context_length
        self.pad_id = pad_id
        self.num_tokens = max(len(stream) - 1, 0)
        self._num_rows = -(-self.num_tokens // context_length) if num_rows is None else num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        row = build_row(self.stream, self._stretches(range(self._num_rows)[index]), self.context_length, self.pad_id)
        del row["lengths"]
        return row

    def piece(self, index: int, number: int, of: int) -> Row:
        """Give one of the equal parts of a row, which reads no more than it needs."""
        length = self.context_length // of
        return PackedRows(self.stream, length, self.pad_id, self._num_rows * of)[index * of + number]

    def predicted(self, rows: int | None = None) -> npt.NDArray[Any]:
        """Give the labels of the first rows, or of all, without padding."""
        return self.stream[1 : None if rows is None else rows * self.context_length + 1]

    def padded_to_multiple(self, multiple: int) -> PackedRows:
        """Give the same rows, followed by empty ones (every label -100) up to a multiple.

        With a multiple of batch size x ranks, every rank has the same number of full batches, so that none waits for
        ever for a collective that another has no batch for.
        """
        padded = copy.copy(self)
        padded._num_rows = -(-self._num_rows // multiple) * multiple
        return padded

    def _stretches(self, index: int) -> list[tuple[int, int]]:
        start = min(index * self.context_length, self.num_tokens)
        return [(start, min(start + self.context_length, self.num_tokens))]


class IsolatedRows(PackedRows):
    """The same rows, which also say where their documents lie: attention and positions restart at each.

    A row's `lengths` add up to the context length; what fills up a row is a document of its own.

    Args:
        stream: Token ids.
        borders: The positions of the stream's eos, ascending, the first one 0 and the last one the stream's end.
        context_length: L.
        pad_id: The id that fills up the last row.
    """

    def __init__(
        self, stream: TokenStream, borders: npt.NDArray[np.int64], context_length: int, pad_id: int = 0
    ) -> None:
        super().__init__(stream, context_length, pad_id)
        self._borders = borders

    def __getitem__(self, index: int) -> Row:
        return build_row(self.stream, self._stretches(range(self._num_rows)[index]), self.context_length, self.pad_id)

    def _stretches(self, index: int) -> list[tuple[int, int]]:
        ((start, end),) = super()._stretches(index)
        first, last = np.searchsorted(self._borders, (start + 1, end))
        return list(pairwise([start, *self._borders[first:last].tolist(), end]))


class WholeRows(IsolatedRows):
    """Rows of whole documents, isolated: a document is cut only if it is longer than a row.

    A longer one fills rows of its own, in order; what is left of it, and the shorter ones, are fitted together so that
    little of a row is padding.
    """

    def __init__(
        self, stream: TokenStream, borders: npt.NDArray[np.int64], context_length: int, pad_id: int = 0
    ) -> None:
        super().__init__(stream, borders, context_length, pad_id)
        self._pieces, self._row_starts = best_fit(borders, context_length)
        self._num_rows = self._full_rows = len(self._row_starts) - 1

    def predicted(self, rows: int | None = None) -> npt.NDArray[Any]:
        stretches = [piece for row in range(len(self) if rows is None else rows) for piece in self._stretches(row)]
        return np.concatenate([self.stream[start + 1 : end + 1] for start, end in stretches] or [self.stream[:0]])

    def _stretches(self, index: int) -> list[tuple[int, int]]:
        if index >= self._full_rows:
            return []
        of_row = self._pieces[self._row_starts[index] : self._row_starts[index + 1]]
        return [(int(start), int(end)) for start, end in of_row]


PACKINGS: dict[str, type[PackedRows]] = {"concat": PackedRows, "isolate": IsolatedRows, "whole": WholeRows}


def pack(
    packing: str, stream: TokenStream, borders: npt.NDArray[np.int64], context_length: int, pad_id: int
) -> PackedRows:
    """The rows of a stream by the name of a packing."""
    if packing == "concat":
        return PackedRows(stream, context_length, pad_id)
    if packing not in PACKINGS:
        raise ValueError(f"packing={packing!r} is not one of {', '.join(PACKINGS)}")
    return PACKINGS[packing](stream, borders, context_length, pad_id)  # type: ignore[arg-type]


def build_row(stream: TokenStream, stretches: Sequence[tuple[int, int]], context_length: int, pad_id: int) -> Row:
    """A row that reads stretches of the stream one after the other, each predicting the token behind it."""
    input_ids = torch.full((context_length,), pad_id, dtype=torch.int64)
    labels = torch.full((context_length,), IGNORE_INDEX, dtype=torch.int64)
    lengths = []
    filled = 0
    for start, end in stretches:
        if end > start:
            window = torch.from_numpy(stream[start : end + 1].astype(np.int64))
            input_ids[filled : filled + end - start] = window[:-1]
            labels[filled : filled + end - start] = window[1:]
            lengths.append(end - start)
            filled += end - start
    if filled < context_length:
        lengths.append(context_length - filled)
    return {"input_ids": input_ids, "labels": labels, "lengths": lengths}


def collate(rows: Sequence[Row]) -> Row:
    """A batch: tensors stacked, the lengths of isolated documents as they are, on the host, where kernels want them."""
    batch: Row = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    if "lengths" in rows[0]:
        batch["lengths"] = [row["lengths"] for row in rows]
    return batch
