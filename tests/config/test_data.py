from __future__ import annotations

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
    ],
)
def test_what_can_be_read_is_not(values):
    assert load_with(**values).data.source == values["data__source"]
