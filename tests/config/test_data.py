from __future__ import annotations

import math

import pytest

from .conftest import load_with, problems_with

PART = {"source": "stdlib", "weight": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data__source": "text"}, "data.path=null: data.source=text needs one"),
        ({"data__source": "text", "data__path": "/nowhere"}, "data.path='/nowhere': no such file or directory"),
        ({"data__source": "stdlb"}, "data.source='stdlb': expected one of stdlib"),
        ({"data__tokenizer": "bites"}, "data.tokenizer='bites': expected bytes, or the directory of a Hugging Face "
         "tokenizer; did you mean bytes?"),
        ({"data__tokenizer": None}, "data.tokenizer=null: only a prepared store has its own"),
        ({"data__streaming": True, "data__packing": "whole"}, "data.packing=whole: a stream does not know"),
        ({"data__streaming": True, "data__source": "copy"}, "data.streaming=true: data.source=copy is not read from"),
        ({"data__streaming": True, "trainer__overfit_batches": 2}, "trainer.overfit_batches=2: a stream has no first"),
        ({"data__source": "mixture"}, "data.mixture=[]: expected the parts"),
        ({"data__source": "mixture", "data__mixture": ["x"]}, "data.mixture[0]='x': expected a mapping"),
        ({"data__source": "mixture", "data__mixture": [PART | {"wait": 1}]}, "data.mixture[0].wait: unknown key; did "
         "you mean weight?"),
        ({"data__source": "mixture", "data__mixture": [PART | {"weight": 0}]}, "data.mixture[0].weight=0: expected"),
        ({"data__source": "mixture", "data__mixture": [PART | {"source": "text"}]}, "data.mixture[0].path=null"),
        ({"data__source": "mixture", "data__mixture": [PART | {"source": "hff"}]}, "data.mixture[0].source='hff'"),
        ({"data__validation_every": 1}, "data.validation_every=1: expected at least 2"),
        ({"data__block_rows": 0}, "data.block_rows=0: expected at least 1"),
        ({"data__source": "copy", "data__sample_lengths": [64, 0]},
         "data.sample_lengths=[64, 0]: expected lengths from 1 to data.context_length=2048, or null"),
        ({"data__source": "copy", "data__sample_lengths": []}, "data.sample_lengths=[]: expected lengths from 1"),
        ({"data__source": "mixture", "data__mixture": [{"source": "copy", "weight": 1, "sample_lengths": [4096]}]},
         "data.mixture[0].sample_lengths=[4096]: expected lengths from 1 to data.context_length=2048"),
        ({"data__source": "mixture", "data__mixture": [{"source": "copy", "weight": 1, "sample_lengths": 64}]},
         "data.mixture[0].sample_lengths=64: expected lengths from 1"),
        ({"data__split": "test"}, "data.split='test' is not read by source=stdlib; leave it out, or take source=hf"),
        ({"data__source": "copy", "data__include": ["*.c"]}, "data.include=['*.c'] is not read by source=copy"),
        ({"data__source": "hf", "data__path": "x", "data__validation_split": "train"}, "data.validation_split='train' "
         "is the split to train on"),
        ({"data__source": "mixture", "data__mixture": [PART | {"subset": "en"}]}, "data.mixture[0].subset='en' is not "
         "read by source=stdlib"),
        ({"data__source": "mixture", "data__mixture": [PART | {"include": "*.c"}]}, "data.mixture[0].include='*.c' is "
         "one word"),
        ({"data__source": "mixture", "data__mixture": [PART | {"on_bad_input": "no"}]}, "data.mixture[0].on_bad_input"),
        ({"data__source": "mixture", "data__mixture": [PART], "data__split": "test"}, "data.split='test' is not read "
         "by source=stdlib"),
    ],
)  # fmt: skip
def test_what_would_stop_the_reading_is_reported(values, message):
    found = problems_with(**values)
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        {"data__source": "hf", "data__path": "some/name", "data__streaming": True, "data__packing": "isolate"},
        {"data__source": "text", "data__path": "/nowhere/*.txt"},
        {"data__source": "prepared", "data__path": "/", "data__tokenizer": None},
        {"data__source": "mixture", "data__mixture": [PART, {"source": "copy", "weight": 0.5, "answer_only": True}]},
        {"data__source": "mixture", "data__mixture": [PART, PART | {"source": "copy"}], "data__include": ["*.py"]},
    ],
)
def test_what_can_be_read_is_not(values):
    assert load_with(**values).data.source == values["data__source"]


def test_options_that_would_not_be_read_are_reported_together_with_the_rest():
    found = problems_with(data__split="test", data__subset="en", data__block_rows=0)
    assert [line.partition("=")[0] for line in sorted(found)] == ["data.block_rows", "data.split", "data.subset"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"samples": "abc"}, "data.mixture[0].samples='abc': expected an integer"),
        ({"samples": 2.5}, "data.mixture[0].samples=2.5: expected an integer; the nearest is 2"),
        ({"samples": 0}, "data.mixture[0].samples=0: expected at least 1; the nearest is 1"),
        ({"answer_only": "no"}, "data.mixture[0].answer_only='no': expected true or false"),
        ({"validation_samples": None}, "data.mixture[0].validation_samples=null: expected an integer"),
        ({"validation_fraction": 5}, "data.mixture[0].validation_fraction=5"),
        ({"weight": math.inf}, "data.mixture[0].weight=inf: expected a finite number above 0"),
        ({"weight": math.nan}, "data.mixture[0].weight=nan: expected a finite number above 0"),
    ],
)
def test_the_values_of_a_part_are_judged_as_those_of_the_whole(option, message):
    part = {"source": "passkey", "weight": 1} | option
    found = problems_with(data__source="mixture", data__mixture=[part], trainer__max_steps=0)
    assert len(found) == 2
    assert any(line.startswith(message) for line in found)


def test_the_values_of_a_part_get_their_types():
    part = {"source": "passkey", "weight": 1, "samples": 1e4}
    (loaded,) = load_with(data__source="mixture", data__mixture=[part]).data.mixture
    assert loaded == part
    assert isinstance(loaded["samples"], int)
    assert isinstance(part["samples"], float)
