"""The examples of sweeps: their commands are ones that train.py takes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from longnet.training.loggers import _run_id

ROOT = Path(__file__).parents[2]


def test_the_agent_of_wandb_starts_jobs_that_compose():
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "scripts/wandb_sweep.yaml").read_text())
    drawn = {
        name: {"value": options.get("values", [options.get("min")])[0]} for name, options in sweep["parameters"].items()
    }
    command = create_sweep_command(sweep["command"])
    arguments = create_sweep_command_args({"args": drawn})
    words = []
    for word in command:
        if word == "${args_no_hyphens}":
            words += arguments["args_no_hyphens"]
        elif word not in ("${env}", "/usr/bin/env"):
            words.append(sweep["program"] if word == "${program}" else word)
    assert words[:2] == ["python", "train.py"]
    done = subprocess.run(
        [sys.executable, *words[1:], "--cfg", "job", "--resolve"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "WANDB_RUN_ID": "abc123"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    assert job["run"]["name"] == "sweep-abc123"
    assert job["logger"]["wandb"] is True
    assert job["optim"]["lr"] == 1e-4


def test_a_run_of_an_agent_has_the_agents_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    assert _run_id(tmp_path / "alone" / "wandb_id.txt") != "abc123"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    assert _run_id(tmp_path / "swept" / "wandb_id.txt") == "abc123"


def test_the_slurm_sweep_is_a_sweep_of_train(tmp_path):
    # A python that shows what it was called with.
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts/slurm/sweep.sh", "experiment=context_study", "attention=dense,dilated"],
        capture_output=True, text=True, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:3] == ["train.py", "-m", "hydra/launcher=submitit_slurm"]
    assert words[-2:] == ["experiment=context_study", "attention=dense,dilated"]
