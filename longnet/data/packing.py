"""Packing: documents become one stream of tokens, and the stream becomes rows of one context each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from longnet.data.tokenizer import Tokenizer

IGNORE_INDEX = -100


def concat(contents: Iterable[bytes], tokenizer: Tokenizer) -> npt.NDArray[Any]:
    """Join documents, in order, into `eos document eos document eos ...`.

    The first eos is there so that the first token of the first document, too, has something to be predicted from.
    """
    eos = np.array([tokenizer.eos_id], dtype=np.min_scalar_type(tokenizer.vocab_size - 1))
    pieces: list[npt.NDArray[Any]] = [eos]
    for content in contents:
        pieces += [tokenizer.encode(content), eos]
    return np.concatenate(pieces)


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of a token stream such that every token after the first is predicted exactly once.

    Row i reads `stream[i*L : (i+1)*L]` and predicts `stream[i*L+1 : (i+1)*L+1]`, L being the context length. What the
    stream does not fill is pad ids with labels of -100. The stream may be a memory map.

    Args:
        stream: Token ids, with one leading token that is only read.
        context_length: L.
        pad_id: The id that fills up the last row.
        num_rows: How many rows to present; as many as the stream fills when None.
    """

    def __init__(
        self, stream: npt.NDArray[Any], context_length: int, pad_id: int = 0, num_rows: int | None = None
    ) -> None:
        if context_length < 1:
            raise ValueError(f"context_length={context_length} must be at least 1")
        self.stream = stream
        self.context_length = context_length
        self.pad_id = pad_id
        self.num_tokens = max(len(stream) - 1, 0)
        self._num_rows = -(-self.num_tokens // context_length) if num_rows is None else num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = range(self._num_rows)[index] * self.context_length
        window = torch.from_numpy(self.stream[start : start + self.context_length + 1].astype(np.int64))
        input_ids = torch.full((self.context_length,), self.pad_id, dtype=torch.int64)
        labels = torch.full((self.context_length,), IGNORE_INDEX, dtype=torch.int64)
        predicted = max(len(window) - 1, 0)
        input_ids[:predicted] = window[:predicted]
        labels[:predicted] = window[1:]
        return {"input_ids": input_ids, "labels": labels}

    def padded_to_multiple(self, multiple: int) -> PackedRows:
        """Give the same rows, followed by empty ones (every label -100) up to a multiple.

        With a multiple of batch size x ranks, every rank has the same number of full batches, so that none waits for
        ever for a collective that another has no batch for.
        """
        num_rows = -(-self._num_rows // multiple) * multiple
        return PackedRows(self.stream, self.context_length, self.pad_id, num_rows)
