from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longnet.config.bounds import BOUNDS
from longnet.config.machine import Machine, inspect_machine, is_first_process
from longnet.config.schema import JobConfig
from longnet.config.typed import leaves

from .conftest import load_with, problems_with


def test_every_number_of_the_schema_has_a_range() -> None:
    numbers = {key for key, hint in leaves(JobConfig) if hint in (int, float, int | None, float | None)}
    assert set(BOUNDS) == numbers


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"optim__lr": 0}, "optim.lr=0.0: expected above 0"),
        ({"model__dropout": 1}, "model.dropout=1.0: expected at least 0 and below 1"),
        ({"trainer__max_steps": 0}, "trainer.max_steps=0: expected at least 1; the nearest is 1"),
        ({"trainer__val_every": -5}, "trainer.val_every=-5: expected at least 1; the nearest is 1"),
        ({"seed": 2**40}, "expected at least 0 and at most 4294967295"),
        ({"optim__betas": [0.9]}, "optim.betas=[0.9]: expected two numbers"),
        ({"optim__betas": [0.9, 1.0]}, "optim.betas=[0.9, 1.0]: expected two numbers"),
        (
            {"model__num_attention_heads": 7},
            "expected a divisor of model.hidden_size=256; the nearest is 8, or give model.head_dim",
        ),
        ({"model__num_key_value_heads": 3}, "divisor of model.num_attention_heads=8; the nearest is 2"),
        ({"model__head_dim": 33}, "model.head_dim=33: expected an even number, since rope rotates pairs"),
        ({"model__hidden_size": 264}, "model.head_dim=33 (model.hidden_size / 8 heads): expected an even number"),
        ({"model__vocab_size": 100}, "expected at least 259"),
        ({"optim__warmup_steps": 1000}, "optim.warmup_steps=1000: expected below trainer.max_steps=1000"),
        (
            {"optim__schedule": "wsd", "optim__warmup_steps": 300, "optim__decay_fraction": 0.8},
            "optim.decay_fraction=0.8: with optim.warmup_steps=300 of trainer.max_steps=1000 the rate would fall "
            "before it has risen; expected at most 0.7",
        ),
        (
            {"trainer__tokens_per_step": 65536},
            "is 16384; data.batch_size=8 trainer.accumulate=4 gives it",
        ),
        (
            {"trainer__tokens_per_step": 50_000, "data__batch_size": 6},
            "is 12288; data.batch_size=6 trainer.accumulate=4 gives 49152, the nearest",
        ),
        (
            {"trainer__activation_checkpointing__kind": "full", "trainer__activation_checkpointing__every": 5},
            "no layer of model.num_hidden_layers=4 would be checkpointed; expected at most 4",
        ),
        ({"trainer__accelerator": "gpu"}, "trainer.accelerator=gpu: this machine shows no GPU"),
        ({"trainer__precision": "fp16"}, "trainer.precision=fp16: the CPU cannot train in it; expected bf16 or fp32"),
        ({"trainer__devices": 2}, "strategy.name=auto: 2 processes (trainer.devices=2 trainer.num_nodes=1)"),
        ({"resume": "/no/such/run"}, "resume='/no/such/run': no such file or directory; expected auto, never"),
        ({"data__path": "/no/such/corpus"}, "data.path='/no/such/corpus': no such file or directory"),
        ({"run__root": ""}, "run.root='': it is empty"),
        ({"run__root": f"{__file__}/runs"}, "is a file; expected a directory"),
    ],
)
def test_what_cannot_work_is_said_with_what_would(values: dict[str, Any], expected: str) -> None:
    (problem,) = problems_with(**values)
    assert expected in problem


@pytest.mark.parametrize(
    ("name", "example"), [("../up", "up"), ("a/b", "a-b"), ("..", "my-run"), ("", "my-run"), (".hidden", "hidden")]
)
def test_a_run_name_stays_in_its_root(name: str, example: str) -> None:
    (problem,) = problems_with(run__name=name)
    assert problem.endswith(f"for example {example}")


@pytest.mark.parametrize("name", ["tiny-dense_2", "lr=0.001", "a" * 200, "größe"])
def test_sound_run_names(name: str) -> None:
    assert load_with(run__name=name).run.name == name


def test_sound_combinations() -> None:
    load_with(trainer__tokens_per_step=16384 * 4, trainer__accumulate=4)
    load_with(trainer__precision="bf16", trainer__accelerator="cpu")
    load_with(trainer__devices=2, strategy__name="ddp")
    load_with(optim__warmup_steps=0, trainer__max_steps=1)
    load_with(Machine(gpus=None), trainer__accelerator="gpu", trainer__precision="fp16")
    load_with(resume=str(Path(__file__).parent))


def test_a_wrong_value_is_not_judged_twice() -> None:
    assert len(problems_with(model__num_attention_heads=0, model__num_key_value_heads=3)) == 1
    assert len(problems_with(trainer__max_steps="x", optim__warmup_steps=10**6)) == 1


def test_more_devices_than_gpus() -> None:
    (problem,) = problems_with(Machine(gpus=2), trainer__devices=4, strategy__name="ddp")
    assert problem == "trainer.devices=4: this machine has 2 GPU(s); expected at most 2"


def test_the_launcher_and_the_config_must_agree() -> None:
    torchrun = Machine(gpus=0, world_size=4, local_world_size=2, multi_node_launcher=True)
    load_with(torchrun, trainer__devices=2, trainer__num_nodes=2, strategy__name="ddp")
    (problem,) = problems_with(torchrun, trainer__devices=4, trainer__num_nodes=2, strategy__name="ddp")
    assert "the launcher started 4 process(es); expected trainer.devices=2 trainer.num_nodes=2" in problem


def test_several_machines_need_something_that_starts_them() -> None:
    (problem,) = problems_with(trainer__devices=8, trainer__num_nodes=2, strategy__name="ddp")
    assert "torchrun --nnodes 2 --nproc-per-node 8" in problem


def test_what_the_machine_is_known_by(tmp_path: Path) -> None:
    assert inspect_machine({}, tmp_path) == Machine(gpus=0)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert inspect_machine({}, tmp_path).gpus == 2
    assert inspect_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == 0
    assert inspect_machine({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path).gpus is None
    launched = inspect_machine({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, tmp_path)
    assert (launched.world_size, launched.local_world_size, launched.multi_node_launcher) == (8, 4, True)


def test_one_process_speaks_for_all() -> None:
    assert is_first_process({})
    assert is_first_process({"RANK": "0", "LOCAL_RANK": "0"})
    assert not is_first_process({"LOCAL_RANK": "1"})
    assert not is_first_process({"RANK": "4", "LOCAL_RANK": "0"})
