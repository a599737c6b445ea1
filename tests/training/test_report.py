from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from longnet.data import ByteTokenizer
from longnet.evaluation.baselines import Baselines
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.training.metrics import MetricsFile
from longnet.training.report import generate_sample, plot_loss, show_summary
from longnet.training.rundir import RunDirectory

BASELINES = Baselines(num_bytes=1000, unigram=4.9, xz=2.1)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path, "run")
    run.path.mkdir()
    metrics = MetricsFile(run.metrics)
    metrics.log_metrics({"train/loss": 3.0}, step=1)
    metrics.log_metrics({"train/loss": 2.0, "val/loss": 2.2, "val/bits_per_byte": 3.17}, step=2)
    return run


def summary(run: RunDirectory, baselines=None, sample=None) -> str:
    console = Console(file=io.StringIO(), width=100)
    show_summary(console, run, baselines, sample)
    return console.file.getvalue()


def test_the_summary_ranks_the_model_among_the_baselines(run):
    lines = summary(run, BASELINES).splitlines()
    order = [line.split()[0] for line in lines if line.strip().endswith(("2.100", "3.170", "4.900"))]
    assert order == ["xz", "this", "unigram"]


def test_the_summary_ends_with_the_place_and_the_next_command(run, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "model=tiny", "attention=dense", "run.name=x", "seed=3"])
    *_, place, command = summary(run).splitlines()
    assert place == f"run   {run.path}"
    assert command == "next  python train.py -m model=tiny seed=3 attention=dense,dilated,sliding_window"


def test_a_sample_is_shown_as_it_is(run):
    screen = summary(run, sample="def [bold]f(\x1b[31m):\n    pass\n")
    assert "def [bold]f(" in screen
    assert "\x1b" not in screen


def test_the_plot_is_drawn_with_and_without_what_it_may_lack(run, tmp_path):
    for metrics, baselines in ((run.metrics, BASELINES), (run.metrics, None), (tmp_path / "none.csv", BASELINES)):
        plot_loss(metrics, run.plot, "run", baselines)
        assert run.plot.read_bytes().startswith(b"\x89PNG")
        run.plot.unlink()


def test_a_sample_continues_the_prompt_and_depends_only_on_weights_and_seed():
    torch.manual_seed(0)
    config = LongNetConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64
    )
    model = LongNetForCausalLM(config).train()
    tokenizer = ByteTokenizer()
    first = generate_sample(model, tokenizer, "def ", 10, seed=1)
    state = torch.get_rng_state()
    second = generate_sample(model, tokenizer, "def ", 10, seed=1)
    assert first == second
    assert first.startswith("def ")
    assert generate_sample(model, tokenizer, "def ", 10, seed=2) != first
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
