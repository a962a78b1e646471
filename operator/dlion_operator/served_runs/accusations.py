"""Which worker this site's workers agree to be bad (`exchange.quarantine: majority`). Pure.

One worker's warning proves nothing: it may be the bad one. So most of the others must name it, and
at least two.
"""

import re
from collections.abc import Collection

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.reasons import EventReason

MIN_REPORTERS = 2
_NAMED = re.compile(r"worker (\d{1,9}) ")
"""Begins the message of `UnusualValues`."""


class Accusations:
    """Which workers have named which in one run."""

    def __init__(self) -> None:
        self._reporters: dict[Rank, set[Rank]] = {}

    def take(
        self, record: EventRecord, *, here: Collection[Rank], known: Collection[Rank]
    ) -> Rank | None:
        """Take a worker's record. Return the worker that most of the others here have named.

        `here`: this site's workers that are present; only they count. `known`: all of the run.
        """
        named = _NAMED.match(record.message)
        if record.reason != EventReason.UNUSUAL_VALUES or named is None:
            return None
        accused = Rank(int(named[1]))
        if accused not in known or accused == record.rank:
            return None
        reporters = self._reporters.setdefault(accused, set())
        reporters.add(record.rank)
        others = set(here) - {accused}
        count = len(reporters & others)
        if count < MIN_REPORTERS or 2 * count <= len(others):
            return None
        del self._reporters[accused]  # once it is trusted again, only new warnings count
        return accused
