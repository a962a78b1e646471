"""What peers said that was refused: told once each, and a peer that goes on is shut out.

Called by `loop`. Two sources: the policies (a message that makes no sense) and the exchange (a
stream or a frame).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_worker.exchange import Exchange, Refused
from dlion_worker.trainer.reporting import Reporter

QUARANTINE_AFTER = 3
"""Refused messages of one peer, after which nothing more is taken from it until it restarts."""

MOST_REFUSALS = 100
"""Different things refused by the exchange that are reported in one incarnation."""


class Refusals:
    """One worker's."""

    def __init__(self, reporter: Reporter, exchange: Exchange) -> None:
        self._reporter = reporter
        self._exchange = exchange
        self._count: Counter[Rank] = Counter()
        self._told: set[tuple[Rank | None, str]] = set()

    def refuse(self, peer: Rank, reason: str, iteration: int) -> None:
        """A policy has refused a message."""
        self._count[peer] += 1
        if self._count[peer] == QUARANTINE_AFTER:
            self._exchange.quarantine(peer, reason)
        self._tell(f"worker {peer}: {reason}", iteration)

    def report(self, refusals: Iterable[Refused], iteration: int) -> None:
        """What the exchange has refused, each thing once: a peer may go on for ever."""
        for refused in refusals:
            told = (refused.peer, refused.reason)
            if told in self._told or len(self._told) >= MOST_REFUSALS:
                continue
            self._told.add(told)
            who = "a caller" if refused.peer is None else f"worker {refused.peer}"
            words = f"{who} refuses us: " if refused.outgoing else f"{who}: "
            self._tell(words + refused.reason, iteration)

    def _tell(self, words: str, iteration: int) -> None:
        self._reporter.event(EventReason.MESSAGE_REFUSED, words, iteration=iteration, warning=True)
