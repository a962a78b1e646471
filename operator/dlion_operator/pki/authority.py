"""A site's certificate authority and its workers' tokens, both in memory.

The coordinator calls it for certificate signing requests, after it has verified the caller's token.
Each site of a run has its own authority, whose key never leaves the process.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dlion_api.errors import ContractError
from dlion_api.names import (
    JobKey,
    KeeperIdentity,
    OperatorIdentity,
    Rank,
    SiteName,
    WorkerIdentity,
)
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE, renewal_after
from dlion_operator.pki.certificate_issuer import (
    CLIENT_AND_SERVER,
    LIFE,
    Issuer,
    checked_dns_name,
    key_usage,
    pem,
)
from dlion_operator.pki.token_bindings import Bearer

AUTHORITY_LIFE = timedelta(days=365)


@dataclass(frozen=True)
class ServerIdentity:
    """Key and certificate chain (PEM) that a server of this site presents."""

    key_pem: bytes
    certificate_chain_pem: bytes
    begins: datetime
    renew_at: datetime

    def is_renewal_due(self, now: datetime) -> bool:
        """Whether half of its lifetime is over, or the clock was set back to before it begins."""
        return not self.begins <= now < self.renew_at


@dataclass(frozen=True)
class StoredAuthority:
    """A stored authority (PEM): its key and its certificates, the newest first."""

    key_pem: bytes
    certificate_pem: bytes


class CertificateAuthority:
    """One site's certificate authority (EC P-256), new or restored from an earlier process."""

    def __init__(
        self,
        site: SiteName,
        *,
        life: timedelta = LIFE,
        now: datetime | None = None,
        stored: StoredAuthority | None = None,
    ) -> None:
        """`stored` is an earlier process's authority; None: create a new one.

        Raises: ContractError if `stored` is invalid, expired or another site's.
        """
        self.site = site
        now = now or datetime.now(UTC)
        if stored is None:
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._certificate = _authority_certificate(self._key, site, now, now + AUTHORITY_LIFE)
            self._earlier: tuple[x509.Certificate, ...] = ()
        else:
            self._key, (self._certificate, *earlier) = _restored(stored, site, now)
            self._earlier = tuple(earlier)
        self._issuer = Issuer(self._key, self._certificate, life)

    def to_stored(self) -> StoredAuthority:
        """Return what restores this authority in a later process, including the private key."""
        return StoredAuthority(_key_pem(self._key), self.bundle_pem)

    @property
    def bundle_pem(self) -> bytes:
        """The public certificates that others trust this authority by, the newest first."""
        return pem(self._certificate, *self._earlier)

    def is_renewal_due(self, *, now: datetime | None = None) -> bool:
        """Whether at most a third of its certificate's lifetime is left, or the clock was set back
        to before it begins."""
        begins, ends = self._certificate.not_valid_before_utc, self._certificate.not_valid_after_utc
        return not begins <= (now or datetime.now(UTC)) < ends - (ends - begins) / 3

    def renewed(self, *, now: datetime | None = None) -> CertificateAuthority:
        """Return the authority with a new certificate for the same key and name.

        Either certificate verifies what it signs, so sites may install the new bundle at any time
        before the old certificate expires.
        """
        now = now or datetime.now(UTC)
        # A clock that is behind makes a renewal due, too: the new one must be valid once it is set.
        ends = max(now + AUTHORITY_LIFE, self._certificate.not_valid_after_utc)
        certificate = _authority_certificate(self._key, self.site, now, ends)
        stored = pem(certificate, self._certificate, *self._earlier)
        return CertificateAuthority(
            self.site,
            life=self._issuer.life,
            now=now,
            stored=StoredAuthority(_key_pem(self._key), stored),
        )

    def sign(
        self,
        csr_pem: bytes,
        worker: WorkerIdentity | KeeperIdentity,
        job: JobKey,
        *,
        now: datetime | None = None,
    ) -> bytes:
        """Return a certificate chain (PEM) for a worker or keeper of that run.

        Raises: ContractError, as `Issuer.sign` does.
        """
        return self._issuer.sign(csr_pem, worker, job, site=self.site, now=now)

    def checkpoint_key(self, job_uid: str, job: JobKey, rank: Rank) -> bytes:
        """Return the 32 bytes that authenticate the checkpoints of that worker in that run.

        A renewed authority and a restarted operator return the same, as the key is the same.
        `job_uid`: UID of the DLionJob at this site. Source: HKDF (RFC 5869) with SHA-256.
        """
        secret = self._key.private_numbers().private_value.to_bytes(32, "big")
        purpose = f"dlion.v1alpha1.Checkpoint\0{job_uid}\0{job}\0{rank}".encode()
        return HKDF(hashes.SHA256(), length=32, salt=None, info=purpose).derive(secret)

    def server_identity(self, dns_name: str, *, now: datetime | None = None) -> ServerIdentity:
        """Return key and certificate for a server in this process (the coordinator)."""
        names = [x509.DNSName(checked_dns_name(dns_name))]
        return self._identity(names, [ExtendedKeyUsageOID.SERVER_AUTH], None, now)

    def operator_identity(
        self, *, life: timedelta | None = None, now: datetime | None = None
    ) -> ServerIdentity:
        """Return this site's operator's key and certificate, valid as client and server."""
        operator = OperatorIdentity(self.site)
        return self._identity(
            [
                x509.UniformResourceIdentifier(operator.spiffe_id),
                x509.DNSName(checked_dns_name(operator.dns_name)),
            ],
            CLIENT_AND_SERVER,
            life,
            now,
        )

    def _identity(
        self,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        life: timedelta | None,
        now: datetime | None,
    ) -> ServerIdentity:
        key, now = ec.generate_private_key(ec.SECP256R1()), now or datetime.now(UTC)
        certificate = self._issuer.issue(key.public_key(), names, usages, now, life=life)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        renew_at = now + renewal_after(begins, ends)
        return ServerIdentity(_key_pem(key), pem(certificate), begins, renew_at)


class Tokens:
    """Random tokens, one per worker of a run, for runs without a cluster that issues tokens."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[JobKey, WorkerIdentity | KeeperIdentity], str] = {}

    def issue(self, worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> str:
        """Return the worker's token, which stays the same."""
        return self._tokens.setdefault((job, worker), secrets.token_urlsafe(32))

    async def verify(
        self, token: str, worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> Bearer | None:
        """Return the bearer if the token is that worker's. Compares in constant time."""
        expected = self._tokens.get((job, worker), "")
        # Compared even if no token was issued, so that timing reveals nothing.
        is_its_own = hmac.compare_digest(token.encode(), expected.encode()) and bool(expected)
        return Bearer() if is_its_own else None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _restored(
    stored: StoredAuthority, site: SiteName, now: datetime
) -> tuple[ec.EllipticCurvePrivateKey, list[x509.Certificate]]:
    """Return its key and its certificates, without expired earlier ones."""
    try:
        key = serialization.load_pem_private_key(stored.key_pem, password=None)
        certificate, *earlier = x509.load_pem_x509_certificates(stored.certificate_pem)
        certified = [each.public_key() for each in (certificate, *earlier)]
    except Exception as error:  # cryptography has no common error class
        raise ContractError(f"the stored authority cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ContractError(f"the stored authority has a {type(key).__name__}; allowed: EC P-256")
    if any(each != key.public_key() for each in certified):
        raise ContractError("the stored authority's certificate is for another key")
    for each in (certificate, *earlier):
        if each.subject != _authority_name(site):
            given = each.subject.rfc4514_string()
            raise ContractError(f"the stored authority is {given}; allowed: that of site {site}")
    if now >= certificate.not_valid_after_utc:
        raise ContractError(
            f"the stored authority expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
        )
    return key, [certificate, *(each for each in earlier if now < each.not_valid_after_utc)]


def _authority_name(site: SiteName) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"dlion site {site}")])


def _authority_certificate(
    key: ec.EllipticCurvePrivateKey, site: SiteName, now: datetime, ends: datetime
) -> x509.Certificate:
    name = _authority_name(site)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW_ALLOWANCE)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
