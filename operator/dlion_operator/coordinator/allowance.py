"""How much a worker may send: a bucket that fills steadily. Pure: time is an argument."""

from __future__ import annotations

RECORDS_PER_S = 2_000.0
BURST_RECORDS = 8_000.0
"""What a worker may have saved up while the coordinator was away, at once."""


class Allowance:
    """The records that one worker may still send now. Source: token bucket; figures ours."""

    def __init__(self) -> None:
        self._left = BURST_RECORDS
        self._since_s: float | None = None

    def spend(self, count: int, now_s: float) -> bool:
        """Whether `count` records are within the allowance; if so they are taken from it."""
        if self._since_s is not None:
            gained = max(0.0, now_s - self._since_s) * RECORDS_PER_S
            self._left = min(BURST_RECORDS, self._left + gained)
        self._since_s = now_s
        if count > self._left:
            return False
        self._left -= count
        return True
