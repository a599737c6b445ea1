"""The command line of a script: key=value words, checked as a job's are, everything that is wrong at once."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_origin

import yaml

from .cli import is_user_error, report_and_exit, wants_traceback
from .errors import ConfigError
from .typed import Problems, convert, show, type_hints

T = TypeVar("T")


def parse_arguments(schema: type[T], words: Sequence[str], about: str) -> T:
    """Makes the options of a script from its command line; answers --help by itself.

    Args:
        schema: a dataclass whose fields all have defaults; what each is for is said in ``about``.
        words: the command line.
        about: what the script is for.

    Raises:
        ConfigError: with every word that does not fit.
    """
    if any(word in ("-h", "--help") for word in words):
        defaults = schema()
        keys = "\n".join(f"    {field.name}={show(getattr(defaults, field.name))}" for field in fields(schema))  # type: ignore[arg-type]
        print(f"{about}\nKeys and their defaults:\n{keys}")
        raise SystemExit(0)
    hints = type_hints(schema)
    problems = Problems(tuple(hints))
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            problems.add(word, f"{word}: not of the form key=value; --help shows the keys")
            continue
        try:
            # Text is taken as it is: a prompt may look like anything.
            values[key] = text if _is_text(hints.get(key)) and text != "null" else _read(text)
        except yaml.YAMLError:
            problems.add(key, f"{key}={show(text)}: not a value that YAML can read")
    options = convert(schema, values, problems)
    if problems.lines:
        raise ConfigError(problems.lines)
    return options


def script(main: Callable[[list[str]], Any]) -> Callable[[], None]:
    """Decorates a script's main: what a user can mend ends it with a short message, the rest keeps its traceback."""

    @functools.wraps(main)
    def wrapped() -> None:
        try:
            main(sys.argv[1:])
        except ValueError as error:
            if wants_traceback() or not is_user_error(error):
                raise
            report_and_exit(error)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except BrokenPipeError:
            # `| head` has read enough. What is still buffered must not fail once more at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None

    return wrapped


def _read(text: str) -> Any:
    value = yaml.safe_load(text)
    try:
        # To YAML 1e9 is text, to everyone else a number.
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_text(hint: Any) -> bool:
    return hint is str or (get_origin(hint) is not list and str in get_args(hint))
