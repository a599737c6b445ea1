"""From a composed Hydra config to a `JobConfig`, or to the list of everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from .checks import check
from .errors import ConfigError
from .machine import Machine, inspect_machine
from .naming import sweep_name
from .schema import JobConfig
from .typed import Problems, convert, leaves

KNOWN_KEYS = tuple(key for key, _ in leaves(JobConfig))


def load(cfg: DictConfig | Mapping[str, Any], machine: Machine | None = None) -> JobConfig:
    """Converts and checks a composed config.

    Args:
        cfg: what Hydra composed, or plain mappings.
        machine: what to check it against; this machine by default.

    Raises:
        ConfigError: with every problem there is, one line each.
    """
    problems = Problems(KNOWN_KEYS)
    job = convert(JobConfig, _plain(cfg, problems) if isinstance(cfg, DictConfig) else cfg, problems)
    job.run.name = sweep_name(job.run.name)
    check(job, problems, machine or inspect_machine())
    if problems.lines:
        raise ConfigError(problems.lines)
    return job


def _plain(node: DictConfig | ListConfig, problems: Problems, key: str = "") -> Any:
    # As OmegaConf.to_container, which would stop at the first interpolation that cannot be resolved.
    is_list = isinstance(node, ListConfig)
    names: Iterable[Any] = range(len(node)) if is_list else node.keys()
    values: dict[Any, Any] = {}
    for name in names:
        place = f"{key}[{name}]" if is_list else f"{key}.{name}" if key else str(name)
        if place == "hydra":
            continue
        try:
            value = node[name]
        except MissingMandatoryValue:
            problems.add(place, f"{place}: has no value; give one by {place}=...")
        except OmegaConfBaseException as error:
            problems.add(place, f"{place}: {str(error).splitlines()[0]}")
        else:
            values[name] = _plain(value, problems, place) if isinstance(value, (DictConfig, ListConfig)) else value
    return list(values.values()) if is_list else values


def _share(fraction: Any, of: Any, most: Any = math.inf) -> int:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 2**63 for x in (fraction, of))
    # What is not a number is reported as the value it is, not as a failure to compute with it.
    return int(min(fraction * of, most)) if numbers else 0


def _ratio(above: Any, below: Any) -> float:
    # As above: what is not a number is reported where it stands.
    try:
        return float(above) / float(below)
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0


# ${share:0.1,${trainer.max_steps},100}: a tenth of the steps, but at most 100.
# ${ratio:0.4,${model.hidden_size}}: a quotient.
OmegaConf.register_new_resolver("share", _share, replace=True)
OmegaConf.register_new_resolver("ratio", _ratio, replace=True)
