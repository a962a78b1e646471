"""Whom a keeper has refused since it began, by reason. Its coordinator is told as it follows.

Counted in the service's loop, read in the follower's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dlion_api.refusals import MAX_TEXT_BYTES, PeerRefusal


class Refusals:
    """One keeper's."""

    def __init__(self) -> None:
        self._counts: Counter[PeerRefusal] = Counter()
        self.words = ""
        """Of the last one."""

    def refused(self, kind: PeerRefusal, words: str) -> None:
        """One more."""
        self.words = words.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
        self._counts[kind] += 1

    def counts(self) -> Mapping[str, int]:
        """By reason."""
        return {str(kind): count for kind, count in self._counts.copy().items()}
