"""Made the run in `kept/`, once: python -m tests.checkpoint.make_kept. Not to be made again: it must load for ever."""

from __future__ import annotations

from pathlib import Path

from longnet.config.schema import JobConfig
from longnet.training.run import train

from ..training.jobs import tiny_job

KEPT = Path(__file__).parent / "kept"


def job(root: Path, steps: int) -> JobConfig:
    return tiny_job(
        root, Path(),
        **{
            "run.name": "version-1", "data.source": "copy", "data.path": None, "data.samples": 64,
            "data.validation_samples": 2, "data.context_length": 64, "model.hidden_size": 8,
            "model.intermediate_size": 8, "model.num_hidden_layers": 1, "model.num_attention_heads": 2,
            "optim.schedule": "constant", "trainer.max_steps": steps, "callbacks.keep_last": 1,
        },
    )  # fmt: skip


if __name__ == "__main__":
    train(job(KEPT, steps=3))
