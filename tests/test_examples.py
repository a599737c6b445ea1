"""The examples run as they stand, and are short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2
    text = example.read_text()
    assert len(text.splitlines()) <= 50
    assert f"python examples/{example.name}" in text


def test_a_loop_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES[0].parent / "own_training_loop.py"))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
