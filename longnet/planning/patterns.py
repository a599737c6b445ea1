"""Patterns for a context: what each sees, what it costs, and which to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longnet.attention.pattern import DilationPattern

from .flops import count_flops
from .workload import Workload

BASES = (512, 1024, 2048, 4096, 8192, 16384)
RATIOS = (2, 4, 8)
# More than this for attention, and a denser pattern costs more than the rest of the model.
LARGEST_SHARE = 0.5


@dataclass(frozen=True)
class PatternChoice:
    """A geometric pattern for a context.

    Attributes:
        base: first segment.
        ratio: by which segments and rates grow.
        levels: how many there are.
        keys: the most that a query sees in a head.
        coarsest: the rate of the last level, whose segment holds the context.
        coverage: share of the positions that some head has as rows of the last level: 1 if there are heads enough.
        share: of the model's FLOPs that is the attention's.
    """

    base: int
    ratio: int
    levels: int
    keys: int
    coarsest: int
    coverage: float
    share: float


def pattern_choices(workload: Workload) -> list[PatternChoice]:
    """Geometric patterns whose last segment holds the context, the cheapest first."""
    heads, context = workload.model.num_attention_heads, workload.context_length
    choices = []
    for base in BASES:
        for ratio in RATIOS:
            if base >= context:
                continue
            pattern = DilationPattern.geometric(context, base, ratio)
            coarsest = pattern.dilation_rates[-1]
            flops = count_flops(replace(workload, model=_Shape(workload.model, pattern)))
            choices.append(
                PatternChoice(
                    base=base,
                    ratio=ratio,
                    levels=len(pattern.levels),
                    keys=pattern.max_keys(context),
                    coarsest=coarsest,
                    coverage=min(1.0, heads / coarsest),
                    share=flops.attention / flops.forward,
                )
            )
    return sorted(choices, key=lambda choice: choice.share)


def recommend(choices: Sequence[PatternChoice]) -> PatternChoice | None:
    """The one whose last level covers most positions while attention stays within half of the FLOPs; then the cheapest.

    A position that no head has as a row of the last level is out of reach of everything beyond the finer segments,
    except through other layers' positions.
    """
    affordable = [choice for choice in choices if choice.share <= LARGEST_SHARE] or list(choices[:1])
    return max(affordable, key=lambda choice: (choice.coverage, -choice.share), default=None)


class _Shape:
    """A model's shape with another pattern."""

    def __init__(self, model: Any, pattern: DilationPattern) -> None:
        self._model = model
        self.attention = [{"name": "dilated", **pattern.to_config()}]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
