"""Records with a text field: lines of JSON, parquet and arrow files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from longnet.data.documents import Document, SourceSpec
from longnet.data.files import UNREADABLE, find_files, open_binary, unreadable

# Rows of a parquet file that are decoded at once: long documents would fill the memory by the usual thousands.
_ROWS_AT_ONCE = 16


def jsonl(spec: SourceSpec) -> Iterator[Document]:
    """Yield the text field of every line of JSON, also of compressed files."""
    for name, path in find_files(spec):
        number = 0
        try:
            with open_binary(path) as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield from _line(spec, f"{name}:{number}", f"{path}, line {number}", line)
        except UNREADABLE as error:
            spec.complain(f"{path}, after line {number}", f"{unreadable(error)}, and everything behind it is lost")
        if number == 0:
            spec.complain(str(path), "is empty")


def parquet(spec: SourceSpec) -> Iterator[Document]:
    """Yield the text field of every row of parquet files."""
    import pyarrow.parquet

    def batches(path: Path) -> Iterator[Any]:
        file = pyarrow.parquet.ParquetFile(path)
        columns = _check_column(spec, path, file.schema_arrow.names)
        yield from file.iter_batches(_ROWS_AT_ONCE, columns=columns) if columns else ()

    return _rows(spec, batches)


def arrow(spec: SourceSpec) -> Iterator[Document]:
    """Yield the text field of every row of arrow files, in the stream format that `datasets` writes or the file one."""
    import pyarrow

    def batches(path: Path) -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_stream(source)
                found: Iterable[Any] = reader
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                found = (reader.get_batch(number) for number in range(reader.num_record_batches))
            if columns := _check_column(spec, path, reader.schema.names):
                yield from (batch.select(columns) for batch in found)

    return _rows(spec, batches)


def record_text(spec: SourceSpec, place: str, value: Any) -> bytes | None:
    """A field's value as bytes; None, after a complaint, if it is no text."""
    if isinstance(value, str):
        # A JSON string may hold half a surrogate pair: such bytes are for the tokenizer to judge.
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    spec.complain(place, f"text_field={spec.text_field!r} is {type(value).__name__}, not text")
    return None


def _line(spec: SourceSpec, document_id: str, place: str, line: bytes) -> Iterator[Document]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        spec.complain(place, f"is not JSON ({error})")
        return
    if not isinstance(record, dict):
        spec.complain(place, f"is {type(record).__name__}, not an object with fields")
    elif spec.text_field not in record:
        spec.complain(place, _no_field(spec, record))
    elif content := record_text(spec, place, record[spec.text_field]):
        yield Document(document_id, content, spec.side(document_id))


def _rows(spec: SourceSpec, batches: Any) -> Iterator[Document]:
    import pyarrow

    for name, path in find_files(spec):
        number = -1
        try:
            for batch in batches(path):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if content := record_text(spec, f"{path}, row {number}", value):
                        yield Document(f"{name}:{number}", content, spec.side(f"{name}:{number}"))
        except (pyarrow.ArrowInvalid, *UNREADABLE) as error:
            spec.complain(f"{path}, after row {number}", f"{unreadable(error)}, and everything behind it is lost")
        if number < 0:
            spec.complain(str(path), "has no rows")


def _check_column(spec: SourceSpec, path: Path, names: list[str]) -> list[str]:
    if spec.text_field in names:
        return [spec.text_field]
    spec.complain(str(path), _no_field(spec, names))
    return []


def _no_field(spec: SourceSpec, names: Iterable[str]) -> str:
    return f"text_field={spec.text_field!r} is missing; there are {', '.join(map(str, names)) or 'no fields'}"
