"""Tests of rate estimates.

A steady rate is kept over the whole window. A rate that changes within an observation is right from
the second observation after it. A single observation that is far too high is not a rise if several
are required. The estimate is the sum of the window, whatever was added and removed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_core.resource_control.rates import ChangingRate

SECONDS, BEFORE, AFTER = 0.4, 20.0, 5.0


def rate_of_a_link(min_rise_count: int = 1) -> ChangingRate:
    return ChangingRate(
        min_s=0.02, max_s=3.0, change_fraction=0.2, min_change_s=0.25, min_rise_count=min_rise_count
    )


def test_a_steady_rate_uses_the_whole_window() -> None:
    rate = rate_of_a_link()
    for number in range(40):
        rate.add(SECONDS * BEFORE * (1.05 if number % 2 else 0.95), SECONDS)
    assert rate.rate() == pytest.approx(BEFORE, rel=0.02)
    assert 2.5 < rate.window_s <= 3.0 + SECONDS


@given(st.floats(0.0, 1.0), st.sampled_from([(BEFORE, AFTER), (AFTER, BEFORE)]))
def test_a_change_within_an_observation_is_right_two_observations_later(
    fraction: float, change: tuple[float, float]
) -> None:
    before, after = change
    rate = rate_of_a_link()
    for _ in range(10):
        rate.add(SECONDS * before, SECONDS)
    rate.add(SECONDS * (fraction * before + (1 - fraction) * after), SECONDS)
    rate.add(SECONDS * after, SECONDS)
    rate.add(SECONDS * after, SECONDS)
    assert rate.rate() == pytest.approx(after)


def test_a_single_observation_that_is_far_too_high_is_not_a_rise() -> None:
    rate = rate_of_a_link(min_rise_count=3)
    for _ in range(10):
        rate.add(SECONDS * AFTER, SECONDS)
    rate.add(SECONDS * BEFORE, SECONDS)
    assert rate.rate() == pytest.approx(AFTER, rel=0.45)
    for _ in range(3):
        rate.add(SECONDS * BEFORE, SECONDS)
    assert rate.rate() == pytest.approx(BEFORE)


observations = st.tuples(
    st.sampled_from([BEFORE, AFTER, 20 * BEFORE]), st.floats(1e-3, 2.0), st.floats(0.0, 3.0)
)


@given(st.lists(observations, max_size=60), st.sampled_from([1, 2]))
def test_the_estimate_is_the_sum_of_its_window(
    taken: list[tuple[float, float, float]], min_rise_count: int
) -> None:
    rate = rate_of_a_link(min_rise_count)
    for per_s, seconds, span_s in taken:
        rate.add(per_s * seconds, seconds, span_s)
        kept = list(rate._buckets)
        seconds_kept = sum(bucket.seconds for bucket in kept)
        assert rate.window_s == pytest.approx(seconds_kept, rel=1e-9)
        if (known := rate.rate()) is not None:
            assert known == pytest.approx(sum(b.amount for b in kept) / seconds_kept, rel=1e-9)
