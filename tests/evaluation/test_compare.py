from __future__ import annotations

import csv
from pathlib import Path

import pytest

from longnet.evaluation.compare import compare, distinct_parts, read_run

HEADER = "step,tokens,train/loss,val/loss,val/bits_per_byte,tokens_per_second,seconds"


def write_run(directory: Path, *rows: str) -> Path:
    directory.mkdir()
    (directory / "metrics.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    dense = write_run(
        tmp_path / "dense",
        "10,1000,3.0,,,10,1",
        "20,2000,2.5,2.6,3.75,100,2",
        "30,3000,2.0,,,101,3",
        "40,4000,1.5,1.6,2.31,102,4",
    )
    dilated = write_run(tmp_path / "dilated", "10,1000,3.0,,,300,1", "20,2000,nan,2.4,3.46,300,2", "30,30")
    (tmp_path / "failed").mkdir()
    return [dense, dilated, tmp_path / "failed", tmp_path / "never_started"]


def test_a_run_is_read_as_far_as_it_is_whole(runs: list[Path]) -> None:
    run = read_run(runs[1])
    assert run.series("train/loss") == [(10.0, 3.0)]
    assert run.series("val/loss", against="tokens") == [(2000.0, 2.4)]
    assert read_run(runs[2]).rows == read_run(runs[3]).rows == []


def test_the_table_has_what_each_run_reached(runs: list[Path], tmp_path: Path) -> None:
    figures = compare(runs, tmp_path / "sweep")
    assert figures[0] == {
        "steps": 40,
        "train loss": 1.5,
        "val loss": 1.6,
        "val bits/byte": 2.31,
        "tokens/s": 100.5,
        "seconds": 4,
    }
    assert figures[1]["train loss"] == 3.0
    assert figures[2:] == [{}, {}]

    with (tmp_path / "sweep" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["dense", "dilated", "failed", "never_started"]
    assert float(rows[0]["val bits/byte"]) == 2.31
    assert rows[2]["steps"] == ""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tiny-dense-stdlib", "tiny-sliding_window-stdlib"], ["dense", "sliding_window"]),
        (["tiny-dense", "tiny-dense-lr=1"], ["dense", "dense-lr=1"]),
        (["a", "b"], ["a", "b"]),
        (["tiny-dense-stdlib"], ["tiny-dense-stdlib"]),
        (["a-b", "a-b"], ["b", "b"]),
        ([], []),
    ],
)
def test_names_are_shown_by_what_tells_them_apart(names: list[str], expected: list[str]) -> None:
    assert distinct_parts(names) == expected


def test_it_is_shown_and_drawn(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(runs, tmp_path / "sweep")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("dense", "dilated", "never_started", "2.3100", "comparison.png"))
    assert (tmp_path / "sweep" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_any_metrics_still_make_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([tmp_path / "a"], tmp_path) == [{}]
    assert "a" in capsys.readouterr().out
