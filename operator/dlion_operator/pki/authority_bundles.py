"""Parse and check CA certificates of files, annotations and other sites' reports. Pure."""

from collections.abc import Iterable
from datetime import datetime

from cryptography import x509

from dlion_api.errors import ContractError
from dlion_operator.pki.certificate_issuer import pem

MAX_RUN_BUNDLE_BYTES = 16 * 1024
_BEGIN = b"-----BEGIN CERTIFICATE-----"
MAX_RUN_CERTIFICATES = 8
"""Per site and run: the current certificate and earlier ones."""


def parse_authorities(content: bytes) -> list[x509.Certificate]:
    """Return the CA certificates of a PEM text; ignore its other content.

    Raises: ContractError if it has no certificates, or one that is cut off or not a CA's.
    """
    try:
        certificates = x509.load_pem_x509_certificates(content)
        are_authorities = all(map(_is_authority, certificates))
    except Exception as error:  # what cryptography raises for odd certificates has no common class
        raise ContractError("holds no certificates (PEM)") from error
    if content.count(_BEGIN) > len(certificates):  # cryptography leaves it out
        raise ContractError("holds a certificate that is cut off")
    if not are_authorities:
        raise ContractError("holds a certificate of no authority")
    return certificates


def valid_now(certificates: Iterable[x509.Certificate], now: datetime) -> list[x509.Certificate]:
    """Return the certificates that are valid at `now`."""
    return [c for c in certificates if c.not_valid_before_utc <= now < c.not_valid_after_utc]


def run_bundle(certificates: Iterable[x509.Certificate]) -> bytes:
    """Return these certificates (PEM) without duplicates, up to the limits of a run's bundle."""
    bundle, included = b"", set[bytes]()
    for certificate in certificates:
        text = pem(certificate)
        fits_size = len(bundle) + len(text) <= MAX_RUN_BUNDLE_BYTES
        if text not in included and fits_size and len(included) < MAX_RUN_CERTIFICATES:
            included.add(text)
            bundle += text
    return bundle


def checked_run_bundle(content: bytes) -> list[x509.Certificate]:
    """Parse a site's reported CA bundle of a run.

    Raises: ContractError if it is too long, has too many certificates, or one that is not a CA's.
    """
    if len(content) > MAX_RUN_BUNDLE_BYTES:
        raise ContractError(f"has {len(content)} bytes; allowed: {MAX_RUN_BUNDLE_BYTES}")
    certificates = parse_authorities(content)
    if len(certificates) > MAX_RUN_CERTIFICATES:
        raise ContractError(f"has {len(certificates)} certificates; allowed {MAX_RUN_CERTIFICATES}")
    return certificates


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    # An invalid date raises on access; it must do so here, where it is handled.
    has_dates = certificate.not_valid_before_utc < certificate.not_valid_after_utc
    return constraints.value.ca and has_dates
