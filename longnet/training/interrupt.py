"""Signals that end a run and lose nothing: SIGTERM, SIGUSR1 and Ctrl-C, to any of its processes, at any moment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from .checkpoints import Checkpoints
from .module import LongNetModule
from .steps import StepCallback

# By which number the processes tell each other of a signal; of several, the highest counts.
WAYS = {signal.SIGINT: 1, signal.SIGUSR1: 2, signal.SIGTERM: 3}
EXIT_CODES = {1: 130, 2: 143, 3: 143}
REQUEUE = WAYS[signal.SIGUSR1]


class Interrupts(StepCallback):
    """Ends the run after the step in which a signal came or the one behind it, saved, whichever process it came to.

    A handler only takes a note; the processes agree on it by the sum that every step has anyway. SIGUSR1, which SLURM
    sends before a job's time is up, also asks SLURM to run the job again. A second Ctrl-C ends the run at once.

    In a validation, the run ends after the batch, and the validation is done again when the run goes on. The last one
    is finished: the run ends with it in any case.
    """

    def __init__(self, checkpoints: Checkpoints, console: Console) -> None:
        super().__init__()
        self.console = console
        self._checkpoints = checkpoints
        self._previous: dict[signal.Signals, Any] = {}
        self._module: LongNetModule | None = None
        self._validation_due = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongNetModule)
        self._module = pl_module
        pl_module.asked_to_stop = 0
        if threading.current_thread() is threading.main_thread():
            for number in WAYS:
                self._previous[number] = signal.signal(number, self._ask)
        if self._validation_due:
            self._validate(trainer)

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        assert isinstance(module, LongNetModule)
        # The last step ends the run by itself.
        if module.agreed_to_stop and trainer.global_step < trainer.max_steps:
            self._stop(trainer, module.agreed_to_stop)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, LongNetModule)
        if pl_module.agreed_to_stop and trainer.global_step < trainer.max_steps:
            self._validation_due = True
            self._stop(trainer, pl_module.agreed_to_stop)

    def restore(self) -> None:
        """Lets signals do what they did before; for when the trainer is gone, which cannot be broken off as it goes."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def state_dict(self) -> dict[str, Any]:
        return {"validation_due": self._validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validation_due = state_dict["validation_due"]

    def _ask(self, number: int, _frame: Any) -> None:
        assert self._module is not None
        way = WAYS[signal.Signals(number)]
        if number == signal.SIGINT:
            if self._module.asked_to_stop == way:
                self.restore()
                raise KeyboardInterrupt
            self.console.print("stopping after this step or the next; Ctrl-C again stops at once, without saving")
        self._module.asked_to_stop = max(self._module.asked_to_stop, way)

    def _stop(self, trainer: Trainer, way: int) -> None:
        self._checkpoints.save(trainer, required=True)
        if way == REQUEUE and trainer.is_global_zero:
            requeue()
        raise SystemExit(EXIT_CODES[way])

    def _validate(self, trainer: Trainer) -> None:
        """The validation in which the run was stopped, as Lightning has it behind a step."""
        self._validation_due = False
        self._checkpoints.forget_saved()
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False
        trainer.validating = True
        loop.run()
        trainer.training = True


def requeue() -> None:
    """Asks SLURM to run this job again, or says why it could not; nothing where there is no SLURM."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if re.fullmatch(r"[0-9_]+", job):
        try:
            subprocess.run(["scontrol", "requeue", job], check=False, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            # As in a container without SLURM's commands. The run is saved all the same.
            print(f"SLURM was not asked to run job {job} again ({error}): send it again by hand", flush=True)
