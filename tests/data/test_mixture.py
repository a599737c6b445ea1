from __future__ import annotations

import pytest

from longnet.data import build_corpus
from longnet.data.packing import IGNORE_INDEX


@pytest.fixture
def parts(books):
    return [
        {"source": "text", "path": str(books), "weight": 3, "name": "books", "validation_every": 3},
        {"source": "passkey", "weight": 1, "answer_only": True, "samples": 5, "validation_samples": 2},
    ]


def build(parts, **options):
    return build_corpus("mixture", mixture=parts, context_length=300, **options)


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_a_mixture_is_its_parts_one_behind_the_other(parts, packing):
    corpus = build(parts, packing=packing)
    text, task = corpus.train.parts
    assert len(corpus.train) == len(text) + len(task)
    for index, row in enumerate(corpus.train):
        expected = text[index] if index < len(text) else task[index - len(text)]
        assert row["labels"].tolist() == expected["labels"].tolist()
        assert ("lengths" in row) == (packing == "whole")
    with pytest.raises(IndexError):
        corpus.train[len(corpus.train)]
    assert corpus.weights == {"books": 3.0, "passkey": 1.0}
    assert corpus.facts()["mixture"] == {"books": 3.0, "passkey": 1.0}
    order = corpus.order(seed=1)
    drawn = sum(row < len(text) for row in order.take(0, 1000))
    assert drawn == 750


def test_its_validation_is_that_of_its_parts_and_can_be_padded(parts):
    corpus = build(parts)
    text, task = corpus.validation.parts
    assert corpus.content("validation") == b"".join(corpus.tokenizer.decode(p.predicted()) for p in (text, task))
    padded = corpus.validation.padded_to_multiple(7)
    assert len(padded) % 7 == 0
    assert all((padded[row]["labels"] == IGNORE_INDEX).all() for row in range(len(corpus.validation), len(padded)))
    assert (padded[len(corpus.validation) - 1]["labels"] != IGNORE_INDEX).any()
    for rows in range(len(corpus.validation)):
        labels = [label for row in range(rows) for label in corpus.validation[row]["labels"].tolist()]
        assert corpus.validation.predicted(rows).tolist() == [label for label in labels if label != IGNORE_INDEX]


def test_the_fingerprint_follows_the_parts_and_the_weights(parts):
    first = build(parts).fingerprint
    assert build(parts).fingerprint == first
    assert build([parts[0] | {"weight": 2}, parts[1]]).fingerprint != first
    assert build([parts[0], parts[1] | {"samples": 6}]).fingerprint != first


def test_parts_may_have_the_same_source(parts):
    corpus = build([{"source": "copy", "weight": 1}, {"source": "copy", "weight": 2}])
    assert list(corpus.weights) == ["copy", "copy-1"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([], r"mixture=\[\]: expected a list of sources"),
        ([{"source": "copy"}], r"mixture\[0\]=.*: expected a source and a weight above 0"),
        ([{"source": "copy", "weight": 0}], r"expected a source and a weight above 0"),
        ([{"source": "mixture", "weight": 1}], r"a mixture takes no mixture and no stream"),
        ([{"source": "stdlib", "weight": 1, "streaming": True}], r"a mixture takes no mixture and no stream"),
        ([{"source": "copy", "weight": 1}, {"source": "recall", "weight": 1e-6}], r"less than a thousandth"),
    ],
)
def test_bad_mixtures_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        build(changed)


def test_parts_of_different_tokenizers_are_refused(parts, bpe):
    with pytest.raises(ValueError, match="different tokenizers, bytes, small-bpe"):
        build([parts[0], parts[1] | {"tokenizer": str(bpe)}])


def test_an_option_of_the_whole_goes_to_the_parts_that_read_it(parts):
    chosen = build(parts, include=["book0*"])
    assert chosen.train.parts[0].num_tokens < build(parts).train.parts[0].num_tokens
    with pytest.raises(ValueError, match="subset='en' is not read by source=text, passkey"):
        build(parts, subset="en")


def test_parts_that_end_documents_differently_are_refused(parts, bpe, other_eos):
    parts = [parts[0] | {"tokenizer": str(bpe)}, parts[1] | {"tokenizer": str(other_eos)}]
    with pytest.raises(ValueError, match="different tokenizers, small-bpe, other-eos"):
        build(parts)
