"""AdamW, with weight decay only where it belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the trainable parameters into those that decay and those that do not.

    Norm weights, biases and embeddings do not decay: pulling them to zero changes what the model can express rather
    than how simple it is. A head tied to the embedding is the embedding.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (keep if parameter.ndim < 2 or id(parameter) in embeddings else decay).append(parameter)
    groups = ((decay, weight_decay), (keep, 0.0))
    return [{"params": parameters, "weight_decay": rate} for parameters, rate in groups if parameters]


def build_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW over ``parameter_groups``; one fused kernel per step where every parameter's device has it."""
    devices = {parameter.device.type for parameter in model.parameters()}
    fused = fused and devices <= {"cpu", "cuda", "mps"}
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=fused)
