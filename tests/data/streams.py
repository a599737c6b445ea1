"""Small streams for tests."""

from __future__ import annotations

import numpy as np

from longnet.data.documents import Document, SourceSpec
from longnet.data.joining import StreamBuilder
from longnet.data.tokenizer import ByteTokenizer

SPEC = SourceSpec("text", "here")


def join(contents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The stream of some documents in bytes, and its borders."""
    builder = StreamBuilder(ByteTokenizer())
    for number, content in enumerate(contents):
        builder.add(Document(str(number), content, "train"), SPEC)
    return builder.stream()
