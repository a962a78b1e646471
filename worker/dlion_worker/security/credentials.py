"""A worker's identity, and its verification of peers' identities.

Trainer and sidecar use it at their start and for every channel and port between workers. Owns the
private key, which is created in memory. `dlion_worker.coordination` carries the signing request and
the certificate.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, SiteName, WorkerIdentity
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE, renewal_after

MAX_CERTIFICATE_BYTES = 16384
GRACE_FRACTION = 1 / 10
"""Fraction of a certificate's lifetime for which a connection may outlast it."""

EARLY_RENEWAL_S, MAX_EARLY_RENEWAL_S = 60.0, 600.0
"""First and longest delay of another request while the certificate is not valid yet. Peers may
refuse it, and do for at most the longest delay after the signer's clock is right."""


class UnknownAuthorityError(UnavailableError):
    """The authority of a site is not known (yet); it may arrive during the run."""


class WorkerKey:
    """A private key (EC P-256) that stays on this worker."""

    def __init__(self, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self._key = key or ec.generate_private_key(ec.SECP256R1())

    @classmethod
    def from_pem(cls, pem: bytes) -> WorkerKey:
        """Load the key that `pem` returned, for the next process of the same worker.

        Raises: ValueError (it is not an elliptic-curve key).
        """
        key = serialization.load_pem_private_key(pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"a key of type {type(key).__name__}; allowed: elliptic curve")
        return cls(key)

    def matches(self, certificate: x509.Certificate) -> bool:
        return certificate.public_key() == self._key.public_key()

    def csr_pem(self) -> bytes:
        """Return a signing request without an identity; the authority knows the caller."""
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "dlion")])
        request = x509.CertificateSigningRequestBuilder().subject_name(name)
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def sign(self, statement: bytes) -> bytes:
        """Sign the statement with ECDSA and SHA-256."""
        return self._key.sign(statement, ec.ECDSA(hashes.SHA256()))

    def public_der(self) -> bytes:
        """The public key (DER), for verifying signatures."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def pem(self) -> bytes:
        """The private key as gRPC expects it; only this worker may read it."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


@dataclass
class WorkerCredentials:
    """Key, certificate and every site's authority; or none (`tls: {mode: Disabled}`).

    Any thread may replace them: certificate and key together, and the authorities. Open connections
    are unaffected; new handshakes use the new ones.
    """

    key: WorkerKey | None
    certificate_chain_pem: bytes
    site_bundles_pem: Mapping[SiteName, bytes]
    renewals: int = field(default=0, compare=False)
    """How many certificates have replaced the first."""
    checkpoint_key: bytes = field(default=b"", repr=False, compare=False)
    """Authenticates this worker's checkpoints; empty: nothing does."""
    _renewing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _stores: dict[SiteName, Store] = field(default_factory=dict, repr=False, compare=False)
    _early_renewals: int = field(default=0, repr=False, compare=False)
    """The last renewals in a row that gave a certificate that was not valid yet."""

    @classmethod
    def insecure(cls) -> WorkerCredentials:
        """No encryption and no verification of identity, as the manifest asks."""
        return cls(None, b"", {})

    def renew(
        self, key: WorkerKey, certificate_chain_pem: bytes, *, now: datetime | None = None
    ) -> None:
        """Use that certificate and its key from the next handshake on."""
        begins = x509.load_pem_x509_certificates(certificate_chain_pem)[0].not_valid_before_utc
        is_early = begins > (now or datetime.now(UTC))
        with self._renewing:
            self.key, self.certificate_chain_pem = key, certificate_chain_pem
            self.renewals += 1
            self._early_renewals = self._early_renewals + 1 if is_early else 0

    def renewal_due_s(self, *, now: datetime | None = None) -> float:
        """Seconds until the certificate should be renewed, at least 0; without TLS never.

        Pass `now` (wall clock) for one signed some time ago; None: it was signed just now, and its
        age is not read from a clock. One that is not valid yet is due soon: its signer's clock may
        be fast, and peers refuse it. Where this worker's clock is slow, renewals do not help.
        """
        if self.key is None:
            return math.inf
        certificate = x509.load_pem_x509_certificates(self.key_and_chain()[1])[0]
        begins = certificate.not_valid_before_utc
        after = renewal_after(begins, certificate.not_valid_after_utc)
        if begins > (now or datetime.now(UTC)):
            doubled_s = math.ldexp(EARLY_RENEWAL_S, min(self._early_renewals, 10))
            return min(after.total_seconds(), MAX_EARLY_RENEWAL_S, doubled_s)
        age = (
            timedelta(0) if now is None else max(timedelta(0), now - begins - CLOCK_SKEW_ALLOWANCE)
        )
        return max(0.0, (after - age).total_seconds())

    def trust(self, site_bundles_pem: Mapping[SiteName, bytes]) -> bool:
        """Use these authorities from the next handshake on; return whether they changed."""
        if self.key is None or site_bundles_pem == self.site_bundles_pem:
            return False
        self._stores = {}
        self.site_bundles_pem = dict(site_bundles_pem)
        self._stores = {}  # another thread may have built one from the old bundles
        return True

    @property
    def enabled(self) -> bool:
        """Whether links are encrypted and peers are verified."""
        return self.key is not None

    def key_and_chain(self) -> tuple[bytes, bytes]:
        """Private key and certificate chain (PEM) that belong together; only with TLS."""
        with self._renewing:
            assert self.key is not None
            return self.key.pem(), self.certificate_chain_pem

    def sign(self, statement: bytes, *, now: datetime) -> tuple[bytes, bytes]:
        """Return the signature of a text and the chain (PEM) of its key; only with TLS.

        Raises: UnavailableError: the certificate is not valid `now`; it may be renewed.
        """
        with self._renewing:
            assert self.key is not None
            leaf = x509.load_pem_x509_certificates(self.certificate_chain_pem)[0]
            begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
            if not begins <= now <= ends:
                raise UnavailableError(
                    f"the certificate to sign with is valid from {begins} to {ends}, and this"
                    f" clock shows {now}: it must be renewed, or the clock set"
                )
            return self.key.sign(statement), self.certificate_chain_pem

    def server(self) -> grpc.ServerCredentials | None:
        """Credentials of a port that requires client certificates; None: insecure."""
        if self.key is None:
            return None
        served = self.site_bundles_pem, self.renewals

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """gRPC calls this at each handshake; None: unchanged."""
            nonlocal served
            bundles, renewals = self.site_bundles_pem, self.renewals
            if bundles is served[0] and renewals == served[1]:
                return None
            served = bundles, renewals
            return self._configuration(bundles)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(served[0]),
            changed,  # type: ignore[arg-type]  # gRPC takes None for "unchanged"
            require_client_authentication=True,
        )

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Open the server's port with them; return its number. Raises: RuntimeError (not free)."""
        secure = self.server()
        if secure is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, secure)

    def channel(self, site: SiteName) -> grpc.ChannelCredentials | None:
        """Credentials of a channel to a worker of that site, trusting no other; None: insecure.

        Raises: UnknownAuthorityError (the site's authority is not known).
        """
        if self.key is None:
            return None
        # A client cannot read the server's certificate, so the channel trusts only this site.
        return grpc.ssl_channel_credentials(self._bundle(site), *self.key_and_chain())

    def target_options(self, dns_name: str) -> list[tuple[str, str]]:
        """Channel options that make gRPC verify that name, whatever address is dialled."""
        return [("grpc.ssl_target_name_override", dns_name)] if self.enabled else []

    def check_peer(
        self,
        certificate_pem: bytes | None,
        claimed: WorkerIdentity,
        job: JobKey,
        *,
        now: datetime | None = None,
    ) -> None:
        """Verify that the certificate is that worker's, by its site's authority.

        Raises: CallerError (it is not, or is missing; no retry helps).
        """
        if not self.enabled:
            return
        if not certificate_pem or len(certificate_pem) > MAX_CERTIFICATE_BYTES:
            raise _bad_certificate(f"{claimed.name}: no certificate of a usable size was presented")
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            # The port trusts all sites' authorities; verify with the authority of the claimed site.
            policy = PolicyBuilder().store(self._store(claimed.site)).time(now or datetime.now(UTC))
            subjects = policy.build_client_verifier().verify(certificate, []).subjects
        except Exception as error:  # cryptography has no common error class
            raise _bad_certificate(
                f"certificate of a caller that claims to be {claimed.name} is not by the"
                f" authority of site {claimed.site}: {error}"
            ) from error
        wanted = x509.UniformResourceIdentifier(claimed.spiffe_id(job))
        if wanted not in (subjects or []):
            given = ", ".join(str(name.value) for name in subjects or [])
            raise _bad_certificate(
                f"a caller claims to be {wanted.value}, its certificate names {given or 'nothing'}"
            )

    def _configuration(
        self, bundles: Mapping[SiteName, bytes]
    ) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [self.key_and_chain()], root_certificates=b"\n".join(bundles.values())
        )

    def _bundle(self, site: SiteName) -> bytes:
        bundle = self.site_bundles_pem.get(site)
        if not bundle:
            raise UnknownAuthorityError(
                f"no authority of site {site} is known here (known:"
                f" {', '.join(sorted(self.site_bundles_pem)) or 'none'}); exchange the bundles"
            )
        return bundle

    def _store(self, site: SiteName) -> Store:
        stores = self._stores  # `trust` replaces the dict
        if site not in stores:
            stores[site] = Store(x509.load_pem_x509_certificates(self._bundle(site)))
        return stores[site]


class PeerCertificate:
    """A certificate that a peer presented, checked again while its connection is open.

    TLS checks a certificate only in the handshake. The connection stays open when the certificate
    expires, or when its authority is no longer trusted. Trainer and sidecar check here and close
    the connection themselves. Without TLS nothing is checked.
    """

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
            raise _bad_certificate(
                f"the certificate of {self._claimed.name} ended at {self._ends} and no newer one"
                " has been presented"
            )
        bundles = self._credentials.site_bundles_pem
        if bundles is self._checked_with or self._ends is None:
            return
        at = min(now or datetime.now(UTC), self._ends)
        self._credentials.check_peer(self.certificate_pem, self._claimed, self._job, now=at)
        self._checked_with = bundles


def _bad_certificate(message: str) -> CallerError:
    return CallerError(PeerRefusal.BAD_CERTIFICATE, message)
