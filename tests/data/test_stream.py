from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from longnet.data.documents import Document
from longnet.data.pieces import break_off
from longnet.data.stream import RowStream, StreamBatches
from longnet.data.tokenizer import ByteTokenizer

documents = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8)


def stream(contents, context_length=7, block_rows=3, packing="concat", seed=1, pieces=1) -> RowStream:
    def read():
        for number, content in enumerate(contents):
            parts = [content] if pieces == 1 else [content[:1], content[1:]]
            for place, part in enumerate(parts):
                yield Document(str(number), part, "train", last=place == len(parts) - 1)

    return RowStream(read, ByteTokenizer(), context_length, packing, block_rows, seed)


def take(rows: RowStream, count: int, state=None, batch_size=1, rank=0, world=1):
    return list(islice(StreamBatches(rows, batch_size, rank, world, state), count))


@given(documents, st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 2]))
def test_every_token_is_predicted_once_a_pass_in_blocks_of_consecutive_rows(contents, context, block_rows, pieces):
    expected = [1]
    while len(expected) <= 4 * block_rows * context:
        for content in contents:
            expected += [*(byte + 3 for byte in content), 1]
    batches = take(stream(contents, context, block_rows, pieces=pieces), 4 * block_rows)
    for block in range(4):
        rows = [batch["labels"][0].tolist() for batch in batches[block * block_rows : (block + 1) * block_rows]]
        start = block * block_rows * context + 1
        wanted = [expected[start + row * context : start + (row + 1) * context] for row in range(block_rows)]
        assert sorted(rows) == sorted(wanted)


@settings(max_examples=50)
@given(documents, st.integers(1, 12), st.integers(1, 5), st.integers(0, 25), st.sampled_from(["concat", "isolate"]))
def test_it_goes_on_anywhere_exactly(contents, context, block_rows, stop, packing):
    rows = stream(contents, context, block_rows, packing)
    whole = take(rows, stop + 8, batch_size=2)
    state = whole[stop - 1]["state"] if stop else None
    for before, after in zip(whole[stop:], take(rows, 8, state, batch_size=2), strict=True):
        assert torch.equal(before["input_ids"], after["input_ids"])
        assert torch.equal(before["labels"], after["labels"])
        assert before.get("lengths") == after.get("lengths")
        assert before["state"] == after["state"]


def test_a_place_is_a_few_integers():
    state = take(stream([b"abcdefgh" * 10]), 5)[-1]["state"]
    assert set(state) == {"block", "document", "offset", "row"}
    assert all(isinstance(value, int) for value in state.values())


@given(documents, st.integers(1, 3), st.integers(1, 3))
def test_ranks_share_what_one_reads_alone_and_their_number_may_change(contents, batch_size, world):
    rows = stream(contents)
    alone = take(rows, 6, batch_size=batch_size * world)
    ranks = [take(rows, 6, batch_size=batch_size, rank=rank, world=world) for rank in range(world)]
    for step in range(6):
        together = torch.cat([ranks[rank][step]["input_ids"] for rank in range(world)])
        assert torch.equal(alone[step]["input_ids"], together)
        assert alone[step]["state"] == ranks[0][step]["state"]
    resumed = take(rows, 3, ranks[-1][2]["state"], batch_size=batch_size * world)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(alone[3:], resumed, strict=True))


@given(documents, st.integers(1, 12))
def test_isolated_documents_begin_at_their_eos(contents, context):
    for batch in take(stream(contents, context, packing="isolate"), 12):
        ids, (lengths,) = batch["input_ids"][0].tolist(), batch["lengths"]
        assert sum(lengths) == context
        starts = np.cumsum([0, *lengths])[:-1]
        assert {place for place in range(1, context) if ids[place] == 1} == set(starts[1:].tolist())


def test_the_seed_chooses_the_order():
    contents = [bytes(range(100))] * 2
    orders = {str([b["input_ids"].tolist() for b in take(stream(contents, 5, 8, seed=s), 16)]) for s in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_does_not_change_the_batches(num_workers):
    rows = stream([b"some text", b"and more of it"])
    options = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(StreamBatches(rows, 2), batch_size=None, **options)
    for expected, found in zip(take(rows, 6, batch_size=2), islice(loader, 6), strict=True):
        assert torch.equal(expected["input_ids"], found["input_ids"])
        assert expected["state"] == found["state"]


def test_whole_documents_and_empty_streams_are_refused():
    with pytest.raises(ValueError, match="packing='whole' must know all documents.*source=prepared"):
        stream([b"x"], packing="whole")
    with pytest.raises(ValueError, match="no document"):
        take(stream([]), 1)


def test_a_document_that_breaks_off_is_left_out():
    def read():
        yield Document("0", b"first", "train")
        yield Document("1", b"half a ", "train", last=False)
        yield break_off("1", "train")
        yield Document("2", b"third", "train")

    rows = RowStream(read, ByteTokenizer(), 6, block_rows=2)
    labels = [ByteTokenizer().decode(batch["labels"][0].numpy()) for batch in take(rows, 2)]
    assert sorted(labels) == [b"first", b"third"]
