"""Random numbers go on where they were, in each process by itself."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from longnet.training import random_state
from longnet.training.module import LongNetModule
from longnet.training.random_state import set_random_state
from longnet.training.run import train


def draw() -> tuple[float, float, float, float]:
    # The second normal number of a pair is kept by the generator, and is part of its state.
    return random.gauss(0, 1), np.random.normal(), float(torch.rand(())), random.random()


def test_each_process_gets_its_own_state_back():
    states, draws = [], []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        draw()
        states.append(json.loads(json.dumps(random_state._own_state())))
        draws.append(draw())
    assert draws[0] != draws[1]
    for rank in (1, 0):
        set_random_state(states, rank)
        assert draw() == draws[rank]
    # There was no third one.
    set_random_state(states, 0)
    set_random_state(states, 2)
    assert draw() == draws[0]


@pytest.mark.parametrize("stop", [3, 4])
def test_a_resumed_run_draws_on(make_job, monkeypatch, stop):
    step, draws = LongNetModule.training_step, []

    def drawing(self, batch):
        draws.append((random.random(), np.random.random()))
        step(self, batch)

    monkeypatch.setattr(LongNetModule, "training_step", drawing)
    train(make_job(run__name="unbroken"))
    expected, draws[:] = list(draws), []
    train(make_job(run__name="broken", trainer__max_steps=stop))
    train(make_job(run__name="broken"))
    assert draws == expected
