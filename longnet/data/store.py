"""A token store: a directory of plain files that are mapped, not read, with a manifest of what they were made from.

    manifest.json             what made it: source, tokenizer, input; how much of it there is; hashes
    train.tokens              the stream `eos document eos document eos ...` as little-endian unsigned integers
    train.borders             the positions of its eos, as little-endian int64
    validation.tokens, validation.borders
    tokenizer/                a copy of the tokenizer, unless it is `bytes`

A directory with a manifest is whole: it is written under another name and renamed at the end.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from longnet.data.documents import SPLITS, Split
from longnet.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

MANIFEST = "manifest.json"
VERSION = 1
_HASHED_AT_ONCE = 2**18


@dataclass
class Side:
    """How much there is on one side of a store, and the hash of its tokens."""

    documents: int = 0
    num_bytes: int = 0
    tokens: int = 0
    digest: str = ""


@dataclass
class Manifest:
    """What a store holds and what it was made from.

    Attributes:
        source: The source's name and options.
        tokenizer: Name, digest and vocabulary of what made the ids.
        dtype: Of the token files.
        input_digest: Hash of the documents, their ids and sides.
        input_stamp: Sizes and times of the input files, hashed: equal means that nothing need be read again.
        skipped: Documents and lines that could not be used.
        sides: By split.
        version: Of this format.
    """

    source: dict[str, Any]
    tokenizer: dict[str, Any]
    dtype: str
    input_digest: str
    input_stamp: str
    skipped: int = 0
    sides: dict[Split, Side] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, store: Path) -> Manifest:
        """The manifest of a store.

        Raises:
            ValueError: If there is no whole store.
        """
        path = store / MANIFEST
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(
                f"path={str(store)!r} is not a prepared store, it has no {MANIFEST}; make one with "
                "scripts/prepare_data.py tokenize"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); delete the store and prepare it again") from None
        found = values.get("version") if isinstance(values, dict) else None
        if found != VERSION:
            raise ValueError(
                f"{path} has version {found}, this code reads {VERSION}; delete the store and prepare it again"
            )
        try:
            sides = {split: Side(**parts) for split, parts in values["sides"].items()}
            manifest = cls(**{**values, "sides": sides})
            _check_types(manifest)
            for side in sides.values():
                _check_types(side)
            for split in SPLITS:
                sides[split]
            for name in ("name", "digest"):
                manifest.tokenizer[name]
            np.iinfo(manifest.dtype)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}); delete the store and prepare it again") from None
        return manifest


def _check_types(part: Manifest | Side) -> None:
    for name, hint in get_type_hints(type(part)).items():
        value, kind = getattr(part, name), get_origin(hint) or hint
        if not isinstance(value, kind) or (kind is int and value < 0):
            raise TypeError(f"{name} is {value!r}")


class MappedTokens:
    """The tokens of a file, mapped into memory when they are first read.

    Sent to another process it takes only its path along, where a numpy memory map would be copied whole.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._length = path.stat().st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice, /) -> npt.NDArray[Any]:
        return self._map[index]

    @cached_property
    def _map(self) -> npt.NDArray[Any]:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_map"}


class TokenStore:
    """A prepared store, open for reading.

    Args:
        path: Its directory.
        tokenizer: What the job says made its ids; None takes the store's own.

    Raises:
        ValueError: If it is not whole, or was made by another tokenizer.
    """

    def __init__(self, path: str | Path, tokenizer: str | None = None) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        made_by = self.manifest.tokenizer
        own = self.path / "tokenizer"
        if tokenizer is None:
            tokenizer = str(own) if own.is_dir() else ByteTokenizer.name
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer)
        eos = check_files(self.path, self.manifest)
        if (self.tokenizer.digest, self.tokenizer.eos_id) != (made_by["digest"], eos):
            raise ValueError(
                f"path={str(self.path)!r} was made with the tokenizer {made_by['name']} (digest {made_by['digest']}, "
                f"eos {eos}), but tokenizer={tokenizer!r} is another (digest {self.tokenizer.digest}, eos "
                f"{self.tokenizer.eos_id}); set tokenizer=null to take the store's own, or prepare the text again"
            )
        check_dtype(self.manifest.dtype, self.tokenizer.vocab_size)

    def stream(self, split: Split) -> MappedTokens:
        """The tokens of a side."""
        return MappedTokens(self.path / f"{split}.tokens", self.manifest.dtype)

    def borders(self, split: Split) -> npt.NDArray[np.int64]:
        """The positions of a side's eos."""
        return np.fromfile(self.path / f"{split}.borders", dtype="<i8")


def check_files(store: Path, manifest: Manifest) -> int:
    """Check the sizes of a store's files; give the eos with which its streams begin, which no digest knows of.

    Raises:
        ValueError: If the files are not those of the manifest.
    """
    for split, side in manifest.sides.items():
        for name, expected in (("tokens", max(side.tokens, 1)), ("borders", side.documents + 1)):
            file = store / f"{split}.{name}"
            width = np.dtype(manifest.dtype if name == "tokens" else np.int64).itemsize
            if not file.is_file() or file.stat().st_size != expected * width:
                raise ValueError(
                    f"{file} does not hold the {expected} numbers of its manifest: it was damaged after it was "
                    "made; delete the store and prepare it again"
                )
    return int(MappedTokens(store / "train.tokens", manifest.dtype)[:1][0])


def check_dtype(dtype: str, vocab_size: int) -> None:
    """Raises `ValueError` if ids of a vocabulary do not fit into a store's integers."""
    largest = np.iinfo(dtype).max
    if vocab_size - 1 > largest:
        raise ValueError(
            f"dtype={dtype} holds ids up to {largest}, but the tokenizer has {vocab_size}; use uint32, or leave "
            "dtype out"
        )


class StreamDigest:
    """Hash of a token stream, piece by piece, the same whatever the pieces and the integers' width."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._length = 0

    def update(self, tokens: npt.NDArray[Any]) -> None:
        self._length += len(tokens)
        for start in range(0, len(tokens), _HASHED_AT_ONCE):
            self._hash.update(np.ascontiguousarray(tokens[start : start + _HASHED_AT_ONCE], dtype="<u4").data)

    def hexdigest(self) -> str:
        return f"{self._hash.hexdigest()}-{self._length}"


def fingerprint(tokenizer_digest: str, sides: dict[Split, str]) -> str:
    """Hash of both sides' tokens, whatever the context length: equal means the same data."""
    words = [tokenizer_digest, sides["train"], sides["validation"]]
    return blake2b("/".join(words).encode(), digest_size=16).hexdigest()
