from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longnet.data.packing import IGNORE_INDEX, PackedRows, collate, pack

from .streams import join

contents = st.lists(st.binary(max_size=40), min_size=1, max_size=8)
contexts = st.integers(1, 30)


@given(contents)
def test_documents_are_joined_by_eos(documents):
    stream = join(documents)[0]
    expected = [1]
    for document in documents:
        expected += [byte + 3 for byte in document] + [1]
    assert stream.tolist() == expected
    assert stream.dtype == np.uint16


@given(contents, contexts)
def test_every_token_is_predicted_once_and_in_order(documents, context_length):
    stream = join(documents)[0]
    rows = PackedRows(stream, context_length)
    labels = torch.cat([rows[index]["labels"] for index in range(len(rows))])
    assert labels[labels != IGNORE_INDEX].tolist() == stream[1:].tolist()
    assert rows.num_tokens == len(stream) - 1
    # Only the end of the last row is filled up.
    assert len(labels) - rows.num_tokens < context_length
    assert (labels[: rows.num_tokens] != IGNORE_INDEX).all()


@given(contents, contexts)
def test_a_row_is_predicted_from_the_token_before(documents, context_length):
    stream = join(documents)[0]
    rows = PackedRows(stream, context_length, pad_id=7)
    for index in range(len(rows)):
        row = rows[index]
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in row.items()} == {
            "input_ids": ((context_length,), torch.int64),
            "labels": ((context_length,), torch.int64),
        }
        start = index * context_length
        for offset, (token, label) in enumerate(zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)):
            if label == IGNORE_INDEX:
                assert token == 7
            else:
                assert (token, label) == (stream[start + offset], stream[start + offset + 1])


@given(contents, contexts, st.integers(1, 9))
def test_padding_adds_only_empty_rows(documents, context_length, multiple):
    rows = PackedRows(join(documents)[0], context_length)
    padded = rows.padded_to_multiple(multiple)
    assert len(padded) % multiple == 0
    assert 0 <= len(padded) - len(rows) < multiple
    for index in range(len(padded)):
        if index < len(rows):
            assert torch.equal(padded[index]["labels"], rows[index]["labels"])
        else:
            assert (padded[index]["labels"] == IGNORE_INDEX).all()
            assert (padded[index]["input_ids"] == 0).all()


def test_rows_end():
    rows = PackedRows(np.arange(10, dtype=np.uint16), 4)
    assert len(list(rows)) == len(rows) == 3
    assert torch.equal(rows[-1]["labels"], rows[2]["labels"])
    with pytest.raises(IndexError):
        rows[3]


def test_reads_a_memory_map(tmp_path):
    np.save(tmp_path / "stream.npy", np.arange(100, dtype=np.uint16))
    rows = PackedRows(np.load(tmp_path / "stream.npy", mmap_mode="r"), 8)
    assert rows[1]["labels"].tolist() == list(range(9, 17))


def test_an_impossible_context_is_refused():
    with pytest.raises(ValueError, match="context_length=0"):
        PackedRows(np.arange(10, dtype=np.uint16), 0)


packings = st.sampled_from(["concat", "isolate", "whole"])


@settings(max_examples=50)
@given(contents, contexts, packings, st.integers(1, 5))
def test_every_token_is_predicted_once_an_epoch_whatever_the_packing(documents, context_length, packing, multiple):
    stream, borders = join(documents)
    rows = pack(packing, stream, borders, context_length, 0).padded_to_multiple(multiple)
    assert len(rows) % multiple == 0
    # A stream of numbers says which token is which.
    numbered = pack(packing, np.arange(len(stream)), borders, context_length, 0)
    labels = [label for row in numbered for label in row["labels"].tolist() if label != IGNORE_INDEX]
    assert sorted(labels) == list(range(1, len(stream)))
    assert sorted(numbered.predicted().tolist()) == sorted(labels)
    for number in range(len(numbered) + 1):
        first = [label for row in range(number) for label in numbered[row]["labels"].tolist() if label != IGNORE_INDEX]
        assert numbered.predicted(number).tolist() == first
    predicted = [label for row in rows for label in row["labels"].tolist() if label != IGNORE_INDEX]
    assert sorted(predicted) == sorted(stream[1:].tolist())


@given(contents, contexts, st.sampled_from(["isolate", "whole"]))
def test_documents_of_a_row_are_kept_apart(documents, context_length, packing):
    stream, borders = join(documents)
    rows = pack(packing, np.arange(len(stream)), borders, context_length, 0)
    for row in rows:
        assert sum(row["lengths"]) == context_length
        assert min(row["lengths"]) > 0
        start = 0
        for length in row["lengths"]:
            ids, labels = (row[name][start : start + length] for name in ("input_ids", "labels"))
            start += length
            if (labels == IGNORE_INDEX).all():
                continue
            # A stretch of one document: it reads on without a gap, and holds no border but where it begins.
            assert labels.tolist() == (ids + 1).tolist()
            assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + length))
            assert not set(ids[1:].tolist()) & set(borders.tolist())
            assert int(labels[-1]) in borders or length == context_length or start == context_length


@given(contents, contexts)
def test_isolated_rows_are_those_of_concat(documents, context_length):
    stream, borders = join(documents)
    plain, isolated = (pack(name, stream, borders, context_length, 0) for name in ("concat", "isolate"))
    assert len(plain) == len(isolated)
    for one, other in zip(plain, isolated, strict=True):
        assert "lengths" not in one
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])


@given(st.lists(st.integers(0, 70), min_size=1, max_size=60), st.integers(1, 40))
def test_whole_cuts_only_what_is_longer_than_a_row_and_wastes_little(lengths, context_length):
    borders = np.cumsum([0, *(length + 1 for length in lengths)])
    rows = pack("whole", np.arange(borders[-1] + 1), borders, context_length, 0)
    where: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        start = 0
        for length in row["lengths"]:
            if row["labels"][start] != IGNORE_INDEX:
                document = int(np.searchsorted(borders, int(row["input_ids"][start]), side="right")) - 1
                where.setdefault(document, []).append(number)
            start += length
    for document, length in enumerate(lengths):
        assert len(where[document]) == -(-(length + 1) // context_length)
    assert all((row["labels"] != IGNORE_INDEX).any() for row in rows)
    full = sum((length + 1) // context_length for length in lengths)
    rest = [(length + 1) % context_length for length in lengths if (length + 1) % context_length]
    # No two of the rows that are shared could be one, so they are at least half full on the whole.
    assert full <= len(rows) <= full + max(2 * sum(rest) / context_length, 1)


def test_the_rows_of_a_long_document_follow_each_other():
    borders = np.array([0, 3, 28, 33])
    rows = pack("whole", np.arange(34), borders, 10, 0)
    starts = [row["input_ids"][0].item() for row in rows]
    assert starts == sorted(starts)
    assert [start for start in starts if 3 <= start < 23] == [3, 13]
    # 5 are left of the long one, which 5 of a short one fill up.
    assert sorted(sorted(row["lengths"]) for row in rows) == [[3, 7], [5, 5], [10], [10]]


def test_a_batch_keeps_the_lengths_beside_the_tensors():
    stream, borders = join([b"abc", b"defgh"])
    batch = collate([pack("isolate", stream, borders, 5, 0)[row] for row in range(2)])
    assert batch["lengths"] == [[4, 1], [5]]
    assert batch["input_ids"].shape == (2, 5)
    assert "lengths" not in collate([PackedRows(stream, 5)[0]])
