"""The time as the API server tells it, so that a wrong clock of the operator's node ends no run.

Deadlines are held against times that the API server wrote. Kept by `kubernetes_api`, which hears
the `Date` of each answer; no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_WHOLE_SECONDS = timedelta(seconds=1)
"""A `Date` leaves fractions out: the moment is so much later at most."""


class ServerClock:
    """Goes on by the monotonic clock from the newest `Date` that was heard."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        local: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._monotonic_s = monotonic_s
        self._local = local
        self._began: datetime | None = None
        """The server's time when the monotonic clock was at 0; None: none was heard yet."""

    def hear(self, date: str | None) -> None:
        """An answer has come with that `Date` (RFC 9110); what is none is passed over."""
        try:
            heard = parsedate_to_datetime(date or "")
        except (ValueError, TypeError):
            return
        if heard.tzinfo is None:
            return
        earliest = heard - timedelta(seconds=self._monotonic_s())
        # Between two answers the time must not jump back by the fraction that is left out.
        kept = earliest if self._began is None else self._began
        self._began = min(max(kept, earliest), earliest + _WHOLE_SECONDS)

    def now(self) -> datetime:
        """The time of the server that answered last; this machine's before any has."""
        if self._began is None:
            return self._local()
        return self._began + timedelta(seconds=self._monotonic_s())
