"""Tests of the cost of a sample.

Single steps at several times the cost do not move the estimate. A real large change is followed
within five observations, a smaller one within the window. After a change of conditions the last
value fades as new ones arrive. Short observations merge.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_core.resource_control.sample_cost import (
    BLENDING_OBSERVATIONS,
    CHANGE_OBSERVATIONS,
    ENOUGH_CPU_S,
    MAX_OBSERVATIONS,
    MIN_CPU_S,
    SampleCost,
)

SAMPLES, COST_S = 100, 0.001


def fed(costs_s: list[float]) -> SampleCost:
    cost = SampleCost()
    for one_s in costs_s:
        cost.add(SAMPLES, one_s * SAMPLES)
    return cost


def test_single_steps_at_three_times_the_cost_do_not_count() -> None:
    rng = random.Random(1)
    cost = fed([COST_S] * 3)
    for number in range(100):
        spike = 3 if number % 5 == 0 else rng.uniform(0.95, 1.05)
        cost.add(SAMPLES, COST_S * SAMPLES * spike)
        assert cost.cost_s() == pytest.approx(COST_S, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.2, 3.0])
def test_a_large_change_is_followed_within_a_few_observations(factor: float) -> None:
    cost = fed([COST_S] * MAX_OBSERVATIONS + [COST_S * factor] * CHANGE_OBSERVATIONS)
    assert cost.cost_s() == pytest.approx(COST_S * factor)


def test_a_small_change_is_followed_within_the_window() -> None:
    cost = fed([COST_S] * MAX_OBSERVATIONS + [COST_S * 1.1] * MAX_OBSERVATIONS)
    assert cost.cost_s() == pytest.approx(COST_S * 1.1)


def test_the_last_value_fades_as_new_ones_arrive() -> None:
    cost = fed([COST_S] * 3)
    cost.reset()
    assert cost.cost_s() == pytest.approx(COST_S)
    estimates_s = []
    for _ in range(BLENDING_OBSERVATIONS):
        cost.add(1000, 1.2 * COST_S * 1000)
        estimates_s.append(cost.cost_s())
    assert estimates_s == pytest.approx([1.05 * COST_S, 1.1 * COST_S, 1.15 * COST_S, 1.2 * COST_S])


def test_one_outlier_does_not_displace_the_last_value() -> None:
    cost = fed([COST_S] * 3)
    cost.reset()
    cost.add(1000, 9 * COST_S * 1000)
    assert cost.cost_s() == pytest.approx(COST_S, rel=0.13)
    for _ in range(BLENDING_OBSERVATIONS):
        cost.add(1000, 2 * COST_S * 1000)
    assert cost.cost_s() == pytest.approx(2 * COST_S), "a repeated value is not an outlier"


def test_the_cost_is_unknown_without_enough_observations_or_a_given_value() -> None:
    cost = SampleCost()
    cost.add(1, ENOUGH_CPU_S / 4)
    assert cost.cost_s() is None
    cost.add(0, 1.0)
    cost.add(1, 0.0)
    assert cost.cost_s() is None
    cost.add_measured(1, ENOUGH_CPU_S / 4)
    assert cost.cost_s() == pytest.approx(ENOUGH_CPU_S / 4)


def test_short_observations_count_together() -> None:
    cost = SampleCost()
    for number in range(4000):
        cost.add(1, 1e-4 * (1 + number % 2))  # a clock too coarse for one observation
    assert cost.cost_s() == pytest.approx(1.5e-4, rel=0.02)
    assert cost.window_s <= MAX_OBSERVATIONS * (MIN_CPU_S + 2e-4)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 10.0)), min_size=1, max_size=60),
    st.floats(1e-3, 1e3),
)
def test_a_cost_lies_between_the_extremes_and_keeps_its_unit(
    observed: list[tuple[int, float]], scale: float
) -> None:
    cost = SampleCost()
    for samples, cpu_s in observed:
        cost.add_measured(samples, cpu_s)
    value_s = cost.cost_s()
    each_s = [cpu_s / samples for samples, cpu_s in observed]
    assert value_s is not None
    assert min(each_s) * 0.999999 <= value_s <= max(each_s) * 1.000001
