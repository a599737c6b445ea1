"""The training and validation steps.

A batch holds the rows of one whole optimiser step for this process, so the number of tokens in the step is known
before its first backward pass. That makes the loss the exact mean over the step's tokens, however they are spread over
micro-batches and processes, and ``global_step`` the number of optimiser steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longnet.config.schema import OptimConfig
from longnet.parallel import SequenceShare

from .loss import LossSums, linear_cross_entropy
from .optim import build_optimizer
from .pretrained import head_weight, hidden_states
from .schedule import build_schedule

IGNORE_INDEX = -100
# Ways to be asked to stop, from 1 on; the highest one asked for counts.
STOPS = 3


class LongNetModule(LightningModule):
    """Trains a LongNet by the mean loss over the tokens of a step.

    Args:
        model: the language model.
        optim: the optimiser, its schedule and the loss's own terms.
        max_steps: the length of the run, for the schedule.
        micro_batch_size: rows per forward pass; a batch is a whole number of these.
        seed: with the step and the process's rank it fixes dropout, so a resumed run needs no random state.
    """

    tokens_seen: Tensor
    gradient_norm: Tensor
    window_nll: Tensor
    window_tokens: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        optim: OptimConfig,
        max_steps: int,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.optim = optim
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        # Called with the reason when a step does not fit; makes room, or raises.
        self.out_of_memory: Callable[[str], None] | None = None
        # Called with the loss of a step, whether the step was sound or has left everything as it was, and its batch.
        self.judge: Callable[[float, bool, dict[str, Any]], None] | None = None
        # What this process was asked to do by a signal, as one of STOPS, and what all agreed on in the last step.
        self.asked_to_stop = 0
        self.agreed_to_stop = 0
        # The batch of a step that is not settled and, on the device, its loss, whether it is sound, and the votes.
        self._unsettled: tuple[dict[str, Any], Tensor] | None = None
        self._loss = torch.zeros(())
        self._sound = torch.ones((), dtype=torch.bool)
        self._validation_sums = torch.zeros(2)
        self._max_steps = max_steps
        self._schedule = build_schedule(
            optim.schedule, max_steps, optim.warmup_steps, optim.min_lr_ratio, optim.decay_fraction, optim.power
        )
        # Sums over all processes, saved with the weights: a resumed run logs what an unbroken one would.
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
        # All that this process has computed since it began, with what has no label.
        self.positions_computed = 0
        self.register_buffer("gradient_norm", torch.zeros(()))
        self.register_buffer("window_nll", torch.zeros(()))
        self.register_buffer("window_tokens", torch.zeros((), dtype=torch.int64))

    @property
    def learning_rate(self) -> float:
        """The rate of the step about to be taken."""
        return self.optim.lr * self._schedule(self.global_step)

    def configure_model(self) -> None:
        if shard_model := getattr(self.trainer.strategy, "shard_model", None):
            shard_model()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A fused step would unscale fp16 gradients by itself, after they were to be clipped.
        fused = getattr(self.trainer.precision_plugin, "scaler", None) is None
        beta1, beta2 = self.optim.betas
        return build_optimizer(
            self.model, self.optim.lr, (beta1, beta2), self.optim.eps, self.optim.weight_decay, fused
        )

    def training_step(self, batch: dict[str, Any]) -> None:
        self.settle()
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate
        batch = self._own_part(batch)

        tokens = self._sum_over_processes((batch["labels"] != IGNORE_INDEX).sum())
        # The strategy averages gradients over the processes; the loss is a mean over all their tokens.
        scale = self.trainer.world_size / tokens.clamp(min=1)
        nll, *votes = self._sum_over_processes(self._with_votes(self._compute_gradients(batch, scale)))
        self._loss = nll / tokens.clamp(min=1)
        optimizer.step()
        self._unsettled = batch, torch.stack([self._loss, self._sound.to(nll.dtype), *votes])

        self.window_nll += nll.where(self._sound, 0)
        self.window_tokens += tokens.where(self._sound, 0)
        self.tokens_seen += tokens
        self.positions_computed += batch["labels"].numel()

    def settle(self) -> None:
        """Waits for the last step, if that was not done yet, and has it judged; all processes do so at the same time.

        No step waits for its own end, so that the device has work while the next batch is fetched: this is called by
        the next one, and before anything is written down, validated or saved.
        """
        if self._unsettled is None:
            return
        batch, summary = self._unsettled
        self._unsettled = None
        loss, sound, *votes = summary.tolist()
        self._count(votes)
        if self.judge is not None:
            self.judge(loss, bool(sound), batch)

    def dry_step(self, context_length: int) -> str | None:
        """A forward and a backward pass over a whole micro-batch, which change nothing; why not, if memory ran out."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        devices = [self.device] if self.device.type == "cuda" else []
        ids = torch.arange(context_length, device=self.device) % self.model.config.vocab_size
        batch = self._own_part({name: ids.repeat(self.micro_batch_size, 1) for name in ("input_ids", "labels")})
        reason = None
        with torch.random.fork_rng(devices):
            try:
                # The optimiser's state takes its place at the end of the first step.
                wanted = 0 if optimizer.state else 2 * sum(weight.numel() for weight in self.model.parameters())
                state = torch.empty(wanted, device=self.device)
                with self.trainer.precision_plugin.train_step_context():
                    loss = self._loss_sums(batch).loss
                loss.backward()
                del loss, state
            except torch.OutOfMemoryError as error:
                reason = str(error)
        optimizer.zero_grad()
        return reason

    def _compute_gradients(self, batch: dict[str, Tensor], scale: Tensor) -> Tensor:
        """Gradients of a whole step, from its start again where memory runs out; the sum of the tokens' losses."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        while True:
            self._seed_step(self.global_step)
            optimizer.zero_grad()
            try:
                return self._backward_through(self._micro_batches(batch), scale)
            except torch.OutOfMemoryError as error:
                if self.out_of_memory is None:
                    raise
                reason = str(error)
            # Out here, where the error no longer holds what the step had computed.
            optimizer.zero_grad()
            self.out_of_memory(reason)

    def _backward_through(self, micro_batches: list[dict[str, Tensor]], scale: Tensor) -> Tensor:
        nll = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            sums = self._loss_sums(micro_batch, self._context_of(self.global_step))
            # Backward is not to run under autocast: it takes its dtypes from the forward pass.
            with self._gradient_sync(index == len(micro_batches) - 1), torch.autocast(self.device.type, enabled=False):
                self.manual_backward(sums.loss * scale)
            nll += sums.nll.detach()
        return nll

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Here the gradients are unscaled and summed over the processes.
        limit = self.optim.gradient_clip or math.inf
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # Of sharded parameters it is the norm of the shards together.
        self.gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Loss and norm are sums over all processes: they are sound in every one of them, or in none.
        self._sound = self._loss.isfinite()
        if optimizer.defaults["fused"]:
            self._sound = self._sound & self.gradient_norm.isfinite()
            # The fused kernel then leaves weights and its own state as they are, and the host need not know yet.
            vars(optimizer)["found_inf"] = (~self._sound).float()
        elif not self._sound:
            # There is a scaler. It skips steps of its own, to find the largest scale: a gradient that overflows is no
            # news to it. Without gradients, the optimiser leaves everything as it is.
            optimizer.zero_grad()
            return
        # Gradients that are not finite are left for whoever looks for where they became so.
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, self.gradient_norm.where(self._sound, 0))

    def on_train_batch_end(self, *_: Any) -> None:
        # Asking to stop makes Lightning validate, so that every run ends with a validation of its final weights.
        self.trainer.should_stop |= self.global_step >= self._max_steps

    def take_window(self) -> float:
        """The mean loss over the tokens since the last call."""
        mean = (self.window_nll / self.window_tokens.clamp(min=1)).item()
        self.window_nll.zero_()
        self.window_tokens.zero_()
        return mean

    def on_train_end(self) -> None:
        self.settle()

    def on_validation_model_zero_grad(self) -> None:
        # What a step has come to is seen in its gradients, too.
        self.settle()
        super().on_validation_model_zero_grad()

    def on_validation_epoch_start(self) -> None:
        self._validation_sums = torch.zeros(2, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        _, *votes = self._sum_over_processes(self._with_votes(torch.zeros((), device=self.device))).tolist()
        self._count(votes)
        sums = self._loss_sums(self._own_part(batch))
        self._validation_sums += torch.stack([sums.nll, sums.tokens.to(sums.nll.dtype)])

    def on_validation_epoch_end(self) -> None:
        nll, tokens = self._sum_over_processes(self._validation_sums)
        loss = nll / tokens.clamp(min=1)
        metrics = {"val/loss": loss, "val/perplexity": loss.exp()}
        # How many bytes the tokens stand for is the data's to know; other data modules need not.
        if num_bytes := getattr(getattr(self.trainer, "datamodule", None), "validation_bytes", 0):
            metrics["val/bits_per_byte"] = nll / math.log(2) / num_bytes
        self.log_dict(metrics, logger=False)

    def forward_again(self, batch: dict[str, Any]) -> list[Tensor]:
        """The losses of the micro-batches of the last step once more, to look at how they come about."""
        step = self.global_step - 1
        self._seed_step(step)
        context = self._context_of(step)
        with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
            return [self._loss_sums(micro_batch, context).nll for micro_batch in self._micro_batches(batch)]

    def _with_votes(self, nll: Tensor) -> Tensor:
        """What is summed over all processes in any case and, with it, what this one was asked to do by a signal."""
        # Filled on the device: a list would be sent there, and waited for.
        return torch.stack([nll, *(nll.new_full((), self.asked_to_stop == way) for way in range(1, STOPS + 1))])

    def _count(self, votes: Sequence[float]) -> None:
        self.agreed_to_stop = max((way for way, vote in enumerate(votes, 1) if vote), default=0)

    @property
    def _sequence(self) -> SequenceShare | None:
        return getattr(self.trainer.strategy, "sequence", None)

    def _context_of(self, step: int) -> int | None:
        """What rows are cut to in a step, as the data has put them together; other data modules need not know."""
        context_of = getattr(getattr(self.trainer, "datamodule", None), "context_of", None)
        return context_of(step) if context_of else None

    def _own_part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The positions of this process, where several share a sequence. Labels are shifted, so they go along."""
        if self._sequence is None:
            return batch
        return self._sequence.cut(batch, {"labels": IGNORE_INDEX})

    def _micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        size = self.micro_batch_size
        starts = range(0, len(batch["input_ids"]), size)
        return [{name: rows[start : start + size] for name, rows in batch.items()} for start in starts]

    def _loss_sums(self, batch: dict[str, Any], context: int | None = None) -> LossSums:
        ids, borders = batch["input_ids"], None
        positions = None if self._sequence is None else self._sequence.positions(ids.shape[1], ids.device)
        if context is not None:
            # Each piece is a row of its own: positions and segments begin anew, and the same tokens are predicted.
            ids = ids.reshape(-1, context)
        if "lengths" in batch:
            # Isolated documents: the rows become one, since it is documents that attention keeps apart. The borders
            # stay on the host, where the kernels' sizes are computed.
            ids = ids.reshape(1, -1)
            lengths = [length for row in batch["lengths"] for length in row]
            borders = torch.tensor([0, *accumulate(lengths)])
        hidden = hidden_states(self.model, ids, positions, borders)
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            head_weight(self.model),
            batch["labels"].flatten(),
            ignore_index=IGNORE_INDEX,
            z_loss=self.optim.z_loss,
        )

    def _gradient_sync(self, wanted: bool) -> AbstractContextManager[Any]:
        strategy = self.trainer.strategy
        if wanted or not isinstance(strategy, ParallelStrategy):
            return nullcontext()
        return strategy.block_backward_sync()

    def _sum_over_processes(self, tensor: Tensor) -> Tensor:
        # Not the strategy's own sum, which has the host wait at a barrier.
        if self.trainer.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _seed_step(self, step: int) -> None:
        words = np.random.SeedSequence([self.seed, step, self.global_rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(words[0]))
