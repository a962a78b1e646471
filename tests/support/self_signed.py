"""Self-signed certificates of servers in tests, with their keys; or signed by one of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path


def self_signed(
    folder: Path,
    name: str,
    *,
    host: str = "127.0.0.1",
    begins_s: float = -3600.0,
    ends_s: float = 3600.0,
    issuer: Path | None = None,
) -> Path:
    """A PEM file: a certificate for an IP address or DNS name, valid from now + `begins_s`.

    `issuer`: the file of another that signs it.
    """
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    is_address = host.replace(".", "").isdigit()
    of_host = x509.IPAddress(ip_address(host)) if is_address else x509.DNSName(host)
    issuer_name, issuer_key = subject, key
    if issuer is not None:
        issuer_name = x509.load_pem_x509_certificate(issuer.read_bytes()).subject
        issuer_key = serialization.load_pem_private_key(issuer.read_bytes(), password=None)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer_name)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(seconds=begins_s))
        .not_valid_after(now + timedelta(seconds=ends_s))
        .add_extension(x509.SubjectAlternativeName([of_host]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )  # fmt: skip
    path = folder / f"{name}.pem"
    pem = made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(pem)
    return path
