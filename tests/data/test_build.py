from __future__ import annotations

import pickle
import shutil
from itertools import islice

import pytest

from longnet.data import SOURCES, Document, build_corpus
from longnet.data.packing import IGNORE_INDEX
from longnet.data.stream import StreamBatches


def test_a_stream_trains_on_what_validation_does_not_have(books):
    options = {"path": str(books), "validation_every": 4, "context_length": 50}
    direct = build_corpus("text", **options)
    stream = build_corpus("text", **options, streaming=True, block_rows=4, validation_samples=10_000)
    assert stream.is_stream
    assert stream.content("validation") == direct.content("validation")
    assert stream.content("train") == b""
    rows = islice(StreamBatches(stream.train, 1), 4 * (len(direct.train) // 4))
    seen = {tuple(row["labels"][0].tolist()) for row in rows}
    assert seen == {tuple(direct.train[index]["labels"].tolist()) for index in range(4 * (len(direct.train) // 4))}
    assert "train" not in stream.facts()["tokens"]


def test_a_stream_keeps_no_more_for_validation_than_it_is_asked_to(books):
    options = {"path": str(books), "validation_every": 2, "context_length": 50, "streaming": True}
    few = build_corpus("text", **options, validation_samples=2)
    assert 2 <= len(few.validation) < len(build_corpus("text", **options, validation_samples=1000).validation)
    labels = [label for row in few.validation for label in row["labels"].tolist() if label != IGNORE_INDEX]
    assert len(labels) == few.validation.num_tokens


def test_a_streams_fingerprint_does_not_know_where_the_files_lie(books, tmp_path):
    shutil.copytree(books, tmp_path / "moved")
    options = {"context_length": 50, "streaming": True, "validation_every": 3}
    here, there = (build_corpus("text", path=str(path), **options) for path in (books, tmp_path / "moved"))
    assert here.fingerprint == there.fingerprint
    assert build_corpus("text", path=str(books), **options, seed=2).fingerprint != here.fingerprint


def test_a_stream_without_validation_is_refused(books):
    with pytest.raises(ValueError, match="longer than the .* validation tokens of the stream text at"):
        build_corpus("text", path=str(books), validation_every=1000, context_length=50_000, streaming=True)


def test_a_store_needs_a_path():
    with pytest.raises(ValueError, match="source=prepared needs the directory of a store"):
        build_corpus("prepared", context_length=8)


def test_what_was_skipped_is_among_the_facts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\nbroken\n' * 20)
    corpus = build_corpus("jsonl", path=str(tmp_path), context_length=8, validation_every=7, on_bad_input="skip")
    assert corpus.facts()["skipped"].startswith("20 skipped: ")


def test_undecodable_documents_are_named(tmp_path, bpe):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"good text, long enough" if number != 5 else b"bad \xff")
    options = {"path": str(tmp_path), "tokenizer": str(bpe), "context_length": 4, "validation_every": 7}
    with pytest.raises(ValueError, match=r"5.txt: is not UTF-8 \(invalid start byte at byte 4\)"):
        build_corpus("text", **options)
    corpus = build_corpus("text", **options, on_bad_input="skip")
    assert corpus.documents == {"train": 5, "validation": 2}


def test_a_stream_leaves_out_what_cannot_be_read_and_goes_on_exactly(tmp_path, bpe):
    for number in range(1, 9):
        (tmp_path / f"{number}.txt").write_bytes(b"good text, long enough" if number % 3 else b"bad \xff")
    options = {"path": str(tmp_path), "tokenizer": str(bpe), "context_length": 4, "validation_every": 7}
    options |= {"streaming": True, "block_rows": 3, "validation_samples": 1}
    with pytest.raises(ValueError, match=r"3.txt: is not UTF-8"):
        list(islice(StreamBatches(build_corpus("text", **options).train, 1), 40))
    stream = build_corpus("text", **options, on_bad_input="skip").train
    whole = list(islice(StreamBatches(stream, 1), 40))
    for stop in (5, 11, 30):
        resumed = islice(StreamBatches(stream, 1, state=whole[stop - 1]["state"]), 40 - stop)
        for before, after in zip(whole[stop:], resumed, strict=True):
            assert before["input_ids"].tolist() == after["input_ids"].tolist()


def test_a_stream_of_nothing_but_bad_input_ends(tmp_path, bpe):
    (tmp_path / "7.txt").write_text("held out, and long enough")
    (tmp_path / "1.txt").write_bytes(b"bad \xff")
    options = {"path": str(tmp_path), "tokenizer": str(bpe), "context_length": 4, "validation_every": 7}
    stream = build_corpus("text", **options, streaming=True, on_bad_input="skip").train
    with pytest.raises(ValueError, match="no document to train on"):
        list(islice(StreamBatches(stream, 1), 2))


@pytest.mark.parametrize("options", [{"streaming": True}, {}, {"packing": "whole"}])
def test_rows_can_be_sent_to_a_process(books, bpe, options):
    corpus = build_corpus("text", path=str(books), tokenizer=str(bpe), context_length=50, validation_every=3, **options)
    copy = pickle.loads(pickle.dumps(corpus.train))
    if options.get("streaming"):
        rows, again = (next(iter(StreamBatches(train, 2))) for train in (corpus.train, copy))
    else:
        rows, again = corpus.train[1], copy[1]
    assert rows["input_ids"].tolist() == again["input_ids"].tolist()


def test_a_stream_reads_no_training_split_for_its_validation(monkeypatch):
    def endless(spec):
        yield Document("held", b"held out, and long enough", "validation")
        for number in range(1000):
            assert number == 0, "one training document is enough to know that validation is over"
            yield Document(f"train:{number}", b"text to train on", "train")

    monkeypatch.setitem(SOURCES, "hf", endless)
    options = {"path": "x", "streaming": True, "validation_split": "held"}
    assert build_corpus("hf", **options, context_length=4).documents == {"validation": 1}
    with pytest.raises(ValueError, match="longer than the 26 validation tokens .*change validation_split='held'"):
        build_corpus("hf", **options, context_length=40)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("text", {"split": "test"}, "split='test' is not read by source=text; leave it out, or take source=hf"),
        ("jsonl", {"validation_split": "test"}, "validation_split='test' is not read by source=jsonl"),
        ("passkey", {"subset": "en"}, "subset='en' is not read by source=passkey"),
        ("prepared", {"revision": "main"}, "revision='main' is not read by source=prepared"),
        ("hf", {"include": ["*.c"]}, r"include=\('\*.c',\) is not read by source=hf; .* take source=stdlib or text"),
        ("text", {"include": "*.c"}, r"include='\*.c' is one word; expected a list of patterns, \['\*.c'\]"),
        ("text", {"on_bad_input": "ignore"}, "on_bad_input='ignore' is neither fatal nor skip"),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(books, source, options, message):
    with pytest.raises(ValueError, match=message):
        build_corpus(source, path=str(books), context_length=8, **options)


def test_the_rule_in_effect_is_named(tmp_path):
    (tmp_path / "1.txt").write_text("text " * 9)
    with pytest.raises(ValueError, match="validation_every=7 leaves no document for validation out of .*change it"):
        build_corpus("text", path=str(tmp_path), validation_every=7, context_length=8)
    (tmp_path / "7.txt").write_text("text")
    with pytest.raises(ValueError, match="validation side .*use at most 5, change validation_every=7"):
        build_corpus("text", path=str(tmp_path), validation_every=7, context_length=8)
