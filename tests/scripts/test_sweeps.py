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


def test_the_agent_of_wandb_starts_jobs_that_train(tmp_path):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
    from wandb.sdk.lib.config_util import save_config_file_from_dict

    sweep = yaml.safe_load((ROOT / "scripts/wandb_sweep.yaml").read_text())
    drawn = {
        name: {"value": options.get("values", [options.get("min")])[0]} for name, options in sweep["parameters"].items()
    }
    # As the agent goes on from here.
    variables = {**create_sweep_command_args({"args": drawn}), "program": [sweep["program"]], "env": ["/usr/bin/env"]}
    words = []
    for word in create_sweep_command(sweep["command"]):
        words += variables[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    assert words[:3] == ["/usr/bin/env", "python", "train.py"]
    parameters = tmp_path / "wandb/sweep-s/config-abc123.yaml"
    save_config_file_from_dict(str(parameters), drawn)
    small = [
        f"run.root={tmp_path}", "data=text", "data.path=longnet/config", "data.context_length=64",
        "trainer.max_steps=1", "trainer.val_batches=1", "attention.dilated.base=16", "trainer.accelerator=cpu",
        "callbacks=quiet",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words[2:], *small], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_RUN_ID": "abc123", "WANDB_SWEEP_ID": "s",
             "WANDB_SWEEP_PARAM_PATH": str(parameters), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "sweep-abc123"
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == 1e-4
    assert list((run / "wandb").glob("offline-run-*-abc123"))


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
