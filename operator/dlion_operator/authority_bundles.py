"""Public certificates of authorities, read from texts that others wrote. Pure.

Called for what stands in files, in annotations, and in what other sites' operators say: nothing of
it is trusted before it has been here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from cryptography import x509

from dlion_api.errors import ContractError
from dlion_operator.issuing import pem

MAX_RUN_BUNDLE_BYTES = 16 * 1024
MAX_RUN_CERTIFICATES = 8
"""Of one site's authority of one run: the one that signs, and those that did before."""


def authorities_in(content: bytes) -> list[x509.Certificate]:
    """The certificates of that PEM text, each of an authority; whatever else it holds is left.

    Raises:
        ContractError: there are none, or one is of no authority.
    """
    try:
        certificates = x509.load_pem_x509_certificates(content)
        are_authorities = all(map(_is_authority, certificates))
    except Exception as error:  # what cryptography raises for odd certificates has no common class
        raise ContractError("holds no certificates (PEM)") from error
    if not are_authorities:
        raise ContractError("holds a certificate of no authority")
    return certificates


def valid_now(certificates: Iterable[x509.Certificate], now: datetime) -> list[x509.Certificate]:
    """Those that hold at that moment."""
    return [c for c in certificates if c.not_valid_before_utc <= now < c.not_valid_after_utc]


def run_bundle(certificates: Iterable[x509.Certificate]) -> bytes:
    """These, PEM, each once, as far as a run's bundle may hold them: the first come first."""
    bundle, seen = b"", set[bytes]()
    for certificate in certificates:
        text = pem(certificate)
        fits = len(bundle) + len(text) <= MAX_RUN_BUNDLE_BYTES and len(seen) < MAX_RUN_CERTIFICATES
        if text not in seen and fits:
            seen.add(text)
            bundle += text
    return bundle


def checked_run_bundle(content: bytes) -> list[x509.Certificate]:
    """The certificates by which a site's workers of a run are said to be known.

    Raises:
        ContractError: it is too long, too much, or holds something other than authorities.
    """
    if len(content) > MAX_RUN_BUNDLE_BYTES:
        raise ContractError(f"has {len(content)} bytes; allowed: {MAX_RUN_BUNDLE_BYTES}")
    certificates = authorities_in(content)
    if len(certificates) > MAX_RUN_CERTIFICATES:
        raise ContractError(f"has {len(certificates)} certificates; allowed {MAX_RUN_CERTIFICATES}")
    return certificates


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    # A date that is none has to show here, not where it is compared.
    has_dates = certificate.not_valid_before_utc < certificate.not_valid_after_utc
    return constraints.value.ca and has_dates
