"""What is said to a person whose job cannot run."""

from __future__ import annotations

from collections.abc import Sequence


class JobError(ValueError):
    """The job cannot run as asked, and its message says what to change: shown without a traceback."""


class ConfigError(JobError):
    """The configuration is wrong; holds every problem that was found, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} in the configuration:", *self.problems]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)
