"""A peer's certificate, checked again while its connection is open.

TLS checks a certificate only in the handshake. The connection stays open when the certificate
expires, or when its authority is no longer trusted. Trainer and sidecar check here and close the
connection themselves.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509

from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE
from dlion_worker.security.credentials import WorkerCredentials

GRACE_FRACTION = 1 / 10
"""Fraction of a certificate's lifetime for which a connection may outlast it."""


class PeerCertificate:
    """A certificate that a peer presented; without TLS nothing is checked."""

    def __init__(
        self,
        credentials: WorkerCredentials,
        certificate_pem: bytes | None,
        claimed: WorkerIdentity,
        job: JobKey,
        *,
        now: datetime | None = None,
    ) -> None:
        """Raises: CallerError, as `WorkerCredentials.check_peer` does."""
        self._credentials, self._claimed, self._job = credentials, claimed, job
        self.certificate_pem = certificate_pem
        self._checked_with = credentials.site_bundles_pem
        credentials.check_peer(certificate_pem, claimed, job, now=now)
        self._ends: datetime | None = None
        self._grace = timedelta(0)
        if credentials.enabled and certificate_pem:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            self._ends = certificate.not_valid_after_utc
            life = self._ends - certificate.not_valid_before_utc - CLOCK_SKEW_ALLOWANCE
            self._grace = max(timedelta(0), life * GRACE_FRACTION)

    def is_expired(self, *, open_connection: bool = False, now: datetime | None = None) -> bool:
        """Whether it has expired. `open_connection`: allow the grace period of one."""
        if self._ends is None:
            return False
        return (now or datetime.now(UTC)) > self._ends + (self._grace * open_connection)

    def check(self, *, open_connection: bool = False, now: datetime | None = None) -> None:
        """Pass while it is unexpired and its authority is trusted.

        Cheap unless the authorities have changed. Raises: CallerError (it is no longer valid).
        """
        if self.is_expired(open_connection=open_connection, now=now):
            raise CallerError(
                PeerRefusal.BAD_CERTIFICATE,
                f"the certificate of {self._claimed.name} ended at {self._ends} and no newer one"
                " has been presented",
            )
        bundles = self._credentials.site_bundles_pem
        if bundles is self._checked_with or self._ends is None:
            return
        at = min(now or datetime.now(UTC), self._ends)
        self._credentials.check_peer(self.certificate_pem, self._claimed, self._job, now=at)
        self._checked_with = bundles
