"""Tiny jobs on a tiny corpus: seconds, not minutes."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

from longnet.config.schema import JobConfig
from longnet.training.metrics import read_metrics

MEASURED = ("tokens_per_second", "data_wait", "mfu", "peak_memory_gib", "seconds")


def write_corpus(root: Path, files: int = 24) -> Path:
    """Python files whose lengths differ; some of them fall to validation."""
    words = ["alpha", "beta", "gamma", "delta", "return", "import", "self", "for", "in", "if"]
    draw = random.Random(0)
    root.mkdir()
    for number in range(files):
        lines = [" ".join(draw.choices(words, k=6)) for _ in range(draw.randint(3, 12))]
        (root / f"module_{number}.py").write_text("\n".join(lines) + "\n")
    return root


def tiny_job(root: Path, corpus: Path, **overrides: Any) -> JobConfig:
    """A job in ``root`` with the overrides given by their dotted keys, `__` standing for the dot."""
    job = JobConfig()
    settings = {
        "run.root": str(root),
        "model.hidden_size": 32,
        "model.intermediate_size": 64,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 4,
        "attention.dilated.base": 16,
        "data.path": str(corpus),
        "data.context_length": 64,
        "data.batch_size": 2,
        "data.validation_fraction": 0.3,
        "optim.warmup_steps": 2,
        "optim.lr": 3e-3,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 6,
        "trainer.log_every": 1,
        "trainer.val_every": 3,
        "trainer.val_batches": 2,
        "callbacks.progress": "none",
        "callbacks.save_every": 3,
        "callbacks.plot": False,
        "callbacks.summary": False,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in settings.items():
        *path, name = key.split(".")
        owner: Any = job
        for part in path:
            owner = getattr(owner, part)
        assert name in {field.name for field in fields(owner)}, key
        setattr(owner, name, value)
    return job


def losses(metrics: Path) -> list[dict[str, float]]:
    """The rows of a run without what depends on the clock."""
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in read_metrics(metrics)]
