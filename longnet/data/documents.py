"""What every source yields, and the rule by which a document falls into training or validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text, whole.

    Attributes:
        id: Its name in the source, the same on every machine (a relative posix path, a row's key).
        content: Its bytes, as they lie on the disk.
        split: The side it belongs to.
    """

    id: str
    content: bytes
    split: Split


class Source(Protocol):
    """A function that yields the documents of a corpus, always in the same order."""

    def __call__(self, path: str | None, validation_fraction: float) -> Iterator[Document]: ...


def split_of(document_id: str, validation_fraction: float) -> Split:
    """Choose a document's side from its id alone.

    So the sides are the same on every machine, do not move when other documents come or go, and a larger fraction
    only adds to validation.
    """
    draw = int.from_bytes(blake2b(document_id.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
    return "validation" if draw < validation_fraction else "train"
