"""What a peer has proved itself by, judged again for as long as it is gone by.

Called by trainer and sidecar where they take calls. TLS looks at a certificate once, in the
handshake; a connection goes on when the certificate has ended, or the site that signed it is no
longer believed. Whoever serves the connection finds out here. Closes nothing itself.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509

from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.refusals import CallerError, PeerRefusal
from dlion_api.trust import BACKDATED
from dlion_worker.credentials import WorkerCredentials

OVERTIME = 1 / 10
"""Part of its certificate's life for which a connection may outlast the certificate."""


class PeerProof:
    """One certificate that a peer has shown; nothing is asked of peers without TLS."""

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
        self._judged_by = credentials.site_bundles_pem
        credentials.check_peer(certificate_pem, claimed, job, now=now)
        self._ends: datetime | None = None
        self._overtime = timedelta(0)
        if credentials.enabled and certificate_pem:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            self._ends = certificate.not_valid_after_utc
            life = self._ends - certificate.not_valid_before_utc - BACKDATED
            self._overtime = max(timedelta(0), life * OVERTIME)

    def has_ended(self, *, standing: bool = False, now: datetime | None = None) -> bool:
        """Whether the certificate's time is over; `standing`: and the time that a connection which
        stands may go on after that."""
        if self._ends is None:
            return False
        return (now or datetime.now(UTC)) > self._ends + (self._overtime * standing)

    def check(self, *, standing: bool = False, now: datetime | None = None) -> None:
        """Passes while it holds: before its end, and by the authorities that are believed now.

        Costs next to nothing unless other authorities are.

        Raises:
            CallerError: It holds no more.
        """
        if self.has_ended(standing=standing, now=now):
            raise CallerError(
                PeerRefusal.BAD_CERTIFICATE,
                f"the certificate of {self._claimed.name} ended at {self._ends} and no newer one"
                " has been shown",
            )
        bundles = self._credentials.site_bundles_pem
        if bundles is self._judged_by or self._ends is None:
            return
        at = min(now or datetime.now(UTC), self._ends)
        self._credentials.check_peer(self.certificate_pem, self._claimed, self._job, now=at)
        self._judged_by = bundles
