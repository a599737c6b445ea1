"""Numbers gone bad: said where, left out without a trace, or gone back from."""

from __future__ import annotations

import copy
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longnet.checkpoint import read_manifest, read_whole, steps_of
from longnet.config.errors import JobError
from longnet.training.module import LongNetModule
from longnet.training.run import train

from .jobs import losses
from .processes import finish, running

OPTIONS = {"trainer__guard__non_finite": "skip", "trainer__val_every": 100}
# Nothing is written down, validated or saved after a step, so that it is the next one that finds out about it.
LATE = {"trainer__log_every": 100, "trainer__val_every": 100, "callbacks__save_every": 100}


def poison(monkeypatch, steps, kind="output"):
    """Makes a part of the model not finite in some steps; the state before and after each step is kept."""
    step, settle, states, handles = LongNetModule.training_step, LongNetModule.settle, [], []

    def training_step(self: LongNetModule, batch: Any) -> None:
        self.settle()
        mlp = self.model.model.layers[1].mlp
        before = copy.deepcopy((self.model.state_dict(), self.optimizers().optimizer.state_dict()["state"]))
        if self.global_step + 1 in steps:
            weight = next(mlp.parameters())
            handles.append(
                mlp.register_forward_hook(lambda module, inputs, output: output * torch.nan)
                if kind == "output"
                else weight.register_hook(lambda gradient: gradient * torch.nan)
            )
        step(self, batch)
        states.append((before, (self.model.state_dict(), self.optimizers().optimizer.state_dict()["state"])))
        states[-1] = copy.deepcopy(states[-1])

    def settled(self: LongNetModule) -> None:
        if self._unsettled is not None:
            settle(self)
            while handles:
                handles.pop().remove()

    monkeypatch.setattr(LongNetModule, "training_step", training_step)
    monkeypatch.setattr(LongNetModule, "settle", settled)
    return states


def equal(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return torch.equal(left, right)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("output", r"the loss is not finite at step 3: first in the output of model\.layers\.1\.mlp \("),
        ("gradient", r"the gradient is not finite at step 3: first in the gradient of model\.layers\.1\.mlp"),
    ],
)
@pytest.mark.parametrize("options", [{}, LATE], ids=["at once", "by the next step"])
def test_raising_names_the_step_the_place_and_the_documents(make_job, monkeypatch, kind, what, options):
    poison(monkeypatch, {3}, kind)
    with pytest.raises(JobError, match=rf"{what}.*rows 7, 37, with documents 1, 2, 13,.*Lower optim\.lr"):
        train(make_job(**options))


def test_what_is_not_sound_is_not_saved(make_job, monkeypatch):
    poison(monkeypatch, {4})
    job = make_job(**LATE | {"callbacks__save_every": 2})
    with pytest.raises(JobError, match="the loss is not finite at step 4"):
        train(job)
    assert [read_manifest(path).step for path in steps_of(Path(job.run.root) / "default/checkpoints")] == [2]


@pytest.mark.parametrize("kind", ["output", "gradient"])
def test_a_skipped_step_leaves_weights_and_optimiser_as_they_were(make_job, monkeypatch, capsys, kind):
    states = poison(monkeypatch, {3, 4}, kind)
    job = make_job(**OPTIONS)
    train(job)
    assert len(states) == 6
    for number, (before, after) in enumerate(states, 1):
        untouched = [equal(old, new) for old, new in zip(before, after, strict=True)]
        assert untouched == [number in (3, 4)] * 2, number
    said = " ".join(capsys.readouterr().out.split())
    assert "not finite at step 3" in said
    assert "Skipped, 2 in a row of trainer.guard.skip_limit=5" in said
    rows = losses(Path(job.run.root) / "default/metrics.csv")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 5, 6]


def test_too_many_in_a_row_end_the_run_but_not_one_here_and_one_there(make_job, monkeypatch):
    with monkeypatch.context() as patch:
        poison(patch, {1, 3, 5})
        train(make_job(run__name="apart", trainer__guard__skip_limit=1, **OPTIONS))
    poison(monkeypatch, {3, 4})
    with pytest.raises(JobError, match="not finite at step 4"):
        train(make_job(run__name="in_a_row", trainer__guard__skip_limit=1, **OPTIONS))


ONE_RANK_IS_BAD = """
import os, torch
from longnet.training.module import LongNetModule
loss_sums = LongNetModule._loss_sums
def poisoned(self, *arguments):
    sums = loss_sums(self, *arguments)
    if os.environ["RANK"] == "1" and sums.loss.requires_grad and self.global_step == 2:
        if {kind!r} == "loss":
            return sums._replace(nll=sums.nll * torch.nan)
        sums.loss.register_hook(lambda gradient: gradient * torch.nan)
    return sums
LongNetModule._loss_sums = poisoned
"""


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "loss"), ("sequence_parallel_fsdp", "gradient")])
def test_all_processes_skip_what_is_bad_in_one(make_job, strategy, kind):
    job = make_job(trainer__devices=2, strategy__name=strategy, data__batch_size=1, **OPTIONS | LATE)
    with running(job, ONE_RANK_IS_BAD.format(kind=kind)) as ranks:
        codes, said = finish(ranks)
    assert codes == [0, 0], said
    assert f"the {kind} is not finite at step 3" in said
    saved = read_whole(steps_of(Path(job.run.root) / "default/checkpoints")[-1])
    assert all(torch.isfinite(weight).all() for weight in saved["state_dict"].values())
    assert saved["callbacks"]["Guard"]["skipped"] == 1
    assert {int(moments["step"]) for moments in saved["optimizer_states"][0]["state"].values()} == {5}


def spike(monkeypatch, bad_batches):
    """Makes the loss jump on some batches of the data; the batches that were trained on."""
    step, taken = LongNetModule.training_step, []

    def training_step(self: LongNetModule, batch: Any) -> None:
        number = self.trainer.datamodule.batch_of(self.global_step)
        taken.append((number, batch["input_ids"].clone()))
        step(self, batch)
        if number in bad_batches:
            self._unsettled[1][0] *= 10

    monkeypatch.setattr(LongNetModule, "training_step", training_step)
    return taken


SPIKES = {"trainer__guard__spike_factor": 2.0, "trainer__guard__spike_window": 2, "trainer__max_steps": 9}
UNSAVED = {"trainer__val_every": 100, "callbacks__save_every": 100}


@pytest.mark.parametrize("stream", [False, True], ids=["store", "stream"])
def test_a_run_goes_back_and_leaves_the_data_out(make_job, monkeypatch, capsys, stream):
    options = {"data__streaming": True, "data__block_rows": 5, "data__validation_samples": 4} if stream else {}
    with monkeypatch.context() as patch:
        seen = spike(patch, set())
        train(make_job(run__name="even", trainer__max_steps=11, **options))
        all_batches = dict(seen)
    taken = spike(monkeypatch, {4})
    job = make_job(**SPIKES, **options)
    train(job)
    # Saved at 3; the fifth batch is the bad one, so two batches are left out.
    assert [number for number, _ in taken] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert all(torch.equal(ids, all_batches[number]) for number, ids in taken)
    said = " ".join(capsys.readouterr().out.split())
    assert "at step 5, and was" in said
    assert "going back to step 3, and on without that data" in said
    rows = losses(Path(job.run.root) / "default/metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, 10))
    state = read_whole(steps_of(Path(job.run.root) / "default/checkpoints")[-1])["TextDataModule"]
    assert state["left_out"] == [[3, 2]]

    # A run that goes on from there leaves the same data out.
    taken.clear()
    train(make_job(**SPIKES | {"trainer__max_steps": 10}, **options))
    assert [number for number, _ in taken] == [11]


def test_a_run_that_goes_back_twice_leaves_out_both(make_job, monkeypatch):
    taken = spike(monkeypatch, {4, 6})
    train(make_job(**SPIKES))
    assert [number for number, _ in taken] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_a_run_goes_back_only_so_often(make_job, monkeypatch):
    spike(monkeypatch, set(range(3, 99)))
    with pytest.raises(JobError, match=r"trainer\.guard\.rewinds=2 are spent"):
        train(make_job(trainer__guard__rewinds=2, **SPIKES))


def test_a_branch_goes_back_to_where_it_began(make_job, monkeypatch, capsys):
    train(make_job(run__name="trunk", trainer__max_steps=3))
    trunk = steps_of(Path(make_job().run.root) / "trunk/checkpoints")[-1]
    taken = spike(monkeypatch, {5})
    train(make_job(run__name="branch", resume=str(trunk), **SPIKES, **UNSAVED))
    assert [number for number, _ in taken] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert "going back to step 3," in " ".join(capsys.readouterr().out.split())


def test_a_run_that_was_sent_back_does_not_return_to_the_course_it_left(make_job, monkeypatch, capsys):
    train(make_job())
    first, later = steps_of(Path(make_job().run.root) / "default/checkpoints")
    assert (read_manifest(first).step, read_manifest(later).step) == (3, 6)
    spike(monkeypatch, {5})
    train(make_job(resume=str(first), **SPIKES, **UNSAVED))
    assert "going back to step 3," in " ".join(capsys.readouterr().out.split())


# One process spikes after an asynchronous save that the first one takes long to write.
SLOW_SAVE = """
import os, time
from longnet.checkpoint import files
from longnet.training.module import LongNetModule
write, step = files._write, LongNetModule.training_step
def slow_write(path, pieces):
    if os.environ["RANK"] == "0" and "step-00000004" in str(path) and path.suffix == ".safetensors":
        time.sleep(3)
    return write(path, pieces)
def training_step(self, batch):
    number = self.trainer.datamodule.batch_of(self.global_step)
    step(self, batch)
    if number == 4:
        self._unsettled[1][0] *= 10
files._write, LongNetModule.training_step = slow_write, training_step
"""


def test_all_processes_go_back_to_the_checkpoint_that_the_first_was_still_writing(make_job):
    two = {"trainer__devices": 2, "strategy__name": "ddp", "data__batch_size": 1, "strategy__timeout": 60.0}
    saving = {"callbacks__save_async": True, "callbacks__save_every": 2, "trainer__val_every": 100}
    job = make_job(**SPIKES | two | saving)
    with running(job, SLOW_SAVE) as ranks:
        codes, said = finish(ranks)
    assert codes == [0, 0], said
    assert "going back to step 4," in " ".join(said.split())


class Reads(TorchDispatchMode):
    """Finds out where a number is read from the device, which waits for it."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.places.append("".join(traceback.format_stack(limit=6)))
        return func(*args, **kwargs or {})


@contextmanager
def synchronising_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_step_does_not_wait_for_itself(make_job, monkeypatch, accelerator):
    step, reads, unsettled = LongNetModule.training_step, Reads(), []

    def watched(self: LongNetModule, batch: Any) -> None:
        self.settle()
        if not self.global_step:
            # The first step loads and builds what it needs.
            step(self, batch)
        else:
            with reads if accelerator == "cpu" else synchronising_is_an_error():
                step(self, batch)
        unsettled.append(self._unsettled)

    monkeypatch.setattr(LongNetModule, "training_step", watched)
    train(make_job(trainer__accelerator=accelerator, **LATE))
    assert len(unsettled) == 6
    assert None not in unsettled
    assert not reads.places, reads.places[0]
