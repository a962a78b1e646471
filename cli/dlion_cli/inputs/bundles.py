"""A site's bundle: the public certificates of its authority, read from PEM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlion_api.errors import ContractError, UnavailableError
from dlion_cli.terminal.failures import install_advice

if TYPE_CHECKING:
    from datetime import datetime

    from cryptography import x509

MAX_BUNDLE_LENGTH: Final = 16_000
"""Characters, as in the chart's schema: the bundles of 64 sites fit into one ConfigMap."""
_AUTHORITY: Final = "dlion site "
"""Subject prefix of authorities that operators create; the site's name follows."""


@dataclass(frozen=True)
class Bundle:
    """One or more certificates of one site's authority."""

    certificates: tuple[x509.Certificate, ...]

    @property
    def pem(self) -> str:
        """Only the certificates, without other text."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return "".join(each.public_bytes(Encoding.PEM).decode() for each in self.certificates)

    @property
    def newest(self) -> x509.Certificate:
        """The certificate that expires last."""
        return max(self.certificates, key=lambda each: each.not_valid_after_utc)

    @property
    def not_before(self) -> datetime:
        """Earliest start of validity."""
        return min(each.not_valid_before_utc for each in self.certificates)

    @property
    def not_after(self) -> datetime:
        """Latest expiry."""
        return self.newest.not_valid_after_utc

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the newest certificate, as `openssl x509 -fingerprint -sha256` prints it."""
        from cryptography.hazmat.primitives.hashes import SHA256

        return self.newest.fingerprint(SHA256()).hex(":").upper()

    @property
    def keys(self) -> frozenset[bytes]:
        """The certified public keys, DER."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        form = PublicFormat.SubjectPublicKeyInfo
        return frozenset(
            each.public_key().public_bytes(Encoding.DER, form) for each in self.certificates
        )

    @property
    def sites(self) -> frozenset[str]:
        """The sites named in the subjects; empty for authorities that no operator created."""
        from cryptography.x509.oid import NameOID

        organizations = [
            str(name.value)
            for each in self.certificates
            for name in each.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        ]
        return frozenset(
            name.removeprefix(_AUTHORITY) for name in organizations if name.startswith(_AUTHORITY)
        )


def read_bundle(text: str | bytes) -> Bundle:
    """Parse a PEM bundle.

    Raises: ContractError if it is too long, contains a private key or a certificate of no
    authority, or is not PEM; UnavailableError if `cryptography` is not installed.
    """
    try:
        from cryptography import x509
    except ImportError as error:
        raise UnavailableError(
            f"the library that reads certificates is missing ({error}). {install_advice('cluster')}"
        ) from None
    content = text.encode() if isinstance(text, str) else text
    if b"PRIVATE KEY" in content:
        raise ContractError(
            "holds a private key. Remove it, and replace the site's key, which may be compromised: "
            "stop its operator, delete the Secret of its authority, and start the operator again"
        )
    if len(content) > MAX_BUNDLE_LENGTH:
        raise ContractError(f"is {len(content)} bytes long; allowed: {MAX_BUNDLE_LENGTH}")
    try:
        certificates = tuple(x509.load_pem_x509_certificates(content))
        are_authorities = all(map(_is_authority, certificates))
    except Exception as error:  # what cryptography raises for odd certificates has no common class
        raise ContractError(f"is not PEM of certificates: {error}") from error
    if not are_authorities:
        raise ContractError("holds a certificate that is not an authority's")
    return Bundle(certificates)


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    certificate.public_key()  # a key of an unknown kind raises here, where it is handled
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return constraints.value.ca
