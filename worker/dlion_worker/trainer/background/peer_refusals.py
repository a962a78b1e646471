"""Reports refused peer messages once each, and counts them for the sidecar's metrics.

Policies and the inbox report from the main thread, exchange and sidecar from their own threads at
any time. The exchange counts violations per incarnation of a peer, and disconnects a peer that
continues.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dlion_api.protocol.measurements import RefusalCount, StreamRefusals
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import ExchangeEvent, Refused
from dlion_worker.once_per_key import OncePerKey
from dlion_worker.trainer.background.sidecar_client import SidecarClient

MAX_SIDECAR_MESSAGES = 1000
"""Limit on different refusals from sidecars; each new sidecar starts its own count."""


@dataclass
class PeerRefusalReporter:
    reporter: Reporter
    sidecar: SidecarClient
    progress: JobProgress

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[PeerRefusal, bool]] = Counter()
        self._peer_messages, self._sidecar_messages = OncePerKey(), OncePerKey(MAX_SIDECAR_MESSAGES)
        self.sidecar.on_refused(self._report_from_sidecar)

    def filtered(self, put: Callable[[ExchangeEvent], None]) -> Callable[[ExchangeEvent], None]:
        """Report refusals from the exchange's thread at once; pass other events to `put`.

        A worker that waits for a peer without a valid certificate may wait without limit, so the
        report must not wait.
        """

        def take(event: ExchangeEvent) -> None:
            if isinstance(event, Refused):
                self.report([event])
            else:
                put(event)

        return take

    def report(self, refusals: Iterable[Refused]) -> None:
        """Report each refusal once, because a peer may repeat it without limit."""
        for refused in refusals:
            self._count(refused.kind, dialled=refused.outgoing)
            source = "a caller" if refused.peer is None else f"worker {refused.peer}"
            message = f"{source} refuses us: " if refused.outgoing else f"{source}: "
            message += refused.reason
            # One key per peer and kind, so that no source suppresses another's messages.
            if self._peer_messages.is_new((refused.peer, refused.kind, refused.outgoing), message):
                self._send_event(message)

    def _report_from_sidecar(self, message: str) -> None:
        if self._sidecar_messages.is_new("measuring", message):
            self._send_event(f"measuring: {message}")

    def _count(self, kind: PeerRefusal, *, dialled: bool) -> None:
        with self._lock:
            self._counts[kind, dialled] += 1
            counts = [RefusalCount(str(k), d, count) for (k, d), count in self._counts.items()]
            self.sidecar.send(StreamRefusals(tuple(counts)))

    def _send_event(self, message: str) -> None:
        at = self.progress.iteration
        self.reporter.event(EventReason.MESSAGE_REFUSED, message, iteration=at, warning=True)
