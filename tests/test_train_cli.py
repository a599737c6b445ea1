"""`train.py` as a person meets it. The job itself is a stand-in here, so that each command takes a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Runs train.py in this process's place, with a stand-in for the training that does what STAND_IN says, and tells at the
# end which of the heavy packages were imported.
DRIVER = """
import json, os, pathlib, runpy, sys, types

def train(job):
    directory = pathlib.Path(job.run.root) / job.run.name
    what = os.environ.get("STAND_IN", "")
    if what == "data":
        from longnet.config import JobError
        raise JobError("the corpus is empty")
    if what == "bug" or what == job.attention.layers[0]:
        int("not a number")
    directory.mkdir(parents=True)
    loss = {"dense": 2.0, "dilated": 1.0}.get(job.attention.layers[0], 3.0)
    header = "step,train/loss,val/bits_per_byte"
    (directory / "metrics.csv").write_text(header + f"\\n1,{loss},{loss}\\n")

stand_in = types.ModuleType("longnet.training.run")
stand_in.train = train
sys.modules["longnet.training"] = types.ModuleType("longnet.training")
sys.modules["longnet.training.run"] = stand_in
sys.argv = [os.environ["TRAIN_PY"], *sys.argv[1:]]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "lightning", "transformers", "matplotlib", "numpy"} & set(sys.modules)
    pathlib.Path(os.environ["IMPORTED"]).write_text(json.dumps(sorted(heavy)))
"""


class Answer:
    """What a command gave, and the files it left."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        imported = directory.parent / f"{directory.name}.imported.json"
        ours = ("HYDRA_FULL_ERROR", "WORLD_SIZE", "RANK", "LOCAL_RANK")
        base = {name: value for name, value in os.environ.items() if name not in ours}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, *arguments],
            cwd=directory,
            env={**base, "TRAIN_PY": str(ROOT / "train.py"), "IMPORTED": str(imported), **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.imported = json.loads(imported.read_text())
        self.files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def test_help_lists_groups_and_commands(here: Path) -> None:
    answer = Answer(here, "--help")
    assert answer.code == 0
    assert "attention: block_sparse, dense, dilated" in answer.out
    assert "python train.py experiment=stdlib_gpu" in answer.out
    assert (answer.imported, answer.files) == ([], [])


def test_cfg_job_shows_the_config(here: Path) -> None:
    answer = Answer(here, "--cfg", "job", "--resolve", "attention=dense")
    assert answer.code == 0
    assert "name: tiny-dense-stdlib" in answer.out
    assert (answer.imported, answer.files) == ([], [])


def test_a_bad_command_line_gets_everything_at_once(here: Path) -> None:
    answer = Answer(here, "trainer.max_stepz=3", "attention=dilatd", "optim.lr=-1", "data.batch_size=x")
    assert answer.code == 2
    assert answer.err.splitlines()[0] == "4 problems in the configuration:"
    for word in ("trainer.max_steps?", "did you mean dilated?", "optim.lr=-1.0", "data.batch_size='x'"):
        assert word in answer.err
    assert "Traceback" not in answer.err
    assert (answer.imported, answer.files) == ([], [])


def test_a_bad_config_ends_short_and_leaves_nothing(here: Path) -> None:
    answer = Answer(here, "optim.lr=-1", "trainer.devices=2", "trainer.accelerator=cpu")
    assert answer.code == 2
    assert answer.err.splitlines() == [
        "2 problems in the configuration:",
        "  optim.lr=-1.0: expected above 0",
        "  strategy.name=auto: 2 processes (trainer.devices=2 trainer.num_nodes=1) need a strategy; "
        "expected strategy=ddp, or sequence_parallel to share each sequence",
    ]
    assert (answer.imported, answer.files) == ([], [])


def test_the_traceback_comes_when_asked_for(here: Path) -> None:
    assert "Traceback" in Answer(here, "optim.lr=-1", HYDRA_FULL_ERROR="1").err


def test_of_several_processes_one_speaks(here: Path) -> None:
    processes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    first = Answer(here, **processes, RANK="0", LOCAL_RANK="0")
    second = Answer(here, **processes, RANK="1", LOCAL_RANK="1")
    assert "expected strategy=ddp" in first.err
    assert (second.code, second.err) == (2, "")


def test_a_job_runs_and_hydra_leaves_no_files(here: Path) -> None:
    answer = Answer(here, "attention=dense")
    assert (answer.code, answer.err) == (0, "")
    assert answer.files == ["runs/tiny-dense-stdlib/metrics.csv"]


def test_what_a_user_can_mend_is_short_and_a_bug_is_not(here: Path) -> None:
    data = Answer(here, STAND_IN="data")
    assert data.code == 1
    assert data.err.splitlines()[0] == "the corpus is empty"
    assert "Traceback" not in data.err
    bug = Answer(here, STAND_IN="bug")
    assert bug.code == 1
    assert "Traceback" in bug.err
    assert "invalid literal for int()" in bug.err


def test_a_sweep_runs_every_job_and_compares_them(here: Path) -> None:
    answer = Answer(here, "-m", "attention=dense,dilated")
    assert (answer.code, answer.err) == (0, "")
    sweep = next(Path(file).parent for file in answer.files if file.endswith("comparison.csv"))
    assert answer.files == sorted(
        [
            "runs/tiny-dense-stdlib/metrics.csv",
            "runs/tiny-dilated-stdlib/metrics.csv",
            *(f"{sweep}/{name}" for name in ("comparison.csv", "comparison.png", "multirun.yaml")),
        ]
    )
    assert "tiny-dilated-stdlib" in answer.out


def test_a_sweep_with_a_failed_job_compares_the_others(here: Path) -> None:
    answer = Answer(here, "-m", "attention=dense,dilated", STAND_IN="dense")
    assert answer.code == 1
    assert answer.err.startswith("runs/tiny-dense-stdlib failed: ValueError: invalid literal")
    assert "invalid literal for int()" in answer.err
    (table,) = (here / file for file in answer.files if file.endswith("comparison.csv"))
    assert [line.split(",")[:2] for line in table.read_text().splitlines()[1:]] == [
        ["tiny-dense-stdlib", ""],
        ["tiny-dilated-stdlib", "1.0"],
    ]


def test_an_unsound_sweep_starts_nothing(here: Path) -> None:
    answer = Answer(here, "-m", "attention=dense,dilated", "optim.lr=1e-3,-1")
    assert answer.code == 2
    assert "[attention=dense optim.lr=-1, attention=dilated optim.lr=-1] optim.lr=-1.0: expected above 0" in answer.err
    assert (answer.imported, answer.files) == ([], [])
