"""Test the credentials of operators in a federation.

An operator replaces its certificate at half of its life, as workers do, so that no certificate
expires on a connection that is renewed as often. One that a fast clock made is replaced once that
clock is set, also the coordinator's. Only a certificate of an operator identifies a caller, issued
by the authority of the site that it names.

Left out: handshakes and streams (tests/local/test_federation.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_operator.coordinator.server import ServerCertificate
from dlion_operator.federation.credentials import MAX_CERTIFICATE_BYTES, Credentials
from dlion_operator.pki.authority import CertificateAuthority
from given_authorities import odd_certificates

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
NOW = datetime.now(UTC)
LIFE = timedelta(hours=24)


def test_a_certificate_is_replaced_at_half_of_its_life() -> None:
    credentials = Credentials(CertificateAuthority(A), LIFE, now=NOW)
    first = credentials.version
    credentials.renew(now=NOW + LIFE / 2 - timedelta(seconds=2))
    assert credentials.version == first
    credentials.renew(now=NOW + LIFE / 2)
    assert credentials.version > first


def test_a_certificate_made_by_a_fast_clock_is_replaced_once_the_clock_is_set() -> None:
    fast = NOW + timedelta(days=1)
    authority = CertificateAuthority(A, now=NOW - timedelta(days=1))
    credentials, server = Credentials(authority, LIFE, now=fast), ServerCertificate(authority)
    server.replace_authority(authority)
    assert server.renewed(now=fast) is not None
    made = credentials.version
    for now, is_replaced in ((fast, False), (NOW, True), (NOW, False)):
        credentials.renew(now=now)
        assert (credentials.version > made) == is_replaced
        assert (server.renewed(now=now) is not None) == is_replaced
        made = credentials.version


def test_a_caller_is_the_operator_that_its_certificate_names() -> None:
    credentials, other, third = (
        Credentials(CertificateAuthority(A), LIFE),
        CertificateAuthority(B),
        CertificateAuthority(C),
    )
    credentials.trust({B: other.bundle_pem, C: third.bundle_pem})
    assert credentials.operator_of(other.operator_identity().certificate_chain_pem) == B
    assert credentials.operator_of(third.operator_identity().certificate_chain_pem) == C


def test_any_other_certificate_identifies_no_caller() -> None:
    credentials, other, third = (
        Credentials(CertificateAuthority(A), LIFE),
        CertificateAuthority(B),
        CertificateAuthority(C),
    )
    credentials.trust({B: other.bundle_pem})
    third.site = B  # names another site's operator
    yesterday = NOW - timedelta(days=1)
    for what, certificate in {
        "none": None,
        "nothing": b"",
        "nonsense": b"nonsense",
        "long": b"x" * (MAX_CERTIFICATE_BYTES + 1),
        "an authority's": other.bundle_pem,
        "a server's": other.server_identity("coordinator.dlion").certificate_chain_pem,
        "by another site's authority": third.operator_identity().certificate_chain_pem,
        "of a site that is not trusted": CertificateAuthority(C)
        .operator_identity()
        .certificate_chain_pem,
        "run out": other.operator_identity(
            life=timedelta(hours=1), now=yesterday
        ).certificate_chain_pem,
        **odd_certificates(other.operator_identity().certificate_chain_pem),
    }.items():
        with pytest.raises(ContractError):
            pytest.fail(f"{what}: {credentials.operator_of(certificate)}")
