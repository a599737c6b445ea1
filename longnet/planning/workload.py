"""What is trained on how much at once, and what of it waits for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["none", "selective", "full", "offload"]


@dataclass(frozen=True)
class RankShare:
    """What differs for one rank of several that share a sequence.

    Attributes:
        attention_flops: per token, of all layers, forward; its queries also see keys of others.
        held: bytes of other ranks' keys, values and their gradients that attention holds at a time.
        touched: share of its rows that other ranks' keys add to, 0 to 1; those are summed in float32.
    """

    attention_flops: float
    held: int
    touched: float


@dataclass(frozen=True)
class Workload:
    """A forward and a backward pass.

    Attributes:
        model: the decoder's shape, a ``LongNetConfig`` or anything with its attributes.
        context_length: positions of a row.
        batch_size: rows of one pass.
        precision: of the matrix products, by autocast; weights are in fp32.
        residual: number format of the residual stream.
        fused_norm: whether the norms are one kernel; the others keep their intermediate results for backward. Torch's
            RMSNorm is one on a GPU where its input and its weight have one number format.
        compiled: whether torch.compile makes the layers.
        share: where ``context_length`` is a shard of a longer row, what that adds; None for whole rows.
    """

    model: Any
    context_length: int
    batch_size: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    residual: Literal["fp32", "bf16"] = "fp32"
    fused_norm: bool = True
    compiled: bool = False
    share: RankShare | None = None

    @property
    def tokens(self) -> int:
        return self.context_length * self.batch_size

    @property
    def compute_bytes(self) -> int:
        """Of an element of queries, keys, values and what the MLP holds."""
        return 4 if self.precision == "fp32" else 2

    @property
    def residual_bytes(self) -> int:
        return 4 if self.precision == "fp32" or self.residual == "fp32" else 2

    @property
    def query_width(self) -> int:
        return int(self.model.num_attention_heads * self.model.head_dim)

    @property
    def key_width(self) -> int:
        return int(self.model.num_key_value_heads * self.model.head_dim)


@dataclass(frozen=True)
class MemoryPlan:
    """What the layers keep for backward, as ``trainer.activation_checkpointing`` and ``trainer.tile`` say it."""

    kind: Kind = "none"
    every: int = 1
    tile: int | None = None

    def __str__(self) -> str:
        every = f" of one layer in {self.every}" if self.every > 1 and self.kind != "none" else ""
        tile = f", tiles of {self.tile:,} positions" if self.tile else ""
        return f"{self.kind} checkpointing{every}{tile}"
