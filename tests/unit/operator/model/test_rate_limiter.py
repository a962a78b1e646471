"""Test the limit on the records that a caller may send.

The allowance refills at its rate, up to the largest burst after any silence. A refused request
takes nothing from it.

Left out: which callers are limited (tests/unit/operator/coordinator/test_state).
"""

from __future__ import annotations

from dlion_operator.model.rate_limiter import BURST_RECORDS, RECORDS_PER_S, RateLimiter

BURST = int(BURST_RECORDS)


def test_a_long_silence_allows_no_more_than_one_burst() -> None:
    limiter = RateLimiter()
    assert limiter.try_acquire(1, 0.0)
    assert not limiter.try_acquire(BURST + 1, 3600.0)
    assert limiter.try_acquire(BURST, 3600.0)
    assert not limiter.try_acquire(1, 3600.0)


def test_the_allowance_refills_at_its_rate_and_a_refusal_takes_nothing() -> None:
    limiter = RateLimiter()
    assert limiter.try_acquire(BURST, 0.0)
    half_s = 0.5
    gained = int(half_s * RECORDS_PER_S)
    assert not limiter.try_acquire(gained + 1, half_s)
    assert limiter.try_acquire(gained, half_s)
