"""Test the bundles of trusted certificates of other sites.

- A bundle is read again when its file changes.
- A file that is missing, too long or expired, or that holds no certificate of an authority, gives
  no trust. The error states the cause and the remedy. Other sites are not affected.
- While a file cannot be read, its earlier content stays valid until it expires.
- Only certificates are read. The settings name the other sites, and not this one.

Left out: what a new bundle does to streams (tests/local/test_federation.py).
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dlion_api.cluster_names import FEDERATION_PORT
from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.names import SiteName
from dlion_operator.federation.bundles import MAX_BUNDLE_BYTES, Bundles
from dlion_operator.model.settings import Settings
from dlion_operator.pki.authority import CertificateAuthority

B, C = SiteName("plant-b"), SiteName("plant-c")
AUTHORITY = CertificateAuthority(B)
NEEDED: dict[str, Any] = {
    "site": "plant-a",
    "images": {"worker": "w", "sidecar": "s"},
    "coordinator": {"address": "here:1"},
}
OTHERS = [{"name": "plant-b", "address": "there:1", "bundleFile": "/b.pem"}]


def test_a_bundle_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "b.pem"
    bundles = Bundles({B: path})
    assert bundles.reload()
    assert "cannot be read: No such file" in bundles.problems[B]
    assert not bundles.reload()
    path.write_bytes(AUTHORITY.bundle_pem)
    assert bundles.reload()
    assert (bundles.pems, bundles.problems) == ({B: AUTHORITY.bundle_pem}, {})
    assert not bundles.reload()
    successor = AUTHORITY.renewed().bundle_pem
    path.write_bytes(successor)
    assert bundles.reload()
    assert bundles.pems == {B: successor}


def with_unknown_version(pem: bytes) -> bytes:
    """Return the certificate with a version that X.509 does not have."""
    der = bytearray(ssl.PEM_cert_to_DER_cert(pem.decode()))
    at = der.index(bytes.fromhex("a003020102"))
    der[at + 4] = 7
    return ssl.DER_cert_to_PEM_cert(bytes(der)).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "(PEM); put the output of `dlion trust show` at that site there"),
        (
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "holds no certificates",
        ),
        (AUTHORITY.to_stored().key_pem, "holds no certificates"),
        (AUTHORITY.operator_identity().certificate_chain_pem, "certificate of no authority"),
        (with_unknown_version(AUTHORITY.bundle_pem), "holds no certificates"),
        (AUTHORITY.bundle_pem + CertificateAuthority(C).bundle_pem[:-20], "that is cut off"),
        (AUTHORITY.bundle_pem[:-20] + CertificateAuthority(C).bundle_pem, "holds no certificates"),
        (b"x" * (MAX_BUNDLE_BYTES + 1), "is longer than"),
        (
            CertificateAuthority(B, now=datetime.now(UTC) - timedelta(days=400)).bundle_pem,
            "expired on",
        ),
    ],
)
def test_an_invalid_bundle_is_not_trusted(tmp_path: Path, content: bytes, words: str) -> None:
    bad, good = tmp_path / "b.pem", tmp_path / "c.pem"
    bad.write_bytes(content)
    good.write_bytes(CertificateAuthority(C).bundle_pem)
    bundles = Bundles({B: bad, C: good})
    bundles.reload()
    assert words in bundles.problems[B]
    assert str(bad) in bundles.problems[B]
    assert set(bundles.pems) == {C}


def test_the_last_valid_bundle_stays_while_its_file_cannot_be_read(tmp_path: Path) -> None:
    path, now = tmp_path / "b.pem", datetime.now(UTC)
    path.write_bytes(AUTHORITY.bundle_pem)
    bundles = Bundles({B: path})
    bundles.reload(now=now)
    broken = AUTHORITY.bundle_pem.replace(b"M", b"N", 3)
    for content, words in ((broken, "holds no certificates"), (None, "cannot be read: No such")):
        path.unlink() if content is None else path.write_bytes(content)
        assert bundles.reload(now=now)
        assert not bundles.reload(now=now)
        assert bundles.pems == {B: AUTHORITY.bundle_pem}
        assert words in bundles.problems[B]
        assert "previous bundle stays in use until this operator restarts" in bundles.problems[B]
    assert bundles.reload(now=now + timedelta(days=400))
    assert bundles.pems == {}
    assert "stands" not in bundles.problems[B]
    path.write_bytes(AUTHORITY.bundle_pem)
    assert bundles.reload(now=now)
    assert (bundles.pems, bundles.problems) == ({B: AUTHORITY.bundle_pem}, {})
    path.write_bytes(CertificateAuthority(B, now=now - timedelta(days=400)).bundle_pem)
    assert bundles.reload(now=now)
    assert bundles.pems == {}, "the file now trusts no certificate"


def test_only_certificates_are_taken_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "b.pem"
    path.write_bytes(b"# of plant-b\n" + AUTHORITY.to_stored().key_pem + AUTHORITY.bundle_pem)
    bundles = Bundles({B: path})
    bundles.reload()
    assert bundles.pems == {B: AUTHORITY.bundle_pem}


def test_settings_name_the_other_sites() -> None:
    alone = parse(Settings, {**NEEDED, "sites": OTHERS})
    assert alone.remote_sites == ()
    settings = parse(Settings, {**NEEDED, "federation": {}, "sites": OTHERS})
    assert [site.name for site in settings.remote_sites] == ["plant-b"]
    assert settings.federation is not None
    assert settings.federation.port == FEDERATION_PORT
    with pytest.raises(SpecError, match="names the other sites"):
        parse(Settings, {**NEEDED, "sites": [{**OTHERS[0], "name": "plant-a"}]})
    with pytest.raises(SpecError, match="plant-b"):
        parse(Settings, {**NEEDED, "sites": OTHERS * 2})
