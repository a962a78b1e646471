"""Tests of rests between steps.

A rest lasts as long as the share of compute requires. It follows a changed share, and ends at a
request to stop.
"""

from __future__ import annotations

import time

import pytest

from dlion_worker.trainer.step_clock import StepClock


def clock(busy_s: float) -> StepClock:
    now_s = time.monotonic()
    return StepClock(now_s - busy_s, 0.0, 0.0, 0, 0.0, 0.0, (0.0, 0.0), busy_s=busy_s)


def rested_s(share: float, *, busy_s: float = 0.4) -> float:
    began_s = time.monotonic()
    clock(busy_s).rest(lambda: share, until=lambda: False)
    return time.monotonic() - began_s


def test_a_rest_lasts_as_long_as_the_share_requires() -> None:
    assert rested_s(0.5) >= 0.39
    assert rested_s(1.0, busy_s=1000.0) < 5.0
    assert rested_s(0.001, busy_s=0.0) < 5.0


def test_a_higher_share_ends_the_rest() -> None:
    shares = iter([0.01, 0.01, 1.0])
    began_s = time.monotonic()
    clock(5.0).rest(lambda: next(shares), until=lambda: False)
    assert time.monotonic() - began_s < 5.0


def test_a_request_to_stop_ends_the_rest() -> None:
    answers = iter([False, True])
    began_s = time.monotonic()
    clock(5.0).rest(lambda: 0.01, until=lambda: next(answers))
    assert time.monotonic() - began_s < 5.0


def test_a_share_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: above 0"):
        clock(1.0).rest(lambda: 0.0, until=lambda: False)
