"""`scripts/plan.py` from end to end, without a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan(monkeypatch, capsys):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)

    def call(*words):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["plan.py", *words])
        runpy.run_path(str(ROOT / "scripts/plan.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_a_job_for_another_machine(plan):
    out = plan("model=125m", "data.context_length=1048576", "trainer.residual=bf16", "--device", "h200",
               "--host-gib", "500", "--patterns")  # fmt: skip
    assert "85.2 M parameters: 12 layers of 7.08 M" in out
    assert "time on H200" in out
    assert "memory=auto takes selective checkpointing" in out
    assert "take attention.dilated.base=" in out


def test_what_does_not_fit_is_told_the_nearest_that_does(plan):
    out = plan("model=1b", "data.context_length=4194304", "--device", "h200", "--device-gib", "80", "--host-gib", "20")
    assert "nothing fits into 80 GiB" in out
    assert "data.context_length=" in out
    assert "trainer.residual=bf16: " in out


def test_bytes_between_ranks(plan):
    out = plan("strategy=sequence_parallel", "trainer.devices=4", "strategy.sequence_parallel_size=4",
               "data.context_length=32768", "--device", "h200", "--link-gbs", "100")  # fmt: skip
    assert "gather:" in out
    assert "over 4 ranks" in out
    assert "w/r 32768/16" in out


def test_this_machine_is_measured(plan):
    out = plan("data.context_length=256", "trainer.accelerator=cpu", "--measure", "--device-gib", "1")
    assert "time on this cpu" in out
    assert "peak" in out


def test_everything_that_is_wrong_is_said_at_once_and_shortly(plan, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan("model=125", "trainer.max_stepz=3", "data.batch_size=0", "--device", "h200")
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("3 problems in the configuration:")
    assert "model=125: no such file in conf/model" in said
    assert "did you mean trainer.max_steps?" in said
    assert "data.batch_size=0: expected at least 1" in said


@pytest.mark.parametrize("number", ["--host-gib=nan", "--host-gib=inf", "--device-gib=0", "--matmul-tflops=0"])
def test_numbers_that_are_none_are_refused(plan, capsys, number):
    with pytest.raises(SystemExit) as stopped:
        plan("--device", "h200", number)
    assert stopped.value.code == 2
    assert f"{number.replace('=', ' ')}: expected a finite number" in capsys.readouterr().err


def test_a_host_without_room_is_not_one_that_is_not_named(plan):
    words = ("model=1b", "data.context_length=131072", "--device", "h200", "--host-gib")
    assert "offload" in plan(*words, "500")
    assert "offload" not in plan(*words, "0")
