"""Checks one link's streams: heartbeats when idle, timeouts, and expired authentication.

The exchange calls it twice per heartbeat, on its loop.
"""

from __future__ import annotations

from dlion_api.protocol.refusals import CallerError
from dlion_core.links.deadline import HEARTBEAT_S
from dlion_worker.transport.client import PeerConnector
from dlion_worker.transport.peer_links import PeerLink
from dlion_worker.transport.service import IncomingStream


def check_link(link: PeerLink, connector: PeerConnector, now_s: float, late_s: float) -> None:
    """Check one link. `late_s`: how long this process itself was suspended."""
    if (outgoing := connector.stream) is not None:
        if now_s - outgoing.last_sent_s >= HEARTBEAT_S:
            link.send_queue.heartbeat()
            link.wake.set()
        outgoing.deadline.extend(late_s)
        if outgoing.deadline.overdue(now_s):
            outgoing.end(f"no acknowledgement: {outgoing.deadline.describe(now_s)}")
    inbound_proof = None
    if isinstance(incoming := link.incoming, IncomingStream):
        incoming.deadline.extend(late_s)
        if incoming.deadline.overdue(now_s):
            incoming.end(incoming.deadline.describe(now_s))
        inbound_proof = incoming.proof
        try:
            incoming.check_proof()
        except CallerError as error:
            link.trust_expired(error)
    connector.check_trust(inbound_proof, now_s)
