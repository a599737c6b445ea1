"""Predicted bytes against those of the tensors that a step really makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.planning import MemoryPlan, Workload, count_parameters, predict_memory
from longnet.planning import memory as predicted
from longnet.training import activation_checkpointing, loss, offload

from ..model.models import PAPER, small_config
from .tracker import LiveBytes

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "wide": {"intermediate_size": 512, "num_key_value_heads": 4},
    "deep": {"num_hidden_layers": 8, "gated_mlp": False, "hidden_act": "gelu"},
    "paper": PAPER,
}
FORMATS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "fp32"), "bf16 stream": ("bf16", "bf16")}
PLANS = [MemoryPlan(kind, 1, tile) for kind in ("none", "selective", "full", "offload") for tile in (None, 64)] + [
    MemoryPlan("full", 2),
    MemoryPlan("offload", 2, 64),
]


def shape(name: str, **changes: Any) -> LongNetConfig:
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
    }
    settings["attention"] = [{"name": "dilated", "segment_lengths": [256, 512], "dilation_rates": [1, 2]}]
    return small_config(**{**settings, **SHAPES[name], **changes})


def measure(workload: Workload, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Bytes after the forward pass, at the peak, and in host memory."""
    stores: list[offload.HostStore] = []

    def small_store() -> offload.HostStore:
        stores.append(offload.HostStore(block_bytes=4096))
        return stores[-1]

    monkeypatch.setattr(activation_checkpointing, "HostStore", small_store)
    monkeypatch.setattr(predicted, "HOST_BLOCK_BYTES", 4096)
    model = LongNetForCausalLM(workload.model).train()
    if workload.residual == "bf16":
        model.model.residual_dtype = torch.bfloat16
    activation_checkpointing.apply(model, plan.kind, plan.every, plan.tile)
    tokens = torch.randint(workload.model.vocab_size, (workload.batch_size, workload.context_length))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=workload.precision == "bf16"):
            hidden = model.model(tokens)
            host = sum(store.host_bytes for store in stores)
            kept = live.now() - host
            total = loss.linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, tokens.flatten()).loss
            del hidden
        total.backward()
    return kept, live.peak - host, host


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("numbers", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_within_a_tenth(name: str, numbers: str, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    precision, residual = FORMATS[numbers]
    workload = Workload(shape(name), 512, 2, precision, residual, fused_norm=False)  # type: ignore[arg-type]
    kept, peak, host = measure(workload, plan, monkeypatch)
    estimate = predict_memory(workload, plan, kernels=False)
    made = estimate.device - estimate.weights - estimate.optimizer
    print(f"{made / peak - 1:+.3f}")
    assert made == pytest.approx(peak, rel=0.1)
    assert estimate.host == host
