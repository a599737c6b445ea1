"""What an evaluation is refused for, before anything is built."""

from __future__ import annotations

import pytest

from longnet.config import load
from longnet.config.data import TASKS
from longnet.config.machine import Machine
from longnet.data import TASKS as MADE_UP


def test_the_config_knows_the_tasks_there_are() -> None:
    assert set(TASKS) == set(MADE_UP)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["evaluation.tasks=[passkey,neeedle]"], "evaluation.tasks[1]='neeedle': expected one of"),
        (["evaluation.contexts=[64,1]"], "evaluation.contexts has 1: expected at least 2"),
        (["evaluation.lengths=[]"], "evaluation.lengths=[]: expected lengths, or null"),
        (["evaluation.depths=[0.5,1.5]"], "expected numbers from 0 to 1"),
        (["evaluation.every=-1"], "evaluation.every=-1: expected at least 0; the nearest is 0"),
        (["evaluation.every=5", "strategy=sequence_parallel", "trainer.devices=2"], "scripts/evaluate.py afterwards"),
        (["evaluation.every=5", "model=hf", "model.pretrained=.", "data.tokenizer=."], "no bounded cache to read with"),
    ],
)
def test_what_cannot_be_measured_is_refused(overrides, expected, compose_job) -> None:
    with pytest.raises(ValueError) as caught:
        load(compose_job(*overrides), Machine(gpus=8))
    assert expected in str(caught.value)
