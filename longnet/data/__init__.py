"""From documents to exact, resumable rows of tokens.

`sources` yields documents, a tokenizer turns them into ids, `packing` cuts the stream into rows, `sampling` says
which rows make the batch of a step, and `build_corpus` puts the first three together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longnet.data.corpus import Corpus, build_corpus
    from longnet.data.documents import Document, split_of
    from longnet.data.packing import PackedRows, concat
    from longnet.data.sampling import StepBatchSampler, batch_rows, validation_batches
    from longnet.data.sources import SOURCES
    from longnet.data.tokenizer import TOKENIZERS, ByteTokenizer, Tokenizer

_MODULES = {
    "Corpus": "corpus",
    "build_corpus": "corpus",
    "Document": "documents",
    "split_of": "documents",
    "PackedRows": "packing",
    "concat": "packing",
    "StepBatchSampler": "sampling",
    "batch_rows": "sampling",
    "validation_batches": "sampling",
    "SOURCES": "sources",
    "TOKENIZERS": "tokenizer",
    "ByteTokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "SOURCES",
    "TOKENIZERS",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "PackedRows",
    "StepBatchSampler",
    "Tokenizer",
    "batch_rows",
    "build_corpus",
    "concat",
    "split_of",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    # torch is only imported by the names that need it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
