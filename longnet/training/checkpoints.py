"""The checkpoints of a run: the last, to go on from, and the best by validation loss."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer

from longnet.parallel.checkpoints import FACTS, is_sharded, read_whole

from .steps import StepCallback
from .throughput import TrainingClock


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames: a job killed while saving leaves the older checkpoint whole.

    (Lightning's own goes through memory and the system's temporary directory, which may be another file system.)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        torch.save(checkpoint, temporary)
        if target.is_dir():
            # Earlier the run had more processes, each with its part.
            shutil.rmtree(target)
        os.replace(temporary, target)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        if is_sharded(Path(path)):
            return read_whole(Path(path))
        return super().load_checkpoint(path, *args, **options)


def checkpoint_step(path: Path) -> int:
    """The step at which a checkpoint was saved; its tensors stay on disk.

    Raises:
        ValueError: if the file is no checkpoint of a run.
    """
    file = path / FACTS if path.is_dir() else path
    try:
        return int(torch.load(file, map_location="cpu", weights_only=True, mmap=True)["global_step"])
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint of a run, or is damaged ({type(error).__name__})") from None


class Checkpoints(StepCallback):
    """Saves the last state every ``save_every`` steps and at the end, and the best one after a validation."""

    def __init__(self, last: Path, best: Path, save_every: int, clock: TrainingClock) -> None:
        super().__init__()
        self.last = last
        self.best = best
        self.save_every = save_every
        self.best_loss = float("inf")
        self._clock = clock

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        if validated and (loss := float(trainer.callback_metrics["val/loss"])) < self.best_loss:
            self.best_loss = loss
            self._save(trainer, self.best)
        if trainer.global_step % self.save_every == 0 or trainer.global_step >= trainer.max_steps:
            self._save(trainer, self.last)

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]

    def _save(self, trainer: Trainer, path: Path) -> None:
        self._clock.stop(trainer.strategy.root_device)
        trainer.save_checkpoint(path, weights_only=False)
        self._clock.start()
