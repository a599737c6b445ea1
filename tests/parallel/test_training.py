"""Whole jobs over (data, sequence) meshes against one process: the same losses, gradient norms and weights."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longnet.training.module import LongNetModule

from ..training.conftest import corpus_path  # noqa: F401
from ..training.jobs import tiny_job
from .training import outcome, train_on

ROWS = 4
# (strategy, data ranks, sequence ranks, other keys)
JOBS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "1x4 gather": ("sequence_parallel", 1, 4, {}),
    "2x2 ring, accumulated": (
        "sequence_parallel", 2, 2, {"strategy.sequence_parallel": "ring", "trainer.accumulate": 2},
    ),
    "1x4 ulysses, checkpointed": (
        "sequence_parallel", 1, 4,
        {"strategy.sequence_parallel": "ulysses", "trainer.activation_checkpointing.kind": "full"},
    ),
    "4x1": ("sequence_parallel", 4, 1, {}),
    "4x1, sharded, checkpointed": (
        "sequence_parallel_fsdp", 4, 1, {"trainer.activation_checkpointing.kind": "selective"},
    ),
    "1x4 ring, sharded, checkpointed": (
        "sequence_parallel_fsdp", 1, 4,
        {"strategy.sequence_parallel": "ring", "trainer.activation_checkpointing.kind": "full"},
    ),
    "2x2 gather, sharded, accumulated, checkpointed": (
        "sequence_parallel_fsdp", 2, 2,
        {"trainer.accumulate": 2, "trainer.activation_checkpointing.kind": "selective"},
    ),
}  # fmt: skip


def job(root, corpus, name, **keys):
    # The last row of the corpus is half empty, so steps and shards differ in their tokens, down to none.
    common = {
        "run.name": name, "trainer.max_steps": 20, "trainer.val_every": 20, "trainer.val_batches": None,
        "model.num_key_value_heads": 2, "data.context_length": 62, "callbacks.save_every": 100,
        "model.dropout": 0.0, "attention.dilated.base": 8,
    }  # fmt: skip
    return tiny_job(root, corpus, **common | keys)


def build(root, corpus, name):
    strategy, data, sequence, keys = JOBS[name]
    batch = ROWS // data // keys.get("trainer.accumulate", 1)
    shape = {"strategy.name": strategy, "strategy.sequence_parallel_size": sequence, "data.batch_size": batch}
    return job(root, corpus, name.replace(" ", "-"), **shape | keys)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, corpus_path):  # noqa: F811
    """All jobs, trained."""
    root = tmp_path_factory.mktemp("runs")
    alone = job(root, corpus_path, "alone", **{"data.batch_size": ROWS})
    train_on(1, [alone])
    meshes = {name: build(root, corpus_path, name) for name in JOBS}
    train_on(4, list(meshes.values()))
    return {"alone": alone, **meshes}


@pytest.mark.parametrize("name", JOBS)
def test_every_mesh_trains_like_one_process(name, jobs):
    rows, weights = outcome(jobs[name])
    expected_rows, expected = outcome(jobs["alone"])
    assert len({row["tokens"] - before["tokens"] for before, row in itertools.pairwise(expected_rows)}) > 1
    for there, here in zip(rows, expected_rows, strict=True):
        assert there == pytest.approx(here, rel=2e-5)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        error = (weights[key] - value).norm() / value.norm()
        assert error < 1e-4, f"{key} is off by {error:.1e}"


def test_dropout_differs_between_all_processes():
    """Also between those that share a sequence, whose positions differ."""
    draws = []
    for rank, step in itertools.product(range(4), range(2)):
        LongNetModule._seed_step(SimpleNamespace(seed=0, global_rank=rank), step)
        draws.append(torch.rand(()).item())
    assert len(set(draws)) == len(draws)
