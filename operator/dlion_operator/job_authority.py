"""The authority that a job names for its workers at this site (`tls.mode` other than `Managed`).

Reads key and certificate as users and cert-manager write them, judges them as the workers' peers
will, and signs. Where they come from is `named_secret`'s business; who is told of them
`site_runs`'. The key stays in this process.
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
from dlion_operator.authority_bundles import (
    MAX_RUN_BUNDLE_BYTES,
    authorities_in,
    run_bundle,
    valid_now,
)
from dlion_operator.issuing import (
    CLIENT_AND_SERVER,
    Issuer,
    SigningKey,
    checked_dns_name,
    pem,
)

LEAST_RSA_BITS = 2048
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_KINDS = f"RSA of {LEAST_RSA_BITS} bits or more, EC P-256, P-384 or P-521"


class CannotSignError(UnavailableError):
    """There is no key to sign with, for now."""


@dataclass(frozen=True)
class NamedAuthority:
    """What was found of the authority that a job names."""

    issuer: Issuer | None
    problem: str = ""
    """Why there is none, and what to do; empty: there is one."""
    missing_s: float = 0.0
    """How long there has been none."""


@dataclass(frozen=True)
class JobAuthority:
    """The authority of one run at this site, over all certificates that it has had."""

    site: SiteName
    issuer: Issuer | None = None
    bundle_pem: bytes = b""
    """By which its workers are known: the certificate that signs, and those that did before, until
    they end. The certificate above it, if any, signs others and is not in it."""
    problem: str = ""
    """Why nothing can be signed; empty: something can."""

    def followed_by(self, found: NamedAuthority, now: datetime) -> JobAuthority:
        """The same one, as it is after that was found of it."""
        earlier = authorities_in(self.bundle_pem) if self.bundle_pem else []
        newest = [found.issuer.certificate] if found.issuer else []
        bundle = run_bundle(valid_now([*newest, *earlier], now))
        return JobAuthority(self.site, found.issuer, bundle, found.problem)

    def sign(self, csr_pem: bytes, worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> bytes:
        """Certificate chain (PEM) for that worker, or that site's keeper, of that run.

        Raises:
            CannotSignError: there is no key; a later call may find one.
            ContractError: as `Issuer.sign` does.
        """
        if self.issuer is None:
            raise CannotSignError(f"no certificate can be signed for {job}: {self.problem}")
        return self.issuer.sign(csr_pem, worker, job, site=self.site)


def issuer_of(
    certificate_pem: bytes, key_pem: bytes, *, life: timedelta, job: JobKey, site: SiteName,
    now: datetime | None = None,
) -> Issuer:  # fmt: skip
    """Who signs for that job's workers, by key and certificate as a Secret holds them. Of several
    certificates the first is the authority's; what follows are those above it.

    Raises:
        ContractError: they cannot be read, do not fit, or peers would not believe what they sign;
            says what to do.
    """
    now = now or datetime.now(UTC)
    certificate, key = _certificate(certificate_pem), _key(key_pem)
    if not _fits(key, certificate):
        raise ContractError("tls.key is not the key of tls.crt: put both of one authority there")
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= ends:
        raise ContractError(f"its certificate has run out on {ends:%Y-%m-%d}: renew it")
    if now < begins:
        raise ContractError(
            f"its certificate holds from {begins:%Y-%m-%d %H:%M} UTC on: wait, or set clocks right"
        )
    if len(pem(certificate)) > MAX_RUN_BUNDLE_BYTES // 2:
        raise ContractError(f"its certificate is longer than {MAX_RUN_BUNDLE_BYTES // 2} bytes")
    issuer = Issuer(key, certificate, life)
    _check_believed(issuer, job, site, now)
    return issuer


def _certificate(content: bytes) -> x509.Certificate:
    try:
        return authorities_in(content)[0]
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
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= LEAST_RSA_BITS:
        return key
    raise ContractError(f"tls.key is of a kind that peers do not take; allowed: {_KINDS}")


def _fits(key: SigningKey, certificate: x509.Certificate) -> bool:
    try:
        return certificate.public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return False


def _check_believed(issuer: Issuer, job: JobKey, site: SiteName, now: datetime) -> None:
    """Signs for a keeper of that job and verifies it as workers verify each other.

    Raises:
        ContractError: they would not believe it.
    """
    keeper = KeeperIdentity(site)
    names = [
        x509.UniformResourceIdentifier(keeper.spiffe_id(job)),
        x509.DNSName(checked_dns_name(keeper.dns_name(job))),
    ]
    public_key = ec.generate_private_key(ec.SECP256R1()).public_key()
    signed = issuer.issue(public_key, names, CLIENT_AND_SERVER, now)
    policy = PolicyBuilder().store(Store([issuer.certificate])).time(now)
    try:
        policy.build_client_verifier().verify(signed, [])
    except VerificationError as error:
        raise ContractError(
            f"peers would not believe what it signs: {error}. An authority's certificate has"
            " basicConstraints CA:TRUE (critical) and keyUsage keyCertSign, and no constraint that"
            " keeps it from signing for names that end in .dlion"
        ) from error
