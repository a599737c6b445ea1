"""What a process takes of a batch, and how a model comes to attend over several of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from longnet.attention.blocks import Dilated
from longnet.attention.dilated import dilated_attention

from .attention import ShardedOperator
from .group import SequenceGroup
from .mesh import MeshShape
from .sharding import shard, shard_length


@dataclass(frozen=True)
class SequenceShare:
    """A process's place in the mesh, and what follows from it.

    Attributes:
        shape: how many read different samples and how many share one.
        rank: of this process among those that share its samples.
    """

    shape: MeshShape
    rank: int

    def cut(self, batch: Mapping[str, Tensor], padding: Mapping[str, int]) -> dict[str, Tensor]:
        """This process's positions of tensors (rows, N, ...); short shards are padded, with 0 unless told otherwise.

        Padding is at the end of the sequence, where a causal model's other positions do not see it.
        """
        cut = {}
        for name, x in batch.items():
            own = shard(self.rank, self.shape.sequence, x.shape[1])
            missing = shard_length(self.shape.sequence, x.shape[1]) - own.length
            after = (*(0, 0) * (x.dim() - 2), 0, missing)
            cut[name] = pad(x[:, own.begin : own.end], after, value=padding.get(name, 0))
        return cut

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The (1, length) places of this process's positions in the whole sequence."""
        return torch.arange(self.rank * length, (self.rank + 1) * length, device=device)[None]


def attend_over(model: nn.Module, form: str, group: SequenceGroup) -> None:
    """Lets the attention blocks of a model attend over the shards of a group.

    Raises:
        ValueError: if a block cannot.
    """
    for block in _blocks(model):
        if not isinstance(block, Dilated):
            raise ValueError(
                f"attention block {type(block).__name__}: sequence parallelism is made for dilated and dense ones; "
                "use attention=dilated or attention=dense"
            )
        block.operator = ShardedOperator(form, group)


def attend_alone(model: nn.Module) -> None:
    """The reverse of ``attend_over``: the model is whole again, for one process by itself."""
    for block in _blocks(model):
        if isinstance(block, Dilated):
            block.operator = dilated_attention


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    # By its place, since blocks of all kinds are told apart by nothing else.
    found = (getattr(module, "block", None) for module in model.modules())
    return [block for block in found if isinstance(block, nn.Module)]
