"""The picture of several evaluations: what is drawn where, and that it is drawn at all."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from longnet.evaluation.figures import context_points, distance_points, position_points
from longnet.evaluation.intervals import share

SCRIPT = Path(__file__).parents[2] / "scripts/plot_evaluations.py"


def position(begin, end, tokens, loss):
    return {"begin": begin, "end": end, "tokens": tokens, "loss": loss, "low": loss - 0.1, "high": None}


def answer(task, length, depth, preferred):
    right = {"preferred": None, "tokens_right": preferred} if task == "copy" else {"preferred": preferred}
    return {"task": task, "length": length, "depth": depth, "samples": 10, **right}


RETRIEVAL = [
    answer("needle", 1000, 0.0, 0.9), answer("needle", 4000, 0.0, 0.1), answer("needle", 4000, 0.75, 0.8),
    answer("copy", 4000, 0.0, 0.5), answer("copy", 1000, 0.0, 0.75),
]  # fmt: skip
POSITIONS = [position(0, 64, 600, 1.0), position(64, 128, 6, 9.0), position(128, 256, 600, 2.0)]
CONTEXTS = [{"context": context, "loss": 1.0, "low": 0.9, "high": 1.1} for context in (512, 2048)]


def test_points():
    assert context_points(CONTEXTS)[1] == pytest.approx((2048, math.e, math.exp(0.9), math.exp(1.1)))
    # A range that hardly any text reached is left out; an interval that does not exist is as wide as the value.
    assert position_points(POSITIONS) == [
        pytest.approx((8, math.e, math.exp(0.9), math.e)),
        pytest.approx((math.sqrt(128 * 256), math.exp(2), math.exp(1.9), math.exp(2))),
    ]
    # A model that gave no number has no point, one that is far off does not end the drawing.
    assert context_points([{"context": 8, "loss": None, "low": None, "high": None}]) == []
    assert context_points([{"context": 8, "loss": 1e4, "low": 1.0, "high": 1e5}])[0][2] == pytest.approx(math.e)
    # The needle at a depth of 3/4 lies a quarter of the prompt back, as far as at the beginning of a shorter one.
    near, far = distance_points(RETRIEVAL, "needle")
    assert [near[:2], far[:2]] == [pytest.approx((1000, 0.85)), (4000, 0.1)]
    pooled, alone = share(17, 20), share(1, 10)
    assert (near[2:], far[2:]) == ((pooled.low, pooled.high), (alone.low, alone.high))
    # Copies lie half of their text back, and have no interval.
    assert distance_points(RETRIEVAL, "copy") == [(500, 0.75, 0.75, 0.75), (2000, 0.5, 0.5, 0.5)]


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["plot_evaluations.py", *map(str, words)])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as stopped:
            return int(stopped.code or 0), *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_runs_and_results_are_drawn(tmp_path, call):
    results = {"contexts": CONTEXTS, "positions": POSITIONS, "retrieval": RETRIEVAL, "placements": []}
    for place in ("a/evaluation/step-3", "b"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "results.json").write_text(json.dumps(results))
    target = tmp_path / "deep/picture.png"
    code, out, err = call(tmp_path / "a", tmp_path / "b", "--labels", "one", "two", "--out", target)
    assert (code, out.strip(), err) == (0, str(target), "")
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size > 20_000


def test_models_of_one_name_are_all_drawn(tmp_path, call, monkeypatch):
    results = {"contexts": CONTEXTS, "positions": [], "retrieval": [], "placements": []}
    places = [tmp_path / name / "evaluation" for name in ("a", "b")]
    for place in places:
        place.mkdir(parents=True)
        (place / "results.json").write_text(json.dumps(results))
    drawn = []
    monkeypatch.setattr("longnet.evaluation.figures.draw_evaluations", lambda found, target: drawn.extend(found))
    assert call(*places)[0] == 0
    assert drawn == [str(place) for place in places]
    code, _, err = call(*places, "--labels", "one", "one")
    assert code == 2
    assert "--labels one one: expected a name of its own for each directory" in err


def test_what_cannot_be_drawn_is_said(tmp_path, call):
    code, _, err = call(tmp_path, "--out", tmp_path / "x.png")
    assert code == 2
    assert "no results.json; expected a run that was evaluated" in err
    empty = {"contexts": [], "positions": [], "retrieval": [], "placements": []}
    (tmp_path / "results.json").write_text(json.dumps(empty))
    code, _, err = call(tmp_path, "--out", tmp_path / "x.png")
    assert code == 1
    assert "nothing to draw" in err
    assert not (tmp_path / "x.png").exists()
