"""Runs that go on with another number of processes: the same rows and weights as an unbroken run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longnet.checkpoint import steps_of
from longnet.parallel.checkpoints import export_weights

from ..training.conftest import corpus_path  # noqa: F401
from ..training.jobs import tiny_job
from .training import outcome, train_on

ROWS, STEPS = 4, 9
# The layouts that a run goes through, each for three steps: (processes, strategy, sequence ranks).
ONE = (1, "auto", 1)
PATHS = {
    "sharded": [(4, "sequence_parallel_fsdp", 2), (2, "sequence_parallel_fsdp", 2), ONE],
    "one, sharded, copies": [ONE, (2, "sequence_parallel_fsdp", 1), (4, "sequence_parallel", 4)],
}


def job(root, corpus, name, stage, layout):
    processes, strategy, sequence = layout
    return tiny_job(
        root, corpus,
        **{
            "run.name": name, "trainer.max_steps": 3 * stage, "data.batch_size": ROWS // (processes // sequence),
            "trainer.val_every": 3, "callbacks.save_every": 3, "optim.schedule": "constant",
            "strategy.name": strategy, "strategy.sequence_parallel_size": sequence, "trainer.val_batches": None,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus_path):  # noqa: F811
    root = tmp_path_factory.mktemp("runs")
    unbroken = job(root, corpus_path, "unbroken", 3, ONE)
    train_on(1, [unbroken])
    last = {"unbroken": unbroken}
    for stage in range(3):
        by_size: dict[int, list] = {}
        for name, layouts in PATHS.items():
            last[name] = job(root, corpus_path, name.replace(" ", "-"), stage + 1, layouts[stage])
            by_size.setdefault(layouts[stage][0], []).append(last[name])
        for processes, jobs in by_size.items():
            train_on(processes, jobs)
        _check_export(last["sharded"], files=PATHS["sharded"][stage][0])
    return last


def _check_export(job, files: int) -> None:
    path = Path(job.run.root) / job.run.name
    checkpoint, target = steps_of(path / "checkpoints")[-1], path / "exported.safetensors"
    assert len(list(checkpoint.glob("tensors-*.safetensors"))) == files
    export_weights(checkpoint, target)
    exported, (_, expected) = load_file(target), outcome(job)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", PATHS)
def test_a_run_goes_on_under_another_layout(name, runs):
    rows, weights = outcome(runs[name])
    expected_rows, expected = outcome(runs["unbroken"])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for there, here in zip(rows, expected_rows, strict=True):
        assert there == pytest.approx(here, rel=2e-5)
    for key, value in expected.items():
        assert (weights[key] - value).norm() / value.norm() < 1e-4, key
    sessions = json.loads((Path(runs[name].run.root) / runs[name].run.name / "environment.json").read_text())
    assert len(sessions["sessions"]) == 3
