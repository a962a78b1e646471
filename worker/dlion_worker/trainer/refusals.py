"""What peers said that was refused: told once each, and counted for the sidecar's metrics.

Two sources: the policies and the inbox (a message that makes no sense), in the main thread; and the
exchange and the sidecar (a stream, a frame, a call), each from its own thread and at any time, also
while this worker waits for others. The exchange counts what an incarnation of a peer offends by,
what policies refuse with the rest, and shuts out one that goes on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from dlion_api.measurements import RefusalCount, StreamRefusals
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.refusals import PeerRefusal
from dlion_worker.exchange import Exchange, ExchangeEvent, Refused
from dlion_worker.sidecar_client import SidecarClient
from dlion_worker.told_once import ToldOnce
from dlion_worker.trainer.reporting import Reporter

MOST_OF_MEASURING = 1000
"""Different things that the sidecar says were refused; it bounds them itself, each sidecar anew."""


class Refusals:
    """One worker's."""

    def __init__(
        self,
        reporter: Reporter,
        sidecar: SidecarClient,
        exchange: Callable[[], Exchange],
        iteration: Callable[[], int],
    ) -> None:
        """`exchange` is asked for when a message is refused; `iteration` is the last one that this
        worker has finished."""
        self._reporter = reporter
        self._sidecar = sidecar
        self._exchange = exchange
        self._iteration = iteration
        self._lock = threading.Lock()
        self._counts: Counter[tuple[PeerRefusal, bool]] = Counter()
        self._told, self._told_of_measuring = ToldOnce(), ToldOnce(MOST_OF_MEASURING)
        sidecar.on_refused(self._measuring)

    def sieve(self, put: Callable[[ExchangeEvent], None]) -> Callable[[ExchangeEvent], None]:
        """Takes what the exchange tells, in its thread: what was refused is told at once, since a
        worker that waits for a peer without proof may wait for ever; `put` gets the rest."""

        def take(event: ExchangeEvent) -> None:
            if isinstance(event, Refused):
                self.report([event])
            else:
                put(event)

        return take

    def refuse(self, peer: Rank, reason: str) -> None:
        """A policy has refused a message: the exchange says so (`sieve`), as of all that it
        refuses."""
        self._exchange().offended(peer, reason)

    def report(self, refusals: Iterable[Refused]) -> None:
        """What was refused, each thing once: a peer may go on for ever."""
        for refused in refusals:
            self._count(refused.kind, dialled=refused.outgoing)
            who = "a caller" if refused.peer is None else f"worker {refused.peer}"
            words = f"{who} refuses us: " if refused.outgoing else f"{who}: "
            words += refused.reason
            # Of each peer, of strangers, and of each kind by itself: that nobody hides another.
            if self._told.is_new((refused.peer, refused.kind, refused.outgoing), words):
                self._tell(words, self._iteration())

    def _measuring(self, words: str) -> None:
        if self._told_of_measuring.is_new("measuring", words):
            self._tell(f"measuring: {words}", self._iteration())

    def _count(self, kind: PeerRefusal, *, dialled: bool) -> None:
        with self._lock:
            self._counts[kind, dialled] += 1
            counts = [RefusalCount(str(k), d, count) for (k, d), count in self._counts.items()]
            self._sidecar.send(StreamRefusals(tuple(counts)))

    def _tell(self, words: str, iteration: int) -> None:
        self._reporter.event(EventReason.MESSAGE_REFUSED, words, iteration=iteration, warning=True)
