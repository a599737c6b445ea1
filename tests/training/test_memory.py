"""Jobs that find their own way to fit into memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from longnet.checkpoint import read_whole, steps_of
from longnet.config.errors import JobError
from longnet.config.schema import JobConfig
from longnet.planning import MemoryPlan
from longnet.training import memory
from longnet.training.memory import MemoryKeeper
from longnet.training.module import LongNetModule
from longnet.training.placement import Placement
from longnet.training.run import train

from ..model.models import small_config
from .jobs import losses

# So long that each plan needs less memory than the one before it.
LONG = {"data__context_length": 256, "model__num_hidden_layers": 3, "attention__dilated__base": 128}
REASON = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[MemoryPlan]:
    """The plans that jobs have used, in order."""
    used: list[MemoryPlan] = []
    use = MemoryKeeper._use

    def record(self: MemoryKeeper, module: LongNetModule, plan: MemoryPlan) -> None:
        used.append(plan)
        use(self, module, plan)

    monkeypatch.setattr(MemoryKeeper, "_use", record)
    return used


def run_out_at(monkeypatch: pytest.MonkeyPatch, step: int, times: int = 1) -> None:
    """Lets memory run out in a step, after all of its gradients were computed."""
    compute = LongNetModule._backward_through
    left = [times]

    def backward(self: LongNetModule, *arguments: Any) -> Tensor:
        result = compute(self, *arguments)
        if self.global_step == step and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(REASON)
        return result

    monkeypatch.setattr(LongNetModule, "_backward_through", backward)


def results(job: JobConfig) -> tuple[list[dict[str, float]], dict[str, Any]]:
    train(job)
    path = Path(job.run.root) / job.run.name
    return losses(path / "metrics.csv"), read_whole(steps_of(path / "checkpoints")[-1])


def assert_same(result: Any, expected: Any) -> None:
    assert result[0] == expected[0]
    assert result[1]["state_dict"].keys() == expected[1]["state_dict"].keys()
    for name, weight in expected[1]["state_dict"].items():
        assert torch.equal(result[1]["state_dict"][name], weight), name
    moments, wanted = (run[1]["optimizer_states"][0]["state"] for run in (result, expected))
    for number, state in wanted.items():
        assert all(torch.equal(moments[number][name], state[name]) for name in state)


def test_a_dry_step_changes_nothing(make_job, plans: list[MemoryPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    step = LongNetModule.dry_step

    def dry_step(self: LongNetModule, context_length: int) -> str | None:
        before = torch.get_rng_state()
        reason = step(self, context_length)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(weight.grad is None for weight in self.parameters())
        return reason

    monkeypatch.setattr(LongNetModule, "dry_step", dry_step)
    expected = results(make_job(run__name="manual", model__dropout=0.1))
    assert not plans
    assert_same(results(make_job(run__name="auto", model__dropout=0.1, memory="auto")), expected)
    assert plans == [MemoryPlan("none")]


def test_nothing_is_lost_when_memory_runs_out(
    make_job, plans: list[MemoryPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "model__dropout": 0.1,
        "trainer__accumulate": 2,
        "trainer__max_steps": 5,
        "memory": "auto",
        **LONG,
    }
    expected = results(make_job(run__name="undisturbed", **options))
    plans.clear()
    run_out_at(monkeypatch, step=3, times=2)
    assert_same(results(make_job(run__name="disturbed", **options)), expected)
    assert plans == [MemoryPlan("none"), MemoryPlan("selective"), MemoryPlan("full")]


def test_a_plan_that_the_dry_step_refutes_is_not_used(
    make_job, plans: list[MemoryPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(make_job(run__name="manual"))
    compute = LongNetModule._loss_sums

    def loss_sums(self: LongNetModule, *arguments: Any) -> Any:
        if len(plans) == 1:
            raise torch.OutOfMemoryError(REASON)
        return compute(self, *arguments)

    monkeypatch.setattr(LongNetModule, "_loss_sums", loss_sums)
    assert_same(results(make_job(run__name="auto", memory="auto")), expected)
    assert plans == [MemoryPlan("none"), MemoryPlan("selective")]


def test_a_small_device_begins_with_a_smaller_plan(
    make_job, plans: list[MemoryPlan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2**10)
    train(make_job(memory="auto", trainer__max_steps=1, optim__warmup_steps=0, callbacks__progress="plain", **LONG))
    assert plans == [MemoryPlan("full")]
    assert "memory: full checkpointing, 0.00" in capsys.readouterr().out


def test_the_error_says_what_would_help(make_job, monkeypatch: pytest.MonkeyPatch) -> None:
    run_out_at(monkeypatch, step=2)
    with pytest.raises(JobError) as caught:
        train(make_job())
    message = str(caught.value)
    assert message.startswith(f"out of memory at step 2 with none checkpointing: {REASON}")
    for change in ("trainer.activation_checkpointing.kind=full", "data.batch_size=1", "memory=auto"):
        assert f"\n  {change}" in message
    assert "data.context_length=32: 0.00" in message


def test_the_error_when_no_plan_is_left(make_job, monkeypatch: pytest.MonkeyPatch) -> None:
    run_out_at(monkeypatch, step=2, times=10)
    with pytest.raises(JobError, match="out of memory at step 2 with full checkpointing"):
        train(make_job(memory="auto", **LONG))


@pytest.mark.parametrize("kind", ["none", "offload"])
def test_a_job_in_tiles_learns_the_same(make_job, kind: str) -> None:
    options = {"trainer__tile": 24, "trainer__activation_checkpointing__kind": kind}
    whole, _ = results(make_job(run__name="whole"))
    tiled, _ = results(make_job(run__name="tiled", **options))
    for row, other in zip(tiled, whole, strict=True):
        assert row == pytest.approx(other, rel=1e-4, nan_ok=True)


def test_a_rank_of_several_plans_for_its_shard(make_job):
    job = make_job(data__context_length=512, strategy__name="sequence_parallel", strategy__sequence_parallel_size=4)
    config = small_config(attention=[{"name": "dilated", "segment_lengths": [64, 512], "dilation_rates": [1, 8]}])
    keeper = MemoryKeeper(job, Placement("cpu", "32-true", False), Console(quiet=True))
    workload = keeper.workload(SimpleNamespace(model=SimpleNamespace(config=config)))
    assert workload.context_length == 128
    assert workload.share.held > 0
