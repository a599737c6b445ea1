"""The checkpoints of a run: saved every so many steps and after the best validation, loaded after a check."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer

from longnet.checkpoint import Facts, HostCopies, Processes, Writer, path_of, prune, read_manifest, read_whole
from longnet.config.errors import JobError
from longnet.parallel.checkpoints import by_name, by_place

from .module import LongNetModule
from .random_state import gather_random_state, set_random_state
from .steps import StepCallback
from .throughput import TrainingClock


def checkpoint_step(path: Path) -> int:
    """The step at which a checkpoint was saved."""
    return read_manifest(path).step


class DirectoryCheckpointIO(CheckpointIO):
    """Writes checkpoints as directories, at once or beside training, and removes those that are no longer kept.

    Args:
        keep: how many of the last ones stay, besides the best.
        asynchronous: whether training goes on while a copy of its state is written.
        timeout: seconds to wait for the parts of other processes, where it is asynchronous.
        warn: told when a checkpoint could not be written.
        beforehand: puts on the disk what a checkpoint relies on, before it is there: the steps before it, and so their
            rows, never come again.
    """

    def __init__(
        self,
        keep: int = 2,
        asynchronous: bool = False,
        timeout: float = 600.0,
        warn: Callable[[str], None] = print,
        beforehand: Callable[[], None] = lambda: None,
    ) -> None:
        self._keep = keep
        self._copies = HostCopies() if asynchronous else None
        self._timeout = timeout
        self._warn = warn
        self._beforehand = beforehand
        self._thread: threading.Thread | None = None
        self.failure: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves; what goes wrong with the disk is kept in `failure`, and the older checkpoints stay as they are."""
        self.finish()
        facts, session = Facts(**checkpoint.pop("manifest")), checkpoint.pop("session")
        processes = storage_options or Processes()
        writer = Writer(Path(path), checkpoint, facts, processes, session, self._copies, self._beforehand)
        if self._copies is None:
            self._write(writer, writer.write)
            return
        self._thread = threading.Thread(
            target=self._write, args=(writer, lambda: writer.write_apart(self._timeout)), name="checkpoint"
        )
        self._thread.start()

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return read_whole(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Never asked for: `save_checkpoint` removes what is no longer kept."""

    def finish(self) -> None:
        """Waits until what was begun is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def teardown(self) -> None:
        self.finish()

    def _write(self, writer: Writer, write: Callable[[], None]) -> None:
        try:
            write()
            self.failure = None
            if writer.rank == 0:
                prune(writer.target.parent, writer.target, self._keep)
        except OSError as error:
            self.failure = f"the checkpoint of step {writer.facts.step} could not be written ({error})"
            self._warn(f"WARNING: {self.failure}; the older ones are untouched, and training goes on")


class Checkpoints(StepCallback):
    """Saves every ``save_every`` steps, at the end, and after the best validation so far.

    Args:
        folder: where the checkpoints lie.
        io: how they are written.
        save_every: steps between them.
        config: hash of the config, for their manifests.
        clock: stands still meanwhile.
    """

    def __init__(
        self, folder: Path, io: DirectoryCheckpointIO, save_every: int, config: str, clock: TrainingClock
    ) -> None:
        super().__init__()
        self.folder = folder
        self.io = io
        self.save_every = save_every
        self.best_loss = float("inf")
        self._config = config
        self._clock = clock
        self._session = ""
        self._saved_step: int | None = None
        self._validation_loss: float | None = None
        self._random: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session = trainer.strategy.broadcast(secrets.token_hex(4))
        # Last of all: what was built before has drawn numbers.
        if self._random is not None:
            set_random_state(self._random, trainer.global_rank)

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        step, last = trainer.global_step, trainer.global_step >= trainer.max_steps
        loss = float(trainer.callback_metrics["val/loss"]) if validated else None
        better = loss is not None and loss < self.best_loss
        if better and loss is not None:
            self.best_loss = loss
        self._validation_loss = loss
        if better or last or step % self.save_every == 0:
            self.save(trainer, required=last)

    def save(self, trainer: Trainer, required: bool = False) -> None:
        """Saves the state after the step that has just ended, if it is not saved yet.

        Raises:
            JobError: if it is ``required`` and cannot be saved.
        """
        step = trainer.global_step
        if self._saved_step != step:
            # What is saved must be sound.
            assert isinstance(trainer.lightning_module, LongNetModule)
            trainer.lightning_module.settle()
            self._clock.stop(trainer.strategy.root_device)
            trainer.save_checkpoint(path_of(self.folder, step), weights_only=False)
            self._saved_step = step
            self._clock.start()
        if required:
            self.io.finish()
            if not trainer.strategy.reduce_boolean_decision(self.io.failure is None):
                raise JobError(
                    f"{self.io.failure or 'another process could not write its part of the checkpoint'}: make room in "
                    f"{self.folder}; the same command goes on from the last checkpoint that is there"
                )

    def forget_saved(self) -> None:
        """Makes the next `save` save, although there is a checkpoint of its step."""
        self._saved_step = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.io.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.io.finish()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["manifest"] = {
            "step": trainer.global_step,
            "config": self._config,
            "validation_loss": self._validation_loss,
        }
        checkpoint["session"] = self._session
        checkpoint["random"] = gather_random_state(trainer)
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        checkpoint["optimizer_states"] = [
            _named(state, [names[id(p)] for group in optimizer.param_groups for p in group["params"]])
            for optimizer, state in zip(trainer.optimizers, checkpoint["optimizer_states"], strict=True)
        ]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._random = checkpoint["random"]
        self._saved_step = checkpoint["global_step"]
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [by_place(state) for state in checkpoint["optimizer_states"]]

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]


def _named(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    # Strategies that shard have named it already.
    return dict(state) if isinstance(state["param_groups"][0]["params"][0], str) else by_name(state, names)
