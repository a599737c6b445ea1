"""From documents to exact, resumable rows of tokens.

`sources` yields documents, a tokenizer turns them into ids, `packing` cuts the stream into rows, `sampling` says
which rows make the batch of a step, and `build_corpus` puts the first three together. `prepare` makes a store of a
source once, for corpora that are larger than memory; `stream` reads one as it comes; `synthetic` needs no files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longnet.data.build import build_corpus
    from longnet.data.corpus import Corpus
    from longnet.data.documents import Document, SourceSpec, split_of
    from longnet.data.packing import PACKINGS, PackedRows
    from longnet.data.prepare import tokenize
    from longnet.data.sampling import StepBatchSampler, batch_rows, validation_batches
    from longnet.data.sources import SOURCES
    from longnet.data.store import TokenStore
    from longnet.data.synthetic import TASKS, Sample, build_sample
    from longnet.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

_MODULES = {
    "build_corpus": "build",
    "Corpus": "corpus",
    "Document": "documents",
    "SourceSpec": "documents",
    "split_of": "documents",
    "PACKINGS": "packing",
    "PackedRows": "packing",
    "tokenize": "prepare",
    "StepBatchSampler": "sampling",
    "batch_rows": "sampling",
    "validation_batches": "sampling",
    "SOURCES": "sources",
    "TokenStore": "store",
    "TASKS": "synthetic",
    "Sample": "synthetic",
    "build_sample": "synthetic",
    "ByteTokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "PACKINGS",
    "SOURCES",
    "TASKS",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "PackedRows",
    "Sample",
    "SourceSpec",
    "StepBatchSampler",
    "TokenStore",
    "Tokenizer",
    "batch_rows",
    "build_corpus",
    "build_sample",
    "load_tokenizer",
    "split_of",
    "tokenize",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    # torch is only imported by the names that need it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
