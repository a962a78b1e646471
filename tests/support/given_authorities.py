"""Authorities as users and cert-manager create them, with the faults that a test asks for.

Certificate and key are PEM.
"""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def ec_key() -> ec.EllipticCurvePrivateKey:
    """Return a new key each time."""
    return ec.generate_private_key(ec.SECP256R1())


@dataclass
class GivenAuthority:
    """A root, or an authority that another one has signed."""

    name: str = "plant-a ca"
    key: Key = field(default_factory=ec_key)
    above: GivenAuthority | None = None
    begins: datetime = field(default_factory=lambda: datetime.now(UTC) - timedelta(hours=1))
    life: timedelta = timedelta(days=90)
    is_authority: bool = True
    key_usage: bool = True
    permitted: str = ""
    """The names that it may sign for, as a constraint; empty for any."""

    def __post_init__(self) -> None:
        self.certificate = self._made()

    @property
    def certificate_pem(self) -> bytes:
        """Its certificate and those above it without the root, as cert-manager writes them."""
        chain = [self.certificate]
        above = self.above
        while above is not None and above.above is not None:
            chain.append(above.certificate)
            above = above.above
        return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain)

    @property
    def own_pem(self) -> bytes:
        """Its own certificate alone."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self, form: str = "PKCS8", password: bytes = b"") -> bytes:
        """Its key in that form (`TraditionalOpenSSL` is PKCS#1 or SEC1)."""
        encryption: Any = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password)
        kind = getattr(serialization.PrivateFormat, form)
        return self.key.private_bytes(serialization.Encoding.PEM, kind, encryption)

    def secret(self, name: str = "plant-ca", **labels: str) -> dict[str, Any]:
        """A Secret with certificate and key."""
        data = {"tls.crt": self.certificate_pem, "tls.key": self.key_pem()}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": name, "labels": labels},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }

    def _made(self) -> x509.Certificate:
        signer = self.above or self
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(self.name))
            .issuer_name(_name(signer.name))
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.begins)
            .not_valid_after(self.begins + self.life)
            .add_extension(
                x509.BasicConstraints(ca=self.is_authority, path_length=None), critical=True
            )
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False
            )
        )
        if self.key_usage:
            builder = builder.add_extension(_KEY_USAGE, critical=True)
        if self.permitted:
            allowed = x509.NameConstraints([x509.DNSName(self.permitted)], None)
            builder = builder.add_extension(allowed, critical=True)
        return builder.sign(signer.key, hashes.SHA256())


_KEY_USAGE = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def odd_certificates(certificate_pem: bytes) -> dict[str, bytes]:
    """The first certificate with a few bytes changed: its encoding is right, its content is not.
    Reading each raises an error of another class."""
    der = ssl.PEM_cert_to_DER_cert(certificate_pem.decode())
    changes = {
        "an unknown version": ("a003020102", "a003020105"),
        "an extension twice": ("0603551d0f", "0603551d13"),  # keyUsage, basicConstraints
        "a key of an unknown kind": ("06072a8648ce3d0201", "06072a8648ce3d027f"),
    }
    made = {}
    for name, (old, new) in changes.items():
        changed = der.replace(bytes.fromhex(old), bytes.fromhex(new), 1)
        assert changed != der, name
        made[name] = ssl.DER_cert_to_PEM_cert(changed).encode()
    return made
