"""What a person sees while a run goes: a live bar on a terminal, one line a logged step anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table


def show_header(console: Console, title: str, facts: Mapping[str, str]) -> None:
    """One compact panel with what is about to run."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, escape(fact))
    console.print(Panel(table, title=f"[bold]{escape(title)}", title_align="left", border_style="cyan", expand=False))


def build_progress(style: str, console: Console, best: float = float("inf")) -> PlainProgress | None:
    """The progress display that ``callbacks.progress`` names; "auto" is "rich" on a terminal and "plain" elsewhere.

    ``best`` is the lowest validation loss that the run has already reached.
    """
    if style == "auto":
        style = "rich" if console.is_terminal else "plain"
    if style == "none":
        return None
    return RichProgress(console, best) if style == "rich" else PlainProgress(console, best)


class PlainProgress(Callback):
    """Prints a line for each row of metrics: readable in a log file."""

    def __init__(self, console: Console, best: float = float("inf")) -> None:
        super().__init__()
        self.console = console
        self.max_steps = 0
        self._best = best
        self._first: tuple[int, float] | None = None
        self._step = 0

    def on_row(self, step: int, row: Mapping[str, float]) -> None:
        """Shows a row of metrics."""
        if "train/loss" in row:
            self._show_training(step, row)
        if "val/loss" in row:
            self._show_validation(step, row)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.max_steps = trainer.max_steps
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._step = trainer.global_step
        # The first step of a session compiles and allocates; the time left is reckoned from the others.
        self._first = self._first or (self._step, time.monotonic())

    def eta(self) -> str:
        """The time left at the mean pace since the start, validations included."""
        if self._first is None or self._step <= self._first[0]:
            return "-"
        first_step, first_time = self._first
        pace = (time.monotonic() - first_time) / (self._step - first_step)
        return _duration(pace * (self.max_steps - self._step))

    def _show_training(self, step: int, row: Mapping[str, float]) -> None:
        self._print(
            f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  loss {row['train/loss']:.4f}  "
            f"lr {row['learning_rate']:.2e}  grad {row['gradient_norm']:.2f}  {_rate(row)}  eta {self.eta()}"
        )

    def _show_validation(self, step: int, row: Mapping[str, float]) -> None:
        bits = f"  {row['val/bits_per_byte']:.3f} bits per byte" if "val/bits_per_byte" in row else ""
        best = row["val/loss"] < self._best
        self._best = min(self._best, row["val/loss"])
        self._print(
            f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  validation {row['val/loss']:.4f}{bits}"
            + ("  best so far" if best else "")
        )

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


class RichProgress(PlainProgress):
    """A live bar with loss, speed and time left; validations stay above it as lines."""

    def __init__(self, console: Console, best: float = float("inf")) -> None:
        super().__init__(console, best)
        self._bar: Progress | None = None
        self._training: TaskID | None = None
        self._validation: TaskID | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._bar = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
        )
        self._bar.start()
        self._training = self._bar.add_task("training", total=self.max_steps, completed=self._step, facts="")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, completed=self._step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            batches = sum(int(number) for number in trainer.num_val_batches)
            self._validation = self._bar.add_task("[dim]validating", total=batches, facts="")

    def on_validation_batch_end(self, *_: Any) -> None:
        if self._bar is not None and self._validation is not None:
            self._bar.advance(self._validation)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None and self._validation is not None:
            self._bar.remove_task(self._validation)
            self._validation = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _show_training(self, step: int, row: Mapping[str, float]) -> None:
        if self._bar is not None and self._training is not None:
            facts = f"[bold]loss {row['train/loss']:.4f}[/]  [cyan]{_rate(row)}[/]  [dim]eta {self.eta()}"
            self._bar.update(self._training, facts=facts)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _rate(row: Mapping[str, float]) -> str:
    wait = row.get("data_wait", 0.0)
    # Below that nobody would change anything.
    waiting = f"  waiting for data {wait:.0%}" if wait >= 0.02 else ""
    return f"{quantity(row['tokens_per_second'])} tokens/s  mfu {row['mfu']:.0%}{waiting}"


def quantity(number: float) -> str:
    """A number for reading: 950, 12.3k, 4.56M, 1.20G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
