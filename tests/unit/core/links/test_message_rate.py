"""Tests of the rate limit of a peer's messages.

A long flood is limited, a burst is not. The oracle is a count of the allowed messages.
"""

from __future__ import annotations

import pytest

from dlion_core.links.message_rate import MAX_BURST, MESSAGES_PER_S, MessageRate


def test_a_flood_is_refused_and_a_burst_is_accepted() -> None:
    rate = MessageRate(0.0)
    assert all(rate.allows(0.0) for _ in range(MAX_BURST))
    assert not rate.allows(0.0)


@pytest.mark.parametrize(("per_s", "is_allowed"), [(0.9, True), (1.1, False)])
def test_a_long_stream_of_messages_is_limited(per_s: float, is_allowed: bool) -> None:
    rate = MessageRate(0.0)
    count = 20 * MAX_BURST
    times_s = [number / (per_s * MESSAGES_PER_S) for number in range(count)]
    assert all(rate.allows(time_s) for time_s in times_s) == is_allowed


def test_messages_held_while_the_receiver_was_stopped_are_accepted() -> None:
    """A peer makes 300 steps a second, with a message each. The receiver is stopped for ten
    seconds.
    """
    rate = MessageRate(0.0)
    assert all(rate.allows(number / 300) for number in range(3000))
    assert all(rate.allows(20.0) for _ in range(3000))
