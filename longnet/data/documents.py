"""What every source yields and is asked for, and the rule by which a document falls into training or validation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, Protocol

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

# Of what was skipped, so many places are named; the rest is counted.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one piece of a text that is too long to hold.

    Attributes:
        id: Its name in the source, the same on every machine (a relative posix path, a row's key).
        content: Its bytes, as they lie on the disk.
        split: The side it belongs to.
        last: Whether the text ends here; if not, the next document is its next piece.
    """

    id: str
    content: bytes
    split: Split
    last: bool = True


@dataclass
class Skipped:
    """What a source could not use: how much, and the first few places."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.places)} more" if self.count > len(self.places) else ""
        return f"{self.count} skipped: " + "; ".join(self.places) + more


@dataclass(frozen=True)
class SourceSpec:
    """What a source is asked for. A source takes of it what it needs.

    Attributes:
        source: The source's name.
        path: A file, a directory, a glob, or a dataset's name on the hub; the source's own place when None.
        include: Patterns of file names to read, such as `*.c`; all files when None.
        text_field: The field of a record that holds its text.
        subset: The configuration of a hub dataset.
        revision: The branch or commit of a hub dataset.
        split: The split of a hub dataset to read.
        validation_split: The split of a hub dataset that is all validation; by the rules below when None.
        streaming: Read a hub dataset as it comes, without a copy on the disk.
        validation_fraction: The share of the documents that falls to validation, by a hash of their ids.
        validation_every: Documents whose number is divisible by this are validation, in the place of the fraction. The
            number is a record's row, else the first one in the file's name.
        on_bad_input: Whether something unreadable stops the job ("fatal") or is left out and counted ("skip").
        skipped: Where what is left out is counted.
    """

    source: str
    path: str | None = None
    include: tuple[str, ...] | None = None
    text_field: str = "text"
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    validation_split: str | None = None
    streaming: bool = False
    validation_fraction: float = 0.05
    validation_every: int | None = None
    on_bad_input: Literal["fatal", "skip"] = "fatal"
    skipped: Skipped = field(default_factory=Skipped, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} must lie between 0 and 1, both excluded; try 0.05"
            )
        if self.validation_every is not None and self.validation_every < 2:
            raise ValueError(f"validation_every={self.validation_every} must be at least 2; try 20, or null")

    @property
    def where(self) -> str:
        """The source and its place, for messages."""
        return self.source if self.path is None else f"{self.source} at {self.path}"

    def side(self, document_id: str) -> Split:
        """The side of a document."""
        if self.validation_every is None:
            return split_of(document_id, self.validation_fraction)
        number = _number_of(document_id)
        return "validation" if number is not None and number % self.validation_every == 0 else "train"

    def complain(self, place: str, what: str) -> None:
        """Says that something cannot be used: raises, or counts it if it is to be skipped."""
        if self.on_bad_input == "fatal":
            raise ValueError(f"{place}: {what}; mend it, or leave such input out by on_bad_input=skip")
        self.skipped.count += 1
        if len(self.skipped.places) < _NAMED:
            self.skipped.places.append(f"{place}: {what}")


class Source(Protocol):
    """A function that yields the documents of a corpus, always in the same order."""

    def __call__(self, spec: SourceSpec) -> Iterator[Document]: ...


def split_of(document_id: str, validation_fraction: float) -> Split:
    """Choose a document's side from its id alone.

    So the sides are the same on every machine, do not move when other documents come or go, and a larger fraction
    only adds to validation.
    """
    draw = int.from_bytes(blake2b(document_id.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
    return "validation" if draw < validation_fraction else "train"


def _number_of(document_id: str) -> int | None:
    row = re.search(r":(\d+)$", document_id)
    found = row[1] if row else re.search(r"\d+", document_id.rpartition("/")[2])
    return None if found is None else int(found if isinstance(found, str) else found[0])
