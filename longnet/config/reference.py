"""The reference of the configuration, as a page: made of the schema, the bounds, and the comments in `conf/`."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from .bounds import BOUNDS
from .overrides import find_groups
from .schema import JobConfig
from .typed import leaves, type_hints

HEAD = """# Configuration

Every key of a job, with its type, the default job's value and what it is for. Made by `make docs` from the schema
(`longnet/config/schema.py`) and from the comments in [conf/](../conf), where each key is explained where it stands.

A key is given on the command line as `key=value`, an option of a group as `group=option`, several for a sweep as
`-m key=a,b`; `python train.py --cfg job` shows all values of a job. Unknown keys, values out of range and keys that do
not go together are refused before anything is built, all at once.
"""


def build_reference(conf: Path) -> str:
    """The page, in Markdown."""
    explained = _explanations(conf)
    parts = [HEAD, _groups(conf)]
    hints = type_hints(JobConfig)
    plain = [name for name, hint in hints.items() if not is_dataclass(hint)]
    parts.append(_section("The job itself", "", plain, explained))
    for name, hint in hints.items():
        if is_dataclass(hint):
            about = (hint.__doc__ or "").splitlines()[0]
            parts.append(_section(name, about, [f"{name}.{key}" for key, _ in leaves(hint)], explained))  # type: ignore[arg-type]
    return "\n".join(parts)


def _groups(conf: Path) -> str:
    rows = []
    for group, options in find_groups(conf).items():
        for option in options:
            lines = (conf / group / f"{option}.yaml").read_text().splitlines()
            first = " ".join(line.lstrip("# ") for line in _opening(lines))
            rows.append(f"| `{group}={option}` | {_cell(_first_sentence(first))} |")
    return "\n".join(["## Groups", "", "| option | |", "|---|---|", *rows, ""])


def _section(title: str, about: str, keys: list[str], explained: dict[str, tuple[str, str]]) -> str:
    types = dict(leaves(JobConfig))
    rows = []
    for key in keys:
        value, text = explained[key]
        rows.append(f"| `{key}` | {_cell(_type(types[key], key))} | `{_cell(value)}` | {_cell(text)} |")
    head = [f"## {title}", "", *([about, ""] if about else [])]
    return "\n".join([*head, "| key | type | default | |", "|---|---|---|---|", *rows, ""])


def _type(hint: Any, key: str) -> str:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join("null" if each is NoneType else _type(each, "") for each in get_args(hint)) + _range(key)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    if origin is list:
        return "list" if get_args(hint)[0] is Any else f"list of {_type(get_args(hint)[0], '')}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}[hint.__name__] + _range(key)


def _range(key: str) -> str:
    return f", {BOUNDS[key]}" if key in BOUNDS else ""


def _explanations(conf: Path) -> dict[str, tuple[str, str]]:
    """For each key its value and its comment in the default job's own files; where it stands there without, any."""
    defaults = yaml.safe_load((conf / "train.yaml").read_text())["defaults"]
    chosen = [conf / group / f"{option}.yaml" for each in defaults if isinstance(each, dict)
              for group, option in each.items() if option and (conf / group).is_dir()]  # fmt: skip
    found: dict[str, tuple[str, str]] = {}
    for file in [conf / "train.yaml", *chosen, *sorted(conf.rglob("*.yaml"))]:
        for key, explanation in _explained(conf, file).items():
            if explanation[1]:
                found.setdefault(key, explanation)
    return found


def _explained(conf: Path, file: Path) -> dict[str, tuple[str, str]]:
    lines = file.read_text().splitlines()
    group = file.parent.relative_to(conf).as_posix()
    prefix = [] if group == "." or "# @package _global_" in lines else [group]
    path: list[tuple[int, str]] = []
    found = {}
    for number, line in enumerate(lines):
        if not (match := re.match(r"( *)(\w+):(?: +(.*))?$", line)):
            continue
        indent, name, rest = len(match[1]), match[2], match[3] or ""
        path = [(depth, key) for depth, key in path if depth < indent] + [(indent, name)]
        value, _, comment = rest.partition(" # ") if not rest.startswith("# ") else ("", "", rest[2:])
        above = _comment_above(lines, number) if not comment else ""
        found[".".join([*prefix, *(key for _, key in path)])] = (value.strip(), (comment or above).strip())
    return found


def _comment_above(lines: list[str], number: int) -> str:
    comments: list[str] = []
    while number > 0 and lines[number - 1].strip().startswith("#"):
        number -= 1
        comments.insert(0, lines[number].strip().lstrip("# "))
    return " ".join(comments)


def _opening(lines: list[str]) -> list[str]:
    comments = [line for line in lines if line.startswith("#") and not line.startswith("# @package")]
    end = next((number for number, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    return [line for line in comments if line in lines[:end]]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[\w)][.?])\s+", text)[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
