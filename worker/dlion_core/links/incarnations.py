"""Which incarnations of a peer may be believed. Pure: time is an argument.

A worker numbers its starts itself, from its clock on. The membership confirms a number: the
coordinator has checked its owner's token. While the coordinator is away, a start that it has not
confirmed may link too, within what a clock can show. An absurd number is refused: it would lock out
the peer's later starts.

A quarantine ends with a confirmed later start, not with another number, and after
`MAX_QUARANTINES` not at all.
"""

from collections import Counter

from dlion_api.protocol.refusals import CallerError, PeerRefusal

MAX_VIOLATIONS = 3
"""A start with this many violations of the protocol is rejected from then on."""

MAX_QUARANTINES = 3
"""A worker whose starts have been rejected so often is rejected until this worker restarts."""

MAX_CLOCK_LEAD_S = 86_400
"""A start's number is its clock in seconds, which may be ahead of this worker's."""

MAX_UNCONFIRMED_STARTS = 1000
"""Starts after the confirmed one while the coordinator is away; each adds one at least."""

_UNCONFIRMED = -1


class PeerIncarnations:
    """What is known of one peer's starts."""

    def __init__(self) -> None:
        self._confirmed = 0
        """The newest one that the membership had."""
        self._violations: Counter[int] = Counter()  # by start; of unconfirmed ones together
        self._quarantined: int | None = None
        self._quarantines = 0

    def confirm(self, incarnation: int) -> None:
        """The membership has this incarnation."""
        self._confirmed = max(self._confirmed, incarnation)

    def check(self, incarnation: int, *, wall_clock_s: float) -> None:
        """Raise CallerError unless this incarnation is possible and may take part."""
        most = max(self._confirmed + MAX_UNCONFIRMED_STARTS, int(wall_clock_s) + MAX_CLOCK_LEAD_S)
        if incarnation > most:
            raise CallerError(
                PeerRefusal.IMPLAUSIBLE, f"incarnation {incarnation}; allowed: up to {most}"
            )
        if self.is_quarantined(incarnation):
            text = f"incarnation {incarnation} is in quarantine"
            raise CallerError(PeerRefusal.QUARANTINED, text)

    def is_quarantined(self, incarnation: int) -> bool:
        if self._quarantined is None:
            return False
        is_new = self._quarantined < incarnation <= self._confirmed
        return not is_new or self._quarantines >= MAX_QUARANTINES

    def add_violation(self, incarnation: int) -> int:
        """Count a violation of the protocol; return how many its start has made."""
        start = incarnation if incarnation <= self._confirmed else _UNCONFIRMED
        self._violations[start] += 1
        return self._violations[start]

    def quarantine(self, incarnation: int) -> None:
        """Reject this incarnation and unconfirmed later ones."""
        self._quarantined = incarnation
        self._quarantines += 1
