"""Test the keeper's service on a real port with mutual TLS, real client, files and threads.

A worker can fetch each file that it uploaded, byte by byte, also after a restart of the keeper. A
new file replaces the old one only when it is complete. Hostile and mistaken uploads are refused
with a reason and leave no trace on the disk. Among them are paths of other workers, wrong
certificates, damaged files and replaced incarnations. A full disk is reported and is not a refusal.

The upload queue sends only the newest version, retries while the keeper is away, and stops after a
refusal. A worker exits with its own code if the keeper did not get its site's model. The keeper
signs a worker's statement about the model that it stores, and keeps none beside another model. A
statement is sent after its files and given up with them. A model without a statement is reported.
Files of one folder are stored one at a time. Waiting uploads do not block other folders, and a
failed or cancelled one changes nothing.

Left out: the keeper as a process and its records (test_pods).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import grpc
import pytest

from attempts import first_that_holds
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.protocol.provenance import PROVENANCE_FILE
from dlion_api.reasons import EventReason
from dlion_api.wire import keeping_pb2 as wire
from dlion_api.wire import keeping_pb2_grpc
from dlion_api.wire.coordination_pb2 import Worker
from dlion_cli.inputs.model_provenance import ExpectedOrigin, verify_model
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.artifact_client import ArtifactClient, UploadQueue
from dlion_worker.artifact_client.chunks import CHUNK_BYTES, crc32
from dlion_worker.artifact_client.paths import (
    MAX_METADATA_BYTES,
    metadata_path,
    model_path,
    provenance_path,
)
from dlion_worker.artifact_client.upload_queue import UploadResult
from dlion_worker.artifact_server import store as store_module
from dlion_worker.artifact_server.store import ArtifactStore
from dlion_worker.coordination.channel import worker_to_wire
from dlion_worker.provenance.writer import ProvenanceWriter
from dlion_worker.security.credentials import WorkerKey
from dlion_worker.trainer.saving import ModelLostError, StateSaver
from dlion_worker.training.site_model import SavedModel
from keeper_service import AUTHORITIES, DISK_THREADS, PLANT_A, PLANT_B, UID, Keeper, job, proof

if TYPE_CHECKING:
    from dlion_api.protocol.worker_config import WorkerConfig
    from dlion_worker.training.checkpointing import Checkpointer
    from dlion_worker.training.site_model import ModelSummary

OWN = "state/w0/checkpoint.npz"


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    (tmp_path / "kept").mkdir()
    it = Keeper(tmp_path / "kept")
    yield it
    it.close()


@pytest.fixture
def client(keeper: Keeper) -> Iterator[ArtifactClient]:
    it = keeper.client(0)
    yield it
    it.close()


def write(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
def test_a_file_is_returned_unchanged(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient, size: int
) -> None:
    source = write(tmp_path / "mine", size)
    assert client.put(OWN, source) == size
    keeper.stop()
    keeper.start()
    assert client.get(OWN, tmp_path / "deep" / "back")
    assert (tmp_path / "deep" / "back").read_bytes() == source.read_bytes()
    assert keeper.files() == {OWN: size}


def test_a_missing_file_is_not_an_error(tmp_path: Path, client: ArtifactClient) -> None:
    assert not client.get(OWN, tmp_path / "back")
    assert not list(tmp_path.glob("*back*"))


def start(
    path: str = OWN,
    total: int = 4,
    rank: int = 0,
    run: str = "",
    site: str = PLANT_A,
    index: int = 0,
) -> wire.PutChunk:
    return wire.PutChunk(
        start=wire.PutStart(
            run=run or str(job().key), path=path, total_bytes=total, incarnation=1,
            worker=Worker(rank=rank, site=site, group="g", index=index),
        )
    )  # fmt: skip


def chunk(payload: bytes, offset: int = 0, damage: int = 0) -> wire.PutChunk:
    return wire.PutChunk(offset=offset, payload=payload, checksum=crc32(payload) ^ damage)


HOSTILE = {
    "climbs out": ([start("../../etc/passwd"), chunk(b"evil")], "PERMISSION_DENIED"),
    "climbs inside": (
        [start("state/w0/../w1/checkpoint.npz"), chunk(b"evil")], "PERMISSION_DENIED",
    ),
    "absolute": ([start("/etc/passwd"), chunk(b"evil")], "PERMISSION_DENIED"),
    "no path": ([start(""), chunk(b"evil")], "PERMISSION_DENIED"),
    "another file of its own": ([start("state/w0/x"), chunk(b"evil")], "PERMISSION_DENIED"),
    "another's path": ([start("state/w1/checkpoint.npz"), chunk(b"evil")], "PERMISSION_DENIED"),
    "another's rank": (
        [start("state/w1/checkpoint.npz", rank=1), chunk(b"evil")], "PERMISSION_DENIED",
    ),
    "another's name": (
        [start("state/w1/checkpoint.npz", rank=1, index=1), chunk(b"evil")], "PERMISSION_DENIED",
    ),
    "a rank of no worker": (
        [start("state/w7/checkpoint.npz", rank=7), chunk(b"evil")], "PERMISSION_DENIED",
    ),
    "a worker that does not exist": (
        [start("state/w7/checkpoint.npz", rank=7, index=7), chunk(b"evil")], "PERMISSION_DENIED",
    ),
    "a name without end": ([start(site="a" * 10000), chunk(b"evil")], "PERMISSION_DENIED"),
    "another site's rank": (
        [start("state/w2/checkpoint.npz", rank=2, site=PLANT_B), chunk(b"evil")],
        "PERMISSION_DENIED",
    ),
    "another site's model": (
        [start("models/plant-b/model.keras"), chunk(b"evil")], "PERMISSION_DENIED",
    ),
    "no such rank": ([start(rank=2**32 - 1), chunk(b"evil")], "PERMISSION_DENIED"),
    "another run": ([start(run="default/test#other"), chunk(b"evil")], "PERMISSION_DENIED"),
    "too long": ([start(total=2**63), chunk(b"evil")], "INVALID_ARGUMENT"),
    "too long a description": (
        [start("models/plant-a/model.json", MAX_METADATA_BYTES + 1), chunk(b"evil")],
        "INVALID_ARGUMENT",
    ),
    "longer than announced": ([start(), chunk(b"evil!")], "INVALID_ARGUMENT"),
    "damaged": ([start(), chunk(b"evil", damage=1)], "INVALID_ARGUMENT"),
    "cut short": ([start(), chunk(b"evi")], "INVALID_ARGUMENT"),
    "with a hole": ([start(), chunk(b"ev"), chunk(b"l", 3)], "INVALID_ARGUMENT"),
    "twice the same": ([start(), chunk(b"ev"), chunk(b"ev")], "INVALID_ARGUMENT"),
    "no start": ([chunk(b"evil")], "INVALID_ARGUMENT"),
    "nothing": ([], "INVALID_ARGUMENT"),
    "two starts": ([start(), start()], "INVALID_ARGUMENT"),
    "a chunk without bytes": ([start(), chunk(b"")], "INVALID_ARGUMENT"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(keeper: Keeper, client: ArtifactClient, name: str) -> None:
    messages, code = HOSTILE[name]
    with pytest.raises(grpc.RpcError) as caught:
        client._stub.Put(iter(messages))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code().name == code, caught.value.details()
    assert caught.value.details()
    assert keeper.files() == {}


def test_garbage_is_refused(keeper: Keeper, client: ArtifactClient) -> None:
    for data in (b"\xff" * 50, os.urandom(CHUNK_BYTES + 5000)):
        put = client._channel.stream_unary("/dlion.v1alpha1.Keeping/Put")
        with pytest.raises(grpc.RpcError) as caught:
            put(iter([data]))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert keeper.files() == {}


def test_a_file_is_replaced_only_by_a_complete_one(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    source = write(tmp_path / "mine", 1000)
    client.put(OWN, source)
    with pytest.raises(grpc.RpcError):
        client._stub.Put(iter([start(), chunk(b"evi")]))
    assert client.get(OWN, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_another_worker_cannot_fetch_a_file(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    client.put(OWN, write(tmp_path / "mine", 10))
    other = keeper.client(1)
    try:
        with pytest.raises(ContractError, match="is not plant-a/g-1's"):
            other.get(OWN, tmp_path / "back")
    finally:
        other.close()


def refused_by_tls(keeper: Keeper, credentials: grpc.ChannelCredentials) -> bool:
    name = KeeperIdentity(PLANT_A).dns_name(job().key)
    options = [("grpc.ssl_target_name_override", name)]
    with grpc.secure_channel(keeper.address, credentials, options=options) as channel:
        stub = keeping_pb2_grpc.KeepingStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            stub.Put(iter([start(), chunk(b"evil")]), timeout=10)
        assert isinstance(caught.value, grpc.Call)
        return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_of_another_kind_is_refused(keeper: Keeper) -> None:
    assert refused_by_tls(keeper, grpc.ssl_channel_credentials(AUTHORITIES[PLANT_A].bundle_pem))
    forged = WorkerKey()
    impostor = WorkerIdentity(Rank(0), PLANT_A, "g", 0)
    chain = CertificateAuthority(PLANT_A).sign(forged.csr_pem(), impostor, job().key)
    bundle = AUTHORITIES[PLANT_A].bundle_pem
    assert refused_by_tls(keeper, grpc.ssl_channel_credentials(bundle, forged.pem(), chain))
    assert keeper.files() == {}


@pytest.mark.parametrize("who", [job().workers()[2], KeeperIdentity(PLANT_A), job().workers()[0]])
def test_a_certificate_for_something_else_is_refused(
    tmp_path: Path, keeper: Keeper, who: WorkerIdentity | KeeperIdentity
) -> None:
    """It is of another site's worker, of the keeper itself, or of another run."""
    run = JobKey("default", "test", "other") if who == job().workers()[0] else None
    it = ArtifactClient(
        keeper.address, job=job().key, worker=job().workers()[0], incarnation=1,
        credentials=proof(who, run),
    )  # fmt: skip
    try:
        with pytest.raises(ContractError, match="PERMISSION_DENIED"):
            it.put(OWN, write(tmp_path / "evil", 4))
    finally:
        it.close()
    assert keeper.files() == {}


def test_a_later_worker_is_identified_by_its_certificate(tmp_path: Path, keeper: Keeper) -> None:
    """The group has grown since: the ranks in the manifest of the others do not change."""
    late = WorkerIdentity(Rank(3), PLANT_A, "g", 2)
    source = write(tmp_path / "mine", 10)

    def put(worker: WorkerIdentity) -> int:
        it = ArtifactClient(
            keeper.address, job=job().key, worker=worker, incarnation=1, credentials=proof(worker)
        )
        try:
            return it.put(f"state/w{worker.rank}/checkpoint.npz", source)
        finally:
            it.close()

    for _ in range(2):
        assert put(late) == 10
        for thief in (replace(late, rank=Rank(5)), WorkerIdentity(Rank(3), PLANT_A, "g", 4)):
            with pytest.raises(ContractError, match="is rank 3"):
                put(thief)
        keeper.stop()
        keeper.start()


def test_an_upload_of_a_replaced_incarnation_is_refused(tmp_path: Path, keeper: Keeper) -> None:
    newer, older = keeper.client(0, incarnation=8), keeper.client(0, incarnation=7)
    try:
        newer.put(OWN, write(tmp_path / "newer", 20))
        with pytest.raises(ContractError, match="was replaced by 8"):
            older.put(OWN, write(tmp_path / "older", 10))
    finally:
        newer.close()
        older.close()
    assert keeper.files() == {OWN: 20}


def test_files_of_a_revoked_worker_are_refused_until_it_is_trusted_again(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    source = write(tmp_path / "mine", 10)
    keeper.revoked.set([job().workers()[0].name])
    with pytest.raises(ContractError, match="is revoked"):
        client.put(OWN, source)
    assert keeper.files() == {}
    assert keeper.refusals.counts() == {"Revoked": 1}
    keeper.revoked.set([job().workers()[1].name])
    assert client.put(OWN, source) == 10


def test_a_download_ends_when_its_worker_is_revoked(keeper: Keeper, client: ArtifactClient) -> None:
    file = keeper.folder / OWN
    file.parent.mkdir(parents=True)
    with file.open("wb") as kept:
        kept.truncate(2**28)  # more than what is under way
    request = wire.GetRequest(
        run=str(job().key), worker=worker_to_wire(job().workers()[0]), path=OWN
    )
    chunks = client._start(OWN, lambda stub: stub.Get(request))
    next(chunks)
    keeper.revoked.set([job().workers()[0].name])
    with pytest.raises(grpc.RpcError, match="is revoked"):
        list(chunks)


def test_no_worker_is_served_before_the_revoked_workers_are_known(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    source, keeper = write(tmp_path / "mine", 10), Keeper(folder, knows_revoked=False)
    try:
        with pytest.raises(UnavailableError, match="has not named the revoked workers yet"):
            keeper.client(0).put(OWN, source)
        keeper.revoked.set([])
        assert keeper.client(0).put(OWN, source) == 10
    finally:
        keeper.close()


def test_a_full_disk_is_reported_and_uploads_resume(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "mine", 10)
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "RESERVE_BYTES", 2**62)
        with pytest.raises(UnavailableError, match="do not fit"):
            client.put(OWN, source)
    assert keeper.files() == {}
    assert client.put(OWN, source) == 10


def test_partial_files_of_an_earlier_keeper_are_removed(tmp_path: Path) -> None:
    file = ArtifactStore(tmp_path).create(OWN, 10)
    file.write(b"half")
    assert ArtifactStore(tmp_path).remove_partial() == 1
    assert not list((tmp_path / "state/w0").iterdir())
    file.discard()


def authority_pem(site: SiteName) -> bytes:
    return AUTHORITIES[site].bundle_pem


SIGNED_BY_KEEPER = ExpectedOrigin(job().key, UID, authority_pem, ())


def stated(folder: Path, about_bytes: int = 10) -> None:
    """Write a model with its statement to that folder, as the first worker saves it."""
    folder.mkdir()
    write(folder / "model.keras", 100)
    write(folder / "model.json", about_bytes)
    inbox = EventInbox(lambda *_: None, clock_s=time.monotonic)
    writer = ProvenanceWriter(
        job(), job().workers()[0].rank, inbox=inbox, membership=lambda: None, data_root=folder
    )
    writer.write(SavedModel(folder, cast("ModelSummary", SimpleNamespace(model="averaged")), ()))


def wait_until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class Results:
    """The results that an upload queue reports."""

    def __init__(self) -> None:
        self.outcomes: list[UploadResult] = []

    def __call__(self, outcome: UploadResult) -> None:
        self.outcomes.append(outcome)

    def wait(self, holds: Callable[[list[UploadResult]], object]) -> None:
        wait_until(lambda: holds(self.outcomes))


def test_the_queue_uploads_the_newest_once_the_keeper_is_back(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    keeper.stop()
    results, source = Results(), write(tmp_path / "mine", 100)
    queue = UploadQueue(client, results)
    try:

        def called_s() -> float:
            began_s = time.monotonic()
            queue.upload(OWN, source, iteration=1)
            return time.monotonic() - began_s

        first_that_holds(called_s, lambda took_s: took_s < 0.1)
        results.wait(lambda outcomes: outcomes)
        assert not results.outcomes[0].final
        assert not queue.wait([OWN], within_s=0.3)
        for iteration in (2, 3):
            queue.upload(OWN, write(source, 100 + iteration), iteration=iteration)
        keeper.start()
        assert queue.wait([OWN], within_s=20)
        results.wait(lambda outcomes: not outcomes[-1].error)
        first, *later = [(o.iteration, o.final) for o in results.outcomes]
        assert (first, later[-1]) == ((1, False), (3, True))
        assert (2, True) not in later  # an attempt with the first may be under way meanwhile
        assert keeper.files() == {OWN: 103}
    finally:
        queue.close()


def test_the_queue_does_not_retry_a_refused_upload(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    results = Results()
    queue = UploadQueue(client, results)
    try:
        queue.upload("state/w1/checkpoint.npz", write(tmp_path / "mine", 10), iteration=1)
        queue.upload(OWN, tmp_path / "missing", iteration=1)
        results.wait(lambda outcomes: len(outcomes) == 2)
        assert all(outcome.final and outcome.error for outcome in results.outcomes)
    finally:
        queue.close()


@pytest.mark.parametrize("keeper_does", ["takes it", "is away", "refuses it", "signs nothing"])
def test_a_model_that_was_not_uploaded_is_lost(
    tmp_path: Path, keeper: Keeper, keeper_does: str
) -> None:
    records: list[ProgressRecord] = []
    saving = StateSaver(
        cast("WorkerConfig", SimpleNamespace(
            state_dir=str(tmp_path), keeper_address=keeper.address, resume=False
        )),
        checkpointer=lambda _path: cast("Checkpointer", SimpleNamespace(key=b"")),
        progress=JobProgress(),
        reporter=Reporter(
            rank=Rank(0),
            incarnation=1,
            start_monotonic_s=time.monotonic(),
            send=records.extend,
            clock_s=time.monotonic,
        ),
        model_upload_timeout_s=20 if keeper_does != "is away" else 0.5,
    )  # fmt: skip
    worker = job().workers()[0]
    saving.connect(job().key, worker, 1, proof(worker))
    about_bytes = MAX_METADATA_BYTES + 1 if keeper_does == "refuses it" else 10
    folder = tmp_path / "model"
    stated(folder, about_bytes)
    if keeper_does == "signs nothing":
        (folder / PROVENANCE_FILE).write_bytes(b"{}")
    if keeper_does == "is away":
        keeper.stop()
    try:
        saving.upload_model_and_wait(folder)
        if keeper_does in ("takes it", "signs nothing"):
            saving.check_model_uploaded()
            names = {Path(path).name for path in keeper.files()}
            assert names >= {"model.keras", "model.json"}
            assert (PROVENANCE_FILE in names) == (keeper_does == "takes it")
        else:
            with pytest.raises(ModelLostError) as lost:
                saving.check_model_uploaded()
            assert lost.value.exit_code is ExitCode.MODEL_LOST
        if keeper_does == "refuses it":  # the statement is given up with the description
            wait_until(lambda: any("neither is a file" in str(each) for each in records))
    finally:
        saving.close()
    events = [record for record in records if isinstance(record, EventRecord)]
    reasons = {record.reason for record in events}
    assert (EventReason.KEEP_FAILED in reasons) == (keeper_does != "takes it")
    is_named = any("without a signed statement" in record.message for record in events)
    assert is_named == (keeper_does == "signs nothing")


def test_the_keeper_signs_the_statement_of_its_stored_model(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    site, made = job().workers()[0].site, tmp_path / "made"
    stated(made)
    files = {name: made / name for name in ("model.keras", "model.json", PROVENANCE_FILE)}
    for path in (provenance_path(site), model_path(site), provenance_path(site)):
        if path == model_path(site):
            client.put(path, files["model.keras"])
            continue
        with pytest.raises(ContractError, match=r"another .*model\.json"):  # that file is missing
            client.put(path, files[PROVENANCE_FILE])
    client.put(metadata_path(site), files["model.json"])
    client.put(provenance_path(site), files[PROVENANCE_FILE])
    folder = keeper.folder / "models" / site
    assert verify_model(folder, site, SIGNED_BY_KEEPER).is_signed
    other = keeper.client(1)
    try:
        with pytest.raises(ContractError, match="statement of"):  # another worker has made it
            other.put(provenance_path(site), files[PROVENANCE_FILE])
        assert (folder / PROVENANCE_FILE).exists()
        for path, name in ((model_path(site), "model.keras"), (metadata_path(site), "model.json")):
            other.put(path, write(tmp_path / "other", 100))
            assert not (folder / PROVENANCE_FILE).exists(), f"no statement beside another {name}"
            with pytest.raises(ContractError, match=f"another {name}"):
                client.put(provenance_path(site), files[PROVENANCE_FILE])
            client.put(path, files[name])
            client.put(provenance_path(site), files[PROVENANCE_FILE])
    finally:
        other.close()
    assert not list(folder.glob(".*"))


def test_a_statement_is_sent_after_its_files(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    site, results, made = job().workers()[0].site, Results(), tmp_path / "made"
    for path in (model_path(site), metadata_path(site)):
        client.put(path, write(tmp_path / "earlier", 50))
    stated(made)
    queue = UploadQueue(client, results)
    files, own = (model_path(site), metadata_path(site)), provenance_path(site)
    try:
        keeper.stop()
        for path in files:
            queue.upload(path, made / Path(path).name, iteration=1)
        queue.upload(own, made / PROVENANCE_FILE, iteration=1, after=files)
        results.wait(lambda outcomes: outcomes)  # the model returns to the end of the queue
        keeper.start()
        assert queue.wait([*files, own], within_s=20)
        results.wait(lambda outcomes: outcomes[-1].path == own)
        assert [o.error for o in results.outcomes if o.path == own] == [""]
    finally:
        queue.close()
    assert verify_model(keeper.folder / "models" / site, site, SIGNED_BY_KEEPER).is_signed


def test_a_waiting_upload_of_a_replaced_incarnation_is_not_stored(
    tmp_path: Path, keeper: Keeper, client: ArtifactClient
) -> None:
    """Its complete file waits while another file of its folder is stored."""
    newer, older = keeper.client(0, incarnation=8), keeper.client(0, incarnation=7)
    errors: list[Exception] = []

    def put_older() -> None:
        try:
            older.put(OWN, write(tmp_path / "older", 10))
        except ContractError as error:
            errors.append(error)

    sending = threading.Thread(target=put_older)
    try:
        with keeper.storing("state/w0"):
            sending.start()
            wait_until(lambda: keeper.waiting_files(OWN) == [10])
            both = threading.Thread(target=lambda: newer.put(OWN, write(tmp_path / "newer", 20)))
            both.start()
            wait_until(lambda: sorted(keeper.waiting_files(OWN)) == [10, 20])
        sending.join(20)
        both.join(20)
    finally:
        newer.close()
        older.close()
    assert "was replaced by 8" in str(errors)
    assert keeper.files() == {OWN: 20}


@pytest.fixture
def signed_model(tmp_path: Path, keeper: Keeper, client: ArtifactClient) -> Path:
    """Upload a site's model with its statement."""
    made = tmp_path / "made"
    stated(made)
    for path in (model_path(PLANT_A), metadata_path(PLANT_A), provenance_path(PLANT_A)):
        client.put(path, made / Path(path).name)
    return keeper.folder / "models" / PLANT_A


@pytest.mark.parametrize("name", ["model.keras", "model.json"])
def test_an_upload_that_fails_leaves_the_model_with_its_statement(
    tmp_path: Path, signed_model: Path, client: ArtifactClient, name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(UnavailableError, match="no space left"):
            client.put(f"models/{PLANT_A}/{name}", write(tmp_path / "newer", 50))
    assert verify_model(signed_model, PLANT_A, SIGNED_BY_KEEPER).is_signed


class Upload:
    """An upload of a newer model in a thread."""

    def __init__(self, keeper: Keeper, source: Path) -> None:
        self._client, self._source = keeper.client(1), source
        self._thread = threading.Thread(target=self._put)
        self._thread.start()

    def cancel(self) -> None:
        self._client.close()
        self._thread.join(20)

    def _put(self) -> None:
        with pytest.raises(UnavailableError):
            self._client.put(model_path(PLANT_A), self._source)


def test_waiting_uploads_do_not_block_other_folders_and_can_be_cancelled(
    tmp_path: Path, keeper: Keeper, signed_model: Path, client: ArtifactClient
) -> None:
    newer = write(tmp_path / "newer", 50)
    with keeper.storing(f"models/{PLANT_A}"):
        waiting: list[Upload] = []
        while len(waiting) < DISK_THREADS:
            waiting.append(Upload(keeper, newer))
            # The next one would refuse what has not arrived.
            wait_until(lambda: keeper.waiting_files(model_path(PLANT_A)) == [50] * len(waiting))
        client.put(OWN, write(tmp_path / "mine", 10))
        for upload in waiting:
            upload.cancel()
        wait_until(lambda: not keeper.waiting_files(model_path(PLANT_A)))
    assert client.get(OWN, tmp_path / "back")
    assert verify_model(signed_model, PLANT_A, SIGNED_BY_KEEPER).is_signed


def test_a_file_is_stored_completely_though_its_call_is_cancelled(
    tmp_path: Path, keeper: Keeper, signed_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_storing, may_store = threading.Event(), threading.Event()

    def slow(_file: int) -> None:
        is_storing.set()
        may_store.wait(20)

    newer = write(tmp_path / "newer", 50)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", slow)
        upload = Upload(keeper, newer)
        try:
            assert is_storing.wait(20)
            upload.cancel()
            wait_until(keeper.is_cancelling)
            assert keeper.waiting_files(model_path(PLANT_A)) == [50]
            assert keeper.service._locks[f"models/{PLANT_A}"].locked()
        finally:
            may_store.set()
        wait_until(lambda: not keeper.is_cancelling())
    assert (signed_model / "model.keras").read_bytes() == newer.read_bytes()
    assert not (signed_model / PROVENANCE_FILE).exists()
