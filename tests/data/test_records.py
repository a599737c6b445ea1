from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import longnet.data.files
from longnet.data.documents import SourceSpec
from longnet.data.records import arrow, jsonl, parquet


def spec(path, **options) -> SourceSpec:
    return SourceSpec("records", str(path), **options)


def contents(source, given: SourceSpec) -> list[tuple[str, bytes]]:
    return [(document.id, document.content) for document in source(given)]


def test_lines_are_documents_also_of_compressed_files(tmp_path):
    lines = b'{"text": "one"}\n\n{"text": "zw\\u00f6lf", "id": 3}\n{"text": ""}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    assert contents(jsonl, spec(tmp_path)) == [
        ("a.jsonl:1", b"one"),
        ("a.jsonl:3", "zwölf".encode()),
        ("b.jsonl.gz:1", b"one"),
        ("b.jsonl.gz:3", "zwölf".encode()),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut o', "is not JSON"),
        (b'{"text": "\xff\xfe"}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "is list, not an object"),
        (b'{"body": "x", "id": 1}', "text_field='text' is missing; there are body, id"),
        (b'{"text": 5}', "text_field='text' is int, not text"),
    ],
)
def test_a_broken_line_is_named_with_its_file_or_skipped_and_counted(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "also good"}\n')
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {message}.*on_bad_input=skip"):
        contents(jsonl, spec(path))
    skipping = spec(path, on_bad_input="skip")
    assert [content for _, content in contents(jsonl, skipping)] == [b"good", b"also good"]
    assert skipping.skipped.count == 1
    assert "a.jsonl, line 2" in str(skipping.skipped)


def test_many_broken_lines_are_counted_and_a_few_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("no\n" * 30 + '{"text": "yes"}\n')
    skipping = spec(tmp_path, on_bad_input="skip")
    assert len(contents(jsonl, skipping)) == 1
    assert str(skipping.skipped).startswith("30 skipped: ")
    assert str(skipping.skipped).endswith(" and 25 more")


def write_arrow(path, table, as_file):
    kind = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow_file"])
def test_rows_of_columns_are_documents(tmp_path, kind):
    table = pa.table({"id": list(range(40)), "body": [f"text {n}" for n in range(39)] + [None]})
    path = tmp_path / "a.data"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        write_arrow(path, table, as_file=kind == "arrow_file")
    source = parquet if kind == "parquet" else arrow
    skipping = spec(path, text_field="body", on_bad_input="skip")
    assert contents(source, skipping) == [(f"a.data:{n}", f"text {n}".encode()) for n in range(39)]
    assert "row 39: text_field='body' is NoneType" in str(skipping.skipped)
    with pytest.raises(ValueError, match="text_field='text' is missing; there are id, body"):
        contents(source, spec(path))


@pytest.mark.parametrize(("source", "name"), [(jsonl, "a.jsonl"), (parquet, "a.parquet"), (arrow, "a.arrow")])
@pytest.mark.parametrize("content", [b"", b"\x00garbage" * 50])
def test_empty_and_foreign_files_are_named(tmp_path, source, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        contents(source, spec(tmp_path))


def test_a_json_string_that_is_no_unicode_reaches_the_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "half \ud800 pair"}))
    ((_, content),) = contents(jsonl, spec(tmp_path))
    with pytest.raises(UnicodeDecodeError):
        content.decode()


def test_what_is_lost_behind_a_break_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(longnet.data.files, "UNPACKED_AT_ONCE", 100)
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(500).hex().encode() for _ in range(100))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-5000])
    skipping = spec(tmp_path, on_bad_input="skip")
    assert 0 < len(contents(jsonl, skipping)) < 100
    assert "and everything behind it is lost" in str(skipping.skipped)
