from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from longnet.config import ConfigError, JobConfig
from longnet.config.sweep import SweepCallback, check_sweep

from .conftest import CONF


@pytest.fixture
def sweep() -> Iterator[Any]:
    """Checks a sweep as Hydra's callback does."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):

        def run(*overrides: str) -> list[JobConfig]:
            given = [*overrides, "hydra.mode=MULTIRUN"]
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            return check_sweep(hydra.compose_config("train", given, run_mode=RunMode.MULTIRUN))

        yield run
    HydraConfig.instance().cfg = None


def names(jobs: list[JobConfig]) -> list[str]:
    return [job.run.name for job in jobs]


def test_jobs_are_named_by_what_varies(sweep: Any) -> None:
    jobs = sweep("attention=dense,dilated", "optim.lr=1e-3,1e-4", "trainer.max_steps=20")
    assert names(jobs) == [
        "tiny-dense-stdlib-lr=0.001",
        "tiny-dense-stdlib-lr=0.0001",
        "tiny-dilated-stdlib-lr=0.001",
        "tiny-dilated-stdlib-lr=0.0001",
    ]
    assert [job.optim.lr for job in jobs] == [1e-3, 1e-4] * 2


def test_a_name_of_ones_own_is_kept_in_front(sweep: Any) -> None:
    assert names(sweep("run.name=mine", "attention=dense,hybrid")) == ["mine-dense", "mine-hybrid"]
    assert names(sweep("run.name=a,b")) == ["a", "b"]
    own = "run.name=mine-of-${hydra:runtime.choices.attention}"
    assert names(sweep(own, "attention=dense,hybrid", "seed=3")) == ["mine-of-dense", "mine-of-hybrid"]


def test_an_experiment_may_bring_its_sweep(sweep: Any) -> None:
    expected = ["comparison-dense", "comparison-dilated", "comparison-sliding_window"]
    assert names(sweep("experiment=attention_comparison")) == expected
    assert names(sweep("experiment=attention_comparison", "attention=hybrid,dense")) == [
        "comparison-hybrid",
        "comparison-dense",
    ]


def test_all_jobs_are_checked_before_the_first(sweep: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("optim.lr=-1,1e-3", "attention=dense,dilated", "trainer.max_steps=0")
    assert sorted(caught.value.problems) == [
        "[optim.lr=-1 attention=dense, optim.lr=-1 attention=dilated] optim.lr=-1.0: expected above 0",
        "trainer.max_steps=0: expected at least 1; the nearest is 1",
    ]


def test_jobs_that_would_share_a_directory_are_refused(sweep: Any) -> None:
    with pytest.raises(ConfigError, match=r"run.name=tiny-dilated-stdlib-lr=0.001: 2 jobs of the sweep"):
        sweep("optim.lr=1e-3,0.001")


def test_several_processes_are_torchruns_business(sweep: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "attention=dense,dilated")
    assert [problem.partition("torchrun ")[2] for problem in caught.value.problems] == [
        "--nproc-per-node 2 train.py strategy=ddp trainer.devices=2 trainer.accelerator=cpu "
        f"attention={attention} run.name=tiny-{attention}-stdlib"
        for attention in ("dense", "dilated")
    ]


def test_the_callback_ends_the_process_where_the_sweep_is_unsound(
    sweep: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    config = hydra.compose_config("train", ["optim.lr=-1,-2", "hydra.mode=MULTIRUN"], run_mode=RunMode.MULTIRUN)
    with pytest.raises(SystemExit) as caught:
        SweepCallback().on_multirun_start(config)
    assert caught.value.code == 2
    assert "[optim.lr=-2] optim.lr=-2.0: expected above 0" in capsys.readouterr().err


def test_other_sweepers_are_left_alone() -> None:
    from omegaconf import OmegaConf

    callback = SweepCallback()
    callback.on_multirun_start(OmegaConf.create({"hydra": {"sweeper": {"_target_": "somewhere.OptunaSweeper"}}}))
    callback.on_multirun_end(OmegaConf.create({}))
    assert callback.run_dirs == list[Path]()
