"""A site's bundle: the public certificates by which other sites believe what its authority signed.

Called by `trust` and `listed_sites`. Reads PEM and says what stands in it; fetches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlion_api.errors import ContractError, UnavailableError

if TYPE_CHECKING:
    from datetime import datetime

    from cryptography import x509

MAX_BUNDLE_LENGTH: Final = 16_000
"""In characters, as in the chart's schema: the bundles of 64 sites fit into one ConfigMap."""
_AUTHORITY: Final = "dlion site "
"""What the subject of an authority that an operator made begins with, before the site's name."""


@dataclass(frozen=True)
class Bundle:
    """Certificates of one site's authority, at least one, the newest first as a rule."""

    certificates: tuple[x509.Certificate, ...]

    @property
    def pem(self) -> str:
        """The certificates and nothing else that stood beside them."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return "".join(each.public_bytes(Encoding.PEM).decode() for each in self.certificates)

    @property
    def newest(self) -> x509.Certificate:
        """The one that ends last."""
        return max(self.certificates, key=lambda each: each.not_valid_after_utc)

    @property
    def begins(self) -> datetime:
        """From when on one of them holds."""
        return min(each.not_valid_before_utc for each in self.certificates)

    @property
    def ends(self) -> datetime:
        """Until when one of them holds."""
        return self.newest.not_valid_after_utc

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the newest certificate, as `openssl x509 -fingerprint -sha256` has it."""
        from cryptography.hazmat.primitives.hashes import SHA256

        return self.newest.fingerprint(SHA256()).hex(":").upper()

    @property
    def keys(self) -> frozenset[bytes]:
        """The public keys that are certified, DER."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        form = PublicFormat.SubjectPublicKeyInfo
        return frozenset(
            each.public_key().public_bytes(Encoding.DER, form) for each in self.certificates
        )

    @property
    def sites(self) -> frozenset[str]:
        """The sites that the subjects name; an authority of another making names none."""
        from cryptography.x509.oid import NameOID

        found = [
            str(name.value)
            for each in self.certificates
            for name in each.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        ]
        return frozenset(
            name.removeprefix(_AUTHORITY) for name in found if name.startswith(_AUTHORITY)
        )


def read_bundle(text: str | bytes) -> Bundle:
    """The bundle that is written there as PEM.

    Raises: ContractError where it is too long, holds a private key (which is not repeated), no
    certificate, or one that is no authority's; UnavailableError where `cryptography` is missing.
    """
    try:
        from cryptography import x509
    except ImportError as error:
        raise UnavailableError(
            f"the library that reads certificates is missing ({error}). Install it: "
            "pip install 'dlion[cluster]'"
        ) from None
    content = text.encode() if isinstance(text, str) else text
    if b"PRIVATE KEY" in content:
        raise ContractError(
            "holds a private key. Take it out, and have a new one made at that site, as this one "
            "may have been seen: stop its operator, delete the Secret of its authority, and start "
            "the operator again"
        )
    if len(content) > MAX_BUNDLE_LENGTH:
        raise ContractError(f"is {len(content)} bytes long; allowed: {MAX_BUNDLE_LENGTH}")
    try:
        certificates = tuple(x509.load_pem_x509_certificates(content))
    except ValueError as error:
        raise ContractError(f"is not PEM of certificates: {error}") from None
    if not all(map(_is_authority, certificates)):
        raise ContractError("holds a certificate that is no authority's")
    return Bundle(certificates)


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except (x509.ExtensionNotFound, ValueError):
        return False
    return constraints.value.ca
