"""A training job on several processes of this machine, as torchrun would start it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from longnet.config.schema import JobConfig

from ..training.jobs import losses
from .processes import run


def train_on(world: int, jobs: list[JobConfig], timeout: float = 200.0) -> None:
    """Trains the jobs one after the other; their processes are the same."""
    for job in jobs:
        job.trainer.devices = world
    run(world, _train, jobs, timeout=timeout, connect=False)


def outcome(job: JobConfig) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The logged rows and the final weights."""
    path = Path(job.run.root) / job.run.name
    return losses(path / "metrics.csv"), load_file(path / "model/model.safetensors")


def _train(jobs: list[JobConfig]) -> None:
    from longnet.training import recorder
    from longnet.training.run import train

    # Measuring the device would take most of a tiny job's time.
    recorder.measure_matmul_rate = lambda device, dtype: 1e12
    for job in jobs:
        train(job)
