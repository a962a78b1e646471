"""Which worker the others agree to be bad (`exchange.quarantine: majority`). Pure.

Used by the operator, by the coordinator of `dlion run` and by the simulator. One worker's warning
proves nothing: it may be the bad one. So most of the others must name it, and at least two, within
some time: false alarms of several days are not one attack. Bad workers that are most of the others
can thus shut an honest one out: two of three, three of five.
"""

import re
import time
from collections.abc import Callable, Collection

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.protocol.revocation import clean_reason
from dlion_api.reasons import EventReason

MIN_REPORTERS = 2
WINDOW_S = 600.0
"""A warning counts for so long. A bad worker is named again and again."""

_NAMED = re.compile(r"worker (\d{1,9}) ")
"""Begins the message of `UnusualValues`."""


class Accusations:
    """Which workers have named which in one run."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s  # the records' own times are claims of workers
        self._named_s: dict[Rank, dict[Rank, float]] = {}
        """For each accused worker, the time when each of the others last named it."""

    def take(
        self, record: EventRecord, *, here: Collection[Rank], known: Collection[Rank]
    ) -> Rank | None:
        """Take a worker's record. Return the worker that most of the others here have named.

        `here`: the workers that are present; only they count. On clusters, those of one site.
        `known`: all of the run.
        """
        named = _NAMED.match(record.message)
        if record.reason != EventReason.UNUSUAL_VALUES or named is None:
            return None
        accused = Rank(int(named[1]))
        if accused not in known or accused == record.rank:
            return None
        now_s = self._monotonic_s()
        named_s = self._named_s.setdefault(accused, {})
        named_s[record.rank] = now_s
        others = set(here) - {accused}
        count = sum(now_s - at_s <= WINDOW_S for rank, at_s in named_s.items() if rank in others)
        if count < MIN_REPORTERS or 2 * count <= len(others):
            return None
        del self._named_s[accused]  # once it is trusted again, only new warnings count
        return accused


def quarantine_reason(last: EventRecord) -> str:
    """Return why a worker is quarantined, after the last warning that `take` has counted."""
    return clean_reason(f"most workers here report it, the last one: {last.message}")


def quarantine_message(name: str, reason: str) -> str:
    """Return the message of the event.

    >>> quarantine_message("plant-a/g-2", "it repeats itself")
    'plant-a/g-2 is quarantined (it repeats itself): no worker accepts it'
    """
    why = f" ({reason})" if reason else ""
    return f"{name} is quarantined{why}: no worker accepts it"
