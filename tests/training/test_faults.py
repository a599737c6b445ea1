"""Faults around a job: it goes on where it can, says what is wrong where it cannot, and its checkpoints stay good."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch.loggers.logger import Logger
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from longnet.checkpoint import files, steps_of, verify
from longnet.config.errors import JobError
from longnet.training import beside, rundir
from longnet.training.beside import LoggerBeside
from longnet.training.checkpoints import Checkpoints
from longnet.training.interrupt import WAYS
from longnet.training.metrics import MetricsFile, read_metrics
from longnet.training.module import LongNetModule
from longnet.training.run import train

from .jobs import losses
from .processes import finish, running, wait_until


def die_at(patch, step):
    """Has the job die after so many steps."""
    training_step = LongNetModule.training_step

    def dies(self, batch):
        if self.global_step == step:
            raise RuntimeError("dies")
        training_step(self, batch)

    patch.setattr(LongNetModule, "training_step", dies)


def checkpoints(job) -> list[Path]:
    return steps_of(Path(job.run.root) / job.run.name / "checkpoints")


def fail_at(monkeypatch, steps, error):
    """Makes writing fail in the saves of some steps, in the middle of a file."""
    write = files._write

    def failing(path, pieces):
        if any(f"step-{step:08d}" in path.parent.name for step in steps) and path.suffix == ".safetensors":
            path.write_bytes(b"half")
            raise OSError(error, os.strerror(error))
        return write(path, pieces)

    monkeypatch.setattr(files, "_write", failing)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_is_said_and_the_run_goes_on(make_job, monkeypatch, capsys, error, asynchronous):
    options = {"callbacks__save_every": 1, "callbacks__keep_last": 9, "callbacks__save_async": asynchronous}
    good = make_job(run__name="good", **options)
    train(good)
    fail_at(monkeypatch, {2, 4}, error)
    job = make_job(run__name="full", **options)
    train(job)
    said = " ".join(capsys.readouterr().out.split())
    assert f"the checkpoint of step 2 could not be written ([Errno {error}] {os.strerror(error)})" in said
    assert [verify(path).step for path in checkpoints(job)] == [1, 3, 5, 6]
    assert not list((Path(job.run.root) / "full/checkpoints").glob(".*"))
    path = Path(job.run.root)
    assert losses(path / "full/metrics.csv") == losses(path / "good/metrics.csv")
    one, other = (load_file(path / name / "model/model.safetensors") for name in ("good", "full"))
    assert all(one[key].equal(value) for key, value in other.items())


def test_a_last_checkpoint_that_cannot_be_saved_ends_the_run_with_the_older_one(make_job, monkeypatch):
    fail_at(monkeypatch, {6}, errno.ENOSPC)
    job = make_job()
    with pytest.raises(JobError, match="step 6 could not be written .*No space left.*make room in"):
        train(job)
    assert [verify(path).step for path in checkpoints(job)] == [3]
    monkeypatch.undo()
    monkeypatch.setattr("longnet.training.recorder.measure_matmul_rate", lambda device, dtype: 1e12)
    train(job)
    assert verify(checkpoints(job)[-1]).step == 6


@pytest.mark.parametrize("place", ["begin", "go on", "model"])
def test_a_full_disk_around_training_is_said_in_plain_words(make_job, monkeypatch, place):
    job = make_job()
    if place == "go on":
        train(make_job(trainer__max_steps=3))

    def full(*_, **__):
        if place == "model":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        match place:
            case "begin":
                patch.setattr(rundir, "_replace", full)
            case "go on":
                patch.setattr(MetricsFile, "_write", full)
            case _:
                patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(JobError, match=r"default cannot be written \(.*No space left.*make room"):
            train(job)
    train(job)
    path = Path(job.run.root) / "default"
    assert (path / "model/model.safetensors").exists()
    assert [row["step"] for row in read_metrics(path / "metrics.csv")] == [1, 2, 3, 4, 5, 6]


def test_rows_wait_for_a_disk_that_is_full(tmp_path, monkeypatch):
    said: list[str] = []
    logger = MetricsFile(tmp_path / "metrics.csv", warn=said.append)
    logger.log_metrics({"train/loss": 1.0}, 1)
    with monkeypatch.context() as patch:

        def full(self):
            with self.path.open("a") as file:
                file.write("2,half a ro")
            os.truncate(self.path, os.path.getsize(self.path) - len("2,half a ro"))
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(MetricsFile, "_append", full)
        logger.log_metrics({"train/loss": 2.0}, 2)
        logger.log_metrics({"train/loss": 3.0}, 3)
    logger.log_metrics({"train/loss": 4.0}, 4)
    assert [row["train/loss"] for row in read_metrics(logger.path)] == [1.0, 2.0, 3.0, 4.0]
    assert len(said) == 1


def test_half_a_row_does_not_stay(tmp_path, monkeypatch):
    logger = MetricsFile(tmp_path / "metrics.csv", warn=lambda text: None)
    logger.log_metrics({"train/loss": 1.0}, 1)
    before = logger.path.read_bytes()
    cells = MetricsFile._cells

    def half(self, row):
        if row["step"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return cells(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "_cells", half)
        logger._waiting = [{"train/loss": 2.0, "step": 2}]
        logger.log_metrics({"train/loss": 3.0}, 3)
    assert logger.path.read_bytes() == before
    logger.log_metrics({"train/loss": 4.0}, 4)
    assert [row["step"] for row in read_metrics(logger.path)] == [1, 2, 3, 4]


def test_rows_that_waited_for_the_disk_survive_a_checkpoint_and_a_death(make_job, monkeypatch):
    expected = make_job(run__name="expected")
    train(expected)
    job = make_job(run__name="full")
    append = MetricsFile._append
    full = {2, 3}

    def failing(self):
        if self._waiting and self._waiting[-1]["step"] in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "_append", failing)
        die_at(patch, 3)
        with pytest.raises(RuntimeError, match="dies"):
            train(job)
    train(job)
    root = Path(job.run.root)
    assert losses(root / "full/metrics.csv") == losses(root / "expected/metrics.csv")


def test_rows_that_wait_at_the_end_are_written_before_the_last_checkpoint(make_job, monkeypatch):
    append, failed = MetricsFile._append, []

    def failing(self):
        # The disk has room again between the last row and the last checkpoint.
        step = self._waiting[-1]["step"]
        if step in {5, 6} and step not in failed:
            failed.append(step)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self)

    monkeypatch.setattr(MetricsFile, "_append", failing)
    job = make_job()
    train(job)
    assert failed == [5, 6]
    assert [row["step"] for row in read_metrics(Path(job.run.root) / "default/metrics.csv")] == [1, 2, 3, 4, 5, 6]


def test_a_death_behind_a_validation_that_was_done_again_leaves_its_row_once(make_job, monkeypatch):
    expected = make_job(run__name="expected")
    train(expected)
    job = make_job(run__name="broken")
    validate = LongNetModule.validation_step

    def signalled(self, batch, index):
        self.asked_to_stop = WAYS[signal.SIGTERM]
        validate(self, batch, index)

    def dies(self, trainer, module, validated):
        raise RuntimeError("dies between the row and the checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(LongNetModule, "validation_step", signalled)
        with pytest.raises(SystemExit):
            train(job)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "on_step_end", dies)
        with pytest.raises(RuntimeError, match="dies"):
            train(job)
    train(job)
    root = Path(job.run.root)
    assert losses(root / "broken/metrics.csv") == losses(root / "expected/metrics.csv")


class Recording(Logger):
    name, version = "recording", "0"

    def __init__(self, act):
        super().__init__()
        self.act, self.rows = act, []

    def log_metrics(self, metrics, step=None):
        self.act(step)
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs): ...


def test_a_logger_that_fails_is_left_alone():
    def act(step):
        if step == 2:
            raise ConnectionError("server gone")

    said: list[str] = []
    inner = Recording(act)
    logger = LoggerBeside(inner, said.append)
    for step in (1, 2, 3):
        logger.log_metrics({"x": 1.0}, step)
    logger.finish()
    assert [step for step, _ in inner.rows] == [1]
    assert said == [
        "WARNING: the logger recording failed (ConnectionError: server gone); training goes on without it, "
        "metrics.csv has all rows"
    ]


def test_a_logger_that_hangs_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(beside, "_WAITING", 3)
    said: list[str] = []
    for rows in (1, 10):
        forever = threading.Event()
        logger = LoggerBeside(Recording(lambda step, forever=forever: forever.wait()), said.append)
        start = time.monotonic()
        for step in range(rows):
            logger.log_metrics({"x": 1.0}, step)
        logger.finish(patience=0.1)
        assert time.monotonic() - start < 5
        forever.set()
    assert "did not answer for 0.1 seconds" in said[0]
    assert "has not taken 3 rows" in said[1]


SLOW_STEPS = """
import time
from longnet.training.module import LongNetModule
step = LongNetModule.training_step
def slow(self, batch):
    time.sleep(0.1)
    step(self, batch)
LongNetModule.training_step = slow
"""


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(entry.parent.name))
    return found


def test_a_killed_data_worker_ends_the_run_in_plain_words(make_job):
    job = make_job(data__num_workers=1, trainer__max_steps=200, callbacks__save_every=1, trainer__val_every=1000)
    with running(job, SLOW_STEPS) as ranks:
        assert wait_until(lambda: checkpoints(job), ranks[0]), ranks[0].said
        for child in children(ranks[0].process.pid):
            os.kill(child, signal.SIGKILL)
        codes, said = finish(ranks)
    assert codes == [1]
    assert "a process that prepares rows has died" in said
    assert "Traceback" not in said
    verify(checkpoints(job)[-1])


def test_a_dead_rank_ends_the_others_in_plain_words(make_job):
    job = make_job(
        trainer__devices=2, strategy__name="ddp", data__batch_size=1, trainer__max_steps=200, callbacks__save_every=1,
        strategy__timeout=20.0, trainer__val_every=1000,
    )  # fmt: skip
    with running(job, SLOW_STEPS) as ranks:
        assert wait_until(lambda: checkpoints(job), ranks[0]), ranks[0].said
        ranks[1].send(signal.SIGKILL)
        codes, said = finish(ranks, seconds=40)
    assert codes == [1, -signal.SIGKILL], said
    assert "process 0 of 2 lost another one" in said
    verify(checkpoints(job)[-1])


def test_a_damaged_last_checkpoint_costs_only_the_steps_since_the_one_before(make_job, monkeypatch, capsys):
    expected = make_job(run__name="expected", trainer__max_steps=8)
    train(expected)
    job = make_job(run__name="damaged", trainer__max_steps=8)
    with monkeypatch.context() as patch:
        die_at(patch, 7)
        with pytest.raises(RuntimeError, match="dies"):
            train(job)
    file = checkpoints(job)[-1] / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    train(job)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{file} has other content than was saved; falling back to" in said
    root = Path(job.run.root)
    assert losses(root / "damaged/metrics.csv") == losses(root / "expected/metrics.csv")
