"""Rows put together from pieces: which pieces, and what is in them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longnet.data import ByteTokenizer
from longnet.data.growing import GrowingRows
from longnet.data.mixture import MixedRows
from longnet.data.packing import PackedRows
from longnet.data.sampling import EpochOrder, GrowingOrder, MixtureOrder, Piece, Stage
from longnet.data.synthetic_rows import SyntheticRows

STREAM = np.arange(1000, 1100)
ROWS = PackedRows(STREAM, 16, pad_id=7)


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([2, 3, 8])), max_size=3),
    st.sampled_from([1, 10, 24, 2**18]),
    st.integers(0, 2**32),
)
def test_a_stage_has_the_pieces_of_the_rows_that_it_would_have_whole(rows, lengths, together, seed):
    ends = np.cumsum([length for length, _ in lengths]).tolist()
    stages = tuple(Stage(end, pieces) for end, (_, pieces) in zip(ends, lengths, strict=True))
    order = EpochOrder(rows, seed)
    growing = GrowingOrder(order, stages, seed, together)
    begin = 0
    for end, pieces in stages:
        read = Counter(piece for places in growing.take(begin, end - begin) for piece in places)
        expected = [Piece(row, number, pieces) for row in order.take(begin, end - begin) for number in range(pieces)]
        assert read == Counter(expected)
        begin = end
    assert growing.take(begin, 10) == order.take(begin, 10)
    assert growing.take(begin // 2, 5) == growing.take(0, begin // 2 + 5)[begin // 2 :]


def test_neighbours_come_apart():
    order = GrowingOrder(EpochOrder(100), (Stage(100, 16),))
    rows = [len({piece.row for piece in places}) for places in order.take(0, 100)]
    assert min(rows) > 10


def test_parts_of_a_mixture_have_their_weights_in_a_stage():
    mixture = MixtureOrder((50, 50), (3.0, 1.0))
    read = [piece for places in GrowingOrder(mixture, (Stage(1000, 4),)).take(0, 1000) for piece in places]
    assert sum(piece.row < 50 for piece in read) == 3000


def test_the_order_is_pinned():
    (first,) = GrowingOrder(EpochOrder(10, seed=3), (Stage(20, 4),), seed=3).take(0, 1)
    assert first == (Piece(3, 0, 4), Piece(1, 1, 4), Piece(5, 1, 4), Piece(8, 3, 4))


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        MixedRows([PackedRows(STREAM, 16), PackedRows(STREAM + 500, 16)]),
    ],
    ids=["packed", "mixed"],
)
def test_pieces_are_read_as_they_stand_in_their_rows(rows):
    growing = GrowingRows(rows)
    for row in range(len(rows)):
        pieces = tuple(Piece(row, number, 4) for number in (2, 0, 1, 3))
        whole, read = rows[row], growing[pieces]
        assert growing[row].keys() == read.keys() == whole.keys()
        for name in whole:
            parts = whole[name].chunk(4)
            assert torch.equal(read[name], torch.cat([parts[2], parts[0], parts[1], parts[3]]))


@pytest.mark.parametrize("lengths", [None, [192, 1024]])
def test_pieces_of_a_task_are_whole_samples(lengths):
    rows = SyntheticRows("passkey", ByteTokenizer(), 4096, 5, first=3, answer_only=True, sample_lengths=lengths)
    ask = "What is the pass key? The pass key is"
    pieces = [rows.piece(row, number, 8) for row in range(5) for number in range(8)]
    assert {len(piece["input_ids"]) for piece in pieces} == {512}
    texts = [ByteTokenizer().decode(piece["input_ids"].numpy()).decode() for piece in pieces]
    for text, piece in zip(texts, pieces, strict=True):
        answers = [part.split(ask)[1][:6] for part in text.split("Somewhere")[1:]]
        assert all(text.count(answer) == 3 for answer in answers)
        assert (piece["labels"] >= 0).sum() == 6 * len(answers)
    assert len(set(texts)) == len(texts)


def test_rows_are_taken_once_for_all_their_pieces():
    class Counted(EpochOrder):
        def take(self, start, count):
            taken.append(count)
            return super().take(start, count)

    taken = []
    GrowingOrder(Counted(10, seed=11), (Stage(100, 8),), together=400).take(0, 100)
    assert taken == [50, 50]
