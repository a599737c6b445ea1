"""Predicted bytes against those of the tensors that a step really makes."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from longnet.attention import fused
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.planning import MemoryPlan, Workload, count_parameters, predict_memory
from longnet.planning import memory as predicted
from longnet.training import activation_checkpointing, loss, offload

from ..model.models import PAPER, small_config
from .tracker import LiveBytes

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "deep": {"num_hidden_layers": 6, "gated_mlp": False, "hidden_act": "gelu"},
    "paper": PAPER,
}
TILE = 128
BLOCK = 2**15
PLANS = [MemoryPlan(kind, 1, tile) for kind in ("none", "selective", "full", "offload") for tile in (None, TILE)]
SPARSE = [MemoryPlan("full", 2), MemoryPlan("offload", 2, TILE)]


def shape(name: str, **changes: Any) -> LongNetConfig:
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
    }
    settings["attention"] = [{"name": "dilated", "segment_lengths": [256, 512], "dilation_rates": [1, 2]}]
    return small_config(**{**settings, **SHAPES[name], **changes})


def measure(workload: Workload, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes at the peak, and in host memory."""
    stores: list[offload.HostStore] = []

    def small_store() -> offload.HostStore:
        stores.append(offload.HostStore(block_bytes=BLOCK))
        return stores[-1]

    monkeypatch.setattr(activation_checkpointing, "HostStore", small_store)
    monkeypatch.setattr(predicted, "HOST_BLOCK_BYTES", BLOCK)
    model = LongNetForCausalLM(workload.model).train()
    if workload.residual == "bf16":
        model.model.residual_dtype = torch.bfloat16
    activation_checkpointing.apply(model, plan.kind, plan.every, plan.tile)
    tokens = torch.randint(workload.model.vocab_size, (workload.batch_size, workload.context_length))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=workload.precision == "bf16"):
            hidden = model.model(tokens)
            host = sum(store.host_bytes for store in stores)
            total = loss.linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, tokens.flatten()).loss
            del hidden
        total.backward()
    return live.peak - host, host


def assert_within_a_tenth(workload: Workload, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    peak, host = measure(workload, plan, monkeypatch)
    estimate = predict_memory(workload, plan, kernels=False)
    assert estimate.device - estimate.weights - estimate.optimizer == pytest.approx(peak, rel=0.1)
    assert estimate.host == host


@pytest.mark.parametrize("plan", [*PLANS, *SPARSE], ids=str)
def test_every_plan(plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_within_a_tenth(Workload(shape("grouped"), 512, 2, "fp32", fused_norm=False), plan, monkeypatch)


@pytest.mark.parametrize("plan", [MemoryPlan("none"), MemoryPlan("full", 2), MemoryPlan("offload", tile=TILE)], ids=str)
@pytest.mark.parametrize("name", ["deep", "paper"])
def test_every_shape(name: str, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_within_a_tenth(Workload(shape(name), 512, 1, "fp32", fused_norm=False), plan, monkeypatch)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("plan", [MemoryPlan("none"), MemoryPlan("full", tile=TILE)], ids=str)
@pytest.mark.parametrize("residual", ["fp32", "bf16"])
def test_mixed_precision(residual: Literal["fp32", "bf16"], plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shape("grouped", num_hidden_layers=2)
    assert_within_a_tenth(Workload(model, 256, 1, "bf16", residual, fused_norm=False), plan, monkeypatch)


@pytest.mark.parametrize("changes", [{}, PAPER, {"tie_word_embeddings": False, "gated_mlp": False}], ids=str)
def test_parameters_are_counted_exactly(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    total, layer = count_parameters(Workload(config, 64))
    model = LongNetForCausalLM(config)
    assert total == model.num_parameters()
    assert layer == sum(weight.numel() for weight in model.model.layers[0].parameters())


def test_constants_are_those_of_the_code() -> None:
    assert (predicted.LOSS_CHUNK_ELEMENTS, predicted.LOSS_MIN_CHUNKS) == (loss.CHUNK_ELEMENTS, loss.MIN_CHUNKS)
    assert predicted.HOST_BLOCK_BYTES == offload.BLOCK_BYTES
    assert predicted.ATTENTION_CHUNK == fused.CHUNK
