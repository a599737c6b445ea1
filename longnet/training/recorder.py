"""Measures a run and writes a row of metrics for each logged step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from longnet.config.errors import JobError

from .datamodule import TextDataModule
from .metrics import MetricsFile
from .module import LongNetModule
from .steps import StepCallback
from .throughput import TrainingClock, measure_matmul_rate, peak_memory_gib, reset_peak_memory

Listener = Callable[[int, Mapping[str, float]], None]


class Recorder(StepCallback):
    """Every ``log_every`` steps, and after every validation, gives one row to the loggers and the listeners.

    Args:
        log_every: steps between rows.
        flops_per_token: model FLOPs of a token, forward and backward, by what rows are cut to (None: not at all).
        matmul_dtype: the number format whose matrix products the model's are compared with.
        clock: counts the time in training.
        data: tells how long training waited for it.
        listeners: called with (step, row) besides the loggers, for example to show the row.
    """

    def __init__(
        self,
        log_every: int,
        flops_per_token: Mapping[int | None, float],
        matmul_dtype: torch.dtype,
        clock: TrainingClock,
        data: TextDataModule | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__()
        self.log_every = log_every
        self.flops_per_token = flops_per_token
        self.matmul_dtype = matmul_dtype
        self.listeners = listeners
        self._clock = clock
        self._data = data
        # Since the last row, in this process.
        self._positions = 0
        self._flops = 0.0
        self._counted = 0
        self._logged: int | None = None
        self._matmul_rate = math.inf

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongNetModule)
        started_from = trainer.strategy.broadcast(trainer.global_step)
        if started_from != trainer.global_step:
            raise JobError(
                f"process {trainer.global_rank} starts from step {trainer.global_step} and process 0 from "
                f"{started_from}: run.root must be a directory that all processes see"
            )
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                # Not to the step of the checkpoint: its row may have been left for a validation that is still due.
                logger.rewind(trainer.global_step if self._logged is None else self._logged)
        reset_peak_memory(pl_module.device)
        self._matmul_rate = measure_matmul_rate(pl_module.device, self.matmul_dtype)
        self._positions, self._flops, self._counted = 0, 0.0, pl_module.positions_computed
        self._clock.start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.stop(pl_module.device)

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        assert isinstance(module, LongNetModule)
        step = trainer.global_step
        self._count(module, step - 1)
        row = {}
        if step % self.log_every == 0 or step >= trainer.max_steps:
            row = self._training_row(trainer, module)
        if validated:
            row |= {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if row:
            row |= {"tokens": int(module.tokens_seen), "seconds": self._clock.total}
            self._emit(trainer, step, row)
        self._clock.start()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._clock.total, "logged": self._logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clock.total = state_dict["seconds"]
        self._logged = state_dict.get("logged")

    def _count(self, module: LongNetModule, step: int) -> None:
        # A window may begin with one context and end with another.
        positions = module.positions_computed - self._counted
        context = self._data.context_of(step) if self._data is not None else None
        self._positions += positions
        self._flops += positions * self.flops_per_token[context]
        self._counted = module.positions_computed

    def _training_row(self, trainer: Trainer, module: LongNetModule) -> dict[str, float]:
        module.settle()
        seconds = max(self._clock.lap(module.device), 1e-9)
        # Not only those with a label: the others cost as much.
        rate = self._positions * trainer.world_size / seconds
        mfu = self._flops / seconds / self._matmul_rate
        self._positions, self._flops = 0, 0.0
        data = {}
        if self._data is not None:
            rows = {f"rows/{part}": count for part, count in self._data.part_rows(trainer.global_step).items()}
            data = {"data_wait": min(self._data.take_wait() / seconds, 1.0), **rows}
        return {
            # Where every step of the window was left out, there is no loss.
            **({"train/loss": module.take_window()} if module.window_tokens else {}),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": float(module.gradient_norm),
            "tokens_per_second": rate,
            "mfu": mfu,
            "peak_memory_gib": peak_memory_gib(module.device),
            **data,
        }

    def _emit(self, trainer: Trainer, step: int, row: dict[str, float]) -> None:
        self._logged = step
        for logger in trainer.loggers:
            logger.log_metrics(row, step)
        for listener in self.listeners:
            listener(step, row)
