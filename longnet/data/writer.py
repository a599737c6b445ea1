"""Writes a token store that is whole or absent, and can go on after a kill."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from longnet.data.documents import SPLITS, SourceSpec, Split
from longnet.data.encoding import Encoded
from longnet.data.pieces import breaks_off
from longnet.data.store import MANIFEST, Manifest, Side, StreamDigest
from longnet.data.tokenizer import Tokenizer

_READ_AT_ONCE = 2**20


class StoreWriter:
    """Appends documents to `<output>.partial`, which becomes `<output>` when all are in.

    The journal says how far the files are good. After a kill they are cut back to it, and what it counts need not be
    encoded again.

    Args:
        output: The store's directory.
        key: What the store is made of; a partial store of another key is thrown away.
        tokenizer: Gives the eos.
        dtype: Of the tokens.

    Raises:
        ValueError: If another process is writing the same store.
    """

    def __init__(self, output: Path, key: dict[str, Any], tokenizer: Tokenizer, dtype: str) -> None:
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self._key = key
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._eos = np.array([tokenizer.eos_id], self._dtype)
        self._files: dict[str, BinaryIO] = {}
        # The side as it was before the document of which pieces have come, and whether that one is to be left out.
        self._before: Side | None = None
        self._broken = False
        self._skipped = 0
        with told_if_full(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._take_up(self._read_journal())
            for split in SPLITS:
                for name, size in (("tokens", self.sides[split].tokens), ("borders", self.sides[split].documents + 1)):
                    self._open_file(f"{split}.{name}", size)
        self._digests = {split: self._digest(split) for split in SPLITS}

    def append(self, encoded: Encoded, spec: SourceSpec) -> None:
        """Write some documents behind the others; one that cannot be encoded, or breaks off, is taken back whole."""
        ends = np.cumsum(encoded.lengths)
        tokens: dict[Split, list[npt.NDArray[Any]]] = {split: [] for split in SPLITS}
        borders: dict[Split, list[int]] = {split: [] for split in SPLITS}
        for place, document in enumerate(encoded.documents):
            side = self.sides[document.split]
            self._before = self._before or replace(side)
            if place in encoded.errors and not self._broken:
                spec.complain(document.id, encoded.errors[place])
                self._skipped += 1
                self._broken = True
            if self._broken or breaks_off(document):
                self._take_back(document.split, tokens[document.split])
            else:
                ids = encoded.ids[ends[place] - encoded.lengths[place] : ends[place]]
                tokens[document.split].append(ids)
                side.tokens += len(ids)
                side.num_bytes += len(document.content)
                if document.last:
                    tokens[document.split].append(self._eos)
                    borders[document.split].append(side.tokens)
                    side.tokens += 1
                    side.documents += 1
            if document.last or breaks_off(document):
                self._before, self._broken = None, False
        with told_if_full(self.partial):
            for split in SPLITS:
                if tokens[split]:
                    joined = np.concatenate(tokens[split]).astype(self._dtype, copy=False)
                    if split in self._digests:
                        self._digests[split].update(joined)
                    self._files[f"{split}.tokens"].write(joined.data)
                    self._files[f"{split}.borders"].write(np.array(borders[split], "<i8").data)

    def checkpoint(self, batches: int, chain: str) -> None:
        """Note in the journal that so many batches are in, and the hash of their input."""
        with told_if_full(self.partial):
            for file in self._files.values():
                file.flush()
            journal = {
                "key": self._key,
                "batches": batches,
                "chain": chain,
                "sides": {split: asdict(side) for split, side in self.sides.items()},
                "before": self._before and asdict(self._before),
                "broken": self._broken,
                "skipped": self._skipped,
            }
            _replace(self.partial / "journal.json", json.dumps(journal))

    def finish(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Make a store of what was written."""
        for split in SPLITS:
            self.sides[split].digest = (self._digests.get(split) or self._digest(split)).hexdigest()
        manifest.sides = self.sides
        with told_if_full(self.partial):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            if hasattr(tokenizer, "save"):
                tokenizer.save(self.partial / "tokenizer")
            _replace(self.partial / MANIFEST, manifest.to_json())
            (self.partial / "journal.json").unlink(missing_ok=True)
            old = self.output.with_name(self.output.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            if self.output.exists():
                self.output.rename(old)
            self.partial.rename(self.output)
            shutil.rmtree(old, ignore_errors=True)
        self._lock.close()
        (self.output / ".lock").unlink(missing_ok=True)

    def close(self, discard: bool = False) -> None:
        """Let go of the files; what is journalled stays for the next run, unless it is to be thrown away."""
        for file in self._files.values():
            file.close()
        self._lock.close()
        if discard:
            shutil.rmtree(self.partial, ignore_errors=True)

    def restart(self) -> None:
        """Forget what was written."""
        (self.partial / "journal.json").unlink(missing_ok=True)
        for file in self._files.values():
            file.close()
        self._take_up({})
        for split in SPLITS:
            self._open_file(f"{split}.tokens", 1)
            self._open_file(f"{split}.borders", 1)
        self._digests = {split: self._digest(split) for split in SPLITS}

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = json.loads((self.partial / "journal.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        if journal.get("key") != self._key or "broken" not in journal:
            return {}
        for split in SPLITS:
            side = journal["sides"][split]
            sizes = {"tokens": side["tokens"] * self._dtype.itemsize, "borders": (side["documents"] + 1) * 8}
            for name, size in sizes.items():
                path = self.partial / f"{split}.{name}"
                if not path.exists() or path.stat().st_size < size:
                    print(f"{path} is shorter than its journal says (a power loss?): beginning anew", file=sys.stderr)
                    return {}
        return journal

    def _take_up(self, journal: dict[str, Any]) -> None:
        self.batches: int = journal.get("batches", 0)
        self.chain: str = journal.get("chain", "")
        # The stream begins with an eos, at which the first document begins.
        sides = journal.get("sides") or {split: {"tokens": 1} for split in SPLITS}
        self.sides: dict[Split, Side] = {split: Side(**sides[split]) for split in SPLITS}
        self._before = Side(**journal["before"]) if journal.get("before") else None
        self._broken = journal.get("broken", False)
        self.skipped_before: int = journal.get("skipped", 0)
        self._skipped = self.skipped_before

    def _take_back(self, split: Split, unwritten: list[npt.NDArray[Any]]) -> None:
        """Drop what there is of the document that is open."""
        side, before = self.sides[split], self._before
        assert before is not None
        while unwritten and side.tokens > before.tokens:
            side.tokens -= len(unwritten.pop())
        written = side.tokens > before.tokens
        self.sides[split] = replace(before)
        if written:
            # The journal counts what is cut off here: a kill before the next one, a second away, begins anew.
            (self.partial / "journal.json").unlink(missing_ok=True)
            file = self._files[f"{split}.tokens"]
            with told_if_full(self.partial):
                file.truncate(before.tokens * self._dtype.itemsize)
            file.seek(0, os.SEEK_END)
            # Made anew from the file at the end, once for all that is taken back.
            self._digests.pop(split, None)

    def _open_file(self, name: str, size: int) -> None:
        path = self.partial / name
        kind = self._dtype if name.endswith("tokens") else np.dtype("<i8")
        first = self._eos if name.endswith("tokens") else np.zeros(1, "<i8")
        file = path.open("r+b" if path.exists() else "w+b")
        if size == 1:
            file.write(first.data)
        file.truncate(size * kind.itemsize)
        file.seek(0, os.SEEK_END)
        self._files[name] = file

    def _digest(self, split: Split) -> StreamDigest:
        digest = StreamDigest()
        self._files[f"{split}.tokens"].flush()
        with (self.partial / f"{split}.tokens").open("rb") as file:
            while data := file.read(_READ_AT_ONCE):
                digest.update(np.frombuffer(data, self._dtype))
        return digest

    def _take_lock(self) -> IO[str]:
        lock = (self.partial / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"output={str(self.output)!r} is being written by another process; wait for it") from None
        return lock


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Turns a full disk, and a place that cannot be written, into a message that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(
                f"{path}: {os.strerror(error.errno)}. There is no store yet; make room and give the same command "
                f"again, which goes on where this one stopped, or delete {path}"
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EPERM):
            raise ValueError(f"{path} cannot be written ({error.strerror}); choose another output") from None
        raise


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
