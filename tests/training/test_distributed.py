"""Two gloo processes on a CPU against one, through `train.py`, by torchrun and by Lightning's own launcher."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longnet.training.run import train

from .jobs import losses

ROOT = Path(__file__).parents[2]


def launch(arguments: list[str], launcher: list[str]) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def overrides(job) -> list[str]:
    keys = {
        "run.root": job.run.root,
        "model.hidden_size": job.model.hidden_size,
        "model.intermediate_size": job.model.intermediate_size,
        "model.num_hidden_layers": job.model.num_hidden_layers,
        "model.num_attention_heads": job.model.num_attention_heads,
        "model.tie_word_embeddings": str(job.model.tie_word_embeddings).lower(),
        "attention.dilated.base": job.attention.dilated.base,
        "data.path": job.data.path,
        "data.context_length": job.data.context_length,
        "data.validation_fraction": job.data.validation_fraction,
        "optim.warmup_steps": job.optim.warmup_steps,
        "optim.lr": job.optim.lr,
        "trainer.max_steps": job.trainer.max_steps,
        "trainer.log_every": job.trainer.log_every,
        "trainer.val_every": job.trainer.val_every,
        "trainer.val_batches": "null",
        "trainer.accelerator": "cpu",
    }
    return [f"{key}={value}" for key, value in keys.items()]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [TORCHRUN, []], ids=["torchrun", "lightning"])
def test_two_processes_train_like_one(make_job, launcher):
    # 4 rows a step: as one batch here, as 2 batches of 1 row on each of 2 processes there. The last row of the corpus
    # is half empty, so the processes do not have equally many tokens.
    alone = make_job(run__name="alone", data__batch_size=4, trainer__max_steps=16, trainer__val_batches=None)
    train(alone)

    together = ["run.name=together", "data.batch_size=1", "trainer.accumulate=2", "trainer.devices=2", "strategy=ddp"]
    screen = launch([*overrides(alone), *together, "callbacks=quiet", "callbacks.save_every=8"], launcher)
    root = Path(alone.run.root)
    expected, found = losses(root / "alone/metrics.csv"), losses(root / "together/metrics.csv")
    assert len({row["tokens"] - before["tokens"] for before, row in itertools.pairwise(expected)}) > 1
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for there, here in zip(found, expected, strict=True):
        assert there == pytest.approx(here, rel=2e-5)

    noise = [line for line in screen.splitlines() if "warn" in line.lower() or "lightning" in line.lower()]
    assert not noise

    if launcher:
        return
    # Lightning's launcher starts the second process when the first one already owns the directory.
    more = launch([*overrides(alone), *together, "callbacks=quiet", "trainer.max_steps=18"], launcher)
    assert [row["step"] for row in losses(root / "together/metrics.csv")] == list(range(1, 19)), more
