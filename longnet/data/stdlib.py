"""The corpus that every machine already has: the Python standard library's own source."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from longnet.data.documents import Document, SourceSpec
from longnet.data.files import included

# Tests repeat themselves and hold odd bytes on purpose; packages are other people's code.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
# Written by the build or the distribution, so they would differ between two machines with the same Python.
_MACHINE_FILES = ("_sysconfigdata", "sitecustomize.", "usercustomize.")
_MACHINE_DIRECTORIES = ("config-",)


def stdlib(spec: SourceSpec) -> Iterator[Document]:
    """Yield the standard library's Python files, by relative path; `path` is that of the running Python when None.

    Raises:
        ValueError: If the directory is missing or holds no Python source.
    """
    root = find_library(spec)
    hint = "set path to the standard library of an installed Python, for example /usr/lib/python3.12"
    if not root.is_dir():
        raise ValueError(f"path={str(root)!r} is not a directory; {hint}")
    files = python_files(spec)
    if not files:
        of = "" if spec.include is None else f" of include={spec.include}"
        raise ValueError(f"path={str(root)!r} holds no .py files{of} outside its tests; {hint}")
    for name in files:
        content = (root / name).read_bytes()
        if content:
            yield Document(name, content, spec.side(name))


def find_library(spec: SourceSpec) -> Path:
    """The standard library's directory."""
    return Path(spec.path if spec.path is not None else sysconfig.get_path("stdlib"))


def python_files(spec: SourceSpec) -> list[str]:
    """The relative paths of the library's own source, sorted."""
    root = find_library(spec)
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in _SKIPPED_DIRECTORIES and not name.startswith(_MACHINE_DIRECTORIES)
        ]
        relative = Path(directory).relative_to(root)
        found += [
            (relative / name).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith(_MACHINE_FILES)
        ]
    return sorted(name for name in found if included(spec, name))
