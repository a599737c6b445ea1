"""The range of every number in the schema."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from .schema import JobConfig
from .typed import Problems, show


@dataclass(frozen=True)
class Bound:
    """`low <= value <= high`, with `<` where an end is open."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def admits(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        words = []
        if self.low > -math.inf:
            words.append(f"{'above' if self.low_open else 'at least'} {self.low}")
        if self.high < math.inf:
            words.append(f"{'below' if self.high_open else 'at most'} {self.high}")
        return " and ".join(words)

    def nearest(self, value: float) -> str:
        if value < self.low and not self.low_open:
            return f"; the nearest is {self.low}"
        if value > self.high and not self.high_open:
            return f"; the nearest is {self.high}"
        return ""


COUNT = Bound(low=1)
NOT_NEGATIVE = Bound(low=0)
POSITIVE = Bound(low=0, low_open=True)
PROBABILITY = Bound(low=0, high=1, high_open=True)

BOUNDS = {
    "seed": Bound(low=0, high=2**32 - 1),
    "model.hidden_size": COUNT,
    "model.intermediate_size": COUNT,
    "model.num_hidden_layers": COUNT,
    "model.num_attention_heads": COUNT,
    "model.num_key_value_heads": COUNT,
    "model.head_dim": COUNT,
    "model.vocab_size": COUNT,
    "model.norm_eps": POSITIVE,
    "model.rope_theta": POSITIVE,
    "model.dropout": PROBABILITY,
    "model.initializer_range": POSITIVE,
    "attention.dropout": PROBABILITY,
    "attention.dilated.base": COUNT,
    "attention.dilated.ratio": Bound(low=2),
    "attention.dilated.shift": NOT_NEGATIVE,
    "attention.sliding_window.window": COUNT,
    "attention.block_sparse.block_size": COUNT,
    "attention.block_sparse.local_blocks": COUNT,
    "attention.block_sparse.stride": COUNT,
    "attention.block_sparse.global_blocks": NOT_NEGATIVE,
    "data.context_length": COUNT,
    "data.batch_size": COUNT,
    "data.validation_fraction": Bound(low=0, high=1, low_open=True, high_open=True),
    "data.validation_every": Bound(low=2),
    "data.block_rows": COUNT,
    "data.samples": COUNT,
    "data.validation_samples": COUNT,
    "data.num_workers": NOT_NEGATIVE,
    "finetune.lora_rank": COUNT,
    "finetune.lora_alpha": COUNT,
    "finetune.lora_dropout": PROBABILITY,
    "optim.lr": POSITIVE,
    "optim.eps": POSITIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.gradient_clip": NOT_NEGATIVE,
    "optim.warmup_steps": NOT_NEGATIVE,
    "optim.min_lr_ratio": Bound(low=0, high=1),
    "optim.decay_fraction": Bound(low=0, high=1, low_open=True),
    "optim.power": POSITIVE,
    "optim.z_loss": NOT_NEGATIVE,
    "trainer.max_steps": COUNT,
    "trainer.accumulate": COUNT,
    "trainer.tokens_per_step": COUNT,
    "trainer.devices": COUNT,
    "trainer.num_nodes": COUNT,
    "trainer.log_every": COUNT,
    "trainer.val_every": COUNT,
    "trainer.val_batches": COUNT,
    "trainer.overfit_batches": NOT_NEGATIVE,
    "trainer.tile": COUNT,
    "trainer.activation_checkpointing.every": COUNT,
    "trainer.guard.skip_limit": NOT_NEGATIVE,
    "trainer.guard.spike_factor": NOT_NEGATIVE,
    "trainer.guard.spike_window": COUNT,
    "trainer.guard.rewinds": NOT_NEGATIVE,
    "strategy.sequence_parallel_size": COUNT,
    "strategy.timeout": POSITIVE,
    "callbacks.save_every": COUNT,
    "callbacks.keep_last": COUNT,
    "callbacks.sample_tokens": NOT_NEGATIVE,
    "evaluation.every": NOT_NEGATIVE,
    "evaluation.max_tokens": COUNT,
    "evaluation.documents": NOT_NEGATIVE,
    "evaluation.document_tokens": COUNT,
    "evaluation.samples": COUNT,
    "evaluation.batch_tokens": COUNT,
}


def check_bounds(job: JobConfig, problems: Problems) -> None:
    """Reports every number that is out of its range."""
    for key in BOUNDS:
        check_bound(key, attrgetter(key)(job), problems, key)


def check_bound(key: str, value: Any, problems: Problems, place: str) -> None:
    """Reports a value that is out of the range of a key, if that has one, by the place where it stands."""
    bound = BOUNDS.get(key)
    if bound and value is not None and not problems.about(place) and not bound.admits(value):
        problems.add(place, f"{place}={show(value)}: expected {bound}{bound.nearest(value)}")
