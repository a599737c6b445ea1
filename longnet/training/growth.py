"""Contexts that grow in the course of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence


class ContextGrowth:
    """Contexts that rows are cut to at first.

    Args:
        stages: (context, share of the steps up to which it is that), with rising shares.
        max_steps: the length of the run.

    Attributes:
        stages: (context, the first step behind it).
    """

    def __init__(self, stages: Sequence[tuple[int, float]], max_steps: int) -> None:
        # 0.7 * 10 is a little more than 7.
        self.stages = [(context, math.ceil(round(share * max_steps, 6))) for context, share in stages]

    def context(self, step: int) -> int | None:
        """The context of a step; None where rows are whole."""
        return next((context for context, end in self.stages if step < end), None)
