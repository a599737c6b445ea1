"""The studies, at a size for a CPU, from the config to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from longnet.config import load
from longnet.config.machine import Machine
from longnet.evaluation.report import write_report
from longnet.training.run import train

CONF = Path(__file__).parents[2] / "conf"


def job(*overrides, machine=None):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        return load(cfg, machine)


@pytest.fixture(autouse=True)
def no_hydra_of_others(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)


@pytest.mark.parametrize("context", [2048, 8192, 32768])
def test_every_run_of_the_context_study_takes_the_same_tokens(context):
    made = job("experiment=context_study", f"data.context_length={context}", machine=Machine(gpus=1))
    rows = made.data.batch_size * made.trainer.accumulate
    assert rows * made.data.context_length == made.trainer.tokens_per_step == 65536
    assert made.run.name == f"context_study-dilated-{context}"
    assert made.evaluation.every == made.trainer.max_steps


def test_the_context_study_ends_in_a_page(tmp_path):
    runs = []
    for context in (128, 512):
        made = job("experiment=context_study_cpu", f"data.context_length={context}", f"run.root={tmp_path}",
                   "callbacks=quiet", "trainer.max_steps=4")  # fmt: skip
        train(made)
        runs.append(tmp_path / made.run.name)
        (evaluation,) = (runs[-1] / "evaluation").glob("step-*/results.json")
        rows = json.loads(evaluation.read_text())["contexts"]
        # The shorter one slides over the longer window.
        assert [(row["context"], row["read"]) for row in rows] == [(128, 128), (512, min(512, context))]
    targets = [json.loads(next(run.glob("evaluation/step-*/results.json")).read_text())["contexts"] for run in runs]
    assert targets[0][0]["tokens"] == targets[1][0]["tokens"]
    write_report(runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_the_recall_study_measures_what_it_trains(tmp_path):
    made = job("experiment=recall_study_cpu", f"run.root={tmp_path}", "callbacks=quiet", "trainer.max_steps=2",
               "trainer.val_every=2", "evaluation.samples=1", "evaluation.depths=[0,1]")  # fmt: skip
    train(made)
    (file,) = (tmp_path / made.run.name / "evaluation").glob("step-2/results.json")
    found = json.loads(file.read_text())
    assert {(row["task"], row["length"]) for row in found["retrieval"]} == {("lookup", 128), ("lookup", 512)}
    assert {row["task"] for row in found["placements"]} == {"lookup"}
    assert {row["place"] for row in found["placements"]} >= {"border of 32", "border of 256", "phase of 16"}
    # Tasks are no running text.
    assert found["contexts"] == []
