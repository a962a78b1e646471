"""Tests of the deadline for a silent peer.

It is learned from the gaps between arrivals. A pause of the worker itself does not count.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlion_core.links.deadline import HEARTBEAT_S, MIN_MISSED_HEARTBEATS, ArrivalDeadline


def after(gaps: list[float]) -> tuple[ArrivalDeadline, float]:
    now_s = 0.0
    deadline = ArrivalDeadline(now_s)
    for gap_s in gaps:
        now_s += gap_s
        deadline.arrived(now_s)
    return deadline, now_s


def test_a_regular_peer_is_missed_after_a_few_heartbeats() -> None:
    deadline, now_s = after([HEARTBEAT_S] * 100)
    assert not deadline.overdue(now_s + MIN_MISSED_HEARTBEATS * HEARTBEAT_S - 0.1)
    assert deadline.overdue(now_s + MIN_MISSED_HEARTBEATS * HEARTBEAT_S + 0.1)


def test_a_slow_or_uneven_link_is_given_longer() -> None:
    slow, _ = after([20.0] * 50)
    uneven, _ = after([0.5, 9.0] * 50)
    assert slow.allowed_s > 19.0
    assert uneven.allowed_s > 30.0


def test_a_peer_cannot_grow_its_silences_beyond_a_given_bound() -> None:
    now_s, deadline = 0.0, ArrivalDeadline(0.0, max_s=60.0)
    for _ in range(50):
        now_s += deadline.allowed_s
        deadline.arrived(now_s)
    assert deadline.allowed_s == 60.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_a_peer_is_never_overdue_just_after_an_arrival(gaps: list[float]) -> None:
    deadline, now_s = after(gaps)
    assert not deadline.overdue(now_s)


def test_a_pause_of_the_worker_is_not_a_silence_of_the_peer() -> None:
    deadline, now_s = after([1.0] * 20)
    deadline.extend(60.0)
    assert not deadline.overdue(now_s + 61.0)
    assert deadline.overdue(now_s + 60.0 + deadline.allowed_s + 1.0)


def test_the_reason_has_both_figures() -> None:
    deadline, now_s = after([1.0] * 200)
    assert deadline.describe(now_s + 9.0) == "silent for 9.0 s; timeout: 8.0 s"
