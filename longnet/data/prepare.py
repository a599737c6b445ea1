"""From any source to a token store: parallel, restartable, and instant where nothing has changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from longnet.data.documents import SPLITS, Document, Skipped, SourceSpec
from longnet.data.encoding import batches, encode_all
from longnet.data.files import find_files
from longnet.data.sources import SOURCES
from longnet.data.stdlib import find_library, python_files
from longnet.data.store import MANIFEST, Manifest, check_dtype, check_files
from longnet.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from longnet.data.writer import StoreWriter

# Seconds between two entries of the journal: what a kill costs at most.
_JOURNAL_EVERY = 1.0


@dataclass(frozen=True)
class Prepared:
    """What became of a store: `made`, `resumed` and made, or `unchanged`; `because` says why an older one was not.

    `skipped` says what could not be used, in words.
    """

    manifest: Manifest
    how: Literal["made", "resumed", "unchanged"]
    because: str = ""
    skipped: str = ""


def tokenize(
    spec: SourceSpec,
    tokenizer: str,
    output: str | Path,
    *,
    workers: int | None = None,
    dtype: str | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Prepared:
    """Make a token store of a source, unless it is there already.

    Args:
        spec: The source.
        tokenizer: `bytes`, or a tokenizer's directory.
        output: The store's directory.
        workers: Processes that encode; one a core by default.
        dtype: Integers of the store; the smallest that hold the vocabulary by default.
        on_progress: Called with the number of bytes that have been read so far.

    Raises:
        ValueError: For what the user can mend. There is no store then, or the older one.
    """
    # What is left out is counted anew in every pass over the source.
    spec = replace(spec, skipped=Skipped())
    output = check_output(output)
    _check_apart(output, spec)
    encoder = load_tokenizer(tokenizer)
    dtype = dtype or token_dtype(encoder.vocab_size).name
    check_dtype(dtype, encoder.vocab_size)
    key = {"source": _options(spec), "tokenizer": encoder.digest, "eos_id": encoder.eos_id, "dtype": dtype}
    stamp = input_stamp(spec)

    because = ""
    if (output / MANIFEST).exists():
        older = Manifest.read(output)
        because = _difference(older, key)
        if not because and (eos := check_files(output, older)) != encoder.eos_id:
            because = f"eos_id was {eos}, is {encoder.eos_id}"
        if not because and older.input_stamp == stamp:
            return Prepared(older, "unchanged")
        if not because and _input_digest(replace(spec, skipped=Skipped())) == older.input_digest:
            # The files are others, or touched, but hold the same documents.
            older.input_stamp = stamp
            (output / MANIFEST).write_text(older.to_json())
            return Prepared(older, "unchanged")
        because = because or "the input has changed"
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"output={str(output)!r} holds files that are not a store's; choose another directory")

    writer = StoreWriter(output, key, encoder, dtype)
    resumed = writer.batches > 0
    try:
        chain = _write(writer, spec, encoder, tokenizer, workers or os.cpu_count() or 1, on_progress)
        _check_sides(writer, spec)
        manifest = Manifest(
            source=_options(spec),
            tokenizer={"name": encoder.name, "digest": encoder.digest, "vocab_size": encoder.vocab_size},
            dtype=dtype,
            input_digest=chain,
            input_stamp=stamp,
            skipped=spec.skipped.count + writer.skipped_before,
        )
        writer.finish(manifest, encoder)
    except BaseException:
        writer.close()
        raise
    skipped = str(spec.skipped) if spec.skipped.count else ""
    return Prepared(manifest, "resumed" if resumed else "made", because, skipped)


def check_output(output: str | Path) -> Path:
    """The place of what is to be made, resolved: `.` has no name, and a link may lead anywhere.

    Raises:
        ValueError: If it, or what it would lie in, is no directory.
    """
    path = Path(output).resolve()
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise ValueError(f"output={str(output)!r} cannot be written: {str(there)!r} is not a directory; choose another")
    return path


def input_bytes(spec: SourceSpec) -> int | None:
    """How many bytes there are to read, where that is known beforehand: files that are not compressed."""
    files = _files(spec)
    if files is None or any(path.suffix in (".gz", ".bz2", ".xz", ".zip", ".tgz", ".tbz2", ".txz") for path in files):
        return None
    return sum(path.stat().st_size for path in files) if spec.source in ("stdlib", "text") else None


def input_stamp(spec: SourceSpec) -> str:
    """A hash of the input files' names, sizes and times; of the name alone for what does not lie on this machine."""
    files = _files(spec)
    if files is None:
        return "remote"
    words = [f"{path}\0{(stat := path.stat()).st_size}\0{stat.st_mtime_ns}" for path in files]
    return blake2b("\n".join(words).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def read_documents(spec: SourceSpec) -> Iterator[Document]:
    """The documents of a source.

    Raises:
        ValueError: If there is no source of that name.
    """
    if spec.source not in SOURCES:
        raise ValueError(f"source={spec.source!r} is not one of {', '.join(SOURCES)}")
    return SOURCES[spec.source](spec)


def _write(
    writer: StoreWriter,
    spec: SourceSpec,
    encoder: Tokenizer,
    name: str,
    workers: int,
    on_progress: Callable[[int], None],
) -> str:
    """Encode and write everything that the journal does not have yet; give the hash of the input."""
    read = 0
    chains: list[str] = [""]

    def groups() -> Iterator[list[Document]]:
        nonlocal read
        for number, group in enumerate(batches(read_documents(spec)), 1):
            chains.append(_chain(chains[-1], group))
            read += sum(len(document.content) for document in group)
            if number == writer.batches and chains[-1] != writer.chain:
                raise _InputChanged
            if number > writer.batches:
                yield group
            else:
                on_progress(read)
        if len(chains) <= writer.batches:
            raise _InputChanged

    last_entry = time.monotonic()
    written = writer.batches
    try:
        for encoded in encode_all(groups(), encoder, name, workers):
            writer.append(encoded, spec)
            written += 1
            on_progress(read)
            if time.monotonic() - last_entry > _JOURNAL_EVERY:
                writer.checkpoint(written, chains[written])
                last_entry = time.monotonic()
    except _InputChanged:
        writer.restart()
        spec.skipped.count, spec.skipped.places[:] = 0, []
        return _write(writer, spec, encoder, name, workers, on_progress)
    return chains[-1]


class _InputChanged(Exception):  # noqa: N818
    """What was written before a kill was made of other documents."""


def _chain(before: str, group: list[Document]) -> str:
    digest = blake2b(before.encode(), digest_size=16)
    for document in group:
        head = f"{document.id}\0{document.split}\0{document.last}\0{len(document.content)}\0"
        digest.update(head.encode("utf-8", "surrogateescape"))
        digest.update(document.content)
    return digest.hexdigest()


def _input_digest(spec: SourceSpec) -> str:
    chain = ""
    for group in batches(read_documents(spec)):
        chain = _chain(chain, group)
    return chain


def _options(spec: SourceSpec) -> dict[str, Any]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "skipped"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _difference(older: Manifest, key: dict[str, Any]) -> str:
    for name, before, now in (
        ("tokenizer", older.tokenizer["digest"], key["tokenizer"]),
        ("dtype", older.dtype, key["dtype"]),
        *((name, older.source.get(name), now) for name, now in key["source"].items()),
    ):
        if before != now:
            return f"{name} was {before!r}, is {now!r}"
    return ""


def _check_apart(output: Path, spec: SourceSpec) -> None:
    # What is walked, as ** is, would find the store while it grows, and all of it the next time.
    root = Path(spec.path.partition("**")[0]) if spec.path is not None else None
    if root is not None and root.is_dir() and output.is_relative_to(root.resolve()):
        raise ValueError(
            f"output={str(output)!r} lies in path={spec.path!r}, which would read it; choose a directory beside it"
        )


def _files(spec: SourceSpec) -> list[Path] | None:
    if spec.source == "stdlib":
        root = find_library(spec)
        return [root / name for name in python_files(spec)]
    if spec.source == "hf":
        root = Path(spec.path or "")
        return sorted(path for path in root.rglob("*") if path.is_file()) if spec.path and root.is_dir() else None
    return [path for _, path in find_files(spec)]


def _check_sides(writer: StoreWriter, spec: SourceSpec) -> None:
    total = sum(writer.sides[split].documents for split in SPLITS)
    for split in SPLITS:
        if not writer.sides[split].documents:
            writer.close(discard=True)
            raise ValueError(
                f"{spec.rule} leaves no document for {split} out of the {total} of source={spec.where}; change it, or "
                "add documents"
            )
