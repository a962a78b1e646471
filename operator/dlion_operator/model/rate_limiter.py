"""Token bucket that limits what a caller may send. Pure: time is an argument."""

RECORDS_PER_S = 2_000.0
BURST_RECORDS = 8_000.0
"""Largest burst: what a worker may have queued while the coordinator was unreachable."""


class RateLimiter:
    """Records that one caller may still send. Source: token bucket; rates ours."""

    def __init__(self) -> None:
        self._left = BURST_RECORDS
        self._since_s: float | None = None

    def try_acquire(self, count: int, now_s: float) -> bool:
        """Take `count` records. Return False, and take nothing, if too few are left."""
        if self._since_s is not None:
            gained = max(0.0, now_s - self._since_s) * RECORDS_PER_S
            self._left = min(BURST_RECORDS, self._left + gained)
        self._since_s = now_s
        if count > self._left:
            return False
        self._left -= count
        return True
