"""Writing beside training: nobody waits for it, and the next save and the end do."""

from __future__ import annotations

import threading

import torch

from longnet.checkpoint import files, path_of, read_whole, steps_of
from longnet.training.checkpoints import Checkpoints, DirectoryCheckpointIO
from longnet.training.throughput import TrainingClock


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    write, may_write = files._write, threading.Event()

    def held(path, pieces):
        assert may_write.wait(60)
        return write(path, pieces)

    monkeypatch.setattr(files, "_write", held)
    io, weight = DirectoryCheckpointIO(asynchronous=True), torch.zeros(4)

    def save(step):
        manifest = {"step": step, "config": "", "validation_loss": None}
        io.save_checkpoint({"weight": weight, "manifest": manifest, "session": "0"}, path_of(tmp_path, step))

    save(1)
    weight += 1
    assert steps_of(tmp_path) == []
    may_write.set()
    save(2)
    # The copies are taken in the same place.
    assert steps_of(tmp_path)[0] == path_of(tmp_path, 1)
    io.finish()
    found = [read_whole(path)["weight"] for path in steps_of(tmp_path)]
    assert [weight.tolist() for weight in found] == [[0.0] * 4, [1.0] * 4]


def test_a_resumed_run_knows_its_best_validation(tmp_path):
    before, after = (Checkpoints(tmp_path, DirectoryCheckpointIO(), 1, "", TrainingClock()) for _ in range(2))
    before.best_loss = 1.5
    after.load_state_dict(before.state_dict())
    assert after.best_loss == 1.5
