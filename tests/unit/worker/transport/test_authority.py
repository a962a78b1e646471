"""Tests of a site's authority: it signs only names that it knows, and peers trust only their site's
authority.

Left out: TLS (tests/local/test_links.py).
"""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE
from dlion_operator.pki.authority import CertificateAuthority, StoredAuthority, Tokens
from dlion_worker.security.credential_store import load_credentials, store_credentials
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from given_authorities import odd_certificates
from linked_workers import JOB, PLANT_A, PLANT_B, credentials, identity

if TYPE_CHECKING:
    from pathlib import Path

ME = identity(0)
OTHER = identity(1)
KEEPER = KeeperIdentity(PLANT_A)
OWN_NAMES = [ME.spiffe_id(JOB), ME.dns_name(JOB), ME.measuring_dns_name(JOB)]


@pytest.fixture(scope="module")
def authorities() -> dict[SiteName, CertificateAuthority]:
    return {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}


def names(pem: bytes) -> list[str]:
    certificate = x509.load_pem_x509_certificate(pem)
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in extension.value]


def test_a_certificate_names_the_worker_and_both_of_its_ports(
    authorities: dict[SiteName, CertificateAuthority],
) -> None:
    pem = authorities[PLANT_A].sign(WorkerKey().csr_pem(), ME, JOB)
    assert names(pem) == OWN_NAMES


def test_names_in_the_request_are_ignored(
    authorities: dict[SiteName, CertificateAuthority],
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    wanted = x509.SubjectAlternativeName([x509.DNSName(OTHER.dns_name(JOB))])
    request = x509.CertificateSigningRequestBuilder(x509.Name([])).add_extension(wanted, False)
    pem = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    assert names(authorities[PLANT_A].sign(pem, ME, JOB)) == OWN_NAMES


def test_a_certificate_is_valid_for_a_day_and_from_a_little_earlier() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    pem = CertificateAuthority(PLANT_A, now=now).sign(WorkerKey().csr_pem(), ME, JOB, now=now)
    certificate = x509.load_pem_x509_certificate(pem)
    assert certificate.not_valid_before_utc == now - CLOCK_SKEW_ALLOWANCE
    assert certificate.not_valid_after_utc == now + timedelta(hours=24)


def rsa_request() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def request_of_another_version() -> bytes:
    request = x509.load_pem_x509_csr(WorkerKey().csr_pem())
    der = request.public_bytes(serialization.Encoding.DER).replace(b"\2\1\0", b"\2\1\10", 1)
    head, tail = b"-----BEGIN CERTIFICATE REQUEST-----\n", b"-----END CERTIFICATE REQUEST-----\n"
    return head + base64.encodebytes(der) + tail


@pytest.mark.parametrize(
    ("request_pem", "words"),
    [
        (b"nonsense", "cannot be read"),
        (b"x" * 10_000, "allowed"),
        (rsa_request(), "EC P-256"),
        (request_of_another_version(), "8 is not a valid CSR version"),
    ],
    ids=["nonsense", "huge", "rsa", "version"],
)
def test_a_bad_request_is_refused(
    authorities: dict[SiteName, CertificateAuthority], request_pem: bytes, words: str
) -> None:
    with pytest.raises(ContractError, match=words):
        authorities[PLANT_A].sign(request_pem, ME, JOB)


def test_a_tampered_request_is_refused(authorities: dict[SiteName, CertificateAuthority]) -> None:
    der = bytearray(
        x509.load_pem_x509_csr(WorkerKey().csr_pem()).public_bytes(serialization.Encoding.DER)
    )
    der[-1] ^= 1
    pem = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(ContractError):
        authorities[PLANT_A].sign(pem, ME, JOB)


def test_an_authority_signs_for_its_own_site_only(
    authorities: dict[SiteName, CertificateAuthority],
) -> None:
    with pytest.raises(ContractError, match="plant-b"):
        authorities[PLANT_A].sign(WorkerKey().csr_pem(), identity(3, PLANT_B), JOB)


@pytest.mark.parametrize("group", ["x" * 64, "Upper", "dot.ted", "", "-dash"])
def test_names_that_no_certificate_can_carry_are_refused(
    authorities: dict[SiteName, CertificateAuthority], group: str
) -> None:
    worker = WorkerIdentity(Rank(0), PLANT_A, group, 0)
    with pytest.raises(ContractError, match="labels of a-z"):
        authorities[PLANT_A].sign(WorkerKey().csr_pem(), worker, JOB)


def test_names_too_long_together_are_refused() -> None:
    site = SiteName("s" * 63)
    worker = WorkerIdentity(Rank(0), site, "g" * 63, 0)
    with pytest.raises(ContractError, match="253"):
        CertificateAuthority(site).sign(
            WorkerKey().csr_pem(), worker, JobKey("n" * 63, "j" * 63, "1")
        )


def shown(proof: WorkerCredentials) -> bytes:
    return proof.certificate_chain_pem


def test_a_peer_has_the_name_that_its_sites_authority_signed(
    authorities: dict[SiteName, CertificateAuthority],
) -> None:
    mine = credentials(ME, authorities)
    mine.check_peer(shown(credentials(OTHER, authorities)), OTHER, JOB)


@pytest.mark.parametrize(
    "claim",
    ["other worker", "other site", "other run", "foreign", "expired", "early", "none",
     "an unknown version", "an extension twice", "a key of an unknown kind"],
)  # fmt: skip
def test_any_other_claim_is_refused(
    authorities: dict[SiteName, CertificateAuthority], claim: str
) -> None:
    mine = credentials(ME, authorities)
    there = identity(1, PLANT_B)
    theirs = shown(credentials(OTHER, authorities))
    now = datetime.now(UTC)
    cases: dict[str, tuple[bytes | None, WorkerIdentity, JobKey, datetime]] = {
        "other worker": (theirs, identity(2), JOB, now),
        "other site": (theirs, there, JOB, now),
        "other run": (theirs, OTHER, JobKey("default", "cifar10", "2"), now),
        "foreign": (
            shown(credentials(OTHER, {PLANT_A: CertificateAuthority(PLANT_A)})), OTHER, JOB, now,
        ),
        "expired": (theirs, OTHER, JOB, now + timedelta(hours=25)),
        "early": (theirs, OTHER, JOB, now - timedelta(hours=1)),
        "none": (None, OTHER, JOB, now),
        **{name: (each, OTHER, JOB, now) for name, each in odd_certificates(theirs).items()},
    }  # fmt: skip
    certificate, who, job, at = cases[claim]
    with pytest.raises(ContractError):
        mine.check_peer(certificate, who, job, now=at)


def test_a_site_cannot_sign_for_another_even_with_a_valid_name() -> None:
    # Plant A's compromised authority signs a certificate with plant B's names.
    bad = CertificateAuthority(PLANT_A)
    bad.site = PLANT_B
    there = identity(1, PLANT_B)
    key = WorkerKey()
    forged = bad.sign(key.csr_pem(), there, JOB)
    honest = {PLANT_A: bad.bundle_pem, PLANT_B: CertificateAuthority(PLANT_B).bundle_pem}
    with pytest.raises(ContractError, match="plant-b"):
        WorkerCredentials(key, forged, honest).check_peer(forged, there, JOB)


def test_a_token_belongs_to_one_worker() -> None:
    tokens = Tokens()
    token = tokens.issue(ME, JOB)

    def holds(given: str, who: WorkerIdentity | KeeperIdentity) -> bool:
        return asyncio.run(tokens.verify(given, who, JOB)) is not None

    assert tokens.issue(ME, JOB) == token
    assert holds(token, ME)
    assert not holds(token, OTHER)
    assert not holds("", OTHER)
    assert not holds(token + "x", ME)
    assert not holds(token, KEEPER)
    assert tokens.issue(OTHER, JOB) != token


def test_a_keepers_certificate_names_the_keeper(
    authorities: dict[SiteName, CertificateAuthority],
) -> None:
    pem = authorities[PLANT_A].sign(WorkerKey().csr_pem(), KEEPER, JOB)
    assert names(pem) == [KEEPER.spiffe_id(JOB), KEEPER.dns_name(JOB)]
    with pytest.raises(ContractError, match="plant-b"):
        authorities[PLANT_A].sign(WorkerKey().csr_pem(), KeeperIdentity(PLANT_B), JOB)


BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
LATER = BEGAN + timedelta(days=300)


def test_a_stored_authority_continues_to_sign() -> None:
    made = CertificateAuthority(PLANT_A)
    again = CertificateAuthority(PLANT_A, stored=made.to_stored())
    assert again.bundle_pem == made.bundle_pem
    proof = credentials(ME, {PLANT_A: again})
    credentials(OTHER, {PLANT_A: made}).check_peer(shown(proof), ME, JOB)


def stored(site: SiteName = PLANT_A, now: datetime | None = None) -> StoredAuthority:
    return CertificateAuthority(site, now=now).to_stored()


ODD = odd_certificates(stored().certificate_pem)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (StoredAuthority(b"", b""), "cannot be read"),
        (StoredAuthority(stored().key_pem, b"nonsense"), "cannot be read"),
        (StoredAuthority(b"nonsense", stored().certificate_pem), "cannot be read"),
        (StoredAuthority(stored().key_pem, stored().certificate_pem), "another key"),
        (stored(PLANT_B), "allowed: that of site plant-a"),
        (stored(now=BEGAN - timedelta(days=400)), "expired on 2025-11-27"),
        (StoredAuthority(stored().key_pem, ODD["an unknown version"]), "cannot be read"),
        (StoredAuthority(stored().key_pem, ODD["a key of an unknown kind"]), "cannot be read"),
    ],
    ids=["empty", "certificate", "key", "another key", "another site", "run out", "version",
         "kind of key"],
)  # fmt: skip
def test_an_invalid_stored_authority_is_refused(given: StoredAuthority, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        CertificateAuthority(PLANT_A, stored=given, now=BEGAN)


def test_an_authority_is_renewed_with_a_third_of_its_life_left() -> None:
    authority = CertificateAuthority(PLANT_A, now=BEGAN)
    assert not authority.is_renewal_due(now=BEGAN + timedelta(days=240))
    assert authority.is_renewal_due(now=BEGAN + timedelta(days=250))
    assert not authority.renewed(now=LATER).is_renewal_due(now=LATER)


def test_an_authority_made_by_a_fast_clock_is_renewed_once_the_clock_is_set() -> None:
    fast = CertificateAuthority(PLANT_A, now=LATER)
    assert fast.is_renewal_due(now=BEGAN)
    authority, key = fast.renewed(now=BEGAN), WorkerKey()
    assert not authority.is_renewal_due(now=BEGAN)
    chain = authority.sign(key.csr_pem(), OTHER, JOB, now=BEGAN)
    mine = WorkerCredentials(WorkerKey(), chain, {PLANT_A: authority.bundle_pem})
    mine.check_peer(chain, OTHER, JOB, now=BEGAN + timedelta(hours=1))


def test_a_restarted_worker_replaces_a_certificate_that_a_fast_clock_made(tmp_path: Path) -> None:
    """No peer accepts it. If the coordinator is away it is used, as the own clock may be slow."""
    authority, fast = CertificateAuthority(PLANT_A, now=BEGAN), BEGAN + timedelta(days=1)
    key = WorkerKey()
    chain = authority.sign(key.csr_pem(), OTHER, JOB, now=fast)
    bundles = {PLANT_A: authority.bundle_pem}
    store_credentials(tmp_path, JOB, WorkerCredentials(key, chain, bundles))
    assert load_credentials(tmp_path, JOB, now=BEGAN) is None
    assert load_credentials(tmp_path, JOB, now=BEGAN, min_life_left=0.0) is not None
    assert load_credentials(tmp_path, JOB, now=fast) is not None


def test_an_authority_renewed_by_a_slow_clock_stays_valid_once_the_clock_is_set() -> None:
    """Such as the clock of a device without a battery, before its first NTP answer."""
    first, slow = CertificateAuthority(PLANT_A, now=BEGAN), BEGAN - timedelta(days=20_000)
    renewed = CertificateAuthority(PLANT_A, stored=first.to_stored(), now=slow).renewed(now=slow)
    restarted = CertificateAuthority(PLANT_A, stored=renewed.to_stored(), now=BEGAN)
    assert restarted.is_renewal_due(now=BEGAN)
    again = restarted.renewed(now=BEGAN)
    assert not again.is_renewal_due(now=BEGAN)
    for signer, known in ((renewed, first), (restarted, first), (again, first), (first, again)):
        chain = signer.sign(WorkerKey().csr_pem(), OTHER, JOB, now=BEGAN)
        mine = WorkerCredentials(WorkerKey(), chain, {PLANT_A: known.bundle_pem})
        mine.check_peer(chain, OTHER, JOB, now=BEGAN + timedelta(hours=1))


def test_old_and_new_certificates_are_trusted_on_both_sides_of_a_renewal() -> None:
    old = CertificateAuthority(PLANT_A, now=BEGAN)
    new = old.renewed(now=LATER)
    for signer, known in ((old, new), (new, old), (new, new)):
        key = WorkerKey()
        chain = signer.sign(key.csr_pem(), OTHER, JOB, now=LATER)
        mine = WorkerCredentials(WorkerKey(), chain, {PLANT_A: known.bundle_pem})
        mine.check_peer(chain, OTHER, JOB, now=LATER + timedelta(hours=1))


def test_a_bundle_holds_the_earlier_certificate_until_it_ends() -> None:
    old = CertificateAuthority(PLANT_A, now=BEGAN)
    new = old.renewed(now=LATER)
    assert new.bundle_pem.endswith(old.bundle_pem)
    again = CertificateAuthority(PLANT_A, stored=new.to_stored(), now=LATER)
    assert again.bundle_pem == new.bundle_pem
    much_later = CertificateAuthority(
        PLANT_A, stored=new.to_stored(), now=LATER + timedelta(days=100)
    )
    assert new.bundle_pem.startswith(much_later.bundle_pem)
    assert len(x509.load_pem_x509_certificates(much_later.bundle_pem)) == 1
