"""A site's certificate authority and its workers' tokens, both in memory.

Called by the coordinator when a worker sends a certificate signing request. Owns the authority's
key, which never leaves the process; each site of a run has an authority of its own. Does not
decide who may join: whoever calls `sign` has checked a token first.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, KeeperIdentity, OperatorIdentity, SiteName, WorkerIdentity
from dlion_api.trust import BACKDATED
from dlion_operator.bearers import Bearer
from dlion_operator.issuing import (
    CLIENT_AND_SERVER,
    LIFE,
    Issuer,
    checked_dns_name,
    key_usage,
    pem,
)

AUTHORITY_LIFE = timedelta(days=365)


@dataclass(frozen=True)
class ServerIdentity:
    """What a server of this site itself presents: key and certificate chain, PEM."""

    key_pem: bytes
    certificate_chain_pem: bytes


@dataclass(frozen=True)
class KeptAuthority:
    """An authority as it is kept, PEM: its key, its certificate, and after it earlier ones."""

    key_pem: bytes
    certificate_pem: bytes


class Authority:
    """One site's certificate authority (EC P-256): made here, or kept from an earlier process."""

    def __init__(
        self,
        site: SiteName,
        *,
        life: timedelta = LIFE,
        now: datetime | None = None,
        kept: KeptAuthority | None = None,
    ) -> None:
        """`kept` is what an earlier process kept; None: a new one is made.

        Raises:
            ContractError: what was kept is no such authority, another site's, or has run out.
        """
        self.site = site
        now = now or datetime.now(UTC)
        if kept is None:
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._certificate = _authority_certificate(self._key, site, now)
            self._earlier: tuple[x509.Certificate, ...] = ()
        else:
            self._key, (self._certificate, *earlier) = _restored(kept, site, now)
            self._earlier = tuple(earlier)
        self._issuer = Issuer(self._key, self._certificate, life)

    def to_keep(self) -> KeptAuthority:
        """All that a later process needs to be this authority. Holds the private key."""
        return KeptAuthority(_key_pem(self._key), self.bundle_pem)

    @property
    def bundle_pem(self) -> bytes:
        """The public certificates that others trust this one by, the newest first."""
        return pem(self._certificate, *self._earlier)

    def is_renewal_due(self, *, now: datetime | None = None) -> bool:
        """Whether a third of its certificate's life is left, or less."""
        ends = self._certificate.not_valid_after_utc
        life = ends - self._certificate.not_valid_before_utc
        return ends - (now or datetime.now(UTC)) <= life / 3

    def renewed(self, *, now: datetime | None = None) -> Authority:
        """The same authority with a new life: a new certificate for its key, under its name.

        What it signs is believed by whoever knows either certificate, so that sites may take over
        the new bundle at any time before the old certificate ends.
        """
        now = now or datetime.now(UTC)
        certificate = _authority_certificate(self._key, self.site, now)
        kept = pem(certificate, self._certificate, *self._earlier)
        return Authority(
            self.site,
            life=self._issuer.life,
            now=now,
            kept=KeptAuthority(_key_pem(self._key), kept),
        )

    def sign(
        self,
        csr_pem: bytes,
        worker: WorkerIdentity | KeeperIdentity,
        job: JobKey,
        *,
        now: datetime | None = None,
    ) -> bytes:
        """Certificate chain (PEM) for that worker, or that site's keeper, of that run.

        Raises: ContractError, as `Issuer.sign` does.
        """
        return self._issuer.sign(csr_pem, worker, job, site=self.site, now=now)

    def server_identity(self, dns_name: str, *, now: datetime | None = None) -> ServerIdentity:
        """Key and certificate for a server in this very process (the coordinator)."""
        names = [x509.DNSName(checked_dns_name(dns_name))]
        return self._identity(names, [ExtendedKeyUsageOID.SERVER_AUTH], None, now)

    def operator_identity(
        self, *, life: timedelta | None = None, now: datetime | None = None
    ) -> ServerIdentity:
        """Key and certificate by which other sites' operators know this site's, on either end."""
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
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._issuer.issue(
            key.public_key(), names, usages, now or datetime.now(UTC), life=life
        )
        return ServerIdentity(key_pem=_key_pem(key), certificate_chain_pem=pem(certificate))


class Tokens:
    """Random tokens, one per worker of a run, for runs without a cluster to issue them."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[JobKey, WorkerIdentity | KeeperIdentity], str] = {}

    def issue(self, worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> str:
        """That worker's token; the same one when asked again."""
        return self._tokens.setdefault((job, worker), secrets.token_urlsafe(32))

    async def verify(
        self, token: str, worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> Bearer | None:
        """Whose that token is, if it is that worker's, compared in constant time. Waits for
        nothing."""
        expected = self._tokens.get((job, worker), "")
        # Compared even where nothing was issued, so that timing tells nothing either way.
        is_its_own = hmac.compare_digest(token.encode(), expected.encode()) and bool(expected)
        return Bearer() if is_its_own else None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _restored(
    kept: KeptAuthority, site: SiteName, now: datetime
) -> tuple[ec.EllipticCurvePrivateKey, list[x509.Certificate]]:
    """Its key, its certificate, and those earlier ones that have not run out."""
    try:
        key = serialization.load_pem_private_key(kept.key_pem, password=None)
        certificate, *earlier = x509.load_pem_x509_certificates(kept.certificate_pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ContractError(f"the kept authority cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ContractError(f"the kept authority has a {type(key).__name__}; allowed: EC P-256")
    for each in (certificate, *earlier):
        if each.public_key() != key.public_key():
            raise ContractError("the kept authority's certificate is for another key")
        if each.subject != _authority_name(site):
            given = each.subject.rfc4514_string()
            raise ContractError(f"the kept authority is {given}; allowed: that of site {site}")
    if now >= certificate.not_valid_after_utc:
        raise ContractError(
            f"the kept authority has run out on {certificate.not_valid_after_utc:%Y-%m-%d}"
        )
    return key, [certificate, *(each for each in earlier if now < each.not_valid_after_utc)]


def _authority_name(site: SiteName) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"dlion site {site}")])


def _authority_certificate(
    key: ec.EllipticCurvePrivateKey, site: SiteName, now: datetime
) -> x509.Certificate:
    name = _authority_name(site)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
