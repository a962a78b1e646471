"""Tests of stragglers: the times, the frequency and the repeatable randomness of slow steps."""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_environments.plan import Straggler
from dlion_simulator.costs import StragglerModel

ZERO, ONE = Rank(0), Rank(1)


def test_a_straggler_is_slow_within_its_time_and_others_never() -> None:
    slow = Straggler(frozenset({ZERO}), 6.0, begins_s=10.0, ends_s=20.0)
    pace = StragglerModel([slow], seed=1, rank=ZERO)
    assert [pace.next_slowdown(now_s) for now_s in (9.9, 10.0, 19.9, 20.0)] == [1, 6, 6, 1]
    other = StragglerModel([slow], seed=1, rank=ONE)
    assert [other.next_slowdown(now_s) for now_s in (9.9, 10.0, 19.9)] == [1, 1, 1]


def test_simultaneous_slowdowns_multiply() -> None:
    always = Straggler(frozenset({ZERO}), 2.0)
    assert StragglerModel([always, always], seed=1, rank=ZERO).next_slowdown(0.0) == 4.0


def test_slow_steps_have_the_given_frequency_follow_the_seed_and_differ_between_workers() -> None:
    now_and_then = Straggler(frozenset({ZERO, ONE}), 6.0, 0.25)

    def steps(seed: int, rank: Rank) -> list[float]:
        pace = StragglerModel([now_and_then], seed=seed, rank=rank)
        return [pace.next_slowdown(0.0) for _ in range(4000)]

    first = steps(1, ZERO)
    assert first.count(6.0) / len(first) == pytest.approx(0.25, abs=0.03)
    assert set(first) == {1.0, 6.0}
    assert steps(1, ZERO) == first
    assert steps(1, ONE) != first
    assert steps(2, ZERO) != first


def test_each_step_draws_once_also_if_it_does_not_count() -> None:
    late = Straggler(frozenset({ZERO}), 6.0, 0.5, begins_s=10.0)
    early, later = (
        StragglerModel([late], seed=3, rank=ZERO),
        StragglerModel([late], seed=3, rank=ZERO),
    )
    whole = [early.next_slowdown(10.0) for _ in range(20)]
    half = [later.next_slowdown(0.0 if step < 10 else 10.0) for step in range(20)]
    assert half[:10] == [1.0] * 10
    assert half[10:] == whole[10:]
