"""Whether a peer that we have dialled is to prove itself anew, and whether it has failed to.

Called by `client`, twice in each heartbeat's time. A state machine without I/O. A server proves
itself in the handshake alone, and a client cannot read what it showed: so it does so again on a new
connection, and goes by what the same peer shows on its own stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dlion_api.names import WorkerIdentity
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.peer_proof import PeerProof

PROVES_WITHIN_S = 30.0
"""A peer whose site is no longer believed by an authority of before; after that the stream ends."""


@dataclass(eq=False)
class Proven:
    """By what a peer is believed on one connection."""

    bundle_pem: bytes | None
    """Its site's authorities at the time."""
    proof: PeerProof | None = None
    """What it showed on its own stream at the time; None: it has none yet."""


class Verdict(Enum):
    """What is to be done."""

    HOLDS = "Holds"
    RENEW = "Renew"  # another connection is to be made, and the stream to go over to it
    OTHER_AUTHORITIES = "has not proved itself since its site's authorities are others"
    ENDED = "has not proved itself since its certificate ended"


class Proving:
    """One peer's."""

    def __init__(self, credentials: WorkerCredentials, peer: WorkerIdentity) -> None:
        self._credentials = credentials
        self._site = peer.site
        self._asked: tuple[Proven, bytes | None, bool] | None = None
        self._asked_s = 0.0
        self._one_is_gone = False
        """Whether the peer may have been believed by an authority that is not there any more."""

    def now(self) -> Proven:
        """By what the peer is believed on a connection that is made now."""
        return Proven(self._credentials.site_bundles_pem.get(self._site))

    def judge(
        self, proven: Proven, shown: PeerProof | None, now_s: float, now: datetime | None = None
    ) -> Verdict:
        """What becomes of a stream on the connection where the peer is so proven.

        `shown`: by what it has proved itself on its own stream, if there is one. `RENEW` comes once
        for each reason to.
        """
        proven.proof = proven.proof or shown
        bundle = self._credentials.site_bundles_pem.get(self._site)
        is_other = bundle != proven.bundle_pem
        is_over = proven.proof is not None and proven.proof.has_ended(now=now)
        if not is_other and not is_over:
            return Verdict.HOLDS
        asks = (proven, bundle, is_over)
        if self._asked != asks:
            self._asked, self._asked_s = asks, now_s
            self._one_is_gone = is_other and not _has_all(bundle, proven.bundle_pem)
            return Verdict.RENEW
        if self._one_is_gone and now_s - self._asked_s > PROVES_WITHIN_S:
            return Verdict.OTHER_AUTHORITIES
        if proven.proof is not None and proven.proof.has_ended(standing=True, now=now):
            return Verdict.ENDED
        return Verdict.HOLDS


def _has_all(bundle: bytes | None, before: bytes | None) -> bool:
    """Whether whoever was believed by that bundle is believed by this one: an authority is its name
    and key, whichever certificate says so."""
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
