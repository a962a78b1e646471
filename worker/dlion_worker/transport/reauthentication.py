"""Decides when a peer must authenticate again, and whether it has failed to. No I/O.

A server authenticates only in the TLS handshake, and gRPC does not show the client its certificate.
It therefore authenticates again on a new connection, and what the same peer proved on its own
stream is the reference.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dlion_api.names import WorkerIdentity
from dlion_worker.security.credentials import PeerCertificate, WorkerCredentials

REAUTHENTICATION_TIMEOUT_S = 30.0
"""Time limit for a peer after its site's authority was removed; then the stream ends."""


@dataclass(eq=False)
class ConnectionTrust:
    """What the trust in a peer on one connection is based on."""

    bundle_pem: bytes | None
    """The authorities of its site when the connection was made."""
    proof: PeerCertificate | None = None
    """What it proved on its own stream; None if there is none yet."""


class TrustVerdict(Enum):
    VALID = "Valid"
    RENEW = "Renew"  # move the stream to a new connection
    AUTHORITIES_CHANGED = "has not authenticated again since its site's authorities changed"
    CERTIFICATE_EXPIRED = "has not authenticated again since its certificate expired"


class Reauthentication:
    def __init__(self, credentials: WorkerCredentials, peer: WorkerIdentity) -> None:
        self._credentials = credentials
        self._site = peer.site
        self._requested: tuple[ConnectionTrust, bytes | None, bool] | None = None
        self._requested_s = 0.0
        self._authority_removed = False
        """Whether an authority that the peer may have relied on has been removed."""

    def current_trust(self) -> ConnectionTrust:
        """The trust that a connection made now is based on."""
        return ConnectionTrust(self._credentials.site_bundles_pem.get(self._site))

    def evaluate(
        self,
        trust: ConnectionTrust,
        inbound_proof: PeerCertificate | None,
        now_s: float,
        now: datetime | None = None,
    ) -> TrustVerdict:
        """Decide about a stream on a connection with that trust.

        `inbound_proof` is what the peer proved on its own stream, if there is one. `RENEW` is
        returned once per reason.
        """
        trust.proof = trust.proof or inbound_proof
        bundle = self._credentials.site_bundles_pem.get(self._site)
        is_changed = bundle != trust.bundle_pem
        is_expired = trust.proof is not None and trust.proof.is_expired(now=now)
        if not is_changed and not is_expired:
            return TrustVerdict.VALID
        request = (trust, bundle, is_expired)
        if self._requested != request:
            self._requested, self._requested_s = request, now_s
            self._authority_removed = is_changed and not _includes_authorities(
                bundle, trust.bundle_pem
            )
            return TrustVerdict.RENEW
        if self._authority_removed and now_s - self._requested_s > REAUTHENTICATION_TIMEOUT_S:
            return TrustVerdict.AUTHORITIES_CHANGED
        if trust.proof is not None and trust.proof.is_expired(open_connection=True, now=now):
            return TrustVerdict.CERTIFICATE_EXPIRED
        return TrustVerdict.VALID


def _includes_authorities(bundle: bytes | None, before: bytes | None) -> bool:
    """Whether `bundle` contains every authority of `before`.

    An authority is a name and a key, in whatever certificate.
    """
    if bundle is None or before is None:
        return False
    try:
        return _authorities(before) <= _authorities(bundle)
    except Exception:  # noqa: BLE001 - what cryptography raises for odd keys has no common class
        return False


def _authorities(bundle: bytes) -> set[tuple[x509.Name, bytes]]:
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    certificates = x509.load_pem_x509_certificates(bundle)
    return {(each.subject, each.public_key().public_bytes(*form)) for each in certificates}
