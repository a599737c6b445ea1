"""One rank of many by itself: what it computes is what a whole sequence of such keys would give it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from longnet.attention import DilationPattern, reference_attention
from longnet.parallel.attention import ShardedOperator
from longnet.parallel.sharding import shard
from longnet.parallel.solo import SoloGroup
from longnet.planning import Rates

SCRIPT = Path(__file__).parents[2] / "scripts/benchmark_sequence_parallel.py"


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize(
    ("ranks", "length", "pattern"),
    [
        (8, 32, DilationPattern.geometric(256, base=16)),
        (5, 19, DilationPattern((7, 40, 95), (1, 3, 5), shift=4)),
        # Rates above a shard's length: most ranks hold no row of the last levels.
        (64, 8, DilationPattern.geometric(512, base=16)),
    ],
)
def test_the_last_rank_sees_what_others_would_have_sent(ranks, length, pattern, form):
    torch.manual_seed(0)
    context, own = ranks * length, shard(ranks - 1, ranks, ranks * length)
    whole = [torch.full((1, context, heads, 8), 0.5, dtype=torch.float64) for heads in (4, 2, 2)]
    parts = [torch.randn(1, length, x.shape[2], 8, dtype=torch.float64, requires_grad=True) for x in whole]
    out = ShardedOperator(form, SoloGroup(ranks - 1, ranks))(*parts, pattern)
    grad = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, parts, grad))
    for x, part in zip(whole, parts, strict=True):
        x[:, own.begin :] = part.detach()
        x.requires_grad_()
    expected = reference_attention(*whole, pattern, causal=True)[0][:, own.begin :]
    truth = (expected, *(x[:, own.begin :] for x in torch.autograd.grad(expected, whole, grad)))
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        assert (a - b).norm() < 1e-12 * b.norm(), name


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens-per-rank", "64", "--ranks", "1", "1024", "--heads", "2", "--head-dim", "8", "--base", "32"],
        ["--context", "256", "--ranks", "1", "4", "--model", "tiny", "--form", "ring", "--plan", "full/64"],
    ],
)
def test_the_benchmark_runs(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *words, "--device", "cpu", "--dtype", "float32", "--repeats", "1"])
    monkeypatch.setattr("longnet.training.rates.measure_rates", lambda *_: Rates("any", 1e12, 1e12, 1e12))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("%  ")]
    assert [row[0] for row in table] == ["1", words[words.index("--ranks") + 2].replace("1024", "1,024")]
    assert table[0][-1] == "100.0%"
