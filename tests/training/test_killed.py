"""SIGKILL at random moments: what comes out is what an unbroken run gives, bit for bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longnet.training.metrics import read_metrics

from .jobs import losses
from .processes import finish, running, wait_until

CASES = {
    "workers, stream": {
        "data__streaming": True, "data__packing": "isolate", "data__block_rows": 5, "data__validation_samples": 4,
        "data__num_workers": 1, "trainer__accumulate": 2, "data__batch_size": 1,
    },
    "2 processes, accumulated, asynchronous": {
        "trainer__devices": 2, "strategy__name": "ddp", "trainer__accumulate": 2, "data__batch_size": 1,
        "callbacks__save_async": True, "trainer__log_every": 3,
    },
}  # fmt: skip
# Slows down what would be over too soon to be hit: saving, then validation.
SLOW = """
import time
from longnet.checkpoint import files
from longnet.training.module import LongNetModule
write, validate = files._write, LongNetModule.validation_step
def slow_write(path, pieces):
    open({saving!r}, "a").close()
    result = write(path, pieces)
    time.sleep(0.05)
    return result
def slow_validation(self, batch, index):
    open({validating!r}, "a").close()
    time.sleep(0.05)
    return validate(self, batch, index)
files._write, LongNetModule.validation_step = slow_write, slow_validation
"""


def outcome(job):
    path = Path(job.run.root) / job.run.name
    return losses(path / "metrics.csv"), load_file(path / "model/model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_kills_at_any_moment_change_nothing(make_job, tmp_path, name):
    options = {"trainer__max_steps": 8, "trainer__val_every": 3, "callbacks__save_every": 2, "model__dropout": 0.1}
    options |= CASES[name]
    unbroken, broken = (make_job(run__name=part, **options) for part in ("unbroken", "broken"))
    with running(unbroken) as processes:
        codes, said = finish(processes)
    assert set(codes) == {0}, said

    metrics = Path(broken.run.root) / "broken/metrics.csv"
    draw = random.Random(name)
    for moment in ("saving", "validating", "step"):
        marks = {mark: str(tmp_path / f"{moment}-{mark}") for mark in ("saving", "validating")}
        before = len(read_metrics(metrics))
        with running(broken, SLOW.format(**marks)) as processes:
            hit = Path(marks.get(moment, "")) if moment in marks else None
            happened = hit.exists if hit else lambda before=before: len(read_metrics(metrics)) > before
            assert wait_until(happened, processes[0]), finish(processes)[1]
            wait_until(lambda: draw.random() < 0.1, processes[0])
            draw.choice(processes).send(signal.SIGKILL)
    with running(broken) as processes:
        codes, said = finish(processes)
    assert set(codes) == {0}, said
    assert "WARNING" not in said
    rows, weights = outcome(broken)
    expected_rows, expected = outcome(unbroken)
    assert rows == expected_rows
    assert weights.keys() == expected.keys()
    assert all(weights[key].equal(value) for key, value in expected.items())
