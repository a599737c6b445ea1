"""How sure a measured number is: 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Of the normal distribution, two-sided.
Z = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A number and the 95 % interval around it; without one where there is too little to tell (NaN)."""

    value: float
    low: float
    high: float


def mean_of_groups(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """The mean over all members of groups, from each group's sum and size.

    Members of a group (the tokens of a stretch of text) resemble each other, so it is the groups that are taken to be
    drawn independently; treating every token so would make the interval far too narrow.
    """
    total, size = np.asarray(sums, float), np.asarray(counts, float)
    if size.sum() == 0:
        return Estimate(math.nan, math.nan, math.nan)
    mean = total.sum() / size.sum()
    groups = int((size > 0).sum())
    if groups < 2:
        return Estimate(float(mean), math.nan, math.nan)
    spread = np.square(total - mean * size).sum() * groups / (groups - 1)
    half = Z * math.sqrt(spread) / size.sum()
    return Estimate(float(mean), float(mean - half), float(mean + half))


def share(hits: int, trials: int) -> Estimate:
    """Wilson's interval of a share, which stays within 0 and 1 and is sound for few trials and for 0 or all hits."""
    if trials == 0:
        return Estimate(math.nan, math.nan, math.nan)
    rate, square = hits / trials, Z * Z
    middle = (rate + square / (2 * trials)) / (1 + square / trials)
    half = Z / (1 + square / trials) * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials * trials))
    return Estimate(rate, max(0.0, middle - half), min(1.0, middle + half))
