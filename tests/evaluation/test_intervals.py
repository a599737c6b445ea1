from __future__ import annotations

import math

import numpy as np
import pytest

from longnet.evaluation.intervals import mean_of_groups, share


def test_the_mean_is_weighted_by_the_groups_sizes():
    found = mean_of_groups([10.0, 2.0], [1, 9])
    assert found.value == pytest.approx(1.2)
    assert found.low < found.value < found.high
    # Two groups of one: the standard error of a mean, by the textbook, is 1.
    assert mean_of_groups([0.0, 2.0], [1, 1]).high == pytest.approx(1 + 1.96, abs=1e-3)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        # Tokens of a group share an offset: an interval that took them for independent would hold far more rarely.
        groups = 3.0 + draw.normal(0, 1, (40, 1)) + draw.normal(0, 1, (40, 50))
        found = mean_of_groups(groups.sum(1).tolist(), [50] * 40)
        held += found.low <= 3.0 <= found.high
    assert 0.91 <= held / 400 <= 0.98


def test_one_group_has_no_interval_and_none_has_no_mean():
    alone = mean_of_groups([6.0], [3])
    assert alone.value == 2.0
    assert math.isnan(alone.low)
    assert math.isnan(mean_of_groups([], []).value)
    assert math.isnan(share(0, 0).value)


def test_shares_stay_within_0_and_1():
    # Wilson's interval for 9 of 10, by the textbook formula.
    found = share(9, 10)
    assert (found.low, found.high) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert share(0, 20).low == 0.0
    assert 0.1 < share(0, 20).high < 0.2
    assert share(20, 20).high == 1.0
