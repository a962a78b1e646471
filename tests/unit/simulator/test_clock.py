"""The virtual clock: order by time, then by the order made; what is cancelled does not happen."""

from __future__ import annotations

from functools import partial

from dlion_simulator.clock import VirtualClock


def run(clock: VirtualClock) -> None:
    while clock.advance():
        pass


def test_order_is_by_time_and_then_by_the_order_made() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now_s))

    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("now", 0.0)):
        clock.after(seconds, partial(note, name))
    run(clock)
    assert seen == [("now", 0.0), ("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_what_is_cancelled_does_not_happen() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    appointment = clock.after(1.0, lambda: seen.append("cancelled"))
    clock.after(0.5, appointment.cancel)
    clock.after(2.0, lambda: seen.append("kept"))
    run(clock)
    assert seen == ["kept"]
    assert clock.now_s == 2.0


def test_an_action_may_make_appointments_and_none_lies_in_the_past() -> None:
    clock = VirtualClock()
    seen: list[float] = []
    clock.after(1.0, lambda: clock.after(-5.0, lambda: seen.append(clock.now_s)))
    run(clock)
    assert seen == [1.0]


def test_what_is_left_to_happen_may_be_one_appointment_alone() -> None:
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
