from __future__ import annotations

import time

import pytest
import torch

from longnet.attention import DilationPattern
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.training.throughput import TrainingClock, measure_matmul_rate, peak_memory_gib, training_flops_per_token

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_by_hand(tied):
    pattern = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}
    config = LongNetConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention=[{"name": "dilated", **pattern}, {"name": "dense"}, {"name": "sliding_window", "window": 8}],
        tie_word_embeddings=tied,
    )
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    products = 3 * layer + 50 * 32
    seen = DilationPattern(**pattern).edges(64, 4) + 4 * (64 * 65 // 2) + 4 * (8 * 9 // 2 + 56 * 8)
    expected = 6 * products + 3 * 4 * 8 * seen / 64
    assert training_flops_per_token(LongNetForCausalLM(config), 64) == pytest.approx(expected)


def test_the_matmul_rate_is_that_of_this_machine():
    rate = measure_matmul_rate(CPU, torch.float32, seconds=0.01)
    assert 1e7 < rate < 1e16


def test_peak_memory_is_at_least_what_torch_alone_takes():
    assert 0.02 < peak_memory_gib(CPU) < 10_000


def test_the_clock_counts_only_while_it_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = TrainingClock()
    clock.start()
    now[0] = 2.0
    clock.start()
    now[0] = 3.0
    clock.stop(CPU)
    now[0] = 10.0
    assert clock.lap(CPU) == 3.0
    clock.start()
    now[0] = 11.0
    assert clock.lap(CPU) == 1.0
    now[0] = 13.0
    assert clock.lap(CPU) == 2.0
    assert clock.total == 6.0
