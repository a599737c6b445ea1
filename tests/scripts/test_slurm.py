"""SLURM's commands by others of their names, which write down how they were called."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..training.jobs import write_corpus

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/train.sbatch"

COMMANDS = {
    # What SLURM would do with the script, but at once and here; options before its name overrule those in it.
    "sbatch": """
        while [[ "$1" == -* ]]; do
            [ "$1" = --nodes ] && export SLURM_JOB_NUM_NODES=$2 && shift
            shift
        done
        cp "$1" "$CALLED/script"
        export SLURM_JOB_ID=77 SLURM_JOB_NODELIST="node[3-6]" SLURM_GPUS_ON_NODE=8 SLURM_NTASKS=1
        (bash "$@"; echo $? > "$CALLED/code") > "$CALLED/log" 2>&1 < /dev/null &
        echo "Submitted batch job 77"
    """,
    "srun": """
        echo "$PPID $$ $OMP_NUM_THREADS" > "$CALLED/processes"
        echo "$@" >> "$CALLED/srun"
        while [[ "$1" == -* ]]; do
            case "$1" in --output | --error) shift ;; esac
            shift
        done
        if [ "$1" = torchrun ]; then
            # Takes its time to save.
            trap 'kill $!; sleep 1; echo saved >> "$CALLED/scontrol"; exit 143' TERM
            echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > "$CALLED/patience"
            sleep 60 &
            wait
        fi
        SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 exec "$@"
    """,
    "scontrol": """
        echo "$@" >> "$CALLED/scontrol"
        if [ "$1" = show ]; then
            # One at a time, as to a reader that may leave before the end.
            for number in 3 4 5 6; do echo "node$number"; sleep 0.05; done
        fi
    """,
    "scancel": """
        echo "scancel $@" >> "$CALLED/scontrol"
        kill -TERM $(cut -d ' ' -f 2 "$CALLED/processes")
    """,
    "sacct": """
        state=RUNNING
        [ -e "$CALLED/code" ] && state=COMPLETED
        printf 'JobID|State|NodeList\\n77|%s|node3\\n' $state
    """,
}


@pytest.fixture
def called(tmp_path, monkeypatch):
    """A directory where the commands leave what they were called with."""
    commands, notes = tmp_path / "commands", tmp_path / "called"
    commands.mkdir()
    notes.mkdir()
    for name, lines in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{lines}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(notes))
    return notes


def wait_for(path: Path, seconds: float = 20.0) -> str:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} was not written within {seconds} seconds"
        time.sleep(0.05)
    return path.read_text()


def test_the_script_starts_torchrun_and_goes_back_into_the_queue(called, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    subprocess.run(["sbatch", "--nodes", "4", SCRIPT, "run.name=long", "optim.lr=1e-3"], check=True)
    words = wait_for(called / "srun").split()
    assert words == [
        "--kill-on-bad-exit=1", "torchrun", "--nnodes", "4", "--nproc-per-node", "8", "--rdzv-id", "77",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "node3:29500",
        "train.py", "strategy=sequence_parallel_fsdp", "run.name=long", "optim.lr=1e-3",
    ]  # fmt: skip
    assert wait_for(called / "patience").strip() == "170"
    shell, _, threads = map(int, (called / "processes").read_text().split())
    assert threads == 8
    # The script says to whom SLURM is to send the signal, and how long before the end: to this shell.
    directives = re.findall(r"^#SBATCH (\S+)", SCRIPT.read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1", "--signal=B:USR1@180"} <= set(directives)
    os.kill(shell, signal.SIGUSR1)
    assert wait_for(called / "code").strip() == str(128 + signal.SIGUSR1)
    # Requeueing kills what still runs, so it comes after the job has saved.
    asked = (called / "scontrol").read_text().splitlines()
    assert asked == ["show hostnames node[3-6]", "scancel --signal=TERM 77", "saved", "requeue 77"]


def test_a_sweep_is_sent_to_slurm_and_trains_there(called, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    small = {
        "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.num_attention_heads": 2, "data.path": corpus,
        "data.context_length": 64, "data.validation_fraction": 0.3, "trainer.max_steps": 1,
        "run.root": tmp_path / "runs", "trainer.accelerator": "cpu", "trainer.devices": 1, "callbacks.plot": "false",
    }  # fmt: skip
    keys = [f"{key}={value}" for key, value in small.items()]
    slurm = ["hydra/launcher=submitit_job", "hydra.launcher.partition=long", "hydra.launcher.gpus_per_node=null"]
    done = subprocess.run(
        [sys.executable, "train.py", "-m", *slurm, *keys, "attention=dense"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    log = (called / "log").read_text() if (called / "log").exists() else ""
    assert done.returncode == 0, done.stderr + log
    directives = re.findall(r"^#SBATCH (\S+)", (called / "script").read_text(), re.MULTILINE)
    assert {"--nodes=1", "--ntasks-per-node=1", "--partition=long", "--time=1440"} <= set(directives)
    assert not any("gpus" in directive for directive in directives)
    (run,) = (tmp_path / "runs").glob("tiny-dense-*")
    assert (run / "metrics.csv").exists(), log
