"""Whole jobs, in this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from longnet.checkpoint import read_whole
from longnet.data import SourceSpec, tokenize
from longnet.training.metrics import COLUMNS, read_metrics
from longnet.training.module import LongNetModule
from longnet.training.recorder import Recorder
from longnet.training.run import train
from longnet.training.rundir import RunDirectory

from .jobs import losses

MIXTURE = [{"source": "stdlib", "weight": 0.7}, {"source": "copy", "weight": 0.3, "answer_only": True}]


class KilledError(Exception):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes the job die in ``step``, after it was taken and before it is recorded."""
    record = Recorder.on_step_end

    def on_step_end(self, trainer, module, validated):
        if trainer.global_step == step:
            raise KilledError
        record(self, trainer, module, validated)

    monkeypatch.setattr(Recorder, "on_step_end", on_step_end)


def run_path(job) -> Path:
    return Path(job.run.root) / job.run.name


def weights(job) -> dict[str, torch.Tensor]:
    return read_whole(RunDirectory(job.run.root, job.run.name).last)["state_dict"]


def test_a_run_leaves_what_it_should(make_job, capsys):
    job = make_job(
        callbacks__plot=True, callbacks__summary=True, callbacks__sample_tokens=8, callbacks__progress="plain"
    )
    train(job)
    path = run_path(job)
    assert yaml.safe_load((path / "config.yaml").read_text()) == asdict(job)
    (session,) = json.loads((path / "environment.json").read_text())["sessions"]
    assert session["packages"]["torch"] == torch.__version__
    assert (path / "metrics.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (path / "sample.txt").read_text().startswith("def ")

    rows = read_metrics(path / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert set(rows[-1]) == set(COLUMNS)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert rows[0]["tokens"] == job.data.batch_size * job.data.context_length
    assert 0 < rows[-1]["mfu"] < 1
    assert all(0 < row["data_wait"] < 1 for row in rows)

    model = AutoModelForCausalLM.from_pretrained(path / "model")
    saved = weights(job)
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(path / "model").decode([104, 105]) == "ef"

    screen = capsys.readouterr().out
    for expected in (
        "parameters",
        "w/r 16/1, 32/2, 64/4",
        "step 6/6  loss",
        "bits per byte",
        "unigram",
        "xz",
        str(path),
    ):
        assert expected in screen, expected


@pytest.mark.parametrize(
    "options",
    [
        {"trainer__val_every": 3},
        {"trainer__val_every": 2, "trainer__accumulate": 2, "data__batch_size": 1},
        {"trainer__val_every": 100, "trainer__log_every": 4},
        {"data__num_workers": 1},
        {"data__streaming": True, "data__packing": "isolate", "data__block_rows": 5, "data__validation_samples": 4},
        {"data__source": "mixture", "data__mixture": MIXTURE, "data__packing": "whole"},
    ],
    ids=["validated where it is saved", "accumulated", "saved between logged steps", "workers", "stream", "mixture"],
)
def test_a_killed_and_resumed_run_equals_an_unbroken_one(make_job, monkeypatch, options):
    options |= {"model__dropout": 0.1, "attention__dropout": 0.1}
    unbroken = make_job(run__name="unbroken", **options)
    train(unbroken)

    broken = make_job(run__name="broken", **options)
    with monkeypatch.context() as patch:
        kill_at(patch, step=5)
        with pytest.raises(KilledError):
            train(broken)
    train(broken)

    assert losses(run_path(broken) / "metrics.csv") == losses(run_path(unbroken) / "metrics.csv")
    expected = weights(unbroken)
    assert all(torch.equal(value, expected[name]) for name, value in weights(broken).items())
    assert len(json.loads((run_path(broken) / "environment.json").read_text())["sessions"]) == 2


def test_an_interrupted_run_is_saved_at_its_step_and_resumes_exactly(make_job, monkeypatch, capsys):
    options = {"trainer__max_steps": 5, "callbacks__save_every": 100, "trainer__val_every": 2}
    unbroken = make_job(run__name="unbroken", **options)
    train(unbroken)
    broken = make_job(run__name="broken", **options)
    with monkeypatch.context() as patch:
        step = LongNetModule.training_step

        def interrupted(self, batch):
            if self.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)
            step(self, batch)

        patch.setattr(LongNetModule, "training_step", interrupted)
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit):
                train(broken)
        finally:
            signal.signal(signal.SIGINT, handler)
    assert "goes on from step 2" in capsys.readouterr().out
    train(broken)
    assert losses(run_path(broken) / "metrics.csv") == losses(run_path(unbroken) / "metrics.csv")
    expected = weights(unbroken)
    assert all(torch.equal(value, expected[name]) for name, value in weights(broken).items())


def test_a_longer_run_goes_on_from_a_finished_one(make_job):
    options = {"optim__schedule": "constant"}
    train(make_job(run__name="longer", trainer__max_steps=4, **options))
    train(make_job(run__name="longer", trainer__max_steps=7, **options))
    train(make_job(run__name="at_once", trainer__max_steps=7, **options))
    longer, at_once = (make_job(run__name=name) for name in ("longer", "at_once"))
    expected = weights(at_once)
    assert all(torch.equal(value, expected[name]) for name, value in weights(longer).items())
    rows = losses(run_path(longer) / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 4, 6, 7]


def test_a_run_goes_on_only_with_the_data_it_had(make_job, corpus_path, tmp_path):
    train(make_job())
    moved = tmp_path / "moved"
    shutil.copytree(corpus_path, moved)
    train(make_job(data__path=str(moved), trainer__max_steps=7))

    (moved / "module_0.py").write_text("changed\n")
    with pytest.raises(ValueError, match=r"was trained on other data .*run\.name=default-2"):
        train(make_job(data__path=str(moved), trainer__max_steps=8))


def test_a_branch_from_the_best_checkpoint_goes_on_under_a_new_name(make_job):
    job = make_job()
    train(job)
    best = RunDirectory(job.run.root, job.run.name).best
    step = read_whole(best)["global_step"]
    branch = make_job(run__name="branch", resume=str(best), trainer__max_steps=8)
    train(branch)
    assert [row["step"] for row in losses(run_path(branch) / "metrics.csv")] == list(range(step + 1, 9))


@pytest.mark.parametrize("name", ["branch", "trunk"])
def test_the_command_that_began_from_a_checkpoint_goes_on_and_does_not_begin_again(make_job, monkeypatch, name):
    trunk = make_job(run__name="trunk")
    train(trunk)
    given = run_path(trunk) / "checkpoints/step-00000003"
    rest = {"trainer__val_every": 100, "callbacks__save_every": 2, "trainer__max_steps": 8}
    job = make_job(run__name=name, resume=str(given), **rest)
    step, taken = LongNetModule.training_step, []

    def training_step(self, batch):
        taken.append(self.global_step + 1)
        step(self, batch)

    monkeypatch.setattr(LongNetModule, "training_step", training_step)
    for killed in (4, 6):
        with monkeypatch.context() as patch:
            kill_at(patch, step=killed)
            with pytest.raises(KilledError):
                train(job)
    train(job)
    # Nothing was saved before the first kill; step 4 was before the second.
    assert taken == [4, 4, 5, 6, 5, 6, 7, 8]
    first = 1 if name == "trunk" else 4
    assert [row["step"] for row in losses(run_path(job) / "metrics.csv")] == list(range(first, 9))


def test_a_finished_run_says_so_and_shows_its_summary(make_job, capsys):
    job = make_job(callbacks__summary=True, callbacks__sample_tokens=0)
    train(job)
    before = (run_path(job) / "metrics.csv").read_text()
    capsys.readouterr()
    train(job)
    screen = capsys.readouterr().out
    assert "is at step 6 of trainer.max_steps=6: nothing is left to train" in screen
    assert "bits per byte" in screen
    assert (run_path(job) / "metrics.csv").read_text() == before


def test_a_branch_with_nothing_left_to_train_is_refused(make_job):
    job = make_job()
    train(job)
    branch = make_job(run__name="branch", resume=str(run_path(job)))
    with pytest.raises(ValueError, match="nothing is left to train; raise trainer.max_steps"):
        train(branch)
    assert not run_path(branch).exists()


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(make_job):
    job = make_job(optim__lr=1.0, optim__gradient_clip=0.0, trainer__val_every=1, trainer__max_steps=5)
    train(job)
    rows = [row for row in losses(run_path(job) / "metrics.csv") if "val/loss" in row]
    best = min(rows, key=lambda row: row["val/loss"])
    saved = read_whole(RunDirectory(job.run.root, job.run.name).best)
    assert saved["global_step"] == best["step"]
    assert saved["callbacks"]["Checkpoints"]["best_loss"] == best["val/loss"]


def test_overfitting_a_batch_takes_the_loss_down(make_job):
    rest = {"optim__schedule": "constant", "optim__lr": 1e-2, "trainer__val_every": 40}
    job = make_job(trainer__overfit_batches=1, trainer__max_steps=40, callbacks__save_every=40, **rest)
    train(job)
    rows = losses(run_path(job) / "metrics.csv")
    assert rows[-1]["val/loss"] < 0.5 * rows[0]["train/loss"]
    assert rows[-1]["val/loss"] == pytest.approx(rows[-1]["train/loss"], rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data__context_length": 4096}, "context_length=4096 is longer"),
        ({"data__path": "/nowhere"}, "is not a directory"),
        ({"trainer__accelerator": "gpu"}, "trainer.accelerator=gpu: no GPU here"),
        ({"run__root": "/dev/null/runs"}, "cannot be written"),
        ({"resume": "/nowhere.ckpt"}, "there is no checkpoint"),
        ({"model__hidden_act": "relux"}, "hidden_act='relux'"),
    ],
)
def test_a_job_that_cannot_run_says_why_and_leaves_no_directory(make_job, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = make_job(**options)
    with pytest.raises(ValueError, match=message):
        train(job)
    assert not run_path(job).exists()


def test_a_job_that_fails_before_its_first_row_leaves_no_directory(make_job, monkeypatch):
    job = make_job()
    kill_at(monkeypatch, step=1)
    with pytest.raises(KilledError):
        train(job)
    assert not run_path(job).exists()


def test_a_diverged_run_stops_with_advice(make_job):
    job = make_job(optim__lr=1e30, optim__gradient_clip=0.0, optim__warmup_steps=0)
    with pytest.raises(ValueError, match="the (loss|gradient) is not finite at step .* Lower optim.lr"):
        train(job)


def test_a_file_that_is_no_checkpoint_is_refused(make_job, tmp_path):
    (tmp_path / "notes.ckpt").write_text("hello")
    job = make_job(resume=str(tmp_path / "notes.ckpt"))
    with pytest.raises(ValueError, match="is a file, and a checkpoint is a directory"):
        train(job)
    assert not run_path(job).exists()


def test_a_mixture_logs_the_rows_of_each_part(make_job):
    job = make_job(data__source="mixture", data__mixture=MIXTURE, data__batch_size=10)
    train(job)
    rows = read_metrics(run_path(job) / "metrics.csv")
    counts = [(row["rows/stdlib"], row["rows/copy"]) for row in rows]
    assert [sum(pair) for pair in counts] == [10, 20, 30, 40, 50, 60]
    assert all(abs(text - 0.7 * sum((text, task))) <= 3 for text, task in counts)


def test_speed_counts_what_is_computed_and_not_what_has_a_label(make_job):
    job = make_job(data__source="copy", data__answer_only=True, data__samples=20, data__path=None, trainer__val_every=6)
    train(job)
    rows = read_metrics(run_path(job) / "metrics.csv")
    for before, row in pairwise(rows):
        seconds = row["seconds"] - before["seconds"]
        assert row["tokens_per_second"] * seconds == pytest.approx(2 * 64, rel=1e-6)
    assert rows[-1]["tokens"] < 6 * 2 * 64 * 0.6


def test_a_store_trains_like_the_text_it_was_made_of(make_job, tmp_path):
    text = make_job(run__name="text", data__packing="isolate")
    train(text)
    store = tmp_path / "store"
    tokenize(SourceSpec("stdlib", text.data.path, validation_fraction=0.3), "bytes", store)
    rest = {"data__source": "prepared", "data__path": str(store), "data__tokenizer": None}
    stored = make_job(run__name="stored", data__packing="isolate", data__num_workers=1, **rest)
    train(stored)
    assert losses(run_path(stored) / "metrics.csv") == losses(run_path(text) / "metrics.csv")


def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused(make_job):
    with pytest.raises(ValueError, match="model.vocab_size=300: expected at least 384, the ids of the tokenizer bytes"):
        train(make_job(model__vocab_size=300))
