"""Test the verification of models by their signed statement.

A model signed by its site's keeper is accepted and its contributing workers are shown. Refused with
the reason are:

- a changed model, description, statement or signature
- a signature of another site's keeper, a worker, another job or run, of a key that is not an EC
  key, or from outside the validity of the certificate
- a statement of another DLionJob of that name, or of none
- a model that a revoked worker or site saved
- a missing statement or signature, unless that is allowed
- a hostile file, a file without a statement, and a missing model

A keeper signs neither without the files of a statement nor with an expired certificate.
Authorities, certificates and the keeper's signer are real.

Left out: the form of the statement (tests/unit/api/test_provenance.py), `dlion fetch` in a cluster
(tests/cluster/test_cli_pods.py).
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.provenance import (
    PROVENANCE_FILE,
    Evidence,
    ModelProvenance,
    ProvenanceStatement,
    StatedRun,
    WorkerUpdates,
    file_sha256,
    stated_digests,
)
from dlion_cli.inputs.model_provenance import (
    MAX_SHOWN,
    ExpectedOrigin,
    ProvenanceError,
    verify_model,
    verify_received,
)
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.certificate_issuer import CLIENT_AND_SERVER, Issuer, pem
from dlion_worker.artifact_server import provenance_signer
from dlion_worker.artifact_server.provenance_signer import ProvenanceSigner
from dlion_worker.artifact_server.workers import RevokedWorkers
from dlion_worker.provenance.envelope import MAX_ENVELOPE_BYTES, SignedEnvelope
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from given_authorities import odd_certificates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

A, B = SiteName("plant-a"), SiteName("plant-b")
JOB = JobKey("ml", "digits", "1")
AUTHORITIES = {site: CertificateAuthority(site) for site in (A, B)}
SAVER = WorkerIdentity(Rank(0), A, "g", 0)


def credentials(
    who: WorkerIdentity | KeeperIdentity, job: JobKey = JOB, certified_at: datetime | None = None
) -> WorkerCredentials:
    key = WorkerKey()
    chain = AUTHORITIES[who.site].sign(key.csr_pem(), who, job, now=certified_at)
    return WorkerCredentials(key, chain, {})


def signed(payload: bytes, own: WorkerCredentials) -> bytes:
    return SignedEnvelope.sign(payload, partial(own.sign, now=datetime.now(UTC))).to_json()


def statement(folder: Path) -> ProvenanceStatement:
    updates = (
        WorkerUpdates(0, SAVER.name, Evidence.REPLICA, 640, 10),
        WorkerUpdates(1, "plant-b/g-0", Evidence.STEPS, 64, 3, revoked=True),
    )
    provenance = ModelProvenance(
        run=StatedRun(JOB.namespace, JOB.name, JOB.run_id),
        site=A,
        saved_by=SAVER.name,
        saved_at=datetime.now(UTC).isoformat(),
        model="averaged",
        policy="adaptive",
        dlion_version="0",
        start_model_sha256="",
        workers=updates,
    )
    return ProvenanceStatement(stated_digests(folder), provenance)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the model of a site, signed by its keeper."""
    path = tmp_path / "models" / A
    path.mkdir(parents=True)
    (path / "model.keras").write_bytes(b"weights")
    (path / "model.json").write_bytes(b'{"accuracy": 0.5}')
    content = keeper(tmp_path).signed(statement(path).to_json(), SAVER)
    (path / PROVENANCE_FILE).write_bytes(content)
    return path


def keeper(root: Path, uid: str = "u-1", own: WorkerCredentials | None = None) -> ProvenanceSigner:
    revoked = RevokedWorkers(root, is_over=False)
    revoked.reasons = {"plant-b/g-0": "stolen"}
    return ProvenanceSigner(JOB, uid, A, root, own or credentials(KeeperIdentity(A)), revoked)


def expected(
    *, job: JobKey = JOB, uid: str = "u-1", revoked: tuple[str, ...] = (), unsigned: bool = False
) -> ExpectedOrigin:
    def authority(site: SiteName) -> bytes:
        return AUTHORITIES[site].bundle_pem

    return ExpectedOrigin(job, uid, authority, revoked, allows_unsigned=unsigned)


def test_a_signed_model_is_accepted_and_its_workers_are_shown(folder: Path) -> None:
    verified = verify_model(folder, A, expected())
    assert (verified.is_signed, verified.sha256) == (True, file_sha256(folder / "model.keras"))
    assert verified.provenance is not None
    assert verified.provenance.run == StatedRun("ml", "digits", "1", "u-1")
    shown = verified.lines()
    assert shown[0].startswith("plant-a: signed by plant-a's keeper; averaged, saved by plant-a/g")
    assert shown[1:] == [
        "  plant-a/g-0: replica, 640 samples, to iteration 10",
        "  plant-b/g-0: steps, 64 samples, to iteration 3, revoked",
        "  revoked: plant-b/g-0 (stolen)",
    ]
    assert json.loads(json.dumps(verified.to_document()))["provenance"]["site"] == A


def test_a_job_of_many_workers_is_summarized(tmp_path: Path, folder: Path) -> None:
    made = statement(folder)
    many = tuple(replace(made.provenance.workers[0], rank=rank) for rank in range(2048))
    made = replace(made, provenance=replace(made.provenance, workers=many))
    content = keeper(tmp_path).signed(made.to_json(), SAVER)
    (folder / PROVENANCE_FILE).write_bytes(content)
    lines = verify_model(folder, A, expected()).lines()
    assert f"  and {2048 - MAX_SHOWN} more" in lines
    assert len(lines) == 1 + MAX_SHOWN + 2


def payload_changed(content: bytes) -> bytes:
    document = json.loads(content)
    text = base64.b64decode(document["payload"]).replace(b'"samples":640', b'"samples":641')
    document["payload"] = base64.b64encode(text).decode()
    return json.dumps(document).encode()


def signed_by(who: WorkerIdentity | KeeperIdentity, job: JobKey = JOB) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        payload = SignedEnvelope.from_json(content).payload
        return signed(payload, credentials(who, job))

    return change


def of_rsa_key(content: bytes) -> bytes:
    stored = AUTHORITIES[A].to_stored()
    key = serialization.load_pem_private_key(stored.key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issuer = Issuer(key, x509.load_pem_x509_certificate(stored.certificate_pem))
    public = rsa.generate_private_key(65537, 2048).public_key()
    names = [x509.UniformResourceIdentifier(KeeperIdentity(A).spiffe_id(JOB))]
    leaf = issuer.issue(public, names, CLIENT_AND_SERVER, datetime.now(UTC))  # type: ignore[arg-type]
    envelope = SignedEnvelope.from_json(content)
    return replace(envelope, chain_pem=pem(leaf)).to_json()


def with_unknown_version(content: bytes) -> bytes:
    envelope = SignedEnvelope.from_json(content)
    odd = odd_certificates(envelope.chain_pem)["an unknown version"]
    return replace(envelope, chain_pem=odd).to_json()


def edited(**values: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | values).encode()


def stating(**values: object) -> Callable[[bytes], bytes]:
    """Return a correctly signed statement with these values in its predicate."""

    def change(content: bytes) -> bytes:
        made = ProvenanceStatement.from_json(SignedEnvelope.from_json(content).payload)
        made = replace(made, provenance=replace(made.provenance, **values))  # type: ignore[arg-type]
        return signed(made.to_json(), credentials(KeeperIdentity(A)))

    return change


def at(moment: datetime) -> Callable[[bytes], bytes]:
    return stating(saved_at=moment.isoformat())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (payload_changed, "does not match"),
        (signed_by(KeeperIdentity(B)), "not by the trusted authority"),
        (signed_by(SAVER), "worker/0, .*; allowed: .*/keeper"),
        (signed_by(KeeperIdentity(A), JobKey("ml", "other", "1")), "job/other/"),
        (signed_by(KeeperIdentity(A), JobKey("ml", "digits", "2")), "run/2/"),
        (at(datetime.now(UTC) - timedelta(days=9)), "valid from .*, after it was saved at"),
        (at(datetime.now(UTC) + timedelta(days=9)), "expired at .*, before it was saved at"),
        (stating(run=StatedRun("ml", "digits", "1")), "the UID is empty"),
        (of_rsa_key, "key of type|not by the trusted"),
        (with_unknown_version, "not by the trusted authority"),
        (lambda _: b"x" * (MAX_ENVELOPE_BYTES + 1), "allowed: at most"),
        (lambda _: b'{"payloadType":' + b"[" * 100_000, "not JSON"),
        (lambda _: b"", "not JSON"),
        (lambda _: b"[]", "given: list"),
        (edited(payloadType="text/plain"), "allowed: application/vnd.in-toto"),
        (edited(payload="?"), "payload, sig or cert"),
        (edited(payload=None), "payload, sig or cert"),
        (edited(signatures=[]), "one signature"),
        (edited(signatures=["x"]), "payload, sig or cert"),
        (edited(signatures=[{"sig": "", "cert": 1}]), "payload, sig or cert"),
        (edited(signatures=[{"sig": "", "cert": ""}]), "not by the trusted authority"),
        (edited(signatures=[{"sig": "", "cert": "x" * 20_000}]), "certificates of"),
    ],
)  # fmt: skip
def test_any_other_statement_is_always_refused(
    folder: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    path = folder / PROVENANCE_FILE
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ProvenanceError, match=words) as refused:
        verify_model(folder, A, expected(unsigned=True))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (expected(job=JobKey("ml", "other", "1")), "allowed: spiffe://plant-a/ns/ml/job/other"),
        (expected(uid="u-2"), "uid='u-1'.*allowed.*uid='u-2'"),
        (expected(uid=""), "uid='u-1'.*allowed.*uid=''"),
        (expected(revoked=(SAVER.name,)), "plant-a/g-0, which saved it, is revoked"),
        (expected(revoked=(A,)), "plant-a, which saved it, is revoked"),
    ],
)
def test_a_signed_model_of_another_origin_is_refused(
    folder: Path, origin: ExpectedOrigin, words: str
) -> None:
    with pytest.raises(ProvenanceError, match=words):
        verify_model(folder, A, origin)


@pytest.mark.parametrize("name", ["model.keras", "model.json"])
def test_a_changed_model_or_description_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"other")
    with pytest.raises(ProvenanceError, match=f"{name} has .* one of them has been changed"):
        verify_model(folder, A, expected(unsigned=True))


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("site", [A, None], ids=["one model", "the whole folder"])
def test_a_model_without_a_statement_about_it_is_refused(
    tmp_path: Path, folder: Path, site: SiteName | None, unsigned: bool
) -> None:
    origin = expected(unsigned=unsigned)
    (model,) = verify_received(tmp_path, origin, site=site)
    assert (model.site, model.is_signed) == (A, True)
    for stray in ("model.keras", "models/model.keras", f"models/{A}/more/model.keras"):
        path = tmp_path / stray
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"other weights")
        with pytest.raises(
            ProvenanceError, match=f"the keeper sends {stray}, which no statement covers"
        ):
            verify_received(tmp_path, origin, site=site)
        path.unlink()
    for name in ("model.json", "model.keras"):
        (folder / name).unlink()
        with pytest.raises(ProvenanceError, match=f"the keeper has no model.keras|no {name}"):
            verify_received(tmp_path, origin, site=site)


def test_other_files_are_allowed_only_in_a_whole_folder(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"")
    assert len(verify_received(tmp_path, expected(), site=None)) == 1
    with pytest.raises(ProvenanceError, match=r"sends events.jsonl, which no statement covers"):
        verify_received(tmp_path, expected(), site=A)


@pytest.mark.parametrize("name", ["plant-a/best.keras", "plant-a/more/w.h5", "other.keras"])
@pytest.mark.parametrize("site", [A, None], ids=["one model", "the whole folder"])
def test_nothing_else_is_accepted_among_the_models(
    tmp_path: Path, folder: Path, site: SiteName | None, name: str
) -> None:
    path = tmp_path / "models" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"other weights")
    with pytest.raises(ProvenanceError, match=f"sends models/{name}, which no statement covers"):
        verify_received(tmp_path, expected(unsigned=True), site=site)


def test_a_missing_model_is_an_error_only_if_one_is_required(tmp_path: Path) -> None:
    assert verify_received(tmp_path, expected(), site=None) == []
    with pytest.raises(ProvenanceError, match=r"no model.keras and no model.json of plant-a"):
        verify_received(tmp_path, expected(), site=A)


def test_a_model_without_signed_statement_is_accepted_only_if_allowed(
    tmp_path: Path, folder: Path
) -> None:
    unsigned = keeper(tmp_path, own=WorkerCredentials.insecure())
    (folder / PROVENANCE_FILE).write_bytes(unsigned.signed(statement(folder).to_json(), SAVER))
    with pytest.raises(ProvenanceError, match=r"not signed.*--allow-unsigned"):
        verify_model(folder, A, expected())
    verified = verify_model(folder, A, expected(unsigned=True))
    assert (verified.is_signed, verified.lines()[0].split(";")[0]) == (False, "plant-a: not signed")
    (folder / PROVENANCE_FILE).unlink()
    with pytest.raises(ProvenanceError, match=r"no statement.*--allow-unsigned"):
        verify_model(folder, A, expected())
    assert verify_model(folder, A, expected(unsigned=True)).provenance is None


def test_a_keeper_signs_only_what_its_caller_may_state(tmp_path: Path, folder: Path) -> None:
    right = statement(folder)
    stated = right.provenance
    wrong = [
        replace(right, provenance=replace(stated, saved_by="plant-a/g-1")),
        replace(right, provenance=replace(stated, site=B)),
        replace(right, provenance=replace(stated, run=replace(stated.run, run_id="2"))),
    ]
    for each in wrong:
        with pytest.raises(ContractError, match=r"statement of"):
            keeper(tmp_path).signed(each.to_json(), SAVER)
    with pytest.raises(ContractError, match="not JSON"):
        keeper(tmp_path).signed(b"anything", SAVER)
    with pytest.raises(ContractError, match="does not know the DLionJob's UID"):
        keeper(tmp_path, uid="").signed(right.to_json(), SAVER)


@pytest.mark.parametrize("name", ["model.keras", "model.json"])
def test_a_statement_about_missing_files_is_refused(
    tmp_path: Path, folder: Path, name: str
) -> None:
    of_newer = replace(
        statement(folder), sha256={**statement(folder).sha256, name: "0" * 64}
    ).to_json()
    refused = pytest.raises(ContractError, match=f"statement of another {name} than is kept here")
    with refused:
        keeper(tmp_path).signed(of_newer, SAVER)
    (folder / name).unlink()
    with refused:
        keeper(tmp_path).signed(of_newer, SAVER)


def test_a_keeper_hashes_each_version_of_a_file_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(provenance_signer, "file_sha256", counted)
    (tmp_path / "newer").write_bytes(b"other..")
    (tmp_path / "newer").replace(folder / "model.keras")
    for _ in range(2):
        keeper(tmp_path).signed(statement(folder).to_json(), SAVER)
    assert hashed == ["model.keras"]


@pytest.mark.parametrize("days", [-9, 9])
def test_a_keeper_does_not_sign_with_a_certificate_that_is_not_valid(
    tmp_path: Path, folder: Path, days: int
) -> None:
    certified_at = datetime.now(UTC) + timedelta(days=days)
    own = credentials(KeeperIdentity(A), certified_at=certified_at)
    with pytest.raises(UnavailableError, match="must be renewed, or the clock set"):
        keeper(tmp_path, own=own).signed(statement(folder).to_json(), SAVER)
    key = WorkerKey()
    own.renew(key, AUTHORITIES[A].sign(key.csr_pem(), KeeperIdentity(A), JOB))
    (folder / PROVENANCE_FILE).write_bytes(
        keeper(tmp_path, own=own).signed(statement(folder).to_json(), SAVER)
    )
    assert verify_model(folder, A, expected()).is_signed
