"""The authority that a job names for its workers at this site (`tls.mode` other than `Managed`).

Parses key and certificate from users or cert-manager, checks that peers will accept what they sign,
and signs. The key stays in this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, KeeperIdentity, SiteName, WorkerIdentity
from dlion_operator.pki.authority_bundles import (
    MAX_RUN_BUNDLE_BYTES,
    parse_authorities,
    run_bundle,
    valid_now,
)
from dlion_operator.pki.certificate_issuer import Issuer, SigningKey, pem
from dlion_operator.pki.named_authority import NamedAuthority

MIN_RSA_BITS = 2048
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_KINDS = f"RSA of {MIN_RSA_BITS} bits or more, EC P-256, P-384 or P-521"


class CannotSignError(UnavailableError):
    """There is no signing key at the moment."""


@dataclass(frozen=True)
class JobAuthority:
    """The authority of one run at this site, with its current and earlier certificates."""

    site: SiteName
    issuer: Issuer | None = None
    bundle_pem: bytes = b""
    """Verifies its workers: the signing certificate and unexpired earlier ones. Their parent is not
    included, because it may sign others."""
    problem: str = ""
    """Why nothing can be signed; empty: signing works."""

    def updated_with(self, named: NamedAuthority, now: datetime) -> JobAuthority:
        """Return the authority with the newly read issuer or problem."""
        earlier = parse_authorities(self.bundle_pem) if self.bundle_pem else []
        newest = [named.issuer.certificate] if named.issuer else []
        bundle = run_bundle(valid_now([*newest, *earlier], now))
        return JobAuthority(self.site, named.issuer, bundle, named.problem)

    def sign(self, csr_pem: bytes, worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> bytes:
        """Return a certificate chain (PEM) for a worker or keeper of that run.

        Raises:
            CannotSignError: There is no key; a retry may help.
            ContractError: As `Issuer.sign` does.
        """
        if self.issuer is None:
            raise CannotSignError(f"no certificate can be signed for {job}: {self.problem}")
        return self.issuer.sign(csr_pem, worker, job, site=self.site)


def issuer_of(
    certificate_pem: bytes, key_pem: bytes, *, life: timedelta, job: JobKey, site: SiteName,
    now: datetime | None = None,
) -> Issuer:  # fmt: skip
    """Return the issuer for key and certificate from a Secret.

    Of several certificates the first is the authority's; its parents follow.

    Raises:
        ContractError: They are unreadable, do not match, or peers would reject what they sign.
            The message gives advice.
    """
    now = now or datetime.now(UTC)
    certificate, key = _certificate(certificate_pem), _key(key_pem)
    if not _key_matches(key, certificate):
        raise ContractError("tls.key is not the key of tls.crt: put both of one authority there")
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= ends:
        raise ContractError(f"its certificate expired on {ends:%Y-%m-%d}: renew it")
    if now < begins:
        raise ContractError(
            f"its certificate is valid from {begins:%Y-%m-%d %H:%M} UTC: wait, or correct the clock"
        )
    if len(pem(certificate)) > MAX_RUN_BUNDLE_BYTES // 2:
        raise ContractError(f"its certificate is longer than {MAX_RUN_BUNDLE_BYTES // 2} bytes")
    issuer = Issuer(key, certificate, life)
    _check_accepted(issuer, job, site, now)
    return issuer


def _certificate(content: bytes) -> x509.Certificate:
    try:
        return parse_authorities(content)[0]
    except ContractError as error:
        advice = "; put the certificate of an authority there (basicConstraints CA:TRUE)"
        raise ContractError(f"tls.crt {error}{advice}") from error


def _key(content: bytes) -> SigningKey:
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError as error:
        raise ContractError("tls.key is encrypted: put it there without a password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ContractError(f"tls.key holds no private key (PEM); allowed: {_KINDS}") from error
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, _CURVES):
        return key
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= MIN_RSA_BITS:
        return key
    raise ContractError(f"tls.key is of a kind that peers do not accept; allowed: {_KINDS}")


def _key_matches(key: SigningKey, certificate: x509.Certificate) -> bool:
    try:
        return certificate.public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return False


def _check_accepted(issuer: Issuer, job: JobKey, site: SiteName, now: datetime) -> None:
    """Sign a test certificate for a keeper of that job and verify it as workers do.

    Raises: ContractError if workers would reject it.
    """
    public_key = ec.generate_private_key(ec.SECP256R1()).public_key()
    signed = issuer.certify(public_key, KeeperIdentity(site), job, now)
    policy = PolicyBuilder().store(Store([issuer.certificate])).time(now)
    try:
        policy.build_client_verifier().verify(signed, [])
    except VerificationError as error:
        raise ContractError(
            f"peers would reject what it signs: {error}. An authority's certificate needs"
            " basicConstraints CA:TRUE (critical) and keyUsage keyCertSign, and no constraint that"
            " forbids names that end in .dlion"
        ) from error
