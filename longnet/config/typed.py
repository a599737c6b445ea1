"""Plain values onto dataclasses, with every misfit collected instead of the first one raised."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

# What torch and every file format can hold.
LARGEST = 2**63 - 1


class Problems:
    """Problems as they are found, one line each, with the keys that are wrong.

    A value that is already known to be wrong is not judged again: what would follow from it misleads.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self.known = known
        self.lines: list[str] = []
        self.wrong: set[str] = set()

    def add(self, key: str, line: str) -> None:
        self.wrong.add(key)
        if line not in self.lines:
            self.lines.append(line)

    def about(self, *keys: str) -> bool:
        """Whether one of the keys, or a part of its value, is already known to be wrong."""
        return any(wrong == key or wrong.startswith((f"{key}.", f"{key}[")) for key in keys for wrong in self.wrong)


def convert(schema: type[T], values: Any, problems: Problems, key: str = "") -> T:
    """Makes a `schema` of a mapping; what does not fit is reported, and its default stands in for it.

    Args:
        schema: a dataclass whose fields all have defaults.
        values: what the config holds there.
        problems: where misfits are put.
        key: the dotted name of this place, for messages.
    """
    hints = type_hints(schema)
    if not isinstance(values, Mapping):
        problems.add(key, f"{key}={show(values)}: expected a mapping with {', '.join(hints)}")
        return schema()
    fields = {}
    for name, value in values.items():
        place = f"{key}.{name}" if key else str(name)
        if name not in hints:
            siblings = [f"{key}.{sibling}" if key else sibling for sibling in hints]
            problems.add(place, unknown_key(place, siblings, problems.known))
            continue
        fitted = _fit(hints[name], value, place, problems)
        if dataclasses.is_dataclass(hints[name]) or not problems.about(place):
            fields[name] = fitted
    return schema(**fields)


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the type of every value that a schema holds."""
    for name, hint in type_hints(schema).items():
        place = f"{prefix}.{name}" if prefix else name
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, place)  # type: ignore[arg-type]
        else:
            yield place, hint


def type_hints(schema: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    return get_type_hints(schema)


def show(value: Any) -> str:
    """A value as a person would write it in a config, shortened."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, choices: Iterable[str], likeness: float = 0.6) -> str:
    """`; did you mean X?` with the choice nearest to a word; nothing where none is near."""
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=likeness)
    return f"; did you mean {lowered[near[0]]}?" if near else ""


def unknown_key(place: str, siblings: Collection[str], known: Collection[str]) -> str:
    """What to say about a key that does not exist, beside its siblings and among all that do."""
    last = place.rpartition(".")[2]
    near = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in siblings], n=1)
    same = [name for name in known if name.rpartition(".")[2] == last]
    if near:
        hint = next(f"; did you mean {name}?" for name in siblings if name.rpartition(".")[2] == near[0])
    elif same:
        hint = f"; did you mean {' or '.join(same[:2])}?"
    else:
        # Whole keys are alike by their sections alone.
        hint = did_you_mean(place, known, likeness=0.8)
    if not hint and siblings:
        hint = f"; expected one of {', '.join(siblings)}"
    return f"{place}: unknown key{hint}"


def _fit(hint: Any, value: Any, key: str, problems: Problems) -> Any:
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _fit(next(o for o in options if o is not type(None)), value, key, problems)
    if origin is list:
        if isinstance(value, (list, tuple)):
            return [_fit(options[0], item, f"{key}[{index}]", problems) for index, item in enumerate(value)]
        problems.add(key, f"{key}={show(value)}: expected a list, for example [{show(value)}]")
        return None
    if dataclasses.is_dataclass(hint):
        return convert(hint, value, problems, key)  # type: ignore[arg-type]
    if origin is Literal:
        # To YAML on and off are booleans.
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else _as_text(value)
        if word not in options:
            expected = f"one of {', '.join(options)}" if len(options) > 1 else options[0]
            problems.add(key, f"{key}={show(value)}: expected {expected}{did_you_mean(word or '', options)}")
        return word
    return _fit_scalar(hint, value, key, problems)


def _fit_scalar(hint: type, value: Any, key: str, problems: Problems) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    nearest = ""
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and (isinstance(value, str) or number):
        return _as_text(value)
    if hint is float and number:
        return float(value)
    if hint is int and number:
        # 1e6 is a float to YAML and a million to everyone else.
        if value == math.floor(value):
            return int(value)
        nearest = f"; the nearest is {round(value)}"
    expected = {bool: "true or false", str: "text", float: "a finite number", int: "an integer"}[hint]
    problems.add(key, f"{key}={show(value)}: expected {expected}{nearest}")
    return None


def _as_text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) else None
