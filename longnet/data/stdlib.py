"""The corpus that every machine already has: the Python standard library's own source."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from longnet.data.documents import Document, split_of

# Tests repeat themselves and hold odd bytes on purpose; packages are other people's code.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
# Written by the build or the distribution, so they would differ between two machines with the same Python.
_MACHINE_FILES = ("_sysconfigdata", "sitecustomize.", "usercustomize.")
_MACHINE_DIRECTORIES = ("config-",)


def stdlib(path: str | None, validation_fraction: float) -> Iterator[Document]:
    """Yield the standard library's Python files, by relative path.

    Args:
        path: The library's directory; that of the running Python when None.
        validation_fraction: The share of the files kept for validation.

    Raises:
        ValueError: If the directory is missing or holds no Python source.
    """
    root = Path(path if path is not None else sysconfig.get_path("stdlib"))
    hint = "set path to the standard library of an installed Python, for example /usr/lib/python3.12"
    if not root.is_dir():
        raise ValueError(f"path={str(root)!r} is not a directory; {hint}")
    files = _python_files(root)
    if not files:
        raise ValueError(f"path={str(root)!r} holds no .py files outside its tests; {hint}")
    for name in files:
        content = (root / name).read_bytes()
        if content:
            yield Document(name, content, split_of(name, validation_fraction))


def _python_files(root: Path) -> list[str]:
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
    return sorted(found)
