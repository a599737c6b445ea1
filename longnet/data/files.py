"""Text files as documents: single ones, directories, globs, compressed ones and archives, which are never unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from longnet.data.documents import Document, SourceSpec
from longnet.data.pieces import break_off, read_pieces
from longnet.data.tei import HEAD_BYTES, TEI_BYTES, is_tei, tei_text

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile, RuntimeError)

# No text is packed this tightly; what is, unpacks to fill the disk or the memory.
MOST_RATIO = 200
HARMLESS_BYTES = 64 * 2**20

UNPACKED_AT_ONCE = 2**20


def text(spec: SourceSpec) -> Iterator[Document]:
    """Yield files as documents, by relative path; the members of an archive are documents of their own.

    Raises:
        ValueError: If there are no files, or an archive is unsafe to read.
    """
    found = False
    for name, path in find_files(spec):
        for document in _read(spec, name, path):
            found = True
            yield document
    if not found:
        raise ValueError(f"path={spec.path!r} holds no text: every file that include={spec.include} leaves is empty")


def find_files(spec: SourceSpec) -> list[tuple[str, Path]]:
    """The files of a file, a directory or a glob, by the ids that their documents get.

    Hidden files and links are left out of directories: they are a tool's own, or lead to a file a second time.

    Raises:
        ValueError: If there are none.
    """
    if spec.path is None:
        raise ValueError(f"path=None: source={spec.source} needs a file, a directory or a glob; set path")
    root = Path(spec.path)
    if root.is_file():
        found = [(root.name, root)]
    elif root.is_dir():
        found = sorted(_walk(root))
    else:
        found = sorted((Path(name).as_posix(), Path(name)) for name in glob(spec.path, recursive=True))
        found = [(name, path) for name, path in found if path.is_file()]
    chosen = [(name, path) for name, path in found if _is_archive(path.name) or included(spec, name)]
    if not chosen:
        there = "no such file or directory" if not found else f"none of its {len(found)} files is in {spec.include}"
        raise ValueError(f"path={spec.path!r}: {there}; expected a file, a directory, or a glob such as 'books/*.txt'")
    return chosen


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading, unpacked if it is compressed, and guarded against bombs."""
    opener = _opener(path.name)
    if opener is None:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(_Guarded(opener(path, "rb"), _Ratio(path)), UNPACKED_AT_ONCE))


def unreadable(error: Exception) -> str:
    """What is wrong with a file, in words."""
    return f"cannot be read ({type(error).__name__}: {error})"


def plain_name(name: str) -> str:
    """A file's name without what says how it is compressed."""
    name = _long_name(name)
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix in _OPENERS else name


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        for name in names:
            path = Path(directory, name)
            if not name.startswith(".") and not path.is_symlink() and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _read(spec: SourceSpec, name: str, path: Path) -> Iterator[Document]:
    try:
        if path.name.endswith(".zip"):
            yield from _read_zip(spec, path)
        elif _is_archive(path.name):
            yield from _read_tar(spec, path)
        else:
            with open_binary(path) as stream:
                yield from _documents(spec, plain_name(name), stream)
    except UNREADABLE as error:
        lost = ", and everything behind it is lost" if plain_name(path.name).endswith(".tar") else ""
        spec.complain(str(path), unreadable(error) + lost)


def _documents(spec: SourceSpec, name: str, stream: BinaryIO) -> Iterator[Document]:
    head = stream.read(HEAD_BYTES) if name.endswith(".xml") else b""
    if is_tei(head):
        content = head + stream.read(TEI_BYTES)
        if len(content) > TEI_BYTES:
            spec.complain(name, f"is TEI of more than {TEI_BYTES} bytes, too long to turn into text; divide it")
            return
        head, stream = b"", io.BytesIO(tei_text(content))
    last = True
    try:
        for content, last in read_pieces(stream, held=head):
            yield Document(name, content, spec.side(name), last)
    except UNREADABLE:
        if not last:
            yield break_off(name, spec.side(name))
        raise


def _read_tar(spec: SourceSpec, path: Path) -> Iterator[Document]:
    ratio = _Ratio(path)
    with open_binary(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = _safe_name(path, member.name)
            if member.isfile() and _is_wanted(spec, name):
                content = archive.extractfile(member)
                assert content is not None
                yield from _member(spec, name, cast(BinaryIO, content), ratio)


def _read_zip(spec: SourceSpec, path: Path) -> Iterator[Document]:
    ratio = _Ratio(path)
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        _Ratio(path).add(sum(member.file_size for member in members))
        for member in members:
            name = _safe_name(path, member.filename)
            if _is_wanted(spec, name):
                try:
                    with archive.open(member) as content:
                        yield from _member(spec, name, cast(BinaryIO, content), ratio)
                except UNREADABLE as error:
                    spec.complain(f"{path}, {name}", unreadable(error))


def _member(spec: SourceSpec, name: str, content: BinaryIO, ratio: _Ratio) -> Iterator[Document]:
    if opener := _opener(name):
        # All that comes out of an archive's members counts, so that many small bombs are one large one.
        content = cast(BinaryIO, io.BufferedReader(_Guarded(opener(content, "rb"), ratio), UNPACKED_AT_ONCE))
    yield from _documents(spec, plain_name(name), content)


def _is_wanted(spec: SourceSpec, name: str) -> bool:
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)
    return not hidden and included(spec, name)


def _safe_name(archive: Path, name: str) -> str:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (len(name) > 1 and name[1] == ":"):
        raise ValueError(f"{archive}: the member {name!r} climbs out of the archive; refusing to read it")
    return parts.as_posix()


class _Ratio:
    """Counts what comes out of a file, as long as its size is believable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed = path.stat().st_size
        self._unpacked = 0

    def add(self, unpacked: int) -> None:
        self._unpacked += unpacked
        if self._unpacked > max(HARMLESS_BYTES, MOST_RATIO * self._packed):
            raise ValueError(
                f"{self._path}: {self._packed} bytes unpack to more than {MOST_RATIO} times as much, which no text "
                "does; refusing to read it. Unpack it yourself if you trust it, and give the directory as path"
            )


class _Guarded(io.RawIOBase):
    """Reads on as long as the file unpacks to a believable size."""

    def __init__(self, stream: BinaryIO, ratio: _Ratio) -> None:
        self._stream = stream
        self._ratio = ratio

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._ratio.add(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def included(spec: SourceSpec, name: str) -> bool:
    """Whether a file is one of those that are asked for, by its name as it is or unpacked."""
    return spec.include is None or any(fnmatch(plain_name(name), p) or fnmatch(name, p) for p in spec.include)


def _is_archive(name: str) -> bool:
    return name.endswith(".zip") or plain_name(name).endswith(".tar")


def _opener(name: str) -> Any:
    return _OPENERS.get(PurePosixPath(_long_name(name)).suffix)


def _long_name(name: str) -> str:
    short = PurePosixPath(name).suffix
    return name.removesuffix(short) + _SHORT.get(short, short)
