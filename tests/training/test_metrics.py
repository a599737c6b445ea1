from __future__ import annotations

from pathlib import Path

import pytest

from longnet.training.metrics import COLUMNS, MetricsFile, read_metrics


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.csv")


def test_rows_have_the_same_columns_whatever_they_hold(metrics):
    metrics.log_metrics({"train/loss": 2.5, "tokens": 128}, step=1)
    metrics.log_metrics({"val/loss": 0.1}, step=2)
    header, first, second = metrics.path.read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert first.startswith("1,128,2.5,")
    assert second.startswith("2,,,0.1,")
    assert len(first.split(",")) == len(second.split(",")) == len(COLUMNS)
    assert read_metrics(metrics.path) == [{"step": 1, "tokens": 128, "train/loss": 2.5}, {"step": 2, "val/loss": 0.1}]


def test_values_survive_the_file_exactly(metrics):
    metrics.log_metrics({"train/loss": 1 / 3, "gradient_norm": float("inf")}, step=1)
    (row,) = read_metrics(metrics.path)
    assert (row["train/loss"], row["gradient_norm"]) == (1 / 3, float("inf"))


def test_rewind_drops_what_came_after_the_step(metrics):
    for step in range(1, 6):
        metrics.log_metrics({"train/loss": float(step)}, step=step)
    metrics.rewind(3)
    metrics.log_metrics({"train/loss": 40.0}, step=4)
    assert [(row["step"], row["train/loss"]) for row in read_metrics(metrics.path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_row_cut_off_by_a_crash_is_dropped(metrics):
    metrics.log_metrics({"train/loss": 1.0}, step=1)
    with metrics.path.open("a") as file:
        file.write("2,256,0.")
    metrics.rewind(10)
    metrics.log_metrics({"train/loss": 3.0}, step=3)
    assert [row["step"] for row in read_metrics(metrics.path)] == [1, 3]


def test_an_unknown_metric_is_an_error_and_not_a_silent_loss(metrics):
    with pytest.raises(ValueError, match="val/los"):
        metrics.log_metrics({"val/los": 1.0}, step=1)
