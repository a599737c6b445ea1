"""SIGTERM, SIGUSR1 and Ctrl-C to one process of a job, in a step, a validation or a save."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longnet.checkpoint import read_manifest, steps_of, verify
from longnet.training.interrupt import requeue

from .jobs import losses
from .processes import finish, running, wait_until

# Holds the job where the signal is to hit it, and says so.
HOLD = """
import os, time
from pathlib import Path
from longnet.checkpoint import files
from longnet.training.module import LongNetModule
moment, mark = {moment!r}, Path({mark!r})
def hold():
    mark.with_suffix("." + os.environ.get("RANK", "0")).touch()
    time.sleep({seconds})
step, validate, write = LongNetModule.training_step, LongNetModule.validation_step, files._write
def training_step(self, batch):
    if moment == "step" and self.global_step == 3:
        hold()
    step(self, batch)
def validation_step(self, batch, index):
    mark.with_name(f"validated-{{index}}").touch()
    if moment == "validation" and index == 0:
        hold()
    validate(self, batch, index)
def _write(path, pieces):
    if moment == "save":
        hold()
    return write(path, pieces)
LongNetModule.training_step, LongNetModule.validation_step, files._write = training_step, validation_step, _write
{more}
"""
OPTIONS = {"trainer__max_steps": 6, "trainer__val_every": 4, "callbacks__save_every": 2, "trainer__val_batches": 2}
TWO = {"trainer__devices": 2, "strategy__name": "ddp", "data__batch_size": 1}


def outcome(job):
    path = Path(job.run.root) / job.run.name
    return losses(path / "metrics.csv"), load_file(path / "model/model.safetensors")


def signalled(job, tmp_path, moment, numbers, rank=0, more="", seconds=0.3):
    """Exit codes, what was said, and the step that the run was left at."""
    mark = tmp_path / "mark"
    with running(job, HOLD.format(moment=moment, mark=str(mark), more=more, seconds=seconds)) as ranks:
        assert wait_until(mark.with_suffix(f".{rank}").exists, ranks[rank]), ranks[rank].said
        for number in numbers:
            ranks[rank].send(number)
            # Two of a kind that wait for the process at once are one.
            time.sleep(0.05)
        codes, said = finish(ranks)
    checkpoints = steps_of(Path(job.run.root) / job.run.name / "checkpoints")
    return codes, said, verify(checkpoints[-1]).step if checkpoints else 0


@pytest.fixture
def unbroken(make_job):
    def train(**options):
        job = make_job(run__name="unbroken", **OPTIONS | options)
        with running(job) as ranks:
            codes, said = finish(ranks)
        assert set(codes) == {0}, said
        return outcome(job)

    return train


def assert_goes_on_exactly(job, expected):
    with running(job) as ranks:
        codes, said = finish(ranks)
    assert set(codes) == {0}, said
    rows, weights = outcome(job)
    assert rows == expected[0]
    assert all(weights[key].equal(value) for key, value in expected[1].items())


def slurm(folder):
    """Code that makes a job believe it is SLURM's; what it asks of SLURM is written to `asked`."""
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    (folder / "scontrol").chmod(0o755)
    return f'os.environ |= {{"PATH": {str(folder)!r} + ":" + os.environ["PATH"], "SLURM_JOB_ID": "77"}}'


def test_a_signal_to_one_of_two_processes_stops_both_with_one_checkpoint(make_job, tmp_path, unbroken):
    expected = unbroken(**TWO)
    job = make_job(run__name="broken", **OPTIONS | TWO)
    codes, said, step = signalled(job, tmp_path, "step", [signal.SIGTERM], rank=1, more=slurm(tmp_path))
    assert codes == [143, 143], said
    assert not (tmp_path / "asked").exists()
    # The validation that belongs to this step is left for when the run goes on.
    assert step == 4
    assert f"goes on from step {step}" in said
    assert_goes_on_exactly(job, expected)


def test_sigusr1_in_a_validation_has_slurm_run_the_job_again(make_job, tmp_path, unbroken):
    # Sharded: the row that is left for then holds the learning rate, which the optimiser must have got back.
    sharded = TWO | {"strategy__name": "sequence_parallel_fsdp"}
    expected = unbroken(**sharded)
    job = make_job(run__name="broken", **OPTIONS | sharded)
    codes, said, step = signalled(job, tmp_path, "validation", [signal.SIGUSR1], rank=1, more=slurm(tmp_path))
    assert codes == [143, 143], said
    assert step == 4
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    # The batch in hand was the last.
    assert [path.name for path in tmp_path.glob("validated-*")] == ["validated-0"]
    assert_goes_on_exactly(job, expected)


@pytest.mark.parametrize("trouble", ["no scontrol", "no answer"])
def test_a_job_that_cannot_be_requeued_says_so_and_ends_as_saved(tmp_path, monkeypatch, capsys, trouble):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    if trouble == "no scontrol":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:

        def silent(command, timeout, **_):
            raise subprocess.TimeoutExpired(command, timeout)

        monkeypatch.setattr(subprocess, "run", silent)
    requeue()
    assert "SLURM was not asked to run job 77 again" in capsys.readouterr().out


def test_two_signals_in_a_save_leave_it_whole(make_job, tmp_path, unbroken):
    expected = unbroken()
    job = make_job(run__name="broken", **OPTIONS)
    codes, said, step = signalled(job, tmp_path, "save", [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM])
    assert codes == [143], said
    assert step == 3
    assert_goes_on_exactly(job, expected)


def test_ctrl_c_saves_and_a_second_one_does_not_wait(make_job, tmp_path):
    seldom = {"callbacks__save_every": 100, "trainer__val_every": 100, "trainer__log_every": 100}
    once = make_job(run__name="once", **OPTIONS | seldom)
    codes, said, step = signalled(once, tmp_path, "step", [signal.SIGINT])
    # It came in the fourth; what that has come to is known in the fifth.
    assert (codes, step) == ([130], 5), said
    assert "stopping after this step or the next" in said
    twice = make_job(run__name="twice", **OPTIONS | {"callbacks__save_every": 100})
    (tmp_path / "mark.0").unlink()
    codes, said, step = signalled(twice, tmp_path, "step", [signal.SIGINT, signal.SIGINT], seconds=3)
    assert codes == [1], said
    assert step == 0


AT_THE_END = """
import os, signal
from lightning.pytorch.loops.fit_loop import _FitLoop
teardown = _FitLoop.teardown
def signalled(self):
    os.kill(os.getpid(), signal.SIGINT)
    teardown(self)
_FitLoop.teardown = signalled
"""


def test_ctrl_c_as_the_trainer_goes_breaks_nothing(make_job):
    job = make_job(trainer__max_steps=2)
    with running(job, AT_THE_END) as ranks:
        codes, said = finish(ranks)
    assert codes == [0], said
    assert outcome(job)[1]


def test_the_last_validation_is_finished(make_job, tmp_path):
    job = make_job(run__name="last", **OPTIONS | {"trainer__val_every": 100})
    codes, said, step = signalled(job, tmp_path, "validation", [signal.SIGTERM])
    assert (codes, step) == ([0], 6), said
    last = steps_of(Path(job.run.root) / "last/checkpoints")[-1]
    assert read_manifest(last).validation_loss is not None
