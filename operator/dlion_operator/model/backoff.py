"""Waits between attempts that failed."""

import random

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


def backoff_s(failures: int) -> float:
    """Seconds to wait after that many failures: doubling, with jitter."""
    longest = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, hides nothing
