"""What an evaluation can be asked for."""

from __future__ import annotations

from difflib import get_close_matches

from .data import TASKS
from .schema import MeasurementConfig
from .typed import Problems, show


def check_evaluation(options: MeasurementConfig, problems: Problems, prefix: str = "") -> None:
    """Adds to ``problems`` what cannot be measured; ``prefix`` stands before the keys in messages."""
    for number, task in enumerate(options.tasks):
        if task not in TASKS:
            nearest = get_close_matches(str(task), TASKS, n=1, cutoff=0.0)[0]
            problems.add(
                f"{prefix}tasks",
                f"{prefix}tasks[{number}]={show(task)}: expected one of {', '.join(TASKS)}; did you mean {nearest}?",
            )
    for name in ("contexts", "lengths"):
        wrong = [length for length in getattr(options, name) or [] if length < 2]
        if wrong:
            problems.add(
                f"{prefix}{name}", f"{prefix}{name} has {wrong[0]}: expected at least 2 tokens; the nearest is 2"
            )
        if getattr(options, name) == []:
            problems.add(f"{prefix}{name}", f"{prefix}{name}=[]: expected lengths, or null to choose them")
    wrong_depths = [depth for depth in options.depths if not 0 <= depth <= 1]
    if wrong_depths or not options.depths:
        problems.add(f"{prefix}depths", f"{prefix}depths={show(options.depths)}: expected numbers from 0 to 1")
