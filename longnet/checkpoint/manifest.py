"""The manifest of a checkpoint: what it is of, and the size and hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import Entry, hash_file, write_json

MANIFEST = "manifest.json"
FORMAT = 1
SEAL = "sha256"
# A manifest is a few kilobytes; more is no manifest.
_LARGEST = 2**24
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class DamagedError(ValueError):
    """A checkpoint that must not be used; says which file of it, and why."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: optimiser steps taken.
        config: hash of the config keys that must stay the same; empty if unknown.
        validation_loss: of these weights, where they were validated.
        files: size and hash of every other file of the directory.
    """

    step: int
    config: str
    validation_loss: float | None
    files: Mapping[str, Entry]

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, **asdict(self)}
        write_json(folder / MANIFEST, content | {SEAL: _seal(content)}, indent=2)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; its other files are not looked at.

    Raises:
        DamagedError: if there is none, or it is of an unknown version or makes no sense.
    """
    file = path / MANIFEST
    if path.is_file():
        raise DamagedError(
            f"{path} is a file, and a checkpoint is a directory with {MANIFEST}; pickled checkpoints are never read"
        )
    try:
        if file.stat().st_size > _LARGEST:
            raise DamagedError(f"{file} is larger than a manifest can be")
        content = json.loads(file.read_bytes())
        version = content["format"]
    except FileNotFoundError:
        raise DamagedError(f"{file} is missing, so {path} is no checkpoint of a run") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{file} cannot be read ({type(error).__name__})") from None
    if version != FORMAT:
        raise DamagedError(
            f"{file} has format {version!r}, and this version of longnet knows {FORMAT}: it was written by a newer one"
        )
    try:
        return _parse(content)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{file} is damaged ({type(error).__name__}: {error})") from None


def verify(path: Path) -> Manifest:
    """Checks every byte of a checkpoint against its manifest.

    Raises:
        DamagedError: names the first file that is missing, cut off or changed.
    """
    manifest = read_manifest(path)
    with ThreadPoolExecutor(4) as pool:
        for problem in pool.map(lambda item: _problem(path / item[0], item[1]), manifest.files.items()):
            if problem:
                raise DamagedError(problem)
    return manifest


def _problem(file: Path, expected: Entry) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected.size:
            return f"{file} has {size} bytes and should have {expected.size}"
        return None if hash_file(file) == expected else f"{file} has other content than was saved"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"


def _seal(content: Mapping[str, Any]) -> str:
    """A hash of all that a manifest says, but for the hash itself."""
    rest = {key: value for key, value in content.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _parse(content: Mapping[str, Any]) -> Manifest:
    if content[SEAL] != _seal(content):
        raise ValueError("it does not say what was saved")
    files = {}
    for name, entry in content["files"].items():
        # A name that leads elsewhere would make another file part of the checkpoint.
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r}")
        files[name] = Entry(int(entry["size"]), str(entry["sha256"]))
    loss = content["validation_loss"]
    return Manifest(int(content["step"]), str(content["config"]), None if loss is None else float(loss), files)
