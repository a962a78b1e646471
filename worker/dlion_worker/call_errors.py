"""Classifies failed calls to peers that a retry alone does not fix.

Used by exchange and sidecar, which dial peers.
"""

import grpc
import grpc.aio

from dlion_api.protocol.refusals import REASON_KEY, PeerRefusal

CLOSED_FOR_S = 10.0
"""How long closed handshakes count as temporary. A peer that is ending also closes them, and so
does a proxy without a backend; after this time the peer does not trust us."""

_CLOSED = ("ocket closed", "andshake read failed", "andshake write failed")
_OF_TLS = ("erification check", "andshak", "SSL_ERROR", "CERTIFICATE")
_REFUSALS = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT})


def refusal_of(error: grpc.aio.AioRpcError) -> PeerRefusal | None:
    """Why the peer refused the call or failed verification.

    None: it was unreachable, has ended, or the call should be retried.
    """
    refusal = dict(error.trailing_metadata() or ()).get(REASON_KEY)
    if refusal is not None:
        try:
            return PeerRefusal(str(refusal))
        except ValueError:  # sent by a later version
            return PeerRefusal.MALFORMED
    if error.code() in _REFUSALS:
        return PeerRefusal.MALFORMED
    return _tls_failure(error.details() or "")


def _tls_failure(details: str) -> PeerRefusal | None:
    """Whether verification of either side failed; gRPC reports it only as text.

    A server that rejects a client's certificate only closes the connection. So does one that is
    killed during a handshake.
    """
    if any(part in details for part in _CLOSED):
        return PeerRefusal.NOT_BELIEVED if "failed to connect" in details else None
    return PeerRefusal.UNPROVEN if any(part in details for part in _OF_TLS) else None


class ClosedHandshakes:
    """Tracks since when one peer closes every handshake."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def should_report(self, kind: PeerRefusal | None, now_s: float) -> bool:
        """Whether to report an attempt that ended like this."""
        if kind is not PeerRefusal.NOT_BELIEVED:
            self._since_s = None
            return kind is not None
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= CLOSED_FOR_S
