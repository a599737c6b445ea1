"""Code that a config can name: an allow list of exact names, checked before Hydra builds anything.

A job's own keys name no code. Hydra builds its callbacks, launcher and sweeper from `_target_`, and handlers of its
logging from `class` and `()`. A prefix would not do as a rule: `logging.os.system` begins like a logger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

ALLOWED = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
    "longnet.config.sweep.SweepCallback",
    "logging.FileHandler",
    "logging.Formatter",
    "logging.StreamHandler",
}
_NAMING = ("_target_", "()", "class")


def check_targets(conf: Path, config_name: str, overrides: Sequence[str], searched: str = "") -> list[str]:
    """Everything in Hydra's own part of the config that names code which is not on the list, one line each.

    Args:
        conf: the directory of the configs.
        config_name: the primary one.
        overrides: of the command line; of a sweep's, every option is looked at.
        searched: an override that adds directories to the search.
    """
    problems: dict[str, None] = {}
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for variant in _variants(overrides):
            try:
                cfg = compose(config_name, [*variant, *([searched] if searched else [])], return_hydra_config=True)
            except (HydraException, OmegaConfBaseException, TypeError, ValueError):
                # What cannot be composed is not built either, and Hydra says why.
                continue
            problems |= dict.fromkeys(_unknown(cfg.hydra, "hydra"))
    return list(problems)


def _variants(overrides: Sequence[str]) -> Iterator[list[str]]:
    parser = OverridesParser.create()
    single, choices = [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue
        if not override.is_sweep_override():
            single.append(text)
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            choices += [f"{override.get_key_element()}={option}" for option in override.sweep_string_iterator()]
    yield single
    yield from ([*single, choice] for choice in choices)


def _unknown(node: Any, place: str) -> Iterator[str]:
    if isinstance(node, ListConfig):
        names: Any = range(len(node))
    elif isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        names = list(node.keys())
    else:
        return
    for name in names:
        try:
            value = node[name]
        except OmegaConfBaseException:
            continue
        if name in _NAMING and value is not None and value not in ALLOWED:
            allowed = ", ".join(sorted(ALLOWED))
            yield f"{place}.{name}={value}: a config may not name this code; expected one of {allowed}"
        yield from _unknown(value, f"{place}.{name}")
