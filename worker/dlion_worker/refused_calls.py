"""What a call to a peer met that no retry alone will mend.

Called by whoever dials peers: exchange and sidecar.
"""

from __future__ import annotations

import grpc
import grpc.aio

from dlion_api.refusals import REASON_KEY, PeerRefusal

CLOSED_FOR_S = 10.0
"""A peer that is ending closes handshakes, too, and so does a proxy while nothing is behind it; who
goes on for so long does not believe us."""

_OF_TLS = ("erification check", "andshak", "SSL_ERROR", "CERTIFICATE")
_REFUSALS = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT})


def refusal_of(error: grpc.aio.AioRpcError) -> PeerRefusal | None:
    """Why the peer refused that call, or how it failed to prove itself; None: it was not reached,
    has ended, or is to be asked again."""
    said = dict(error.trailing_metadata() or ()).get(REASON_KEY)
    if said is not None:
        try:
            return PeerRefusal(str(said))
        except ValueError:  # one of a later version
            return PeerRefusal.MALFORMED
    if error.code() in _REFUSALS:
        return PeerRefusal.MALFORMED
    return _inside_tls(error.details() or "")


def _inside_tls(details: str) -> PeerRefusal | None:
    """Whether the connection failed over who either side is (gRPC tells it only in words). A server
    that refuses a client's certificate only closes."""
    if any(word in details for word in _OF_TLS):
        return PeerRefusal.UNPROVEN
    is_closed = "failed to connect" in details and "ocket closed" in details
    return PeerRefusal.NOT_BELIEVED if is_closed else None


class Handshakes:
    """Of one peer: since when it closes every one of them."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def is_told(self, kind: PeerRefusal | None, now_s: float) -> bool:
        """Whether an attempt that ended so is to be told."""
        if kind is not PeerRefusal.NOT_BELIEVED:
            self._since_s = None
            return kind is not None
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= CLOSED_FOR_S
