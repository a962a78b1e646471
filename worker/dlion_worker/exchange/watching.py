"""Looks after one link's streams: heartbeats where nothing else is said, an end to silence, and to
what a peer cannot prove any more.

Called by `exchange`, on its loop, twice in each heartbeat's time.
"""

from __future__ import annotations

from dlion_api.refusals import CallerError
from dlion_worker.exchange.client import Dialler
from dlion_worker.exchange.deadline import HEARTBEAT_S
from dlion_worker.exchange.links import Link
from dlion_worker.exchange.service import IncomingStream


def watch(link: Link, dialler: Dialler, now_s: float, late_s: float) -> None:
    """Looks after one link. `late_s`: for so long we ourselves stood still, and heard nobody."""
    if (outgoing := dialler.stream) is not None:
        if now_s - outgoing.last_sent_s >= HEARTBEAT_S:
            link.outbox.heartbeat()
            link.wake.set()
        outgoing.deadline.excuse(late_s)
        if outgoing.deadline.overdue(now_s):
            outgoing.end(f"no acknowledgement: {outgoing.deadline.describe(now_s)}")
    shown = None
    if isinstance(incoming := link.incoming, IncomingStream):
        incoming.deadline.excuse(late_s)
        if incoming.deadline.overdue(now_s):
            incoming.end(incoming.deadline.describe(now_s))
        shown = incoming.proof
        try:
            incoming.check_proof()
        except CallerError as error:
            link.unproven(error)
    dialler.have_proven(shown, now_s)
