"""Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from .steps import StepCallback


class SaveOnInterrupt(StepCallback):
    """Lets the first Ctrl-C end the run after the step it is in, saved; a second one ends it at once.

    Only in a run of one process: several would have to agree on the step.
    """

    def __init__(self, last: Path, console: Console) -> None:
        super().__init__()
        self.last = last
        self.console = console
        self._asked = False
        self._previous: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._ask)

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        if self._asked:
            trainer.save_checkpoint(self.last, weights_only=False)
            raise KeyboardInterrupt

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _ask(self, *_: Any) -> None:
        self._asked = True
        self._restore()
        self.console.print("stopping after this step; Ctrl-C again stops at once, without saving")

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
