"""Tests of the virtual clock.

Actions run in order of time, then in the order of their creation. A cancelled action does not run.
"""

from __future__ import annotations

from functools import partial

from dlion_simulator.clock import VirtualClock


def run(clock: VirtualClock) -> None:
    while clock.advance():
        pass


def test_actions_run_by_time_and_then_by_order_of_creation() -> None:
    clock = VirtualClock()
    ran: list[tuple[str, float]] = []

    def note(name: str) -> None:
        ran.append((name, clock.now_s))

    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("now", 0.0)):
        clock.after(seconds, partial(note, name))
    run(clock)
    assert ran == [("now", 0.0), ("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_a_cancelled_action_does_not_run() -> None:
    clock = VirtualClock()
    ran: list[str] = []
    appointment = clock.after(1.0, lambda: ran.append("cancelled"))
    clock.after(0.5, appointment.cancel)
    clock.after(2.0, lambda: ran.append("kept"))
    run(clock)
    assert ran == ["kept"]
    assert clock.now_s == 2.0


def test_an_action_may_schedule_others_but_none_in_the_past() -> None:
    clock = VirtualClock()
    times_s: list[float] = []
    clock.after(1.0, lambda: clock.after(-5.0, lambda: times_s.append(clock.now_s)))
    run(clock)
    assert times_s == [1.0]


def test_one_scheduled_action_may_be_left() -> None:
    clock = VirtualClock()
    end = clock.after(9.0, lambda: None)
    assert clock.has_only(end)
    before, behind = clock.after(1.0, lambda: None), clock.after(10.0, lambda: None)
    assert not clock.has_only(end)
    before.cancel()
    assert not clock.has_only(end)
    behind.cancel()
    assert clock.has_only(end)
    assert not clock.has_only(None)
    end.cancel()
    assert clock.has_only(None)
