from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longnet.data.packing import IGNORE_INDEX, PackedRows

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
