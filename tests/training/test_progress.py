from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from longnet.training.progress import PlainProgress, RichProgress, build_progress, quantity, show_header

TRAINING = {
    "train/loss": 2.34567,
    "learning_rate": 1e-3,
    "gradient_norm": 0.5,
    "tokens_per_second": 12345.0,
    "mfu": 0.41,
}
VALIDATION = {"val/loss": 2.0, "val/bits_per_byte": 2.885}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_auto_draws_a_bar_on_a_terminal_only():
    assert type(build_progress("auto", console(terminal=True))) is RichProgress
    assert type(build_progress("auto", console(terminal=False))) is PlainProgress
    assert build_progress("none", console()) is None


def test_plain_progress_prints_one_line_a_row(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("longnet.training.progress.time.monotonic", lambda: now[0])
    screen = console()
    progress = PlainProgress(screen)
    progress.on_train_start(SimpleNamespace(max_steps=200, global_step=0), None)
    for step in range(1, 101):
        progress.on_train_batch_end(SimpleNamespace(global_step=step))
        now[0] += 1.0
    progress.on_row(100, TRAINING | VALIDATION)
    first, second = text(screen).splitlines()
    assert first.startswith("step 100/200  loss 2.3457  lr 1.00e-03  grad 0.50  12.3k tokens/s  mfu 41%  eta 1:4")
    assert second == "step 100/200  validation 2.0000  2.885 bits per byte  best so far"


def test_only_the_lowest_validation_is_called_the_best():
    screen = console()
    progress = PlainProgress(screen)
    for loss in (2.0, 2.5, 1.5):
        progress.on_row(1, {"val/loss": loss})
    assert [line.endswith("best so far") for line in text(screen).splitlines()] == [True, False, True]


def test_the_bar_shows_loss_speed_and_validations_and_ends_cleanly():
    screen = console(terminal=True)
    progress = RichProgress(screen)
    trainer = SimpleNamespace(max_steps=20, global_step=0, num_val_batches=[3])
    progress.on_train_start(trainer, None)
    trainer.global_step = 10
    progress.on_train_batch_end(trainer)
    progress.on_validation_start(trainer, None)
    progress.on_validation_batch_end()
    progress.on_validation_end(trainer, None)
    progress.on_row(10, TRAINING | VALIDATION)
    progress.on_train_end(trainer, None)
    progress.on_exception(trainer, None, KeyboardInterrupt())
    for expected in ("10/20", "loss 2.3457", "12.3k tokens/s", "eta", "2.885 bits per byte"):
        assert expected in text(screen), expected


def test_the_header_does_not_read_names_as_markup():
    screen = console()
    show_header(screen, "LongNet", {"run": "runs/[red]x"})
    assert "runs/[red]x" in text(screen)


@pytest.mark.parametrize(
    ("number", "shown"), [(950, "950"), (12_345, "12.3k"), (4_560_000, "4.56M"), (1.2e9, "1.2G"), (0, "0")]
)
def test_quantities_are_short(number, shown):
    assert quantity(number) == shown
