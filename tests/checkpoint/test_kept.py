"""A checkpoint of the first version of the format, which every later version must go on from."""

from __future__ import annotations

import shutil

import pytest
import torch

from longnet.checkpoint import read_whole, steps_of, verify
from longnet.training.run import train

from ..training.conftest import known_matmul_rate  # noqa: F401
from ..training.jobs import losses
from .make_kept import KEPT, job

# What it was when it was made.
WEIGHT_SUM = 132.49281266739126
LOSSES = [5.964677810668945, 5.947960376739502, 5.93695592880249, 5.902799606323242, 5.904598712921143]


@pytest.mark.usefixtures("known_matmul_rate")
def test_a_run_of_version_1_goes_on(tmp_path):
    shutil.copytree(KEPT / "version-1", tmp_path / "version-1")
    (checkpoint,) = steps_of(tmp_path / "version-1/checkpoints")
    assert verify(checkpoint).step == 3
    weights = read_whole(checkpoint)["state_dict"]
    assert sum(x.double().abs().sum() for x in weights.values() if x.is_floating_point()) == pytest.approx(WEIGHT_SUM)
    train(job(tmp_path, steps=5))
    rows = losses(tmp_path / "version-1/metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["train/loss"] for row in rows] == pytest.approx(LOSSES, rel=1e-4)
    assert torch.isfinite(weights["model.model.embed_tokens.weight"]).all()
