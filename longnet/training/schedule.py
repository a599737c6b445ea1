"""Learning-rate schedules: pure functions of the step, as a factor of the peak rate.

Being a function of the step alone, a schedule has no state to save, and a resumed run is at the right rate at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES = ("cosine", "linear", "polynomial", "wsd", "constant")


def build_schedule(
    name: str,
    max_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    decay_fraction: float = 0.2,
    power: float = 1.0,
) -> Callable[[int], float]:
    """Returns ``factor(step)`` for steps 0 .. max_steps - 1.

    Every schedule rises linearly and reaches 1 in the last of the ``warmup_steps`` (a first step of rate 0 would be a
    step lost), and all but "constant" arrive at ``min_ratio`` in the very last step.

    Args:
        name: one of ``SCHEDULES``; "wsd" is warmup-stable-decay.
        max_steps: the length of the run.
        warmup_steps: steps of linear rise.
        min_ratio: what is left of the peak rate in the last step.
        decay_fraction: for "wsd", the part of the run over which the rate falls.
        power: for "polynomial", the exponent of the fall.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}")
    last = max_steps - 1
    if name == "wsd":
        peak = max(warmup_steps - 1, last - max(1, round(decay_fraction * max_steps)))
    else:
        peak = max(warmup_steps - 1, 0)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if name == "constant" or step <= peak:
            return 1.0
        left = max(0.0, (last - step) / (last - peak)) if last > peak else 0.0
        if name == "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
        elif name == "polynomial":
            shape = left**power
        else:
            shape = left
        return min_ratio + (1.0 - min_ratio) * shape

    return factor
