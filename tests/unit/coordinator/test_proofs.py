"""Facts: a request's proof is its own key's, kept over processes of a pod and counted upwards; one
for any other request, by another key, or of another kind is refused; a damaged key is replaced."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from dlion_api.errors import ContractError
from dlion_api.refusals import MAX_PROOF_BYTES
from dlion_api.wire.coordination_pb2 import SigningProof, SignRequest
from dlion_operator.bearers import Proof
from dlion_operator.coordinator.messages import checked_size
from dlion_operator.coordinator.proofs import checked_proof
from dlion_worker.coordination.proving import proof_of
from dlion_worker.credentials import WorkerKey
from dlion_worker.kept_credentials import forget_credentials, kept_proof_key

RUN = "default/digits#1"


def request(folder: Path, role: str = "trainer") -> SignRequest:
    csr_pem = WorkerKey().csr_pem()
    proof = proof_of(folder, run=RUN, role=role, csr_pem=csr_pem)
    return SignRequest(run=RUN, role=role, csr_pem=csr_pem, proof=proof)


def der(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_a_process_that_is_started_again_proves_to_be_the_same(tmp_path: Path) -> None:
    first, second = (checked_proof(request(tmp_path)) for _ in range(2))
    assert first.key_der == second.key_der == kept_proof_key(tmp_path, "trainer").public_der()
    assert first.count < second.count
    assert checked_proof(request(tmp_path, "sidecar")).key_der != first.key_der
    (file,) = tmp_path.glob("*trainer*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_none_is_no_proof() -> None:
    assert checked_proof(SignRequest(run=RUN)) == Proof()


@pytest.mark.parametrize(
    "change",
    [{"run": "default/digits#2"}, {"role": "sidecar"}, {"csr_pem": b"another"}],
    ids=lambda change: next(iter(change)),
)
def test_it_is_for_that_request_alone(tmp_path: Path, change: dict[str, str | bytes]) -> None:
    bent = request(tmp_path)
    for name, value in change.items():
        setattr(bent, name, value)
    with pytest.raises(ContractError, match="has not signed this request"):
        checked_proof(bent)


def test_nor_for_another_count(tmp_path: Path) -> None:
    bent = request(tmp_path)
    bent.proof.count += 1
    with pytest.raises(ContractError, match="has not signed this request"):
        checked_proof(bent)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (SigningProof(), "cannot be read"),
        (SigningProof(key_der=b"\xff" * 91, signature=b"x"), "cannot be read"),
        (SigningProof(key_der=der(rsa.generate_private_key(65537, 1024))), "allowed: EC P-256"),
        (SigningProof(key_der=der(ec.generate_private_key(ec.SECP384R1()))), "allowed: EC P-256"),
        (SigningProof(key_der=WorkerKey().public_der()), "has not signed"),
        (SigningProof(key_der=WorkerKey().public_der(), signature=b"\0" * 72), "has not signed"),
    ],
    ids=["empty", "garbage", "RSA", "another curve", "no signature", "no signature's form"],
)
def test_a_hostile_one_is_refused(proof: SigningProof, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        checked_proof(SignRequest(run=RUN, role="trainer", proof=proof))


@pytest.mark.parametrize("field", ["key_der", "signature"])
def test_a_long_one_is_not_looked_at(tmp_path: Path, field: str) -> None:
    bent = request(tmp_path)
    setattr(bent.proof, field, b"x" * (MAX_PROOF_BYTES + 1))
    with pytest.raises(ContractError, match=f"proof of {MAX_PROOF_BYTES + 1} bytes"):
        checked_size(bent)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe"])
def test_a_damaged_key_is_replaced(tmp_path: Path, content: bytes) -> None:
    before = kept_proof_key(tmp_path, "trainer").public_der()
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    after = kept_proof_key(tmp_path, "trainer").public_der()
    assert after != before
    assert kept_proof_key(tmp_path, "trainer").public_der() == after


def test_a_key_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        kept_proof_key(tmp_path / "missing", "trainer")


def test_nothing_is_left_of_a_run_that_is_over(tmp_path: Path) -> None:
    for role in ("trainer", "sidecar"):
        kept_proof_key(tmp_path, role)
    forget_credentials(tmp_path)
    assert not list(tmp_path.iterdir())
