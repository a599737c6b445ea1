"""How a job's command line answers: everything that is wrong in one short message, and no traceback for it."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException

from .errors import ConfigError, JobError
from .loading import load
from .machine import Machine, is_first_process
from .naming import is_sweeping
from .overrides import check_overrides, find_groups
from .schema import JobConfig
from .targets import check_targets

PACKAGE = Path(__file__).resolve().parents[1]


def check_command_line(conf: Path, config_name: str, about: str) -> None:
    """Answers --help, and ends the process with a message if an override names a key or an option that does not exist.

    Args:
        conf: the directory of the configs.
        config_name: the primary one.
        about: what the command is for, shown by --help above the groups. Hydra's own help takes twice as long.
    """
    arguments = get_args_parser().parse_args()
    if arguments.help:
        groups = "\n".join(f"    {group}: {', '.join(options)}" for group, options in find_groups(conf).items())
        print(f"{about}\nGroups, given as group=option; each file in conf/ explains its keys:\n{groups}")
        raise SystemExit(0)
    extra = [Path(arguments.config_dir).resolve()] if arguments.config_dir else []
    searched = "hydra.searchpath=[" + ",".join(f"'file://{directory}'" for directory in extra) + "]" if extra else ""
    given, name = conf.parent / (arguments.config_path or conf.name), arguments.config_name or config_name
    if given.is_dir() and (problems := check_targets(given, name, arguments.overrides, searched)):
        report_and_exit(ConfigError(problems))
    if arguments.config_path or arguments.config_name or arguments.shell_completion:
        # Another tree of configs has groups of its own, and completion has words of its own.
        return
    sound, problems = check_overrides(arguments.overrides, [conf, *extra])
    if problems and not arguments.multirun:
        problems += _problems_of([*sound, *([searched] if searched else [])], conf, config_name)
    if problems:
        report_and_exit(ConfigError(problems))


def compose_job(conf: Path, overrides: Sequence[str], machine: Machine | None = None) -> JobConfig:
    """The job that train.py would run by these words, for other commands.

    Raises:
        ConfigError: with everything that is wrong with them.
    """
    sound, problems = check_overrides(overrides, [conf])
    if problems:
        raise ConfigError([*problems, *_problems_of(sound, conf, "train", machine)])
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return _load("train", sound, machine)


def reports_user_errors(task: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a Hydra task: what a user can mend ends it with a short message, anything else keeps its traceback."""

    @functools.wraps(task)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return task(*args, **kwargs)
        except ValueError as error:
            if wants_traceback() or not is_user_error(error):
                raise
            if is_sweeping():
                # The other jobs of the sweep go on; Hydra reports this one after them, as short.
                raise CompactHydraException(str(error)) from error
            report_and_exit(error)

    return wrapped


def is_user_error(error: ValueError) -> bool:
    """Whether an error was raised for the user: by name, or as the plain ValueError of our own code.

    A ValueError out of a library's depths means that we called it wrongly.
    """
    if isinstance(error, JobError):
        return True
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0].f_code.co_filename
    return type(error) is ValueError and PACKAGE in Path(innermost).resolve().parents


def report_and_exit(error: ValueError) -> NoReturn:
    """Prints the error and ends the process: with 2 for a bad config, with 1 for the rest."""
    bad_config = isinstance(error, ConfigError)
    if wants_traceback():
        traceback.print_exception(error)
    elif not bad_config:
        print(f"{error}\n(HYDRA_FULL_ERROR=1 shows where this was raised)", file=sys.stderr)
    elif is_first_process():
        # All processes of a job have the same config, and would say the same.
        print(error, file=sys.stderr)
    raise SystemExit(2 if bad_config else 1)


def wants_traceback() -> bool:
    """Whether the user asked for tracebacks, in Hydra's own way."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def _load(config_name: str, overrides: list[str], machine: Machine | None) -> JobConfig:
    cfg = compose(config_name, overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return load(cfg, machine)


def _problems_of(overrides: list[str], conf: Path, config_name: str, machine: Machine | None = None) -> list[str]:
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        try:
            _load(config_name, overrides, machine)
        except ConfigError as error:
            return error.problems
        except CompactHydraException as error:
            return [str(error).splitlines()[0]]
    return []
