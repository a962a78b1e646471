"""A peer's messages are limited for long and not in a burst; oracle: a count of what is allowed."""

from __future__ import annotations

import pytest

from dlion_core.links.message_rate import MAX_BURST, MESSAGES_PER_S, MessageRate


def test_a_flood_is_refused_and_a_burst_is_not() -> None:
    rate = MessageRate(0.0)
    assert all(rate.allows(0.0) for _ in range(MAX_BURST))
    assert not rate.allows(0.0)


@pytest.mark.parametrize(("per_s", "is_allowed"), [(0.9, True), (1.1, False)])
def test_what_comes_for_long_is_limited(per_s: float, is_allowed: bool) -> None:
    rate = MessageRate(0.0)
    count = 20 * MAX_BURST
    times_s = [number / (per_s * MESSAGES_PER_S) for number in range(count)]
    assert all(rate.allows(time_s) for time_s in times_s) == is_allowed


def test_what_a_connection_held_while_its_receiver_stood_still_is_taken() -> None:
    """A peer makes 300 steps a second, with a message each; the receiver is away for ten."""
    rate = MessageRate(0.0)
    assert all(rate.allows(number / 300) for number in range(3000))
    assert all(rate.allows(20.0) for _ in range(3000))
