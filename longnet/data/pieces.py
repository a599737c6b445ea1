"""Texts longer than memory, in pieces that give the same tokens as the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from longnet.data.documents import Document, Split

# What a source holds of one document at most, and what a tokenizer is given of it at once.
DOCUMENT_BYTES = 4 * 2**20
ENCODED_BYTES = 2**18


def read_pieces(stream: BinaryIO, size: int | None = None, held: bytes = b"") -> Iterator[tuple[bytes, bool]]:
    """Yield a file's bytes in pieces of at most `size` and whether each is the last; nothing for an empty file.

    Args:
        stream: The file.
        size: Bytes of a piece.
        held: What was read of the file before.
    """
    size = size or DOCUMENT_BYTES
    # One byte more than a piece says whether another follows.
    held += stream.read(max(size + 1 - len(held), 0))
    while len(held) > size:
        at = cut_point(held[:size])
        yield held[:at], False
        held = held[at:]
        held += stream.read(max(size + 1 - len(held), 0))
    if held:
        yield held, True


def break_off(document_id: str, split: Split) -> Document:
    """What stands for the rest of a text that cannot be read to its end: the pieces before it are to be dropped.

    An empty piece that is not the last: no text has one.
    """
    return Document(document_id, b"", split, last=False)


def breaks_off(document: Document) -> bool:
    """Whether a text ends here without being whole."""
    return not document.content and not document.last


def split_text(content: bytes, size: int | None = None) -> Iterator[bytes]:
    """Yield a text's bytes in pieces of at most `size`."""
    size = size or ENCODED_BYTES
    start = 0
    while len(content) - start > size:
        at = cut_point(content[start : start + size])
        yield content[start : start + at]
        start += at
    yield content[start:] if start else content


def cut_point(data: bytes) -> int:
    """Where a long text may be cut without changing its tokens: before a single space between two letters.

    Byte-level BPE splits there before it merges anything. Text without such a place is cut between two characters.
    """
    end = len(data) - 1
    while (at := data.rfind(b" ", 1, end)) > 0:
        if data[at - 1 : at].isalpha() and data[at + 1 : at + 2].isalpha():
            return at
        end = at
    at = len(data)
    # At most 3 bytes of a UTF-8 character follow its first one.
    for back in range(1, min(3, at) + 1):
        byte = data[at - back]
        if byte >= 0xC0:
            return at - back or at
        if byte < 0x80:
            break
    return at
