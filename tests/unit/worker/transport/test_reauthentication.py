"""Tests of reauthentication.

A peer's certificate counts until its end. On an open connection it counts for another tenth of its
life. It is checked again when the trusted authorities change. A peer that this worker dialled must
authenticate itself again, once for each reason. Otherwise its stream ends, unless all authorities
that it may have used are still trusted.

Time is an argument.

Left out: the streams (tests/local/test_renewed_links.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import PeerCertificate, WorkerCredentials, WorkerKey
from dlion_worker.transport.reauthentication import (
    REAUTHENTICATION_TIMEOUT_S,
    Reauthentication,
    TrustVerdict,
)
from linked_workers import JOB, PLANT_A, PLANT_B, identity

SIGNED = datetime(2026, 1, 1, tzinfo=UTC)
LIFE = timedelta(hours=24)
END, LAST = SIGNED + LIFE, SIGNED + 1.1 * LIFE
SECOND = timedelta(seconds=1)
PEER = identity(1, PLANT_B)


class Site:
    """Plant A's worker, and a worker of plant B with its certificate."""

    def __init__(self) -> None:
        self.authority = CertificateAuthority(PLANT_B, life=LIFE, now=SIGNED)
        self.own = CertificateAuthority(PLANT_A, now=SIGNED).bundle_pem
        self.mine = WorkerCredentials(WorkerKey(), b"", {PLANT_A: self.own})
        self.trusts(self.authority)

    def trusts(self, *authorities: CertificateAuthority) -> None:
        bundle = b"".join(authority.bundle_pem for authority in authorities)
        self.mine.trust({PLANT_A: self.own} | ({PLANT_B: bundle} if bundle else {}))

    def shown(self, signed: datetime = SIGNED) -> PeerCertificate:
        pem = self.authority.sign(WorkerKey().csr_pem(), PEER, JOB, now=signed)
        return PeerCertificate(self.mine, pem, PEER, JOB, now=signed + SECOND)


@pytest.mark.parametrize(
    ("at", "of_a_call", "of_a_stream"),
    [
        (SIGNED, True, True),
        (END, True, True),
        (END + SECOND, False, True),
        (LAST, False, True),
        (LAST + SECOND, False, False),
    ],
)
def test_a_certificate_counts_to_its_end_and_a_tenth_longer_on_open_connections(
    at: datetime, of_a_call: bool, of_a_stream: bool
) -> None:
    proof = Site().shown()
    for holds, open_connection in ((of_a_call, False), (of_a_stream, True)):
        if holds:
            proof.check(open_connection=open_connection, now=at)
            continue
        with pytest.raises(CallerError, match="ended at 2026-01-02 00:00:00") as refused:
            proof.check(open_connection=open_connection, now=at)
        assert refused.value.kind is PeerRefusal.BAD_CERTIFICATE


def test_an_earlier_certificate_is_checked_by_the_new_authorities() -> None:
    site = Site()
    proof = site.shown()
    site.trusts(CertificateAuthority(PLANT_B, now=SIGNED), site.authority)
    proof.check(now=SIGNED + SECOND)
    proof.check(now=LAST, open_connection=True)  # in the extra time it is checked as at its end
    for others in ((CertificateAuthority(PLANT_B, now=SIGNED),), ()):
        site.trusts(*others)
        for _ in range(2):
            with pytest.raises(CallerError, match="not by the authority of site plant-b"):
                proof.check(now=SIGNED + SECOND)


def test_without_tls_no_reauthentication_is_required() -> None:
    off = WorkerCredentials.insecure()
    proof = PeerCertificate(off, None, PEER, JOB)
    proof.check(now=LAST + LIFE)
    proving = Reauthentication(off, PEER)
    assert proving.evaluate(proving.current_trust(), proof, 0.0, LAST + LIFE) is TrustVerdict.VALID


def test_a_peer_is_asked_once_and_disconnected_long_after_its_certificate_ends() -> None:
    site = Site()
    proving, proof = Reauthentication(site.mine, PEER), site.shown()
    dialled = proving.current_trust()
    assert proving.evaluate(dialled, None, 0.0, SIGNED) is TrustVerdict.VALID
    assert proving.evaluate(dialled, proof, 0.0, SIGNED) is TrustVerdict.VALID
    newer = site.shown(END - SECOND)  # it has renewed, and shows this on its own stream
    assert proving.evaluate(dialled, newer, 1.0, END) is TrustVerdict.VALID
    assert proving.evaluate(dialled, newer, 2.0, END + SECOND) is TrustVerdict.RENEW
    assert proving.evaluate(dialled, newer, 3.0, LAST) is TrustVerdict.VALID
    assert (
        proving.evaluate(dialled, newer, 1000.0, LAST + SECOND) is TrustVerdict.CERTIFICATE_EXPIRED
    )
    again = proving.current_trust()
    assert proving.evaluate(again, newer, 1001.0, LAST + SECOND) is TrustVerdict.VALID


def test_a_peer_without_a_trusted_authority_is_disconnected_soon() -> None:
    site = Site()
    proving = Reauthentication(site.mine, PEER)
    dialled = proving.current_trust()
    site.trusts(site.authority, CertificateAuthority(PLANT_B, now=SIGNED))
    assert proving.evaluate(dialled, None, 10.0, SIGNED) is TrustVerdict.RENEW
    between = proving.current_trust()
    site.trusts(site.authority)  # and others again, while that connection opens
    site.trusts(CertificateAuthority(PLANT_B, now=SIGNED))
    assert proving.evaluate(between, None, 20.0, SIGNED) is TrustVerdict.RENEW
    late_s = 20.0 + REAUTHENTICATION_TIMEOUT_S
    assert proving.evaluate(between, None, late_s, SIGNED) is TrustVerdict.VALID
    assert proving.evaluate(between, None, late_s + 1.0, SIGNED) is TrustVerdict.AUTHORITIES_CHANGED
    assert (
        proving.evaluate(proving.current_trust(), None, late_s + 2.0, SIGNED) is TrustVerdict.VALID
    )


def test_a_peer_with_additional_authorities_is_asked_and_not_disconnected() -> None:
    site = Site()
    proving, more = Reauthentication(site.mine, PEER), CertificateAuthority(PLANT_B, now=SIGNED)
    dialled = proving.current_trust()
    for authorities in ((site.authority, more), (site.authority.renewed(),)):
        site.trusts(*authorities)
        assert proving.evaluate(dialled, None, 10.0, SIGNED) is TrustVerdict.RENEW
        late_s = 11.0 + REAUTHENTICATION_TIMEOUT_S
        assert proving.evaluate(dialled, None, late_s, SIGNED) is TrustVerdict.VALID
    site.trusts()
    assert proving.evaluate(dialled, None, 50.0, SIGNED) is TrustVerdict.RENEW
    late_s = 51.0 + REAUTHENTICATION_TIMEOUT_S
    assert proving.evaluate(dialled, None, late_s, SIGNED) is TrustVerdict.AUTHORITIES_CHANGED


def test_authorities_of_other_sites_are_not_a_reason() -> None:
    site = Site()
    proving = Reauthentication(site.mine, PEER)
    dialled = proving.current_trust()
    other = CertificateAuthority(PLANT_A, now=SIGNED).bundle_pem
    site.mine.trust({**site.mine.site_bundles_pem, PLANT_A: other})
    assert proving.evaluate(dialled, site.shown(), 0.0, SIGNED) is TrustVerdict.VALID
