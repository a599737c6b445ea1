"""Files that are known to be whole: hashed on the way to the disk, then read back from it and compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What safetensors calls them.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 2**22


@dataclass(frozen=True)
class Entry:
    """What a file must be."""

    size: int
    sha256: str


def write_json(path: Path, value: Any, indent: int | None = None) -> Entry:
    """Writes JSON; floats come back bit for bit."""
    return _write(path, [json.dumps(value, indent=indent).encode()])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Entry:
    """Writes a safetensors file, tensor by tensor: the library's own writer needs all of it in memory once more."""
    # Wide numbers first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _write(path, _pieces(text, (tensor for _, tensor in ordered)))


def hash_file(path: Path) -> Entry:
    """What a file is, read from the disk."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return Entry(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Makes names in a directory outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(header: bytes, tensors: Iterable[Tensor]) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield from (flat[start : start + _PIECE].data for start in range(0, len(flat), _PIECE))


def _write(path: Path, pieces: Iterable[Any]) -> Entry:
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            # So that what is read back comes from the disk and not from memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    written = Entry(size, digest.hexdigest())
    if (found := hash_file(path)) != written:
        raise OSError(f"{path} was written but reads back otherwise: {found.size} bytes of {written.size}, or others")
    return written
