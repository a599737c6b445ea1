"""Rows of a corpus that is read as it comes: endless, shuffled in blocks, resumable anywhere.

The documents become one endless stream of tokens, pass after pass. A block of rows is cut from it and permuted by
(seed, block); batches take the rows of block after block. Every rank reads the whole stream and takes its own rows, so
the number of ranks does not change what is trained on. A place in the stream is a few integers, since a block can
be read again from where it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from longnet.data.documents import Document
from longnet.data.packing import PackedRows, Row, collate, pack
from longnet.data.pieces import breaks_off
from longnet.data.sampling import permutation
from longnet.data.tokenizer import Tokenizer, token_dtype


@dataclass(frozen=True)
class Cursor:
    """Where a block begins: at a token of a document.

    Attributes:
        block: Its number.
        document: Documents of this pass over the source that lie before it.
        offset: Tokens of the document before it, counting the eos in front of the document as its first.
    """

    block: int = 0
    document: int = 0
    offset: int = 0


class RowStream:
    """The rows of a stream of documents.

    Args:
        documents: Begins a pass over the source.
        tokenizer: Makes the ids.
        context_length: Tokens in a row.
        packing: "concat" or "isolate".
        block_rows: Rows that are shuffled among each other, and held in memory.
        seed: Chooses the permutations.
        complain: Called with the id of a document that cannot be encoded, and why; the document is left out if it
            does not raise. Such a document raises when None.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[Document]],
        tokenizer: Tokenizer,
        context_length: int,
        packing: str = "concat",
        block_rows: int = 256,
        seed: int = 0,
        complain: Callable[[str, str], None] | None = None,
    ) -> None:
        if packing == "whole":
            raise ValueError(
                "packing='whole' must know all documents before the first row; a stream takes concat or isolate, or "
                "prepare the corpus and use source=prepared"
            )
        self.context_length = context_length
        self.block_rows = block_rows
        self._documents = documents
        self._tokenizer = tokenizer
        self._packing = packing
        self._seed = seed
        self._complain = complain

    def rows(self, start: Cursor, skip: int = 0) -> Iterator[tuple[Row, Cursor, int]]:
        """Yield rows for ever, each with the cursor of its block and its place in it.

        Args:
            start: Where a block begins.
            skip: Rows of that block to leave out.
        """
        for cursor, packed in self._blocks(start):
            order = permutation(self.block_rows, self._seed, (cursor.block,))
            for place in range(skip, self.block_rows):
                yield packed[int(order[place])], cursor, place
            skip = 0

    def _blocks(self, cursor: Cursor) -> Iterator[tuple[Cursor, PackedRows]]:
        wanted = self.block_rows * self.context_length
        tokens: list[npt.NDArray[Any]] = []
        # Of each document in hand: its number, how much of it is gone, and where the rest of it begins.
        held: list[tuple[int, int, int]] = []
        have = 0
        for number, ids in self._encoded(cursor.document):
            gone = 0 if held else cursor.offset
            tokens.append(ids[gone:])
            held.append((number, gone, have))
            have += len(ids) - gone
            # One token more than a block, since the last one is a label alone.
            while have > wanted:
                stream = np.concatenate(tokens)
                starts = [start for *_, start in held]
                borders = np.array(sorted({0, *(s for s in starts if s < wanted), wanted}), dtype=np.int64)
                yield (
                    cursor,
                    pack(self._packing, stream[: wanted + 1], borders, self.context_length, self._tokenizer.pad_id),
                )
                # The document in which the next block begins.
                document, gone, start = next(entry for entry in reversed(held) if entry[2] <= wanted)
                cursor = Cursor(cursor.block + 1, document, gone + wanted - start)
                tokens = [stream[wanted:]]
                have -= wanted
                later = [(number, gone, start - wanted) for number, gone, start in held if start > wanted]
                held = [(document, cursor.offset, 0), *later]

    def _encoded(self, first: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """The documents from the first one on, pass after pass, each as its eos and its tokens."""
        eos = np.array([self._tokenizer.eos_id], dtype=token_dtype(self._tokenizer.vocab_size))
        while True:
            nothing = first == 0
            for number, (name, pieces) in enumerate(islice(_whole(self._documents()), first, None), first):
                try:
                    ids = [self._tokenizer.encode(piece) for piece in pieces]
                except UnicodeDecodeError as error:
                    if self._complain is None:
                        raise
                    self._complain(name, f"is not UTF-8 ({error.reason})")
                    continue
                nothing = False
                yield number, np.concatenate([eos, *ids])
            if nothing:
                raise ValueError("the stream has no document to train on")
            first = 0


class StreamBatches(IterableDataset[Row]):
    """One rank's batches of a stream, each with the place behind it, for a DataLoader with at most one worker.

    Args:
        stream: The rows.
        batch_size: Rows a rank takes at a step.
        data_rank: Index among the ranks that read different rows.
        data_world: How many such ranks there are.
        state: What came with the last batch that was trained on; the beginning when None.
        passed: Batches from there on to pass over.
    """

    def __init__(
        self,
        stream: RowStream,
        batch_size: int,
        data_rank: int = 0,
        data_world: int = 1,
        state: dict[str, int] | None = None,
        passed: int = 0,
    ) -> None:
        self._passed = passed
        self._stream = stream
        self._batch_size = batch_size
        self._data_rank = data_rank
        self._data_world = data_world
        self._state = state

    def __iter__(self) -> Iterator[Row]:
        start, skip = Cursor(), 0
        if self._state is not None:
            place = dict(self._state)
            skip = place.pop("row")
            start = Cursor(**place)
        rows = self._stream.rows(start, skip)
        rows = islice(rows, self._passed * self._data_world * self._batch_size, None)
        first = self._data_rank * self._batch_size
        while True:
            step = list(islice(rows, self._data_world * self._batch_size))
            batch = collate([row for row, *_ in step[first : first + self._batch_size]])
            _, cursor, row = step[-1]
            # A finished block is read once more on resuming, and yields nothing of it: the next one begins there.
            batch["state"] = asdict(cursor) | {"row": row + 1}
            yield batch


def _whole(documents: Iterator[Document]) -> Iterator[tuple[str, list[bytes]]]:
    pieces: list[bytes] = []
    for document in documents:
        if breaks_off(document):
            pieces = []
            continue
        pieces.append(document.content)
        if document.last:
            yield document.id, pieces
            pieces = []
