from __future__ import annotations

import json
import subprocess
import sys

import pytest

from longnet.data import Document, build_corpus
from longnet.data.corpus import Corpus
from longnet.data.sources import SOURCES

TRAIN = [b"first <pad> text\n", b"\xff\x00 second"]
VALIDATION = [b"kept back", "naïve".encode()]


@pytest.fixture(autouse=True)
def small_source(monkeypatch):
    def small(spec):
        for number, content in enumerate(TRAIN):
            yield Document(f"train{number}", content, "train")
        for number, content in enumerate(VALIDATION):
            yield Document(f"validation{number}", content, "validation")

    monkeypatch.setitem(SOURCES, "small", small)


def build(**changes) -> Corpus:
    return build_corpus(**{"source": "small", "context_length": 8, "validation_fraction": 0.5, **changes})


def test_sides_are_kept_apart_and_whole():
    corpus = build()
    assert corpus.content("train") == b"".join(TRAIN)
    assert corpus.content("validation") == b"".join(VALIDATION)
    assert corpus.num_bytes == {"train": 26, "validation": 15}
    assert corpus.documents == {"train": 2, "validation": 2}
    assert corpus.vocab_size == 384


def test_bytes_of_the_first_rows_are_those_they_predict():
    corpus = build()
    for rows in range(len(corpus.validation) + 1):
        labels = [label for row in range(rows) for label in corpus.validation[row]["labels"].tolist()]
        assert corpus.content("validation", rows) == corpus.tokenizer.decode(labels)


def test_bytes_per_token_turns_a_loss_per_token_into_one_per_byte():
    corpus = build()
    assert corpus.bytes_per_token * corpus.validation.num_tokens == pytest.approx(15)
    assert corpus.validation.num_tokens == 15 + 2


def test_fingerprint_follows_the_content_alone(monkeypatch):
    first = build().fingerprint
    assert build().fingerprint == build(context_length=3).fingerprint == first
    for side, other in [
        ("TRAIN", [TRAIN[0] + TRAIN[1]]),
        ("TRAIN", TRAIN[::-1]),
        ("VALIDATION", [b"other than it was"]),
    ]:
        with monkeypatch.context() as patch:
            patch.setitem(globals(), side, other)
            assert build().fingerprint != first


def test_a_document_that_changes_sides_changes_the_fingerprint(monkeypatch):
    def fingerprint(second: str) -> str:
        documents = [("train", b"a" * 20), (second, b""), ("validation", b"c" * 20)]
        source = lambda spec: (Document(str(i), text, side) for i, (side, text) in enumerate(documents))  # noqa: E731
        monkeypatch.setitem(SOURCES, "small", source)
        return build().fingerprint

    assert fingerprint("train") != fingerprint("validation")


def test_facts_can_be_written_down():
    facts = json.loads(json.dumps(build().facts()))
    assert facts["tokens"] == {"train": 28, "validation": 17}
    assert facts["rows"] == {"train": 4, "validation": 3}
    assert facts["context_length"] == 8


def test_the_standard_library_is_a_corpus():
    corpus = build(source="stdlib", context_length=2048, validation_fraction=0.05)
    assert corpus.num_bytes["train"] > 10 * corpus.num_bytes["validation"] > 1_000_000
    assert b"import" in corpus.content("validation")
    assert corpus.train[0]["input_ids"][0] == corpus.tokenizer.eos_id
    assert 0.99 < corpus.bytes_per_token < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "stdlb"}, r"source='stdlb' is not one of arrow.*; did you mean 'stdlib'"),
        ({"tokenizer": "byte"}, r"tokenizer='byte' is not a directory; expected bytes, or a directory"),
        ({"packing": "concatenate"}, r"packing='concatenate' is not one of concat, isolate, whole"),
        ({"textfield": "body"}, r"\['textfield'\] are not options of a source; there are include, .*text_field"),
        ({"validation_fraction": 0.0}, r"validation_fraction=0.0 .*0.05"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1.0 "),
        ({"context_length": 0}, r"context_length=0 "),
        ({"context_length": 18}, r"=18 .*validation.* 17 tokens; use at most 17, change validation_fraction=0.5"),
        ({"context_length": 29}, r"context_length=29 .*train.* 28 tokens; use at most 28"),
        ({"source": "stdlib", "path": "/absent"}, r"path='/absent' is not a directory"),
    ],
)
def test_bad_input_is_told_what_to_change(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_empty_sides_are_refused(monkeypatch):
    monkeypatch.setitem(SOURCES, "small", lambda spec: iter(()))
    with pytest.raises(ValueError, match="source=small at here has no documents"):
        build(path="here")
    monkeypatch.setitem(SOURCES, "small", lambda spec: iter([Document("one", b"x" * 99, "train")]))
    with pytest.raises(ValueError, match=r"validation_fraction=0.5 leaves no document for validation out of the 1"):
        build()


def test_names_of_sources_are_known_without_torch():
    code = "import sys; from longnet.data import SOURCES; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("packing", ["concat", "isolate", "whole"])
def test_rows_have_the_documents_that_each_of_them_has(packing):
    corpus = build(context_length=4, packing=packing)
    alone = [corpus.documents_of([row]) for row in range(len(corpus.train))]
    assert alone[0] == [0]
    assert [1] in alone
    assert corpus.documents_of([5, 2, 0, 5]) == sorted({*alone[0], *alone[2], *alone[5]})
