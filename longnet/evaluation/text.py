"""The running text that a model is measured on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longnet.data import Corpus, Tokenizer, load_tokenizer
from longnet.data.documents import SourceSpec
from longnet.data.joining import StreamBuilder
from longnet.data.packing import PackedRows, TokenStream
from longnet.data.sources import SOURCES
from longnet.data.store import TokenStore


@dataclass(frozen=True)
class Text:
    """Tokens `eos document eos document eos ...`, and what made them. A made-up task or a mixture has none."""

    tokenizer: Tokenizer
    stream: TokenStream
    source: str


def validation_text(corpus: Corpus) -> Text:
    """What a corpus keeps from training."""
    rows = corpus.validation
    stream = rows.stream if isinstance(rows, PackedRows) else np.empty(0, np.int64)
    return Text(corpus.tokenizer, stream, corpus.source)


def read_text(source: str, path: str | None, tokenizer: str) -> Text:
    """All of a source, for a model that has seen nothing of it; of a prepared store, its validation side.

    Args:
        source: a name in ``SOURCES``, or "prepared".
        path: where it lies.
        tokenizer: "bytes", or a tokenizer's directory.
    """
    if source == "prepared" and path is not None:
        store = TokenStore(path, tokenizer)
        return Text(store.tokenizer, store.stream("validation"), source)
    if source not in SOURCES:
        raise ValueError(f"source={source!r}: expected one of {', '.join([*SOURCES, 'prepared'])}, and its path")
    encoder, spec = load_tokenizer(tokenizer), SourceSpec(source, path)
    joined = StreamBuilder(encoder)
    for document in SOURCES[source](spec):
        joined.add(document, spec)
    return Text(encoder, joined.stream()[0], spec.where)
