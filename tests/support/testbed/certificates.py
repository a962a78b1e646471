"""Keys and certificates of one site's cluster: an authority, and one certificate per component.

Elliptic curves, valid for a week. Kubernetes reads the user from the common name and its groups
from the organisations.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LIFE = timedelta(days=7)
_EARLIER = timedelta(minutes=10)


@dataclass(frozen=True)
class Authority:
    """A certificate authority whose key and certificates are in one folder, as `NAME.{crt,key}`."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        """Create an authority and write its files."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"{name} of a DLion testbed", ())
        certificate = (
            _builder(subject, subject, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(folder, name, key, certificate)
        return cls(folder, name, key, certificate)

    def issue(
        self,
        file_name: str,
        user: str,
        groups: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> None:
        """Write `FILE_NAME.{crt,key}` for a client and, with `hosts`, for a server."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(_name(user, groups), self.certificate.subject, key)
        if hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = (
            builder.add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        _write(self.folder, file_name, key, certificate)

    def kubeconfig(self, server: str, file_name: str, context: str) -> str:
        """A kubeconfig (JSON is YAML) for the certificate of that file name."""

        def encoded(suffix: str, name: str = file_name) -> str:
            return base64.b64encode((self.folder / f"{name}.{suffix}").read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": encoded("crt", self.name)}
        user = {"client-certificate-data": encoded("crt"), "client-key-data": encoded("key")}
        return json.dumps({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": context, "cluster": cluster}],
            "users": [{"name": file_name, "user": user}],
            "contexts": [{"name": context, "context": {"cluster": context, "user": file_name}}],
            "current-context": context,
        }, indent=1)  # fmt: skip


def write_key_pair(folder: Path, name: str) -> None:
    """Write `NAME.key` and `NAME.pub`, for signing service accounts' tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    _write_private(folder / f"{name}.key", _key_pem(key))
    (folder / f"{name}.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + _LIFE)
    )


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    return x509.Name([
        *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups),
        x509.NameAttribute(NameOID.COMMON_NAME, user),
    ])  # fmt: skip


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs, crl_sign=signs, key_encipherment=False,
        content_commitment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / f"{name}.key", _key_pem(key))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
