"""Callers of each port of `port_table`: honest ones, and the channels and methods of those that
flood it."""

from __future__ import annotations

import socket
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

import port_table as ports
from dlion_api.addresses import split_host_port
from dlion_api.names import KeeperIdentity, OperatorIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import Capacity, CapacitySource
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME, WorkerConfig
from dlion_api.wire import coordination_pb2, keeping_pb2
from dlion_core.links.events import LinkUp
from dlion_core.policies.interface import Message, MessageKind
from dlion_operator.coordinator import CoordinatorServer, CoordinatorThread
from dlion_operator.federation.messages import site_hello
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_worker.coordination.channel import worker_to_wire
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.sidecar.capacity_messages import to_wire
from dlion_worker.trainer.background.sidecar_client import SidecarClient
from flooded_servers import LOOPBACK, WITHIN_S, A, B, FloodedServer, flooded_server
from keeper_service import job as keeper_job
from linked_workers import JOB, Worker, credentials, identity, until
from local_run import job_document
from operator_process import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from dlion_api.names import JobKey

SERVERS = {
    ports.EXCHANGE: "exchange",
    ports.MEASURING: "sidecar",
    ports.KEEPER: "keeper",
    ports.COORDINATOR: "coordinator",
    ports.FEDERATION: "federation",
    ports.WORKER_METRICS: "sidecar",
    ports.OPERATOR_METRICS: "operator",
    ports.HEALTH: "operator",
    ports.SOCKET: "sidecar",
}
"""The process of each row."""

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


@dataclass
class FloodedPort:
    """The port of one row, its process, and who calls it."""

    where: str
    server: FloodedServer
    address: str
    authorities: Mapping[SiteName, CertificateAuthority]
    established: Callable[[], None]
    """Served over a connection from before the flood; raises if it is not."""
    fresh: Callable[[], None]
    """Served over a connection of its own; raises if it is not."""
    _certificates: dict[int, WorkerCredentials] = field(default_factory=dict)

    def connect(self, timeout_s: float = WITHIN_S) -> socket.socket:
        """Connect without a word.

        A full queue of the server drops the first packet, which is sent again after 1, 3, 7, 15 and
        31 seconds.
        """
        if self.where == ports.SOCKET:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.address)  # waits while the server's queue is full
            connection.settimeout(timeout_s)
            return connection
        host, port = split_host_port(self.address)
        return socket.create_connection((host, int(port)), timeout=timeout_s)

    def channel(self, number: int = 0) -> grpc.aio.Channel:
        """Connect with that certificate, all of the same caller, for calls of the loop."""
        secure, options = _proof(self.where, self.authorities, self._certificate(number))
        return grpc.aio.secure_channel(self.address, secure, [*_OPTIONS, *options])

    def _certificate(self, number: int) -> WorkerCredentials:
        if number not in self._certificates:
            self._certificates[number] = _of_worker(self.where, self.authorities)
        return self._certificates[number]


@contextmanager
def flooded_port(where: str, folder: Path, constants: Mapping[str, float]) -> Iterator[FloodedPort]:
    """Start the row's process, and its honest callers."""
    authorities = {site: CertificateAuthority(site) for site in (A, B)}
    with ExitStack() as stack:
        peer = _prepare(where, folder, authorities, stack)
        server = stack.enter_context(flooded_server(SERVERS[where], folder, authorities, constants))
        if SERVERS[where] == "sidecar":
            client = SidecarClient(folder / "s")
            stack.callback(client.close)
            measuring = client.endpoint(WITHIN_S)
            address = {
                ports.MEASURING: measuring,
                ports.SOCKET: str(folder / "s"),
                ports.WORKER_METRICS: f"{LOOPBACK}:{(folder / 'metrics-port').read_text()}",
            }[where]
        else:
            address = server.address("health" if where == ports.HEALTH else "address")
        port = FloodedPort(where, server, address, authorities, _nothing, _nothing)
        if where == ports.EXCHANGE:
            assert peer is not None
            port.established, port.fresh = _peer(peer, address)
        elif where in ports.GRPC:
            port.established, port.fresh = _grpc(port, folder, stack)
        elif where == ports.SOCKET:
            port.established = port.fresh = lambda: _read_records(port)
        else:
            path = "livez" if where == ports.HEALTH else "metrics"
            port.established = port.fresh = lambda: _get(f"http://{address}/{path}")
        yield port


def _nothing() -> None:
    """Stand for a caller that is not made yet."""


def _prepare(
    where: str,
    folder: Path,
    authorities: Mapping[SiteName, CertificateAuthority],
    stack: ExitStack,
) -> Worker | None:
    """Start what the process needs; return the peer of an exchange."""
    if where == ports.EXCHANGE:
        peer = Worker(identity(0, A), credentials(identity(0, A), dict(authorities)))
        stack.callback(peer.exchange.close)
        (folder / "peer").write_text(peer.exchange.address)
        return peer
    if SERVERS[where] == "sidecar":
        job, tokens = keeper_job(), Tokens()
        server = CoordinatorServer(f"{LOOPBACK}:0", authorities[A])
        server.open(job, authorities=authorities, tokens=tokens, on_record=lambda _: None)
        thread = CoordinatorThread(server, job.key)
        port = thread.start()
        stack.callback(thread.close)
        (folder / "token").write_text(tokens.issue(job.workers()[0], job.key))
        (folder / "ca.pem").write_bytes(thread.authority_pem)
        (folder / "metrics-port").write_text(str(free_ports(1)[0]))
        WorkerConfig(
            job_document=job_document({A: 2, B: 1}), rank=Rank(0),
            coordinator_address=f"{LOOPBACK}:{port}", authority_pem_path=str(folder / "ca.pem"),
            token_path=str(folder / "token"), state_dir=str(folder), socket_path=str(folder / "s"),
            listen_host=LOOPBACK, advertise_host=LOOPBACK, data_root="", results_dir=str(folder),
        ).save(folder / "config.json")  # fmt: skip
    return None


# ---- certificates --------------------------------------------------------------------------------


def _job_of(where: str) -> JobKey:
    return JOB if where == ports.EXCHANGE else keeper_job().key


def _caller_of(where: str) -> WorkerIdentity:
    return identity(0, A) if where == ports.EXCHANGE else keeper_job().workers()[1]


def _of_worker(
    where: str, authorities: Mapping[SiteName, CertificateAuthority]
) -> WorkerCredentials:
    key, who = WorkerKey(), _caller_of(where)
    chain = authorities[who.site].sign(key.csr_pem(), who, _job_of(where))
    return WorkerCredentials(key, chain, {s: each.bundle_pem for s, each in authorities.items()})


def _proof(
    where: str,
    authorities: Mapping[SiteName, CertificateAuthority],
    certificate: WorkerCredentials,
) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
    """Return a channel's credentials and options."""
    if where == ports.COORDINATOR:
        secure = grpc.ssl_channel_credentials(authorities[A].bundle_pem)
        return secure, [("grpc.ssl_target_name_override", COORDINATOR_DNS_NAME)]
    if where == ports.FEDERATION:
        own = authorities[B].operator_identity()
        secure = grpc.ssl_channel_credentials(
            authorities[A].bundle_pem, own.key_pem, own.certificate_chain_pem
        )
        return secure, [("grpc.ssl_target_name_override", OperatorIdentity(A).dns_name)]
    name = {
        ports.EXCHANGE: identity(1, B).dns_name(JOB),
        ports.KEEPER: KeeperIdentity(A).dns_name(keeper_job().key),
        ports.MEASURING: keeper_job().workers()[0].dns_name(keeper_job().key),
    }[where]
    given = certificate.channel(B if where == ports.EXCHANGE else A)
    assert given is not None
    return given, list(certificate.target_options(name))


# ---- honest callers ------------------------------------------------------------------------------


def _peer(peer: Worker, address: str) -> tuple[Callable[[], None], Callable[[], None]]:
    there = Rank(1)
    introduce_to(peer, address)
    peer.wait_for(LinkUp)

    def send() -> None:
        sent = peer.exchange.link_counters()[there].sent_total
        peer.exchange.send(there, Message(MessageKind.GRADIENT, 1, payload=bytes(1000)))
        until(lambda: peer.exchange.link_counters()[there].sent_total > sent)
        until(lambda: peer.exchange.link_counters()[there].unacknowledged_bytes == 0)

    def pull() -> None:
        assert peer.exchange.pull_state(there).iteration == 7

    return send, pull


def introduce_to(peer: Worker, address: str) -> None:
    """Link that worker to the one at the address."""
    from dlion_api.protocol.membership import Member, Membership, MemberState

    there = Member(identity(1, B), 1, MemberState.READY, address)
    peer.exchange.set_members(Membership(1, JOB, 2, (peer.member(), there)))


def _grpc(
    port: FloodedPort, folder: Path, stack: ExitStack
) -> tuple[Callable[[], None], Callable[[], None]]:
    own = _of_worker(port.where, port.authorities)

    def connect() -> grpc.Channel:
        secure, options = _proof(port.where, port.authorities, own)
        return grpc.secure_channel(port.address, secure, [*_OPTIONS, *options])

    def call(channel: grpc.Channel) -> None:
        request = _request(port.where, folder)
        answers = channel.stream_stream(ports.GRPC[port.where])(iter([request]), timeout=WITHIN_S)
        try:
            assert next(answers)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:  # the keeper's answer: no such file
                raise
        finally:
            answers.cancel()

    def fresh() -> None:
        with connect() as channel:
            call(channel)

    kept = stack.enter_context(connect())
    call(kept)
    return lambda: call(kept), fresh


def _request(where: str, folder: Path) -> bytes:
    job, who = keeper_job().key, _caller_of(where)
    message: Any
    if where == ports.KEEPER:
        path = f"state/w{who.rank}/checkpoint.npz"
        message = keeping_pb2.GetRequest(run=str(job), worker=worker_to_wire(who), path=path)
    elif where == ports.MEASURING:
        message = to_wire(Capacity(who.rank, 100.0, 1.0, CapacitySource.RATE, 1), job, 1)
    elif where == ports.COORDINATOR:
        message = coordination_pb2.SignRequest(
            token=(folder / "token").read_text(), run=str(job), role="keeper",
            worker=coordination_pb2.Worker(site=A), csr_pem=WorkerKey().csr_pem(),
        )  # fmt: skip
    else:
        message = site_hello(B, A)
    content: bytes = message.SerializeToString()
    return content


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
        assert answer.status == 200
        assert answer.read()


def _read_records(port: FloodedPort) -> None:
    with port.connect() as connection:
        assert connection.recv(1)
