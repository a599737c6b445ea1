"""What sequence parallelism needs of the other keys, and how its jobs are launched."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from longnet.config import load
from longnet.config.machine import Machine
from longnet.config.sweep import check_sweep

from .conftest import CONF, load_with, problems_with

TORCHRUN = Machine(gpus=8, world_size=8, local_world_size=8, multi_node_launcher=True)
SHARED: dict[str, Any] = {
    "trainer__devices": 8,
    "strategy__name": "sequence_parallel",
    "strategy__sequence_parallel_size": 8,
}


def test_a_sound_mesh_loads():
    assert load_with(TORCHRUN, **SHARED).strategy.sequence_parallel == "gather"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"strategy__sequence_parallel_size": 3}, "strategy.sequence_parallel_size=3: expected a divisor of the 8 "),
        ({"strategy__name": "ddp"}, "strategy.sequence_parallel_size=8: strategy.name=ddp shares no sequence"),
        (
            {"strategy__sequence_parallel": "ulysses", "model__num_attention_heads": 4, "model__hidden_size": 32},
            "strategy.sequence_parallel_size=8: strategy.sequence_parallel=ulysses gives each process heads of its own",
        ),
        ({"attention__layers": ["dilated", "sliding_window"]}, "attention.layers=['dilated', 'sliding_window']: slid"),
        ({"attention__backend": "reference"}, "attention.backend=reference: it is made for one process"),
        ({"strategy__timeout": 0.0}, "strategy.timeout=0.0: expected above 0"),
        (
            {"strategy__name": "sequence_parallel_fsdp", "trainer__precision": "fp16"},
            "trainer.precision=fp16: its loss scale is not shared",
        ),
        ({"data__packing": "isolate"}, "data.packing=isolate: not with a sequence shared by 8 processes"),
        ({"data__packing": "whole"}, "data.packing=whole: not with a sequence shared by 8 processes"),
        (
            {"strategy__name": "sequence_parallel_fsdp", "model__keep_code": True},
            "model.keep_code=true:",
        ),
        ({"data__context_length": 4}, "strategy.sequence_parallel_size=8: data.context_length=4 has no position"),
    ],
)
def test_what_does_not_go_together_is_refused(changed, problem):
    found = problems_with(TORCHRUN, **SHARED | changed)
    assert [line for line in found if line.startswith(problem)], found


def test_tokens_per_step_count_processes_that_read_different_rows():
    values = SHARED | {"strategy__sequence_parallel_size": 4, "data__batch_size": 1, "data__context_length": 2048}
    assert load_with(TORCHRUN, **values, trainer__tokens_per_step=2 * 2048)
    (found,) = problems_with(TORCHRUN, **values, trainer__tokens_per_step=8 * 2048)
    assert "x 2 process(es) is 4096; data.batch_size=1 trainer.accumulate=4 gives it" in found


def test_the_command_of_the_documentation(compose_job, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    machine = Machine(gpus=4, world_size=4, local_world_size=4, multi_node_launcher=True)
    job = load(compose_job("strategy=sequence_parallel"), machine)
    assert job.strategy.sequence_parallel_size == 4


def test_a_sweep_on_slurm_may_have_many_processes(compose_job):
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    overrides = [
        "hydra/launcher=submitit_job", "hydra.launcher.partition=gpu", "trainer.devices=8", "trainer.num_nodes=2",
        "strategy=sequence_parallel_fsdp", "attention=dense,dilated", "hydra.mode=MULTIRUN",
    ]  # fmt: skip
    config = hydra.compose_config("train", overrides, run_mode=RunMode.MULTIRUN)
    assert [job.strategy.sequence_parallel_size for job in check_sweep(config)] == [8, 8]
    launcher = config.hydra.launcher
    assert launcher._target_ == "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (2, 8, 8)


def test_the_slurm_script_is_sound(compose_job, monkeypatch):
    script = CONF.parent / "scripts/slurm/train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    (given,) = re.findall(r"train\.py (strategy=\S+) \"\$@\"", text)
    machine = Machine(gpus=8, world_size=16, local_world_size=8, multi_node_launcher=True)
    assert load(compose_job(given), machine).strategy.name == "sequence_parallel_fsdp"
