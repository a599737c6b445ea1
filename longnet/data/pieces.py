"""Texts longer than memory, in pieces that give the same tokens as the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

# What a source holds of one document at most, and what a tokenizer is given of it at once.
DOCUMENT_BYTES = 4 * 2**20
ENCODED_BYTES = 2**18


def read_pieces(stream: BinaryIO, size: int | None = None) -> Iterator[tuple[bytes, bool]]:
    """Yield a file's bytes in pieces of at most `size` and whether each is the last; nothing for an empty file."""
    size = size or DOCUMENT_BYTES
    held = stream.read(size)
    while held:
        more = stream.read(size)
        if not more:
            yield held, True
            return
        at = cut_point(held)
        yield held[:at], False
        held = held[at:] + more
        while len(held) > size:
            at = cut_point(held[:size])
            yield held[:at], False
            held = held[at:]


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
    for back in range(1, min(4, at)):
        byte = data[at - back]
        if byte >= 0xC0:
            return at - back
        if byte < 0x80:
            break
    return at
