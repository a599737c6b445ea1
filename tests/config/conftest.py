from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from longnet.config import ConfigError, JobConfig, load
from longnet.config.machine import Machine

CONF = Path(__file__).resolve().parents[2] / "conf"
CPU_ONLY = Machine(gpus=0)


@pytest.fixture
def compose_job() -> Iterator[Callable[..., DictConfig]]:
    """Composes a job as `train.py` does, Hydra's own part included."""
    before = HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):

        def run(*overrides: str, config_name: str = "train") -> DictConfig:
            cfg = compose(config_name, list(overrides), return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
            return cfg

        yield run
    HydraConfig.instance().cfg = before


def load_with(machine: Machine = CPU_ONLY, **values: Any) -> JobConfig:
    """Loads the schema's defaults with some values changed; `__` in a name stands for a dot."""
    tree: dict[str, Any] = asdict(JobConfig())
    for name, value in values.items():
        *path, last = name.split("__")
        section = tree
        for part in path:
            section = section[part]
        section[last] = value
    return load(tree, machine)


def problems_with(machine: Machine = CPU_ONLY, **values: Any) -> list[str]:
    """The lines of the ConfigError that such a config gets."""
    with pytest.raises(ConfigError) as caught:
        load_with(machine, **values)
    return caught.value.problems
