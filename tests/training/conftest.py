from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longnet.config.schema import JobConfig

from .jobs import tiny_job, write_corpus


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "files")


@pytest.fixture(autouse=True)
def known_matmul_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the device would take most of a tiny job's time."""
    monkeypatch.setattr("longnet.training.recorder.measure_matmul_rate", lambda device, dtype: 1e12)


@pytest.fixture
def make_job(tmp_path: Path, corpus_path: Path) -> Callable[..., JobConfig]:
    def make(**overrides: Any) -> JobConfig:
        return tiny_job(tmp_path / "runs", corpus_path, **overrides)

    return make
