"""Floating-point operations of a token, by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .workload import MemoryPlan, Workload


@dataclass(frozen=True)
class Flops:
    """Operations per token, forward: a product costs 2 per weight, attention 4 per pair that is seen and dimension."""

    attention_inputs: float
    attention: float
    attention_output: float
    mlp: float
    head: float

    @property
    def forward(self) -> float:
        return self.layers + self.head

    @property
    def layers(self) -> float:
        return self.attention_inputs + self.attention + self.attention_output + self.mlp

    @property
    def training(self) -> float:
        """Forward and backward, with nothing that is computed twice, as is the custom for model FLOPs."""
        return 3 * self.forward


def count_flops(workload: Workload) -> Flops:
    """The operations of one token of a full row, or of a rank's share of one."""
    from longnet.attention import build_block

    model, context = workload.model, workload.context_length
    layers, hidden = model.num_hidden_layers, model.hidden_size
    if workload.share:
        attention = workload.share.attention_flops
    else:
        blocks: list[Any] = [build_block(spec) for spec in model.attention[:layers]]
        seen = [block.flops(context, model.num_attention_heads, model.head_dim) for block in blocks]
        attention = sum(seen[layer % len(seen)] for layer in range(layers)) / context
    return Flops(
        attention_inputs=2 * layers * hidden * (workload.query_width + 2 * workload.key_width),
        attention=attention,
        attention_output=2 * layers * hidden * workload.query_width,
        mlp=2 * layers * hidden * model.intermediate_size * (3 if model.gated_mlp else 2),
        head=2 * hidden * model.vocab_size,
    )


def recomputed_flops(workload: Workload, plan: MemoryPlan) -> float:
    """The operations of a token that a plan computes a second or third time."""
    flops = count_flops(workload)
    positionwise = flops.layers - flops.attention
    # The untiled kinds stop before a layer's last product, whose output nothing needs.
    last = flops.mlp / (3 if workload.model.gated_mlp else 2)
    tiled, share = plan.tile is not None, -(-workload.model.num_hidden_layers // plan.every)
    checkpointed = {
        "none": positionwise if tiled else 0.0,
        "selective": positionwise + flops.attention_inputs if tiled else positionwise - last,
        "full": flops.layers + flops.attention_inputs if tiled else flops.layers - last,
        "offload": flops.layers + flops.attention_inputs,
    }[plan.kind]
    others = positionwise if tiled else 0.0
    share = share / workload.model.num_hidden_layers
    return share * checkpointed + (1 - share) * others
