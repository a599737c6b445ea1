"""A part of a checkpoint is trained on two processes as on one: the same losses, weights and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ..model.hf.originals import original
from ..training.conftest import corpus_path  # noqa: F401
from ..training.jobs import tiny_job
from .training import outcome, train_on

# (what is trained, strategy, processes that share a sequence)
JOBS: dict[str, tuple[str, str, int]] = {
    "lora-ddp": ("lora", "ddp", 1),
    "lora-shared": ("lora", "sequence_parallel", 2),
    "lora-sharded": ("lora", "sequence_parallel_fsdp", 2),
    "attention-sharded": ("attention", "sequence_parallel_fsdp", 1),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, corpus_path: Path) -> dict[str, Any]:  # noqa: F811
    root = tmp_path_factory.mktemp("runs")
    original("smollm2", vocab_size=384).save_pretrained(root / "checkpoint")

    def job(name: str, trained: str, batch: int, **keys: Any) -> Any:
        return tiny_job(
            root, corpus_path, run__name=name, model__pretrained=str(root / "checkpoint"), finetune__train=trained,
            finetune__lora_rank=4, data__batch_size=batch, **keys,
        )  # fmt: skip

    alone = {trained: job(trained, trained, 2) for trained in ("lora", "attention")}
    train_on(1, list(alone.values()))
    together = {
        name: job(name, trained, size, strategy__name=strategy, strategy__sequence_parallel_size=size)
        for name, (trained, strategy, size) in JOBS.items()
    }
    train_on(2, list(together.values()))
    return alone | together


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_fine_tune_like_one(name: str, jobs: dict[str, Any]) -> None:
    rows, weights = outcome(jobs[name])
    expected_rows, expected = outcome(jobs[JOBS[name][0]])
    for there, here in zip(rows, expected_rows, strict=True):
        assert there == pytest.approx(here, rel=2e-5)
    assert expected_rows[-1]["val/loss"] < expected_rows[2]["val/loss"]
    assert_close(weights, expected, 1e-4)
    if JOBS[name][0] == "lora":
        found, alone = (
            load_file(Path(jobs[run].run.root) / run / "adapter" / "adapter_model.safetensors")
            for run in (name, "lora")
        )
        assert any(tensor.any() for key, tensor in alone.items() if "lora_B" in key)
        # They begin at zero, where Adam makes the rounding of the smallest gradients as large as a step.
        assert_close(found, alone, 1e-3)


def assert_close(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        error = (found[key] - value).norm() / value.norm()
        assert error < bound, f"{key} is off by {error:.1e}"
