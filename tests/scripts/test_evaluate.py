"""`scripts/evaluate.py` from end to end, and the same evaluation while a model is trained."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

from longnet.training import run as training
from tests.training.jobs import losses, tiny_job, write_corpus

ROOT = Path(__file__).parents[2]
OPTIONS = ("tasks=[passkey,needle]", "lengths=[256]", "depths=[0,0.5]", "samples=2", "max_tokens=256", "device=cpu")


@pytest.fixture
def evaluate(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *words])
        try:
            runpy.run_path(str(ROOT / "scripts/evaluate.py"), run_name="__main__")
        except SystemExit as stopped:
            return int(stopped.code or 0), *capsys.readouterr()
        return 0, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that is evaluated while it goes on, and the same one without."""
    root = tmp_path_factory.mktemp("evaluated")
    corpus = write_corpus(root / "files", files=40)
    measured = {"evaluation__contexts": [32, 64], "evaluation__max_tokens": 64, "evaluation__documents": 2}
    # A model that is left in eval mode would drop nothing from there on.
    measured["model__dropout"] = 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longnet.training.recorder.measure_matmul_rate", lambda device, dtype: 1e12)
        for name, every in (("watched", 4), ("plain", 0)):
            training.train(tiny_job(root, corpus, run__name=name, evaluation__every=every, **measured))
    return root


def test_a_run_is_evaluated_while_it_goes_on_and_unchanged_by_it(runs):
    assert losses(runs / "watched/metrics.csv") == losses(runs / "plain/metrics.csv")
    assert not (runs / "plain/evaluation").exists()
    steps = sorted(path.name for path in (runs / "watched/evaluation").iterdir())
    assert steps == ["step-4", "step-6"]
    early, late = (json.loads((runs / "watched/evaluation" / step / "results.json").read_text()) for step in steps)
    assert (early["facts"]["step"], late["facts"]["step"]) == (4, 6)
    assert [row["context"] for row in late["contexts"]] == [32, 64]
    assert late["contexts"][1]["loss"] < early["contexts"][1]["loss"]


def test_the_same_weights_give_the_same_numbers_afterwards(runs, evaluate):
    words = ("contexts=[32,64]", "max_tokens=64", "documents=2", "tasks=[]", "device=cpu")
    code, out, err = evaluate(f"run={runs / 'watched'}", *words)
    assert (code, err) == (0, "")
    assert "loss by context, on the same tokens" in out
    now = json.loads((runs / "watched/evaluation/results.json").read_text())
    then = json.loads((runs / "watched/evaluation/step-6/results.json").read_text())
    for name in ("contexts", "positions"):
        assert [row["tokens"] for row in now[name]] == [row["tokens"] for row in then[name]]
        assert [row["loss"] for row in now[name]] == pytest.approx([row["loss"] for row in then[name]], rel=1e-5)
    assert now["retrieval"] == []


def test_a_checkpoint_on_other_text_gives_every_table(runs, tmp_path, evaluate):
    words = (f"model={runs / 'plain/model'}", "source=text", f"path={runs / 'files'}", f"out={tmp_path / 'out'}")
    code, out, err = evaluate(*words, *OPTIONS, "placements=true", "documents=3", "document_tokens=40")
    assert (code, err) == (0, "")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"results.json", "contexts.csv", "positions.csv", "retrieval.csv"}
    # A context of 64 has no room for a needle at any border.
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert sum(row["tokens"] for row in results["positions"]) == 3 * 40
    assert [(row["task"], row["depth"]) for row in results["retrieval"]] == [
        (task, depth) for task in ("passkey", "needle") for depth in (0, 0.5)
    ]
    with (tmp_path / "out/retrieval.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [row["loss"] for row in results["retrieval"]]
    assert "retrieval" in out


def test_everything_that_is_wrong_is_said_at_once(runs, evaluate, tmp_path):
    words = ("tasks=[passkye]", "depths=[2]", "contexts=[1]", "samples=0", "documents=-1")
    code, _, err = evaluate(*words, f"run={tmp_path / 'none'}")
    assert code == 2
    assert err.splitlines()[0] == "6 problems in the configuration:"
    assert "samples=0: expected at least 1; the nearest is 1" in err
    assert "documents=-1: expected at least 0; the nearest is 0" in err
    assert "did you mean passkey?" in err
    code, _, err = evaluate(f"run={runs / 'plain'}", "contexts=[100000]", "device=cpu")
    assert code == 1
    assert "the longest window and one token need 100001 tokens of text" in err
    code, _, err = evaluate(f"model={runs / 'plain/model'}")
    assert "out: has no value" in err


def test_an_evaluation_that_cannot_be_is_refused_before_the_first_step(tmp_path):
    corpus = write_corpus(tmp_path / "files", files=40)
    job = tiny_job(tmp_path, corpus, run__name="refused", evaluation__every=2, evaluation__contexts=[10**6])
    with pytest.raises(ValueError, match="contexts="):
        training.train(job)
    assert not (tmp_path / "refused").exists()
