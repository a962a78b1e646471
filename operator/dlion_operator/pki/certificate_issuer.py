"""Issue certificates for workers, keepers and servers with a given authority."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dlion_api.errors import ContractError
from dlion_api.names import DNS_LABEL, JobKey, KeeperIdentity, SiteName, WorkerIdentity
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE

LIFE = timedelta(hours=24)
MAX_REQUEST_BYTES = 8192
MAX_LABEL_LENGTH = 63
WORKER_LABELS = 7
"""Worker, group, run, job, namespace, site, `dlion`; none may contain a dot."""

KEEPER_LABELS = 6
"""The number of labels of a keeper's name, with `keeper` in place of worker and group."""

MAX_NAME_LENGTH = 253
CLIENT_AND_SERVER = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)

SigningKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Issuer:
    """An authority's key and certificate, and the lifetime of the certificates that it signs."""

    key: SigningKey
    certificate: x509.Certificate
    life: timedelta = LIFE

    def sign(
        self,
        csr_pem: bytes,
        worker: WorkerIdentity | KeeperIdentity,
        job: JobKey,
        *,
        site: SiteName,
        now: datetime | None = None,
    ) -> bytes:
        """Return a certificate chain (PEM) for a worker or keeper of that site and run.

        Takes *only* the public key from the request: the names are those of `worker`.

        Raises:
            ContractError: The worker is another site's; the request, its signature or its kind
                of key is invalid; or a name does not fit a certificate.
        """
        if worker.site != site:
            raise ContractError(
                f"worker {worker.name}: the authority of site {site} signs for its own"
                f" workers only (given: site {worker.site}); ask that site's coordinator"
            )
        return pem(self.certify(requested_key(csr_pem), worker, job, now or datetime.now(UTC)))

    def certify(
        self,
        public_key: ec.EllipticCurvePublicKey,
        worker: WorkerIdentity | KeeperIdentity,
        job: JobKey,
        now: datetime,
    ) -> x509.Certificate:
        """Return a certificate for that key of a worker or keeper of that run.

        Raises: ContractError if a name does not fit a certificate.
        """
        label_count = KEEPER_LABELS if isinstance(worker, KeeperIdentity) else WORKER_LABELS
        dns_names = [worker.dns_name(job)]
        if isinstance(worker, WorkerIdentity):
            dns_names.append(worker.measuring_dns_name(job))
        names = [
            x509.UniformResourceIdentifier(worker.spiffe_id(job)),
            *(x509.DNSName(checked_dns_name(name, label_count)) for name in dns_names),
        ]
        return self.issue(public_key, names, CLIENT_AND_SERVER, now)

    def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        now: datetime,
        *,
        life: timedelta | None = None,
    ) -> x509.Certificate:
        """Return a certificate for that key and these names.

        It is valid for `life`, or `self.life`, but no longer than the authority's own.
        """
        ends = min(now + (life or self.life), self.certificate.not_valid_after_utc)
        return (
            x509.CertificateBuilder()
            # No common name: it is limited to 64 characters, and no client reads it.
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "dlion")]))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW_ALLOWANCE)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(self._authority_identifier(), critical=False)
            .sign(self.key, _digest(self.key))
        )

    def _authority_identifier(self) -> x509.AuthorityKeyIdentifier:
        try:
            own = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        except x509.ExtensionNotFound:
            return x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value)


def requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a self-signed certificate signing request (PEM).

    Raises: ContractError if it is too long, malformed or altered, or its key is not EC P-256.
    """
    if len(csr_pem) > MAX_REQUEST_BYTES:
        raise ContractError(
            f"certificate signing request of {len(csr_pem)} bytes; allowed: {MAX_REQUEST_BYTES}"
        )
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        signed = request.is_signature_valid
        key = request.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ContractError(f"certificate signing request cannot be read: {error}") from error
    if not signed:
        raise ContractError("certificate signing request is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ContractError(
            f"certificate signing request carries a {type(key).__name__}; allowed: EC P-256"
        )
    return key


def checked_dns_name(name: str, label_count: int | None = None) -> str:
    """Return the name if it is a valid DNS name with that number of labels, or any number.

    Raises: ContractError if it is not.
    """
    labels = name.split(".")
    label_count = label_count or len(labels)
    bad = [x for x in labels if len(x) > MAX_LABEL_LENGTH or not DNS_LABEL.fullmatch(x)]
    if bad or len(labels) != label_count or len(name) > MAX_NAME_LENGTH:
        raise ContractError(
            f"{name!r} ({len(name)} characters) cannot be a certificate's name"
            + (f" because of {', '.join(map(repr, bad))}" if bad else "")
            + f"; allowed: {label_count} labels of a-z, 0-9 and '-' of at most {MAX_LABEL_LENGTH},"
            f" at most {MAX_NAME_LENGTH} in all. Shorten the names of job, run, site or group"
        )
    return name


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return the key usage of a CA's certificate or of a leaf certificate."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def pem(*certificates: x509.Certificate) -> bytes:
    """Return the concatenated PEM of these certificates."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _digest(key: SigningKey) -> hashes.SHA256 | hashes.SHA384 | hashes.SHA512:
    """Return the hash for the key's size: verifiers accept only the hash that matches a curve."""
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.key_size > 256:
        return hashes.SHA512() if key.key_size > 384 else hashes.SHA384()
    return hashes.SHA256()
