"""Predictions against what was measured, and the pieces they are made of."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from longnet.config import load, resolve_attention
from longnet.config.machine import Machine
from longnet.model import LongNetConfig
from longnet.planning import (
    MemoryPlan,
    Rates,
    Workload,
    candidate_plans,
    choose_plan,
    count_flops,
    longest_context,
    pattern_choices,
    predict_memory,
    predict_time,
    recommend,
)
from longnet.planning.time import H200
from longnet.training.rates import measure_rates

from ..model.models import small_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planning.md").read_text()
TABLES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (tiny|125m|paper_125m|1b) \|", line)
]
ROWS = [row for row in TABLES if len(row) == 10]
CPU_ROWS = [row for row in TABLES if len(row) == 6]
SMALL = Workload(small_config(), 64)


def measured_workload(model: str, context: int) -> Workload:
    """What scripts/benchmark_training.py trains on a GPU."""
    overrides = [f"model={model}", f"data.context_length={context}", "run.name=benchmark"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = load(compose("train", overrides), Machine(gpus=1))
    shape = asdict(job.model) | {"vocab_size": job.model.vocab_size or 50304}
    config = LongNetConfig(**shape, attention=resolve_attention(job), max_position_embeddings=context)
    return Workload(config, context, 1, "bf16", "bf16", compiled=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:4]))
def test_the_table_of_the_documentation_is_current_and_close(row):
    model, context, kind, tile, gib, predicted_gib, gib_error, ms, predicted_ms, ms_error = row
    workload = measured_workload(model, int(context.replace(",", "")))
    plan = MemoryPlan(kind, 1, int(tile) if tile else None)
    memory = predict_memory(workload, plan).device / 2**30
    time = predict_time(workload, plan, H200).total * 1e3
    measured_ms = float(ms.replace(",", ""))
    assert (f"{memory:.1f}", f"{memory / float(gib) - 1:+.0%}") == (predicted_gib, gib_error)
    assert (f"{time:,.0f}", f"{time / measured_ms - 1:+.0%}") == (predicted_ms, ms_error)
    assert memory == pytest.approx(float(gib), rel=0.1)
    assert time == pytest.approx(measured_ms, rel=0.2)


def test_there_are_rows_to_compare():
    assert (len(ROWS), len(CPU_ROWS), len(TABLES)) == (9, 8, 17)


@pytest.mark.parametrize("row", CPU_ROWS, ids=lambda row: "-".join(row[:3]))
def test_the_errors_on_a_cpu_are_those_of_their_row(row):
    measured, predicted = (float(cell.replace(",", "")) for cell in row[3:5])
    assert f"{predicted / measured - 1:+.0%}" == row[5]
    assert predicted == pytest.approx(measured, rel=0.2)


def test_the_parts_of_a_step_add_up():
    rates = Rates("round", matmul=1e9, attention=1e8, bandwidth=1e7, link=1e6)
    flops = count_flops(SMALL)
    none = predict_time(SMALL, MemoryPlan(), rates)
    assert none.products == pytest.approx(64 * 3 * (flops.forward - flops.attention) / 1e9)
    assert none.attention == pytest.approx(64 * 3.5 * flops.attention / 1e8)
    assert none.communication == 0
    full = predict_time(SMALL, MemoryPlan("full"), rates)
    assert full.attention == pytest.approx(64 * 4.5 * flops.attention / 1e8)
    assert full.products > none.products
    assert full.memory > none.memory
    spread = predict_time(SMALL, MemoryPlan(), rates, received=3 * 10**6)
    assert spread.total == pytest.approx(none.total + 3.0)
    with pytest.raises(ValueError, match="rates.link=None"):
        predict_time(SMALL, MemoryPlan(), H200, received=1)


def test_rates_are_measured_here():
    for workload in (None, SMALL):
        rates = measure_rates(torch.device("cpu"), torch.float32, workload)
        assert rates.matmul > rates.attention > 1e6
        assert rates.copies > rates.bandwidth > 1e6


def test_the_optimizer_goes_by_the_rate_of_copies():
    rates = Rates("round", matmul=1e9, attention=1e8, bandwidth=1e7)
    slow, fast = (predict_time(SMALL, MemoryPlan(), each) for each in (rates, replace(rates, copies=1e8)))
    assert fast.optimizer == pytest.approx(slow.optimizer / 10)
    assert fast.memory == slow.memory


def test_the_longest_context_is_the_border_between_what_fits_and_what_does_not():
    room, host = 2 * 2**30, 2**33
    workload = replace(SMALL, context_length=2**24)
    longest = longest_context(workload, room, host)

    def fits(context):
        at = replace(workload, context_length=context)
        return choose_plan(at, candidate_plans(at, host), room) is not None

    assert longest % 1024 == 0
    assert fits(longest)
    assert not fits(longest + 1024)
    assert longest_context(workload, 10**5) == 0


def test_the_recommended_pattern_covers_what_it_can_afford():
    few = replace(measured_workload("125m", 32768))
    choices = pattern_choices(few)
    assert [choice.share for choice in choices] == sorted(choice.share for choice in choices)
    best = recommend(choices)
    assert best.share <= 0.5
    assert best.coverage == max(choice.coverage for choice in choices if choice.share <= 0.5)
    for choice in choices:
        # 12 heads have 12 phases between them.
        assert choice.coverage == min(1.0, 12 / choice.coarsest)
        assert choice.base * choice.ratio ** (choice.levels - 1) >= 32768
    assert recommend([]) is None
