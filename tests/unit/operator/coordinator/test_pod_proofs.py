"""Test the proof in a request that it comes from a certain pod.

The pod's key signs it, the same key in all processes. Its count increases whatever the clock shows.
A proof for another request, by another key or of another kind is refused. A damaged key is
replaced.
"""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from dlion_api.errors import ContractError
from dlion_api.names import JobKey
from dlion_api.protocol.refusals import MAX_PROOF_BYTES
from dlion_api.protocol.trust import FOLLOWING, JOINING
from dlion_api.wire.coordination_pb2 import FollowRequest, JoinRequest, PodProof, SignRequest
from dlion_operator.coordinator.messages import checked_proof, checked_size
from dlion_operator.pki.token_bindings import Proof
from dlion_worker.security.credential_store import (
    PROOF_COUNT_FILE,
    PROOF_KEY_FILE,
    load_or_create_proof_key,
    make_pod_proof,
    next_proof_count,
)
from dlion_worker.security.credentials import WorkerKey

JOB = JobKey("default", "digits", "1")
RUN = str(JOB)


def request(folder: Path, role: str = "trainer") -> SignRequest:
    csr_pem = WorkerKey().csr_pem()
    proof = make_pod_proof(folder, job=JOB, use=role, csr_pem=csr_pem)
    return SignRequest(run=RUN, role=role, csr_pem=csr_pem, proof=proof)


def checked(request: SignRequest) -> Proof:
    return checked_proof(request, request.role, request.csr_pem)


def der(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_all_processes_of_a_pod_prove_the_same_pod(tmp_path: Path) -> None:
    first, second = (checked(request(tmp_path)) for _ in range(2))
    assert first.key_der == second.key_der == load_or_create_proof_key(tmp_path).public_der()
    assert first.count < second.count
    assert checked(request(tmp_path, "sidecar")).key_der == first.key_der
    mode = stat.S_IMODE((tmp_path / PROOF_KEY_FILE).stat().st_mode)
    assert mode == 0o640


def test_concurrent_processes_have_the_same_key(tmp_path: Path) -> None:
    for number in range(20):
        (folder := tmp_path / str(number)).mkdir()
        with ThreadPoolExecutor(4) as pool:
            keys = {key.public_der() for key in pool.map(load_or_create_proof_key, [folder] * 4)}
        assert len(keys) == 1
        assert [path.name for path in folder.iterdir()] == [PROOF_KEY_FILE]


def test_counts_grow_after_a_reset_of_the_clock(tmp_path: Path) -> None:
    assert next_proof_count(tmp_path, "join", 1000) == 1000
    assert next_proof_count(tmp_path, "join", 5) == 1001
    assert next_proof_count(tmp_path, "trainer", 5) == 5
    (tmp_path / PROOF_COUNT_FILE.format("join")).write_bytes(b"damaged")
    assert next_proof_count(tmp_path, "join", 7) == 7


def test_a_count_that_cannot_be_stored_stops_no_request(tmp_path: Path) -> None:
    (tmp_path / PROOF_COUNT_FILE.format("join")).mkdir()
    assert next_proof_count(tmp_path, "join", 7) == 7
    assert next_proof_count(tmp_path, "join", 8) == 8


@pytest.mark.parametrize("use", [JOINING, FOLLOWING])
def test_joining_and_following_have_a_proof(tmp_path: Path, use: str) -> None:
    kind = JoinRequest if use == JOINING else FollowRequest
    made = kind(run=RUN, proof=make_pod_proof(tmp_path, job=JOB, use=use))
    checked_size(made)
    assert checked_proof(made, use).key_der == load_or_create_proof_key(tmp_path).public_der()
    with pytest.raises(ContractError, match="has not signed"):
        checked_proof(made, "trainer")
    made.proof.signature = b"x" * (MAX_PROOF_BYTES + 1)
    with pytest.raises(ContractError, match="proof of"):
        checked_size(made)


def test_a_missing_proof_is_refused() -> None:
    assert checked(SignRequest(run=RUN)) == Proof()


@pytest.mark.parametrize(
    "change",
    [{"run": "default/digits#2"}, {"role": "sidecar"}, {"csr_pem": b"another"}],
    ids=lambda change: next(iter(change)),
)
def test_a_proof_is_valid_for_one_request_only(
    tmp_path: Path, change: dict[str, str | bytes]
) -> None:
    bent = request(tmp_path)
    for name, value in change.items():
        setattr(bent, name, value)
    with pytest.raises(ContractError, match="has not signed this request"):
        checked(bent)


def test_a_proof_is_invalid_for_another_count(tmp_path: Path) -> None:
    bent = request(tmp_path)
    bent.proof.count += 1
    with pytest.raises(ContractError, match="has not signed this request"):
        checked(bent)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (PodProof(), "cannot be read"),
        (PodProof(key_der=b"\xff" * 91, signature=b"x"), "cannot be read"),
        (PodProof(key_der=der(rsa.generate_private_key(65537, 1024))), "allowed: EC P-256"),
        (PodProof(key_der=der(ec.generate_private_key(ec.SECP384R1()))), "allowed: EC P-256"),
        (PodProof(key_der=WorkerKey().public_der()), "has not signed"),
        (PodProof(key_der=WorkerKey().public_der(), signature=b"\0" * 72), "has not signed"),
    ],
    ids=["empty", "garbage", "RSA", "another curve", "no signature", "no signature's form"],
)
def test_a_hostile_proof_is_refused(proof: PodProof, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        checked(SignRequest(run=RUN, role="trainer", proof=proof))


@pytest.mark.parametrize("field", ["key_der", "signature"])
def test_a_long_proof_is_not_parsed(tmp_path: Path, field: str) -> None:
    bent = request(tmp_path)
    setattr(bent.proof, field, b"x" * (MAX_PROOF_BYTES + 1))
    with pytest.raises(ContractError, match=f"proof of {MAX_PROOF_BYTES + 1} bytes"):
        checked_size(bent)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe"])
def test_a_damaged_key_is_replaced(tmp_path: Path, content: bytes) -> None:
    before = load_or_create_proof_key(tmp_path).public_der()
    (tmp_path / PROOF_KEY_FILE).write_bytes(content)
    after = load_or_create_proof_key(tmp_path).public_der()
    assert after != before
    assert load_or_create_proof_key(tmp_path).public_der() == after


def test_a_key_that_cannot_be_stored_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        load_or_create_proof_key(tmp_path / "missing")
