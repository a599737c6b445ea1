"""The text of a TEI file, the XML in which libraries of literature are kept."""

from __future__ import annotations

import html
import re

# A file is turned into its text as a whole, which takes a few times its size of memory.
TEI_BYTES = 64 * 2**20
# How far into a file its first tag may lie.
HEAD_BYTES = 10_000

_BODY = re.compile(rb"<text\b.*</text>", re.DOTALL)
# Comments and notes are the editor's, and what ends a block ends a line.
_NOTE = re.compile(rb"<!--.*?-->|<note\b[^>]*/>|<note\b.*?</note>", re.DOTALL)
_BLOCK_END = re.compile(rb"</(?:p|head|l|div|trailer|closer|opener|argument|epigraph|quote|item)>|<lb\b[^>]*/>")
_TAG = re.compile(rb"<[^>]*>")


def is_tei(content: bytes) -> bool:
    """Whether a file that begins so is TEI."""
    return b"<TEI" in content[:HEAD_BYTES]


def tei_text(content: bytes) -> bytes:
    """Give the words of a TEI file, an empty line between paragraphs; what is no TEI is given back as it is.

    By patterns, not by a parser: nothing in the file can refer to another one, or grow when it is read.
    """
    body = _BODY.search(content) if is_tei(content) else None
    if body is None:
        return content
    text = re.sub(rb"\s+", b" ", _NOTE.sub(b"", body[0]))
    text = _TAG.sub(b"", _BLOCK_END.sub(b"\n", text))
    lines = (line.strip() for line in html.unescape(text.decode("utf-8", "surrogateescape")).splitlines())
    return ("\n\n".join(line for line in lines if line) + "\n").encode("utf-8", "surrogateescape")
