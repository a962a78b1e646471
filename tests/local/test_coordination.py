"""Test the calls between workers and their coordinator, over real gRPC, TLS and threads on
loopback.

A worker gets a certificate, joins, receives the membership, reports, and is asked to stop. It
leaves in order or is reported lost, also with a long round trip to its coordinator. A coordinator
that restarts is found again. No record that it has not taken is lost, and no member that it does
not know yet is dropped. A revoked worker ends, and waits until it is trusted again. Each hostile
call is refused with its own status and counted.

Left out: which workers are admitted (tests/unit/operator/coordinator), worker processes (the
runner's tests).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.protocol.refusals import REASON_KEY, RefusalReason
from dlion_api.protocol.revocation import Revocation
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job, load_job
from dlion_api.wire import coordination_pb2 as wire
from dlion_operator.coordinator import CoordinatorServer, CoordinatorThread
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_worker.coordination import CoordinationClient, next_incarnation
from dlion_worker.coordination.channel import coordination_stub, open_channel
from dlion_worker.coordination.saved_state import load_membership
from dlion_worker.security.credential_store import CREDENTIALS_FILE, store_credentials
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 30.0

DOCUMENT = {
    "apiVersion": "dlion.dev/v1alpha1",
    "kind": "DLionJob",
    "metadata": {"name": "digits"},
    "spec": {
        "runId": "1",
        "sites": [
            {"name": "plant-a", "groups": [{"name": "small", "workers": 2}]},
            {"name": "plant-b", "groups": [{"name": "gpu", "workers": 1}]},
        ],
        "trainer": {
            "image": "dlion",
            "program": {"builtin": "digits"},
            "dataset": {"name": "digits"},
            "stop": {"maxSteps": 10},
        },
    },
}


def wait_until(true: Callable[[], object], what: str) -> None:
    """Return as soon as the condition holds; fail after 30 s."""
    deadline_s = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)


@dataclass
class Site:
    """A coordinator that can be stopped and restarted on its port, and its workers' files."""

    folder: Path
    secure: bool = True
    life: timedelta = timedelta(hours=1)
    job: Job = field(default_factory=lambda: load_job(DOCUMENT))
    records: list[ProgressRecord] = field(default_factory=list)
    take: Callable[[ProgressRecord], None] | None = None
    """Called with each record; it is then not added to `records`."""
    port: int = 0
    age_s: float = 0.0
    """Age of the run when the coordinator starts."""

    def __post_init__(self) -> None:
        names = [site.name for site in self.job.spec.sites] if self.secure else []
        self.authorities = {name: CertificateAuthority(name, life=self.life) for name in names}
        self.tokens = Tokens()
        self.coordinator = self.start()

    def start(self) -> CoordinatorThread:
        authority = next(iter(self.authorities.values()), None)
        server = CoordinatorServer(f"127.0.0.1:{self.port}", authority)
        server.open(
            self.job,
            authorities=self.authorities,
            tokens=self.tokens,
            on_record=self.take or self.records.append,
            start_time_monotonic_s=time.monotonic() - self.age_s,
        )
        self.coordinator = CoordinatorThread(server, self.job.key)
        self.port = self.coordinator.start()
        return self.coordinator

    def config(self, rank: int, at_port: int | None = None) -> WorkerConfig:
        folder = self.folder / str(rank)
        folder.mkdir(exist_ok=True)
        worker = self.job.workers()[rank]
        (folder / "token").write_text(self.tokens.issue(worker, self.job.key))
        (folder / "ca.pem").write_bytes(self.coordinator.authority_pem)
        return WorkerConfig(
            job_document=DOCUMENT,
            rank=Rank(rank),
            coordinator_address=f"127.0.0.1:{at_port or self.port}",
            authority_pem_path=str(folder / "ca.pem") if self.secure else "",
            token_path=str(folder / "token"),
            state_dir=str(folder),
            socket_path=str(folder / "s"),
            listen_host="127.0.0.1",
            advertise_host="127.0.0.1",
            data_root="",
            results_dir=str(folder),
        )

    def client(
        self, rank: int, incarnation: int | None = None, *, at_port: int | None = None
    ) -> CoordinationClient:
        config = self.config(rank, at_port)
        return CoordinationClient(
            config,
            job=self.job.key,
            worker=self.job.workers()[rank],
            spec_hash=self.job.hash(),
            incarnation=next_incarnation(config.state_dir) if incarnation is None else incarnation,
        )

    def state(self, rank: int) -> MemberState | None:
        member = self.coordinator._server.membership(self.job.key).member(Rank(rank))
        return member.state if member else None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    before = set(threading.enumerate())
    site = Site(tmp_path)
    yield site
    site.coordinator.close()
    leaked = {t for t in set(threading.enumerate()) - before if t.name.startswith("dlion")}
    assert not leaked


def event(rank: int, message: str) -> EventRecord:
    return EventRecord(1.0, Rank(rank), 1, "Tested", message)


def messages(site: Site) -> list[str]:
    return [record.message for record in site.records if isinstance(record, EventRecord)]


def csr_pem() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@contextlib.contextmanager
def far_away(port: int, delay_s: float) -> Iterator[int]:
    """Open a port that forwards to `port` and delays everything by `delay_s` in each direction."""
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def begin(work: Callable[..., None], *given: object) -> None:
        threads.append(threading.Thread(target=work, args=given))
        threads[-1].start()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):  # the test closes it at the end
            while True:
                near = listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", port))
                ends.extend((near, there))
                begin(pump, near, there)
                begin(pump, there, near)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        begin(accept)
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            threads[0].join()
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads[1:]:
                thread.join()
            for end in ends:
                end.close()


def test_a_worker_far_away_is_signed_and_joins(site: Site) -> None:
    """A round trip takes 0.3 s, and a handshake several times that."""
    with far_away(site.port, 0.15) as port:
        client = site.client(0, at_port=port)
        assert client.sign(csr_pem=csr_pem(), wait_s=LONG_S).chain_pem
        client.join("127.0.0.1:1", "", lambda _: None)
        wait_until(client.connected, "connected")
        assert client.close(finished=True, flush_s=LONG_S)


def test_a_worker_with_its_token_gets_a_certificate_in_its_own_name(site: Site) -> None:
    client = site.client(2)
    signed = client.sign(csr_pem=csr_pem())
    client.close()
    names = (
        x509.load_pem_x509_certificate(signed.chain_pem)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value.get_values_for_type(x509.DNSName)
    )
    worker = site.job.workers()[2]
    assert names == [worker.dns_name(site.job.key), worker.measuring_dns_name(site.job.key)]
    assert set(signed.site_bundles_pem) == {"plant-a", "plant-b"}


def test_a_wrong_certificate_request_is_refused_for_good(site: Site) -> None:
    client = site.client(0)
    with pytest.raises(ContractError, match="INVALID_ARGUMENT"):
        client.sign(csr_pem=b"no request")
    client.close()
    assert site.coordinator._server.service.refusals == {RefusalReason.MALFORMED: 1}


def test_waiting_for_a_certificate_ends_when_asked(site: Site) -> None:
    client = site.client(0)
    site.coordinator.close()
    began_s = time.monotonic()
    with pytest.raises(UnavailableError):
        client.sign(csr_pem=csr_pem(), stopped=lambda: time.monotonic() > began_s + 0.5)
    with pytest.raises(UnavailableError):
        client.sign(csr_pem=csr_pem(), wait_s=0.3)
    assert time.monotonic() - began_s < 5
    client.close()


def test_workers_are_informed_of_each_other_and_of_a_loss(site: Site) -> None:
    memberships: list[Membership] = []
    first, second = site.client(0), site.client(1)
    first.join("127.0.0.1:1", "", memberships.append)
    second.join("127.0.0.1:2", "127.0.0.1:3", lambda _: None)
    wait_until(lambda: memberships and len(memberships[-1].ready()) == 2, "both ready")
    assert memberships[-1].expected_count == 3
    member = memberships[-1].member(Rank(1))
    assert member is not None
    assert (member.exchange_address, member.measuring_address) == ("127.0.0.1:2", "127.0.0.1:3")
    second.close()
    wait_until(lambda: len(memberships[-1].ready()) == 1, "one lost")
    assert site.state(1) is MemberState.LOST
    assert first.close(finished=True)
    assert site.state(0) is MemberState.FINISHED


def test_new_addresses_are_announced_without_a_loss(site: Site) -> None:
    memberships: list[Membership] = []
    watcher, client = site.client(0), site.client(1)
    watcher.join("127.0.0.1:1", "", memberships.append)
    client.join("127.0.0.1:2", "", lambda _: None)
    wait_until(lambda: site.state(1), "joined")
    client.join("127.0.0.1:2", "127.0.0.1:9", lambda _: None)

    def announced() -> bool:
        member = memberships[-1].member(Rank(1)) if memberships else None
        return member is not None and member.measuring_address == "127.0.0.1:9"

    wait_until(announced, "announced")
    states = {m.state for membership in memberships for m in membership.members}
    assert states == {MemberState.READY}
    client.close()
    watcher.close()


def test_a_stream_that_is_replaced_as_it_joins_stays_until_the_new_one_has_joined(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = site.client(1)
    original = client._stub.Join

    def join(request: wire.JoinRequest) -> object:
        call = original(request)
        wait_until(lambda: site.state(1), "joined")
        for stream in client._streams:
            stream.supersede()
        return call

    monkeypatch.setattr(client._stub, "Join", join)
    client.join("127.0.0.1:2", "", lambda _: None)
    wait_until(client.connected, "connected")
    assert site.state(1) is MemberState.READY
    client.close()


def test_records_arrive_in_order_and_the_end_flushes_them(site: Site) -> None:
    client = site.client(0)
    client.join("127.0.0.1:1", "", lambda _: None)
    wait_until(client.connected, "connected")
    client.report(event(0, str(number)) for number in range(1000))
    assert client.close(finished=True)
    assert messages(site) == [str(number) for number in range(1000)]


def test_all_records_have_the_time_of_the_run(tmp_path: Path) -> None:
    """A slow worker learns only when it joins when the run began. The times of its earlier reports
    are right nevertheless.
    """
    site = Site(tmp_path, age_s=1000.0)

    def reported() -> list[tuple[str, float]]:
        mine = [r for r in site.records if isinstance(r, EventRecord) and r.reason == "Tested"]
        return [(record.message, round(record.time_s, -2)) for record in mine]

    late = site.client(0)
    late.report([event(0, "before joining")])
    late.join("127.0.0.1:1", "", lambda _: None)
    wait_until(reported, "reported")
    late.report([event(0, "after it")])
    late.close()
    again = site.client(0)  # its state folder has the start time
    again.join("127.0.0.1:1", "", lambda _: None)
    again.report([event(0, "after a restart")])
    assert again.close(finished=True)
    site.coordinator.close()
    assert reported() == [("before joining", 1000), ("after it", 1000), ("after a restart", 0)]


def test_the_start_time_of_the_runner_is_used(tmp_path: Path) -> None:
    """`dlion run` has one clock for all processes of a machine; its coordinator starts earlier."""
    site = Site(tmp_path, age_s=1000.0)
    config = replace(site.config(0), start_time_monotonic_s=time.monotonic())
    client = CoordinationClient(
        config,
        job=site.job.key,
        worker=site.job.workers()[0],
        spec_hash=site.job.hash(),
        incarnation=1,
    )
    client.join("127.0.0.1:1", "", lambda _: None)
    wait_until(client.connected, "connected")
    client.report([event(0, "reported")])
    assert client.close(finished=True)
    site.coordinator.close()
    assert [record.time_s for record in site.records] == [1.0]


def test_a_stop_reaches_present_and_later_workers(site: Site) -> None:
    first, second = site.client(0), site.client(1)
    first.join("127.0.0.1:1", "", lambda _: None)
    wait_until(first.connected, "connected")
    assert first.stop_reason() is None
    site.coordinator.stop("Interrupted")
    wait_until(first.stop_reason, "the reason arrives")
    second.join("127.0.0.1:2", "", lambda _: None)
    wait_until(second.stop_reason, "the reason arrives at the second too")
    assert first.stop_reason() == second.stop_reason() == "Interrupted"
    first.close()
    second.close()


def test_a_restarted_coordinator_is_found_and_keeps_all_members(site: Site) -> None:
    memberships: list[Membership] = []
    first, second = site.client(0), site.client(1)
    first.join("127.0.0.1:1", "", memberships.append)
    second.join("127.0.0.1:2", "", lambda _: None)
    wait_until(lambda: memberships and len(memberships[-1].ready()) == 2, "both ready")
    site.coordinator.close()
    wait_until(lambda: not first.connected(), "noticed")
    second.close()
    first.report([event(0, "while it was away")])
    site.start()
    wait_until(first.connected, "found again")
    wait_until(lambda: messages(site) == ["while it was away"], "reported")
    versions = [membership.version for membership in memberships]
    assert versions == sorted(set(versions))
    latest = first.membership()
    assert latest is not None
    assert [m.state for m in latest.members] == [MemberState.READY, MemberState.READY]
    assert first.close(finished=True)


def test_a_restarted_worker_starts_from_the_saved_membership(site: Site) -> None:
    first = site.client(0)
    first.join("127.0.0.1:1", "", lambda _: None)
    wait_until(first.membership, "joined")
    kept, start_s = first.membership(), first.start_time_monotonic_s()
    first.close()
    site.coordinator.close()
    again = site.client(0)
    assert again.membership() == kept
    assert again.start_time_monotonic_s() == start_s
    again.join("127.0.0.1:1", "", lambda _: None)
    again.close()


def test_closing_is_bounded_without_a_coordinator(site: Site) -> None:
    client = site.client(0)
    client.join("127.0.0.1:1", "", lambda _: None)
    wait_until(client.connected, "connected")
    site.coordinator.close()
    client.report([event(0, "lost")])
    began_s = time.monotonic()
    assert not client.close(finished=True, flush_s=0.5)
    assert time.monotonic() - began_s < 5


def test_a_finished_worker_waits_for_a_slow_coordinator(site: Site) -> None:
    """Its last records report the saved model. A worker that is restarted does not wait."""
    busy, goes_on = threading.Event(), threading.Event()

    def take(record: ProgressRecord) -> None:
        site.records.append(record)
        if isinstance(record, EventRecord) and record.message == "slow":
            busy.set()
            goes_on.wait(LONG_S)  # in the event loop, as on a machine without a free core

    site.coordinator.close()
    site.take = take
    site.start()
    restarted, finished = clients = [site.client(rank) for rank in (0, 1)]
    for rank, client in enumerate(clients):
        client.join("127.0.0.1:1", "", lambda _: None)
        wait_until(client.connected, "connected")
        client.report([event(rank, "first")])
    wait_until(lambda: messages(site) == ["first", "first"], "both are answered")
    time.sleep(0.1)  # on the way
    finished.report([event(1, "slow")])
    assert busy.wait(LONG_S)
    finished.report([event(1, "last")])
    restarted.report([event(0, "none")])
    assert not restarted.close(finished=False, flush_s=0.2)
    assert "last" not in messages(site)
    threading.Timer(1.0, goes_on.set).start()
    assert finished.close(finished=True, flush_s=0.2)
    assert "last" in messages(site)


def test_a_finished_worker_that_is_asked_to_end_does_not_wait(
    site: Site,
) -> None:
    busy, goes_on = threading.Event(), threading.Event()

    def take(record: ProgressRecord) -> None:
        site.records.append(record)
        if isinstance(record, EventRecord) and record.message == "slow":
            busy.set()
            goes_on.wait(LONG_S)  # in the event loop

    site.coordinator.close()
    site.take = take
    site.start()
    client = site.client(0)
    client.join("127.0.0.1:1", "", lambda _: None)
    wait_until(client.connected, "connected")
    client.report([event(0, "first")])
    wait_until(lambda: messages(site) == ["first"], "it is answered")
    time.sleep(0.1)  # on the way
    client.report([event(0, "slow")])
    assert busy.wait(LONG_S)
    began_s = time.monotonic()
    taken = client.close(
        finished=True, flush_s=0.2, interrupted=lambda: time.monotonic() - began_s > 0.5
    )
    ended_s = time.monotonic() - began_s
    goes_on.set()
    assert not taken
    assert ended_s < 5


def test_a_silent_coordinator_does_not_block_a_worker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        site = Site(tmp_path)
        site.coordinator.close()
        site.port = silent.getsockname()[1]
        client = site.client(0)
        client.join("127.0.0.1:1", "", lambda _: None)
        client.report([event(0, "x")])
        with pytest.raises(UnavailableError):
            client.sign(csr_pem=csr_pem(), wait_s=0.5)
        began_s = time.monotonic()
        assert not client.close(finished=True, flush_s=0.5)
        assert time.monotonic() - began_s < 5


def test_an_old_incarnation_is_refused_and_a_lost_counter_is_accepted(site: Site) -> None:
    known = next_incarnation(site.config(0).state_dir) + 1000
    newer, older = site.client(0, incarnation=known), site.client(0, incarnation=known - 1)
    newer.join("127.0.0.1:1", "", lambda _: None)
    wait_until(newer.connected, "connected")
    older.join("127.0.0.1:2", "", lambda _: None)
    wait_until(older.failure, "refused")
    assert "ABORTED" in str(older.failure())
    assert newer.failure() is None
    assert newer.connected()
    assert next_incarnation(site.config(0).state_dir) == known + 1
    older.close()
    newer.close()


def test_without_tls_a_worker_joins_and_nothing_is_signed(tmp_path: Path) -> None:
    site = Site(tmp_path, secure=False)
    client = site.client(0)
    client.join("127.0.0.1:1", "", lambda _: None)
    wait_until(client.connected, "connected")
    with pytest.raises(ContractError, match="Disabled"):
        client.sign(csr_pem=csr_pem())
    assert client.close(finished=True)
    site.coordinator.close()


def test_the_servers_certificate_is_renewed_before_it_ends(tmp_path: Path) -> None:
    site = Site(tmp_path, life=timedelta(seconds=1))
    assert site.client(0).sign(csr_pem=csr_pem())
    time.sleep(1.5)
    assert site.client(0).sign(csr_pem=csr_pem(), wait_s=10)
    site.coordinator.close()


def test_another_sites_authority_is_not_trusted(site: Site) -> None:
    client_config = site.config(0)
    Path(client_config.authority_pem_path).write_bytes(site.authorities["plant-b"].bundle_pem)
    with open_channel(client_config) as channel, pytest.raises(grpc.RpcError) as raised:
        coordination_stub(channel).Sign(wire.SignRequest())
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


HOSTILE: dict[str, tuple[str, bytes, grpc.StatusCode]] = {
    "not a message": ("Join", b"\xff" * 40, grpc.StatusCode.INVALID_ARGUMENT),
    "wrong UTF-8": ("Report", b"\x0a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
    "empty": ("Sign", b"", grpc.StatusCode.INVALID_ARGUMENT),
    "another run": (
        "Join",
        wire.JoinRequest(run="a/b#c").SerializeToString(),
        grpc.StatusCode.NOT_FOUND,
    ),
    "unknown rank": (
        "Join",
        wire.JoinRequest(
            run="default/digits#1", worker=wire.Worker(rank=77, site="plant-a", group="small")
        ).SerializeToString(),
        grpc.StatusCode.PERMISSION_DENIED,
    ),
    "no token": (
        "Report",
        wire.ProgressReport(
            run="default/digits#1", worker=wire.Worker(rank=0, site="plant-a", group="small")
        ).SerializeToString(),
        grpc.StatusCode.UNAUTHENTICATED,
    ),
    "token not ASCII": (
        "Report",
        wire.ProgressReport(
            run="default/digits#1",
            worker=wire.Worker(rank=0, site="plant-a", group="small"),
            token="ß" * 30,
        ).SerializeToString(),
        grpc.StatusCode.UNAUTHENTICATED,
    ),
    "long token": (
        "Sign",
        wire.SignRequest(token="x" * 9000, role="trainer").SerializeToString(),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "too many records": (
        "Report",
        wire.ProgressReport(records_json=["{}"] * 1000).SerializeToString(),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "too long": (
        "Report",
        b"\x2a\x80\x80\xc0\x01" + b"x" * 3145728,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_call_is_refused_with_its_status(site: Site, name: str) -> None:
    method, content, status = HOSTILE[name]
    with open_channel(site.config(0)) as channel:
        call = channel.unary_stream(f"/dlion.v1alpha1.Coordination/{method}")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(content))
    assert raised.value.code() is status
    if (
        status is not grpc.StatusCode.RESOURCE_EXHAUSTED
    ):  # from gRPC: the call never reaches the service
        reason = dict(raised.value.trailing_metadata())[REASON_KEY]
        assert site.coordinator._server.service.refusals == {RefusalReason(reason): 1}


def test_a_bad_record_rejects_only_its_report(site: Site) -> None:
    client = site.client(0, incarnation=5)
    client.join("127.0.0.1:1", "", lambda _: None)
    wait_until(client.connected, "connected")
    config = site.config(0)
    request = wire.ProgressReport(
        run=str(site.job.key),
        worker=wire.Worker(rank=0, site="plant-a", group="small", index=0),
        incarnation=5,
        token=Path(config.token_path).read_text(),
        sequence=1,
        records_json=['{"kind": "step"'],
    )
    with open_channel(config) as channel, pytest.raises(grpc.RpcError) as raised:
        coordination_stub(channel).Report(request)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    client.report([event(0, "still here")])
    assert client.close(finished=True)
    assert messages(site) == ["still here"]


def test_a_revoked_worker_ends_and_waits_until_it_is_trusted_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Its peers are informed. The files that would let it start without the coordinator are
    removed.
    """
    run = site.coordinator._server.runs[site.job.key]
    workers = site.job.workers()
    stolen = Revocation(workers[1].name, "stolen")
    memberships: list[Membership] = []
    peer, client = site.client(0), site.client(1)
    state_dir = Path(site.config(1).state_dir)
    peer.join("127.0.0.1:1", "", memberships.append)
    client.join("127.0.0.1:2", "", lambda _: None)
    wait_until(
        lambda: client.connected() and memberships and len(memberships[-1].ready()) == 2,
        "both ready",
    )
    signed = client.sign(csr_pem=csr_pem())
    key = WorkerKey()
    store_credentials(
        state_dir,
        site.job.key,
        WorkerCredentials(key, signed.chain_pem, signed.site_bundles_pem),
    )
    began_s = time.monotonic()
    site.coordinator._loop.call_soon_threadsafe(run.revoke, [stolen], workers)
    wait_until(lambda: memberships[-1].members[1].revoked, "the peer is informed")
    assert time.monotonic() - began_s < 5
    wait_until(client.failure, "it ends")
    assert isinstance(client.failure(), UnavailableError)  # its supervisor restarts it
    assert "stolen" in str(client.failure())
    assert not (state_dir / CREDENTIALS_FILE).exists()
    assert load_membership(state_dir, site.job.key) is None
    client.close()
    again = site.client(1)
    caplog.clear()
    with pytest.raises(UnavailableError, match="is revoked: stolen"):
        again.sign(csr_pem=csr_pem(), stopped=lambda: "is revoked: stolen" in caplog.text)
    site.coordinator._loop.call_soon_threadsafe(run.revoke, [], workers)
    again.sign(csr_pem=csr_pem(), wait_s=LONG_S)
    again.join("127.0.0.1:2", "", lambda _: None)
    wait_until(lambda: len(memberships[-1].ready()) == 2, "ready again")
    again.close()
    peer.close()
