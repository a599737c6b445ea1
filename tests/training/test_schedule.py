from __future__ import annotations

import pytest

from longnet.training.schedule import SCHEDULES, build_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_is_linear_and_peaks_in_its_last_step(name):
    factor = build_schedule(name, max_steps=100, warmup_steps=10, min_ratio=0.1)
    assert [factor(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factor(9) == 1.0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_the_last_step_is_at_the_floor_and_the_rate_never_rises_after_the_peak(name, warmup):
    factor = build_schedule(name, max_steps=50, warmup_steps=warmup, min_ratio=0.1)
    factors = [factor(step) for step in range(50)]
    after = factors[max(warmup - 1, 0) :]
    assert after[0] == 1.0
    assert after == sorted(after, reverse=True)
    assert factors[-1] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert factor(1000) == pytest.approx(factors[-1])


def test_the_shapes_at_half_way():
    options = {"max_steps": 101, "warmup_steps": 0, "min_ratio": 0.2}
    assert build_schedule("cosine", **options)(50) == pytest.approx(0.6)
    assert build_schedule("linear", **options)(50) == pytest.approx(0.6)
    assert build_schedule("polynomial", power=2.0, **options)(50) == pytest.approx(0.2 + 0.8 * 0.25)
    assert build_schedule("cosine", **options)(25) > build_schedule("linear", **options)(25)


def test_wsd_is_flat_until_the_decay_begins():
    factor = build_schedule("wsd", max_steps=100, warmup_steps=10, min_ratio=0.0, decay_fraction=0.2)
    assert all(factor(step) == 1.0 for step in range(9, 80))
    assert factor(80) == pytest.approx(0.95)
    assert factor(89) == pytest.approx(0.5)
    assert factor(99) == 0.0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (1, 1), (2, 2), (3, 10), (2, 0)])
def test_runs_of_a_few_steps_stay_within_bounds(name, max_steps, warmup):
    factor = build_schedule(name, max_steps=max_steps, warmup_steps=warmup, min_ratio=0.1)
    assert all(0.0 < factor(step) <= 1.0 for step in range(max_steps))


def test_an_unknown_schedule_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="schedule='cosin': expected one of cosine, linear"):
        build_schedule("cosin", max_steps=10)
