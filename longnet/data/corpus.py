"""A corpus: the documents of a source, tokenized, split and packed, with the facts a run should remember of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from longnet.data.documents import Split
from longnet.data.packing import PackedRows, concat
from longnet.data.sources import SOURCES
from longnet.data.tokenizer import TOKENIZERS, Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Corpus:
    """Rows for training and validation, and what they were made of.

    Attributes:
        source: Name of the source.
        tokenizer: What made the ids, and decodes them.
        train: Rows to train on.
        validation: Rows of documents that `train` has nothing of.
        documents: Number of documents on each side.
        num_bytes: Number of bytes on each side; every one of them is predicted once by the rows.
        fingerprint: Hash of both sides' tokens, whatever the context length: equal means the same data.
    """

    source: str
    tokenizer: Tokenizer
    train: PackedRows
    validation: PackedRows
    documents: dict[Split, int]
    num_bytes: dict[Split, int]
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """Validation bytes per predicted token: bits per byte = loss / ln 2 / bytes_per_token.

        Separators are predicted but are no bytes, so they count against the model.
        """
        return self.num_bytes["validation"] / self.validation.num_tokens

    def content(self, split: Split, rows: int | None = None) -> bytes:
        """Give exactly the bytes that the first rows of a side predict; all of them when `rows` is None."""
        packed = self.train if split == "train" else self.validation
        end = None if rows is None else rows * packed.context_length + 1
        return self.tokenizer.decode(packed.stream[1:end])

    def facts(self) -> dict[str, Any]:
        """What to write down with a run."""
        return {
            "source": self.source,
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "context_length": self.train.context_length,
            "documents": dict(self.documents),
            "bytes": dict(self.num_bytes),
            "tokens": {"train": self.train.num_tokens, "validation": self.validation.num_tokens},
            "rows": {"train": len(self.train), "validation": len(self.validation)},
            "fingerprint": self.fingerprint,
        }


def build_corpus(
    source: str,
    *,
    context_length: int,
    validation_fraction: float,
    path: str | None = None,
    tokenizer: str = "bytes",
) -> Corpus:
    """Read, tokenize, split and pack a corpus.

    Args:
        source: A name in `SOURCES`.
        context_length: Tokens in a row.
        validation_fraction: The share of the documents kept for validation, between 0 and 1.
        path: Where the source looks; its own default when None.
        tokenizer: A name in `TOKENIZERS`.

    Raises:
        ValueError: If a name is unknown, a number out of range, or a side is empty or shorter than one context.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must lie between 0 and 1, both excluded; try 0.05")
    read = _look_up("source", source, SOURCES)
    encoder = _look_up("tokenizer", tokenizer, TOKENIZERS)()

    contents: dict[Split, list[bytes]] = {"train": [], "validation": []}
    for document in read(path, validation_fraction):
        contents[document.split].append(document.content)

    where = source if path is None else f"{source} at {path}"
    total = sum(map(len, contents.values()))
    if not total:
        raise ValueError(f"source={where} has no documents; set path to where there are some")
    rows: dict[Split, PackedRows] = {}
    for split, texts in contents.items():
        if not texts:
            raise ValueError(
                f"validation_fraction={validation_fraction} leaves no document for {split} out of the {total} "
                f"of source={where}; bring it nearer to 0.5, or add documents"
            )
        rows[split] = PackedRows(concat(texts, encoder), context_length, encoder.pad_id)
        if (tokens := rows[split].num_tokens) < context_length:
            remedy = "raise validation_fraction" if split == "validation" else "lower validation_fraction"
            raise ValueError(
                f"context_length={context_length} is longer than the whole {split} side of source={where}, {tokens} "
                f"tokens; use at most {tokens}, {remedy}={validation_fraction}, or add documents"
            )
    return Corpus(
        source=source,
        tokenizer=encoder,
        train=rows["train"],
        validation=rows["validation"],
        documents={split: len(texts) for split, texts in contents.items()},
        num_bytes={split: sum(map(len, texts)) for split, texts in contents.items()},
        fingerprint=_fingerprint(encoder, rows["train"].stream, rows["validation"].stream),
    )


def _look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{kind}={name!r} is not one of {', '.join(sorted(known))}; did you mean {nearest!r}?")
    return known[name]


def _fingerprint(tokenizer: Tokenizer, *streams: npt.NDArray[Any]) -> str:
    digest = blake2b(f"{tokenizer.name}/{tokenizer.vocab_size}".encode(), digest_size=16)
    for stream in streams:
        # One fixed byte order and width, and the length first, so that equal hashes mean equal sides anywhere.
        digest.update(len(stream).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(stream, dtype=stream.dtype.newbyteorder("<")).data)
    return digest.hexdigest()
