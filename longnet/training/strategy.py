"""How the processes of a job work together, and what is said when one of them is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy

from longnet.config.errors import JobError
from longnet.config.schema import FinetuneConfig, JobConfig
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.parallel.strategies import SequenceParallelFSDPStrategy, SequenceParallelStrategy

from .finetune import choose_trained
from .module import LongNetModule

# How gloo and NCCL begin to say that a peer is gone or silent; they have no class of errors for it.
_LOST = ("gloo", "timed out", "timeout", "connection closed", "connection reset", "broken pipe", "nccl", "socket")


def build_strategy(job: JobConfig) -> Strategy | str:
    """Lightning's strategy for a job; one process needs none."""
    config = job.strategy
    if job.trainer.devices * job.trainer.num_nodes == 1:
        return "auto"
    match config.name:
        case "sequence_parallel":
            return SequenceParallelStrategy(config.sequence_parallel_size, config.sequence_parallel, config.timeout)
        case "sequence_parallel_fsdp":
            return SequenceParallelFSDPStrategy(config.sequence_parallel_size, config.sequence_parallel, config.timeout)
        case _:
            return DDPStrategy(gradient_as_bucket_view=True, timeout=timedelta(seconds=config.timeout))


def gather_weights(module: LongNetModule, strategy: Strategy, finetune: FinetuneConfig) -> None:
    """Makes the model of the first process whole again after training, where weights were spread over all of them."""
    if isinstance(strategy, SequenceParallelFSDPStrategy):
        state = strategy.full_state_dict()
        if strategy.is_global_zero:
            config = module.model.config
            assert isinstance(config, LongNetConfig)
            module.model = LongNetForCausalLM(config)
            # With the same adapters as before, where it had some.
            choose_trained(module.model, finetune)
            module.model.load_state_dict(state)


@contextmanager
def answers_in_time(seconds: float) -> Iterator[None]:
    """Says in plain words that another process or a data worker is gone, or has not answered for so many seconds."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker"):
            raise JobError(
                "a process that prepares rows has died, of a signal or for want of memory: lower data.num_workers, or "
                f"data.num_workers=0; the same command goes on from the last checkpoint ({error})"
            ) from error
        if not dist.is_initialized() or not any(word in str(error).lower() for word in _LOST):
            raise
        reason = str(error).strip().splitlines()[0][:300]
        raise JobError(
            f"process {dist.get_rank()} of {dist.get_world_size()} lost another one, which has died or has not "
            f"answered for strategy.timeout={seconds:g} seconds: look for the first error in the output of the others; "
            f"the same command goes on from the last checkpoint ({reason})"
        ) from error
