from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from longnet.model import LongNetForCausalLM
from longnet.planning import (
    MemoryPlan,
    Workload,
    candidate_plans,
    choose_plan,
    count_flops,
    predict_memory,
    recomputed_flops,
    suggest_savings,
)
from longnet.planning.choice import USABLE
from longnet.training.throughput import training_flops_per_token

from ..model.models import HYBRID, PAPER, small_config

GIB = 2**30
LARGE = small_config(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
    vocab_size=50304, gated_mlp=False,
    attention=[{"name": "dilated", "segment_lengths": [2048, 2**20], "dilation_rates": [1, 512]}],
)  # fmt: skip
LONG = Workload(LARGE, 2**20)


def test_each_candidate_computes_more_again_and_needs_less_memory() -> None:
    plans = candidate_plans(LONG, 2**40)
    assert plans[0] == MemoryPlan("none")
    assert plans[-1] == MemoryPlan("offload", tile=16384)
    again = [recomputed_flops(LONG, plan) for plan in plans]
    needed = [predict_memory(LONG, plan).device for plan in plans]
    assert again == sorted(again)
    assert needed == sorted(set(needed), reverse=True)


def test_the_cheapest_that_fits_is_chosen() -> None:
    plans = candidate_plans(LONG, 2**40)
    for number, plan in enumerate(plans):
        room = int(predict_memory(LONG, plan).device / USABLE)
        assert choose_plan(LONG, plans, room + 1024) == plan
        assert choose_plan(LONG, plans, room - 1024) == (plans[number + 1] if number + 1 < len(plans) else None)


def test_activations_go_only_into_host_memory_that_is_there() -> None:
    assert all(plan.kind != "offload" for plan in candidate_plans(LONG, host_bytes=GIB))


def test_short_rows_are_not_tiled() -> None:
    assert all(plan.tile is None for plan in candidate_plans(replace(LONG, context_length=16384), 2**40))


@pytest.mark.parametrize(
    "plan", [MemoryPlan("none"), MemoryPlan("selective", 2), MemoryPlan("full", tile=16384)], ids=str
)
def test_savings_are_those_of_the_changed_plan(plan: MemoryPlan) -> None:
    workload = replace(LONG, batch_size=2)
    savings = {saving.change: saving.bytes for saving in suggest_savings(workload, plan)}
    now = predict_memory(workload, plan).device
    assert all(saved > 0 for saved in savings.values())
    halved = predict_memory(replace(workload, context_length=2**19), plan).device
    assert savings["data.context_length=524288"] == now - halved
    narrow = predict_memory(replace(workload, residual="bf16"), plan).device
    assert savings["trainer.residual=bf16"] == now - narrow
    stronger = predict_memory(workload, replace(plan, kind="offload")).device
    assert savings["trainer.activation_checkpointing.kind=offload"] == now - stronger
    assert "data.batch_size=1 with trainer.accumulate raised as much" in savings


@pytest.mark.parametrize("changes", [{}, PAPER, {"attention": HYBRID, "num_hidden_layers": 7}], ids=str)
def test_flops_are_those_of_the_modules(changes: dict) -> None:
    config = small_config(**changes)
    counted = training_flops_per_token(LongNetForCausalLM(config), 64)
    assert count_flops(Workload(config, 64)).training == pytest.approx(counted, rel=1e-12)


def test_planning_needs_no_torch() -> None:
    code = "import sys, longnet.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
