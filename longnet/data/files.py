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
from longnet.data.pieces import read_pieces
from longnet.data.tei import tei_text

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile, RuntimeError)

# No text is packed this tightly; what is, unpacks to fill the disk or the memory.
MOST_RATIO = 200
HARMLESS_BYTES = 64 * 2**20


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
        return [(root.name, root)]
    if root.is_dir():
        found = sorted(_walk(root))
    else:
        found = sorted((Path(name).as_posix(), Path(name)) for name in glob(spec.path, recursive=True))
        found = [(name, path) for name, path in found if path.is_file()]
    chosen = [(name, path) for name, path in found if _is_archive(path.name) or _included(spec, name)]
    if not chosen:
        there = "no such file or directory" if not found else f"none of its {len(found)} files is in {spec.include}"
        raise ValueError(f"path={spec.path!r}: {there}; expected a file, a directory, or a glob such as 'books/*.txt'")
    return chosen


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading, unpacked if it is compressed, and guarded against bombs."""
    opener = _OPENERS.get(PurePosixPath(_long_name(path.name)).suffix)
    if opener is None:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(_Guarded(opener(path, "rb"), path), 2**20))


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
        spec.complain(str(path), f"cannot be read ({type(error).__name__}: {error})")


def _documents(spec: SourceSpec, name: str, stream: BinaryIO) -> Iterator[Document]:
    for number, (content, last) in enumerate(read_pieces(stream)):
        if last and not number and name.endswith(".xml"):
            content = tei_text(content)
        yield Document(name, content, spec.side(name), last)


def _read_tar(spec: SourceSpec, path: Path) -> Iterator[Document]:
    with open_binary(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = _safe_name(path, member.name)
            if member.isfile() and _included(spec, name):
                content = archive.extractfile(member)
                assert content is not None
                yield from _documents(spec, name, cast(BinaryIO, content))


def _read_zip(spec: SourceSpec, path: Path) -> Iterator[Document]:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        _check_ratio(path, sum(member.file_size for member in members))
        for member in members:
            name = _safe_name(path, member.filename)
            if _included(spec, name):
                with archive.open(member) as content:
                    yield from _documents(spec, name, cast(BinaryIO, content))


def _safe_name(archive: Path, name: str) -> str:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (len(name) > 1 and name[1] == ":"):
        raise ValueError(f"{archive}: the member {name!r} climbs out of the archive; refusing to read it")
    return parts.as_posix()


def _check_ratio(path: Path, unpacked: int) -> None:
    packed = path.stat().st_size
    if unpacked > max(HARMLESS_BYTES, MOST_RATIO * packed):
        raise ValueError(
            f"{path}: {packed} bytes unpack to more than {MOST_RATIO} times as much, which no text does; refusing to "
            "read it. Unpack it yourself if you trust it, and give the directory as path"
        )


class _Guarded(io.RawIOBase):
    """Reads on as long as the file unpacks to a believable size."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._unpacked += len(data)
        _check_ratio(self._path, self._unpacked)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _included(spec: SourceSpec, name: str) -> bool:
    return spec.include is None or any(fnmatch(plain_name(name), p) or fnmatch(name, p) for p in spec.include)


def _is_archive(name: str) -> bool:
    return name.endswith(".zip") or plain_name(name).endswith(".tar")


def _long_name(name: str) -> str:
    short = PurePosixPath(name).suffix
    return name.removesuffix(short) + _SHORT.get(short, short)
