"""A corpus: the rows of a source for training and validation, with the facts a run should remember of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from longnet.data.documents import Split
from longnet.data.mixture import MixedRows, Rows
from longnet.data.packing import PackedRows, TokenStream
from longnet.data.sampling import EpochOrder, MixtureOrder, Order
from longnet.data.stream import RowStream
from longnet.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """Rows for training and validation, and what they were made of.

    Attributes:
        source: Name of the source.
        tokenizer: What made the ids, and decodes them.
        train: Rows to train on; a `RowStream` if they are read as they come.
        validation: Rows of documents that `train` has nothing of.
        documents: Number of documents on each side, where they are counted.
        num_bytes: Number of bytes on each side, where they are counted; every one of them is predicted once.
        fingerprint: Hash of both sides' tokens, whatever the context length: equal means the same data.
        skipped: What could not be used, in words; empty if there was nothing.
        weights: Share of each part of a mixture, by its name; empty if it is none.
    """

    source: str
    tokenizer: Tokenizer
    train: Rows | MixedRows | RowStream
    validation: Rows | MixedRows
    documents: dict[Split, int]
    num_bytes: dict[Split, int]
    fingerprint: str
    skipped: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def is_stream(self) -> bool:
        return isinstance(self.train, RowStream)

    @property
    def bytes_per_token(self) -> float:
        """Validation bytes per predicted token: bits per byte = loss / ln 2 / bytes_per_token.

        Separators are predicted but are no bytes, so they count against the model.
        """
        return self.num_bytes["validation"] / self.validation.num_tokens

    def order(self, seed: int, rows: int | None = None) -> Order:
        """The sequence in which training reads the rows, or the first so many of them."""
        assert not isinstance(self.train, RowStream)
        if isinstance(self.train, MixedRows) and rows is None:
            return MixtureOrder(tuple(map(len, self.train.parts)), tuple(self.weights.values()), seed)
        return EpochOrder(len(self.train) if rows is None else rows, seed)

    def content(self, split: Split, rows: int | None = None) -> bytes:
        """Give exactly the bytes that the first rows of a side predict; all of them when `rows` is None."""
        packed = self.train if split == "train" else self.validation
        return b"" if isinstance(packed, RowStream) else self.tokenizer.decode(packed.predicted(rows))

    def documents_of(self, rows: Iterable[int]) -> list[int]:
        """The numbers of the documents in rows of the training data, from 0 on; empty where rows are not packed."""
        if not isinstance(self.train, PackedRows):
            return []
        numbers: set[int] = set()
        counted = before = 0
        for start, end in sorted({stretch for row in rows for stretch in self.train._stretches(row)}):
            # Each document has an eos before it. They are counted from the beginning on, once, for an error.
            before += _count(self.train.stream, start + 1, self.tokenizer.eos_id, counted)
            counted = start + 1
            inside = _count(self.train.stream, end, self.tokenizer.eos_id, start + 1)
            numbers |= set(range(max(before - 1, 0), before + inside))
        return sorted(numbers)

    def facts(self) -> dict[str, Any]:
        """What to write down with a run."""
        sides: dict[Split, Any] = {"train": self.train, "validation": self.validation}
        counted = {split: rows for split, rows in sides.items() if not isinstance(rows, RowStream)}
        return {
            "source": self.source,
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "context_length": self.train.context_length,
            "documents": dict(self.documents),
            "bytes": dict(self.num_bytes),
            "tokens": {split: rows.num_tokens for split, rows in counted.items()},
            "rows": {split: len(rows) for split, rows in counted.items()},
            "fingerprint": self.fingerprint,
            **({"skipped": self.skipped} if self.skipped else {}),
            **({"mixture": dict(self.weights)} if self.weights else {}),
        }


def _count(stream: TokenStream, end: int, token: int, start: int = 0) -> int:
    pieces = range(start, end, 2**24)
    return sum(int((stream[piece : min(piece + 2**24, end)] == token).sum()) for piece in pieces)
