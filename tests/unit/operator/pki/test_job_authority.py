"""Test the authority that a job names.

- Its key may be RSA or EC, in PKCS#1, SEC1 or PKCS#8, below a chain. Peers that know only its own
  certificate trust what it signs.
- An authority that peers would not trust is refused with the reason.
- Signatures of a successor and of its predecessor are both trusted until the predecessor ends.
  Without a key nothing is signed and nothing forgotten.

Left out: where the Secret comes from (test_named_secret), TLS itself (tests/local).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from dlion_api.errors import ContractError
from dlion_api.names import KeeperIdentity
from dlion_operator.pki.authority_bundles import MAX_RUN_CERTIFICATES
from dlion_operator.pki.certificate_issuer import Issuer
from dlion_operator.pki.job_authority import CannotSignError, JobAuthority, issuer_of
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from given_authorities import GivenAuthority, ec_key
from linked_workers import JOB, PLANT_A, PLANT_B, identity

ME = identity(0)
NOW = datetime.now(UTC)
LIFE = timedelta(hours=24)


def read(given: GivenAuthority, key_pem: bytes | None = None) -> Issuer:
    return issuer_of(
        given.certificate_pem, key_pem or given.key_pem(), life=LIFE, job=JOB, site=PLANT_A
    )


def authority(given: GivenAuthority) -> JobAuthority:
    return JobAuthority(PLANT_A).updated_with(NamedAuthority(read(given)), datetime.now(UTC))


def believes(bundle_pem: bytes, chain_pem: bytes) -> bool:
    """Return whether a peer with this bundle accepts the chain as worker 0 of the site."""
    peer = WorkerCredentials(WorkerKey(), b"", {PLANT_A: bundle_pem})
    try:
        peer.check_peer(chain_pem, ME, JOB)
    except ContractError:
        return False
    return True


KEYS = {
    "P-256": ec_key(),
    "P-384": ec.generate_private_key(ec.SECP384R1()),
    "P-521": ec.generate_private_key(ec.SECP521R1()),
    "RSA": rsa.generate_private_key(65537, 2048),
}


@pytest.mark.parametrize("form", ["PKCS8", "TraditionalOpenSSL"])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_accepted_in_every_usual_form(kind: str, form: str) -> None:
    given = GivenAuthority(key=KEYS[kind])
    issuer = read(given, given.key_pem(form))
    signed = issuer.sign(WorkerKey().csr_pem(), ME, JOB, site=PLANT_A)
    assert believes(given.own_pem, signed)


def test_a_key_after_its_parameters_is_accepted() -> None:
    """`openssl ecparam -genkey` writes this form."""
    given = GivenAuthority()
    parameters = b"-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
    read(given, parameters + given.key_pem("TraditionalOpenSSL"))


def test_peers_trust_the_authority_and_nothing_above_it() -> None:
    root = GivenAuthority("root")
    given = GivenAuthority("plant-a", above=GivenAuthority("middle", above=root))
    assert given.certificate_pem.count(b"BEGIN") == 2
    made = authority(given)
    assert made.bundle_pem == given.own_pem
    assert believes(made.bundle_pem, made.sign(WorkerKey().csr_pem(), ME, JOB))
    beside = authority(GivenAuthority("plant-b", above=root))
    assert not believes(made.bundle_pem, beside.sign(WorkerKey().csr_pem(), ME, JOB))


def test_a_certificate_ends_with_its_authority() -> None:
    given = GivenAuthority(life=timedelta(hours=2))
    signed = authority(given).sign(WorkerKey().csr_pem(), ME, JOB)
    ends = x509.load_pem_x509_certificate(signed).not_valid_after_utc
    assert ends == given.certificate.not_valid_after_utc


def other_kind() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def too_weak() -> GivenAuthority:
    return GivenAuthority(key=rsa.generate_private_key(65537, 1024))


LATER = NOW + timedelta(days=1)
REFUSED = {
    "no certificate": (b"nonsense", None, "tls.crt holds no certificates"),
    "no authority": (GivenAuthority(is_authority=False), None, "CA:TRUE"),
    "another key": (GivenAuthority(), GivenAuthority().key_pem(), "not the key of tls.crt"),
    "no key": (GivenAuthority(), b"nonsense", "tls.key holds no private key"),
    "encrypted": (
        given := GivenAuthority(), given.key_pem(password=b"secret"), "without a password",
    ),
    "kind": (GivenAuthority(), other_kind(), "EC P-256, P-384 or P-521"),
    "weak": (weak := too_weak(), weak.key_pem(), "2048 bits"),
    "ended": (GivenAuthority(begins=NOW - timedelta(days=91)), None, "expired on"),
    "early": (GivenAuthority(begins=LATER), None, "is valid from"),
    "no key usage": (GivenAuthority(key_usage=False), None, "keyUsage keyCertSign"),
    "constrained": (GivenAuthority(permitted="plant-a.example"), None, "end in .dlion"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_authority_that_peers_would_not_trust_is_refused(case: str) -> None:
    given, key_pem, words = REFUSED[case]
    certificate_pem = given if isinstance(given, bytes) else given.certificate_pem
    if key_pem is None:
        key_pem = given.key_pem() if isinstance(given, GivenAuthority) else b""
    with pytest.raises(ContractError) as refusal:
        issuer_of(certificate_pem, key_pem, life=LIFE, job=JOB, site=PLANT_A)
    assert words in str(refusal.value)


def test_an_authority_signs_only_for_its_own_site() -> None:
    made = authority(GivenAuthority())
    with pytest.raises(ContractError, match="plant-b"):
        made.sign(WorkerKey().csr_pem(), identity(3, PLANT_B), JOB)
    with pytest.raises(ContractError, match="plant-b"):
        made.sign(WorkerKey().csr_pem(), KeeperIdentity(PLANT_B), JOB)


def test_a_predecessor_is_trusted_until_it_ends() -> None:
    old, new = GivenAuthority("old", life=timedelta(hours=2)), GivenAuthority("new")
    before = authority(old)
    signed = before.sign(WorkerKey().csr_pem(), ME, JOB)
    after = before.updated_with(NamedAuthority(read(new)), NOW)
    assert after.bundle_pem == new.own_pem + old.own_pem
    assert believes(after.bundle_pem, signed)
    assert believes(after.bundle_pem, after.sign(WorkerKey().csr_pem(), ME, JOB))
    assert not believes(before.bundle_pem, after.sign(WorkerKey().csr_pem(), ME, JOB))
    assert after.updated_with(NamedAuthority(after.issuer), NOW) == after
    ended = after.updated_with(NamedAuthority(after.issuer), NOW + timedelta(hours=3))
    assert ended.bundle_pem == new.own_pem


def test_without_a_key_nothing_is_signed_and_nothing_forgotten() -> None:
    made = authority(GivenAuthority())
    signed = made.sign(WorkerKey().csr_pem(), ME, JOB)
    lost = made.updated_with(NamedAuthority(None, "the Secret is gone"), NOW)
    assert believes(lost.bundle_pem, signed)
    with pytest.raises(CannotSignError, match="the Secret is gone"):
        lost.sign(WorkerKey().csr_pem(), ME, JOB)


def test_the_newest_of_many_predecessors_are_trusted() -> None:
    made = authority(first := GivenAuthority("0"))
    givens = [first]
    for number in range(MAX_RUN_CERTIFICATES):
        givens.append(GivenAuthority(str(number + 1)))
        made = made.updated_with(NamedAuthority(read(givens[-1])), NOW)
    assert made.bundle_pem == b"".join(each.own_pem for each in reversed(givens[1:]))
