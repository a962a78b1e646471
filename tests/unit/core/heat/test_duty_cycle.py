"""Tests of the duty cycle.

Rests keep a worker at its share over steps of any length. Waiting counts as rest. The busy share of
long steps is neither lost nor counted twice.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_core.heat.duty_cycle import BusyTime, rest_s

seconds = st.floats(0.0, 1e4)


@given(st.floats(0.01, 1.0), seconds, seconds)
def test_a_step_with_its_rest_is_busy_for_at_most_the_share(
    share: float, busy_s: float, waited_s: float
) -> None:
    wall_s = busy_s + waited_s
    rest = rest_s(share, busy_s=busy_s, wall_s=wall_s)
    assert rest >= 0
    assert busy_s <= share * (wall_s + rest) * (1 + 1e-9) + 1e-9
    if waited_s == 0:
        assert busy_s == pytest.approx(share * (wall_s + rest))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_outside_of_its_bounds_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="allowed: above 0, at most 1"):
        rest_s(share, busy_s=1.0, wall_s=1.0)


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.1, 5.0)), min_size=1, max_size=40))
def test_no_busy_time_is_lost_or_counted_twice(steps: list[tuple[float, float]]) -> None:
    busy, read_s = BusyTime(), 0.0
    for busy_s, interval_s in steps:
        busy.add(busy_s)
        share = busy.share(interval_s)
        assert 0.0 <= share <= 1.0
        read_s += share * interval_s
    left_s = busy.share(1e6) * 1e6
    assert read_s + left_s == pytest.approx(sum(busy_s for busy_s, _ in steps), abs=1e-6)


def test_an_empty_interval_has_no_share() -> None:
    busy = BusyTime()
    busy.add(1.0)
    assert busy.share(0.0) == 0.0
    assert busy.share(2.0) == 0.5
