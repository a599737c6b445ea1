"""The sources of documents by the name that `data.source` gives them."""

from __future__ import annotations

from longnet.data.documents import Source
from longnet.data.files import text
from longnet.data.hub import hf
from longnet.data.records import arrow, jsonl, parquet
from longnet.data.stdlib import stdlib

SOURCES: dict[str, Source] = {
    "stdlib": stdlib,
    "text": text,
    "jsonl": jsonl,
    "parquet": parquet,
    "arrow": arrow,
    "hf": hf,
}
