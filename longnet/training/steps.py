"""The end of a step, as the callbacks of a run mean it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn


class StepCallback(Callback):
    """A callback that is told of every step exactly once, when all of it is done: after its validation if it has one.

    Lightning ends the batch first and validates then. What is written down at the end of the batch would lack the
    validation, and a checkpoint saved there would make a resumed run skip it.
    """

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        """Called after each optimiser step and, where ``validated``, the validation that belongs to it."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not validation_follows(trainer):
            self.on_step_end(trainer, pl_module, validated=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.on_step_end(trainer, pl_module, validated=True)


def validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates after the batch that has just ended: at intervals, and after the last step."""
    assert isinstance(trainer.val_check_batch, int)
    return trainer.global_step % trainer.val_check_batch == 0 or trainer.global_step >= trainer.max_steps
