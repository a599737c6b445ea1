"""What every source yields and is asked for, and the rule by which a document falls into training or validation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, Literal, Protocol

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

# Who takes an option that the other sources would leave unread.
_TAKEN_BY = {
    "include": ("stdlib", "text", "jsonl", "parquet", "arrow"),
    "subset": ("hf",),
    "revision": ("hf",),
    "split": ("hf",),
    "validation_split": ("hf",),
}

# Of what was skipped, so many places are named; the rest is counted.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one piece of a text that is too long to hold.

    Attributes:
        id: Its name in the source, the same on every machine (a relative posix path, a row's key).
        content: Its bytes, as they lie on the disk.
        split: The side it belongs to.
        last: Whether the text ends here; if not, the next document is its next piece. An empty piece that is not the
            last takes back those before it (`pieces.break_off`).
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
    """What a source is asked for. A source takes of it what it needs; `wrong_options` says what it must not be given.

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
        for line in wrong_options(vars(self), self.source).values():
            raise ValueError(line)

    @property
    def where(self) -> str:
        """The source and its place, for messages."""
        return self.source if self.path is None else f"{self.source} at {self.path}"

    @property
    def rule(self) -> str:
        """The option that decides the sides, for messages."""
        rules = ("validation_split", "validation_every", "validation_fraction")
        name = next(rule for rule in rules if getattr(self, rule) is not None)
        return f"{name}={getattr(self, name)!r}"

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


def wrong_options(options: Mapping[str, Any], *sources: str) -> dict[str, str]:
    """What is wrong with the options, in a line by option: none of the sources takes it, or its value is out of range.

    A config's checks tell all of them before anything is built, a `SourceSpec` the first.
    """
    defaults = {entry.name: entry.default for entry in fields(SourceSpec)}
    given: dict[str, Any] = {name: options.get(name, default) for name, default in defaults.items()}
    wrong = {}
    for name, takers in _TAKEN_BY.items():
        if given[name] != defaults[name] and not set(takers) & set(sources):
            wrong[name] = (
                f"{name}={given[name]!r} is not read by source={', '.join(sources)}; leave it out, or take "
                f"source={' or '.join(takers)}"
            )
    include, on_bad_input = given["include"], given["on_bad_input"]
    fraction, every = given["validation_fraction"], given["validation_every"]
    if isinstance(include, str):
        wrong["include"] = f"include={include!r} is one word; expected a list of patterns, [{include!r}]"
    if "validation_split" not in wrong and given["validation_split"] == given["split"]:
        wrong["validation_split"] = (
            f"validation_split={given['split']!r} is the split to train on; expected another, or null, which keeps "
            "documents of it back"
        )
    if not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        wrong["validation_fraction"] = (
            f"validation_fraction={fraction!r} must lie between 0 and 1, both excluded; try 0.05"
        )
    if every is not None and (not isinstance(every, int) or every < 2):
        wrong["validation_every"] = f"validation_every={every!r} must be at least 2; try 20, or null"
    if on_bad_input not in ("fatal", "skip"):
        wrong["on_bad_input"] = f"on_bad_input={on_bad_input!r} is neither fatal nor skip; try fatal, which stops at it"
    return wrong


def taken_by(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a part of a mixture has of the options of the whole: those that its source takes."""
    return {name: value for name, value in options.items() if source in _TAKEN_BY.get(name, (source,))}


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
