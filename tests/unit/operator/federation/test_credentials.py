"""Test the credentials of operators in a federation.

An operator replaces its certificate at half of its life, as workers do, so that no certificate
expires on a connection that is renewed as often. Only a certificate of an operator identifies a
caller, issued by the authority of the site that it names.

Left out: handshakes and streams (tests/local/test_federation.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_operator.federation.credentials import MAX_CERTIFICATE_BYTES, Credentials
from dlion_operator.pki.authority import CertificateAuthority

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
from given_authorities import odd_certificates
NOW = datetime.now(UTC)
LIFE = timedelta(hours=24)


def test_a_certificate_is_replaced_at_half_of_its_life() -> None:
    credentials = Credentials(CertificateAuthority(A), LIFE, now=NOW)
    first = credentials.version
    credentials.renew(now=NOW + LIFE / 2 - timedelta(seconds=2))
    assert credentials.version == first
    credentials.renew(now=NOW + LIFE / 2)
    assert credentials.version > first


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
    }.items():
        with pytest.raises(ContractError):
            pytest.fail(f"{what}: {credentials.operator_of(certificate)}")
        **odd_certificates(other.operator_identity().certificate_chain_pem),
