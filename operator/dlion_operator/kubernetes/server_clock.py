"""The API server's time, so that a wrong clock on the operator's node ends no run.

Deadlines refer to times that the API server wrote. `kubernetes_api` updates the clock from the
`Date` of each response. No I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_WHOLE_SECONDS = timedelta(seconds=1)
"""A `Date` has no fractions: the real time is later by less than this."""


class ServerClock:
    """Continues from the latest `Date`, by the monotonic clock."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        local: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._monotonic_s = monotonic_s
        self._local = local
        self._epoch: datetime | None = None
        """The server's time at monotonic time 0. None: no `Date` was received yet."""

    def update(self, date: str | None) -> None:
        """Take the `Date` of a response (RFC 9110). An invalid one is ignored."""
        try:
            received = parsedate_to_datetime(date or "")
        except (ValueError, TypeError):
            return
        if received.tzinfo is None:
            return
        earliest = received - timedelta(seconds=self._monotonic_s())
        # Between two responses the time must not jump back by the missing fraction.
        kept = earliest if self._epoch is None else self._epoch
        self._epoch = min(max(kept, earliest), earliest + _WHOLE_SECONDS)

    def now(self) -> datetime:
        """The API server's time; before any response, the local time."""
        if self._epoch is None:
            return self._local()
        return self._epoch + timedelta(seconds=self._monotonic_s())
