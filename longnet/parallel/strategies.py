"""Lightning's strategies over a ("data", "sequence") mesh.

In both, gradients are averaged over all processes. What makes that right is the loss: each process sums it over its own
tokens and multiplies by processes / tokens of all. So neither an uneven share nor an empty one needs special care.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from longnet.checkpoint import Contents, Processes

from .group import SequenceGroup
from .mesh import MeshShape
from .share import SequenceShare, attend_alone, attend_over


class _OverSequences:
    """What both strategies do: build the mesh and give the attention blocks their group."""

    sequence: SequenceShare | None = None
    # Set by the strategies.
    root_device: torch.device
    lightning_module: Any

    def __init__(self, size: int, form: str, timeout: float, **options: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout), **options)  # type: ignore[call-arg]
        self._size = size
        self._form = form
        self._seconds = timeout

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        shape = MeshShape.of(dist.get_world_size(), self._size)
        self.mesh: DeviceMesh = shape.build(self.root_device.type)
        self.sequence = SequenceShare(shape, self.mesh.get_local_rank("sequence"))
        if shape.sequence > 1:
            group = SequenceGroup.of(self.mesh.get_group("sequence"), timedelta(seconds=self._seconds))
            attend_over(self.lightning_module, self._form, group)

    def teardown(self) -> None:
        # One process may go on alone from here, for example to generate a sample.
        attend_alone(self.lightning_module)
        super().teardown()  # type: ignore[misc]


class SequenceParallelStrategy(_OverSequences, DDPStrategy):
    """A copy of the model in each process, and sequences spread over ``size`` of them.

    Args:
        size: processes that share a sequence.
        form: "gather", "ring" or "ulysses".
        timeout: seconds that a process may take to answer.
    """

    def __init__(self, size: int, form: str = "gather", timeout: float = 600.0) -> None:
        super().__init__(size, form, timeout, gradient_as_bucket_view=True)


class SequenceParallelFSDPStrategy(_OverSequences, ModelParallelStrategy):
    """Weights, gradients and optimiser state spread over all processes (FSDP2), sequences over ``size`` of them.

    Args:
        size: processes that share a sequence.
        form: "gather", "ring" or "ulysses".
        timeout: seconds that a process may take to answer.
    """

    def __init__(self, size: int, form: str = "gather", timeout: float = 600.0) -> None:
        # The mesh that Lightning would make is not used.
        super().__init__(size, form, timeout, data_parallel_size=1, tensor_parallel_size=1)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard_model(self) -> None:
        """Spreads the module's model over all processes; called from its ``configure_model``."""
        model = self.lightning_module.model
        shard_weights(model, model.model.layers, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        model = self.lightning_module.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Each process writes its part."""
        processes = Processes(self.global_rank, self.world_size, self.reduce_boolean_decision)
        self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options=processes)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Each process reads what it holds, whoever wrote it; weights and optimiser are in place afterwards."""
        assert self.model is not None
        with Contents(Path(self.broadcast(checkpoint_path))) as contents:
            weights = get_model_state_dict(self.model)
            contents.fill_all(weights, "state_dict")
            set_model_state_dict(self.model, weights)
            for number, optimizer in enumerate(self.optimizers):
                state = get_optimizer_state_dict(self.model, optimizer)
                moments = state["state"]
                assert isinstance(moments, dict)
                contents.fill_all(moments, "optimizer_states", number, "state")
                groups: Any = state["param_groups"]
                saved = contents.get("optimizer_states", number, "param_groups")
                state["param_groups"] = [
                    old | {"params": new["params"]} for old, new in zip(saved, groups, strict=True)
                ]
                set_optimizer_state_dict(self.model, optimizer, state)
            return contents.state("state_dict", "optimizer_states")

    def full_state_dict(self) -> dict[str, Any]:
        """All weights, whole, in the first process's host memory; empty in the others. Every process calls this."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.lightning_module.model, options=options)


def shard_weights(model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Spreads the weights of a decoder over all processes, layer by layer. All must hold the same ones."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The loss uses the head's weight by itself, after this.
    register_fsdp_forward_method(model, "hidden_states")
    if dist.get_backend() == "gloo":
        # It has no averages, only sums.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
