"""The command line against the schema: every key and every group's option that does not exist, all at once.

Hydra itself stops at the first one and suggests nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from .loading import KNOWN_KEYS
from .typed import did_you_mean, unknown_key

SECTIONS = tuple(sorted({key.rpartition(".")[0] for key in KNOWN_KEYS} - {""}))


def find_groups(conf: Path) -> dict[str, list[str]]:
    """The config groups below a directory, each with its options."""
    groups: dict[str, list[str]] = {}
    for file in sorted(conf.rglob("*.yaml")):
        group = file.parent.relative_to(conf).as_posix()
        if group != ".":
            groups.setdefault(group, []).append(file.stem)
    return groups


def check_overrides(overrides: Sequence[str], conf: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Sorts overrides into those that Hydra can apply and the problems of the others, one line each."""
    groups: dict[str, list[str]] = {}
    for directory in conf:
        for group, options in find_groups(directory).items():
            groups.setdefault(group, []).extend(options)
    parser = OverridesParser.create()
    sound, problems = [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            found = [f"{text}: not of the form key=value ({str(error).splitlines()[0]})"]
        else:
            found = list(_problems(override, groups))
        problems += found
        sound += [] if found else [text]
    return sound, problems


def _problems(override: Override, groups: dict[str, list[str]]) -> Iterator[str]:
    key = override.key_or_group
    if override.is_hydra_override():
        return
    if key in groups:
        for option in _options(override):
            if option not in groups[key]:
                # Hydra itself takes null in a defaults list only.
                hint = (
                    "; left out, it is as in conf/train.yaml" if option == "null" else did_you_mean(option, groups[key])
                )
                yield f"{key}={option}: no such file in conf/{key}; expected one of {', '.join(groups[key])}{hint}"
    elif key not in KNOWN_KEYS and key not in SECTIONS and not _inside_a_value(key):
        names = dict.fromkeys((*KNOWN_KEYS, *SECTIONS, *groups))
        siblings = [name for name in names if name.rpartition(".")[0] == key.rpartition(".")[0]]
        yield unknown_key(key, siblings, list(names))


def _options(override: Override) -> list[str]:
    if override.is_delete() and override.value() is None:
        return []
    values: list[Any] = [override.value()]
    if override.is_sweep_override():
        named = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
        values = list(override.sweep_iterator()) if named else []
    options = [option for value in values for option in (value if isinstance(value, list) else [value])]
    return ["null" if option is None else str(option) for option in options]


def _inside_a_value(key: str) -> bool:
    # attention.layers.1.shift: whether that exists, the composed config tells.
    return any(key.startswith(f"{known}.") for known in KNOWN_KEYS)
