"""A worker's proof of who it is, and its judgement of who its peers are.

Called by trainer and sidecar when they start, and by whoever opens a channel or a port between
workers. Owns the private key, which is made in memory and stays there. Does not talk to the
coordinator: `dlion_worker.coordination` carries the request and brings the certificate back.

Why two checks (docs of gRPC, tried): a client cannot read the server's certificate, so a channel
to a peer trusts *only that peer's site* and asks for the peer's DNS name; a server that trusts
several authorities accepts a certificate of one that claims to be another's worker, so the
certificate is verified again, against the authority of the site it claims.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, SiteName, WorkerIdentity
from dlion_api.refusals import CallerError, PeerRefusal
from dlion_api.trust import BACKDATED, renewal_after

MAX_CERTIFICATE_BYTES = 16384


class UnknownAuthorityError(UnavailableError):
    """Nothing is known to believe a site's workers by; it may come while the run goes on."""


class WorkerKey:
    """A private key (EC P-256) that never leaves this worker."""

    def __init__(self, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self._key = key or ec.generate_private_key(ec.SECP256R1())

    @classmethod
    def from_pem(cls, pem: bytes) -> WorkerKey:
        """The key that `pem` gave, for the next process of the same worker.

        Raises:
            ValueError: That is no such key.
        """
        key = serialization.load_pem_private_key(pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"a key of type {type(key).__name__}; allowed: elliptic curve")
        return cls(key)

    def fits(self, certificate: x509.Certificate) -> bool:
        """Whether that certificate is for this key."""
        return certificate.public_key() == self._key.public_key()

    def csr_pem(self) -> bytes:
        """Certificate signing request; it names nobody, the authority knows who asks."""
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "dlion")])
        request = x509.CertificateSigningRequestBuilder().subject_name(name)
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def signed(self, statement: bytes) -> bytes:
        """Signature of that statement, ECDSA with SHA-256."""
        return self._key.sign(statement, ec.ECDSA(hashes.SHA256()))

    def public_der(self) -> bytes:
        """The public key, for whoever is to hold signatures against it."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def pem(self) -> bytes:
        """The key as gRPC wants it; nobody but this worker may read it."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


@dataclass
class WorkerCredentials:
    """Key, certificate and every site's authority; or none of them (`tls: {mode: Disabled}`).

    They may change, from any thread: certificate and key together, and the authorities. What is
    connected stays so, and goes by the new ones when it is connected anew.
    """

    key: WorkerKey | None
    certificate_chain_pem: bytes
    site_bundles_pem: Mapping[SiteName, bytes]
    renewals: int = field(default=0, compare=False)
    """How many certificates have taken the place of the first."""
    _renewing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _stores: dict[SiteName, Store] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def insecure(cls) -> WorkerCredentials:
        """No encryption and no proof of identity, because the manifest says so."""
        return cls(None, b"", {})

    def renew(self, key: WorkerKey, certificate_chain_pem: bytes) -> None:
        """Shows that certificate, which is for that key, from the next handshake on."""
        with self._renewing:
            self.key, self.certificate_chain_pem = key, certificate_chain_pem
            self.renewals += 1

    def trust(self, site_bundles_pem: Mapping[SiteName, bytes]) -> bool:
        """Knows the sites by these from the next handshake on; whether they are others."""
        if self.key is None or site_bundles_pem == self.site_bundles_pem:
            return False
        self._stores = {}
        self.site_bundles_pem = dict(site_bundles_pem)
        self._stores = {}  # one may have been made in between, of what was trusted before
        return True

    @property
    def enabled(self) -> bool:
        """Whether links are encrypted and peers have to prove who they are."""
        return self.key is not None

    def shown(self) -> tuple[bytes, bytes]:
        """Key and certificate chain, PEM, that belong together; only with TLS."""
        with self._renewing:
            assert self.key is not None
            return self.key.pem(), self.certificate_chain_pem

    def server(self) -> grpc.ServerCredentials | None:
        """Credentials of a port that demands a certificate of its callers; None: insecure."""
        if self.key is None:
            return None
        served = self.site_bundles_pem, self.renewals

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Asked by gRPC at each handshake; None: nothing is other than it was."""
            nonlocal served
            bundles, renewals = self.site_bundles_pem, self.renewals
            if bundles is served[0] and renewals == served[1]:
                return None
            served = bundles, renewals
            return self._configuration(bundles)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(served[0]),
            changed,  # type: ignore[arg-type]  # None is "unchanged", says gRPC
            require_client_authentication=True,
        )

    def channel(self, site: SiteName) -> grpc.ChannelCredentials | None:
        """Credentials of a channel to a worker of that site, trusting no other; None: insecure.

        Raises:
            UnknownAuthorityError: That site's is not known.
        """
        if self.key is None:
            return None
        return grpc.ssl_channel_credentials(self._bundle(site), *self.shown())

    def target_options(self, dns_name: str) -> list[tuple[str, str]]:
        """Channel options that make gRPC ask for a peer of that name, wherever it is dialled."""
        return [("grpc.ssl_target_name_override", dns_name)] if self.enabled else []

    def check_peer(
        self,
        certificate_pem: bytes | None,
        claimed: WorkerIdentity,
        job: JobKey,
        *,
        now: datetime | None = None,
    ) -> None:
        """Passes if that certificate is that worker's, by its own site's authority.

        Raises:
            CallerError: It is not, or there is none. No retry helps.
        """
        if not self.enabled:
            return
        if not certificate_pem or len(certificate_pem) > MAX_CERTIFICATE_BYTES:
            raise _bad(f"{claimed.name}: no certificate of a usable size was shown")
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            policy = PolicyBuilder().store(self._store(claimed.site)).time(now or datetime.now(UTC))
            subjects = policy.build_client_verifier().verify(certificate, []).subjects
        except (ValueError, VerificationError, UnknownAuthorityError) as error:
            raise _bad(
                f"certificate of a caller that claims to be {claimed.name} is not by the"
                f" authority of site {claimed.site}: {error}"
            ) from error
        wanted = x509.UniformResourceIdentifier(claimed.spiffe_id(job))
        if wanted not in (subjects or []):
            given = ", ".join(str(name.value) for name in subjects or [])
            raise _bad(
                f"a caller claims to be {wanted.value}, its certificate says {given or 'nothing'}"
            )

    def _configuration(
        self, bundles: Mapping[SiteName, bytes]
    ) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [self.shown()], root_certificates=b"\n".join(bundles.values())
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
        stores = self._stores  # others take their place when other bundles are trusted
        if site not in stores:
            stores[site] = Store(x509.load_pem_x509_certificates(self._bundle(site)))
        return stores[site]


def _bad(words: str) -> CallerError:
    return CallerError(PeerRefusal.BAD_CERTIFICATE, words)


def renewal_due_s(chain_pem: bytes, *, now: datetime | None = None) -> float:
    """Seconds until a certificate is to be replaced, at least 0.

    `now` is for one that was signed some time ago, by this machine's wall clock; None: it was just
    now, and no clock is asked.
    """
    certificate = x509.load_pem_x509_certificates(chain_pem)[0]
    begins = certificate.not_valid_before_utc
    after = renewal_after(begins, certificate.not_valid_after_utc)
    age = timedelta(0) if now is None else max(timedelta(0), now - begins - BACKDATED)
    return max(0.0, (after - age).total_seconds())
