"""Test exchanges through one port of each site, behind a proxy that routes TLS by server name.

The proxy is HAProxy. Workers of two sites exchange messages, and their sidecars measure each other.
Each call reaches the requested worker and port and verifies its certificate. A server name without
a route reaches nothing.

Exchanges, measuring services and the proxy are real, on loopback; the proxy's routes are those that
an operator creates, of either kind. Left out: clusters and workers that train
(tests/cluster/test_exposure.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlion_api import cluster_names as names
from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import Capacity, CapacitySource
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.spec import Job, load_job
from dlion_core.links.events import LinkUp
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_operator.children.exposed_workers import worker_routes
from dlion_operator.model.settings import Gateway, GatewayListenerSettings
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.sidecar.measuring_service import MeasuringService
from dlion_worker.sidecar.peer_client import PeerSidecarClient
from haproxy import PROGRAM, gateways, leads
from linked_workers import PLANT_A, PLANT_B, Worker, credentials
from manifest_table import smallest
from operator_process import free_ports

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no haproxy here: `make testbed-setup`")
WITHIN_S = 20.0
GATEWAYS = {
    PLANT_A: Gateway(address="plant-a.example:443", parent=GatewayListenerSettings(name="edge")),
    PLANT_B: Gateway(address="plant-b.example:443", route="IngressRouteTCP"),
}


@pytest.fixture(scope="module")
def job() -> Job:
    return job_named("digits")


def job_named(name: str) -> Job:
    document = smallest()
    document["metadata"]["name"] = name
    document["spec"]["sites"] = [
        {"name": site, "groups": [{"name": "small", "workers": 1}]} for site in (PLANT_A, PLANT_B)
    ]
    document["spec"]["network"] = {"exposure": "Gateway"}
    return load_job(document)


@pytest.fixture(scope="module")
def proofs(job: Job) -> list[WorkerCredentials]:
    """Return the credentials of both workers, each from its own site's authority."""
    authorities = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}
    return [credentials(worker, authorities, job.key) for worker in job.workers()]


def membership(job: Job, ports: dict[SiteName, int]) -> Membership:
    """Return both workers, with only their sites' gateways as addresses."""
    members = []
    for worker in job.workers():
        address = f"127.0.0.1:{ports[worker.site]}"
        members.append(Member(worker, 1, MemberState.READY, address, address))
    return Membership(1, job.key, len(members), tuple(members))


def routes(
    job: Job, worker: WorkerIdentity, *, exchange: str = "", measuring: str = ""
) -> dict[str, str]:
    """Return the routes of that worker at its site's gateway: the address behind each name.

    A port without an address gets one on which no process listens.
    """
    unused = f"127.0.0.1:{free_ports(1)[0]}"
    behind = {names.EXCHANGE_PORT: exchange or unused, names.MEASURING_PORT: measuring or unused}
    service = names.worker_service_name(job.key, worker.group, worker.index)
    document = {"metadata": {"name": service, "uid": "u-1"}}
    found = leads(worker_routes(job, worker, GATEWAYS[worker.site], document))
    assert {backend.service for backend in found.values()} == {service}
    return {name: behind[backend.port] for name, backend in found.items()}


def ports_of_sites() -> dict[SiteName, int]:
    return dict(zip((PLANT_A, PLANT_B), free_ports(2), strict=True))


def test_workers_of_two_sites_exchange_through_one_port_of_each(
    job: Job, proofs: list[WorkerCredentials], tmp_path: Path
) -> None:
    ports = ports_of_sites()
    workers = [
        Worker(who, proof, job=job.key, is_exposed=True)
        for who, proof in zip(job.workers(), proofs, strict=True)
    ]
    known = {ports[w.who.site]: routes(job, w.who, exchange=w.exchange.address) for w in workers}
    with gateways(tmp_path, known):
        for worker in workers:
            worker.exchange.set_members(membership(job, ports))
        for worker in workers:
            worker.wait_for(LinkUp)
        for worker, peer in (workers, workers[::-1]):
            sent = Message(MessageKind.GRADIENT, 1, 32, 0, bytes([worker.who.rank]) * 200_000)
            worker.exchange.send(peer.who.rank, sent)
            arrived = peer.wait_for(MessageArrived)
            assert (arrived.sender, bytes(arrived.message.payload)) == (
                worker.who.rank,
                sent.payload,
            )
        for worker in workers:
            worker.exchange.close()


class Measured:
    """A trainer beside a sidecar, with a known speed."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.peers: dict[Rank, float] = {}
        self.news = asyncio.Event()
        self.refusals = 0

    def own(self) -> Capacity:
        return Capacity(self._rank, 100.0 + self._rank, 1.0, CapacitySource.RATE, 1)

    def incarnation(self) -> int:
        return 1

    def is_revoked(self, _rank: Rank) -> bool:
        return False

    def handle_capacity(self, capacity: Capacity, incarnation: int) -> None:
        self.peers[capacity.rank] = capacity.samples_per_s
        self.news.set()

    def count_sent(self, _peer: Rank, _sent_bytes: int) -> None:
        """Ignore sent bytes."""

    def refused(self, kind: PeerRefusal, words: str, *, dialled: bool) -> None:
        self.refusals += not dialled


def test_sidecars_measure_each_other_through_the_same_port(
    job: Job, proofs: list[WorkerCredentials], tmp_path: Path
) -> None:
    async def measure() -> None:
        ports, beside, services, known = ports_of_sites(), [], [], {}
        for who, proof in zip(job.workers(), proofs, strict=True):
            beside.append(Measured(who.rank))
            service = MeasuringService(job=job, rank=who.rank, worker=beside[-1], credentials=proof)
            services.append(service)
            port = await service.start("127.0.0.1", preferred_port=0)
            known[ports[who.site]] = routes(job, who, measuring=f"127.0.0.1:{port}")
        with gateways(tmp_path, known):
            await call(job, proofs[0], beside[0], membership(job, ports), by_gateway=True)
            assert beside[0].peers == {1: 101.0}
            assert beside[1].peers == {0: 100.0}
            assert beside[1].refusals == 0
            with pytest.raises(UnavailableError):
                await call(job, proofs[0], beside[0], membership(job, ports), by_gateway=False)
        for service in services:
            await service.stop()

    asyncio.run(measure())


async def call(
    job: Job,
    proof: WorkerCredentials,
    beside: Measured,
    known: Membership,
    *,
    by_gateway: bool,
) -> None:
    """Send the capacity of rank 0's sidecar, receive the peer's, and probe the link."""
    caller = PeerSidecarClient(
        job=job.key,
        rank=Rank(0),
        worker=beside,
        credentials=proof,
        dial=lambda rank: None,
        by_gateway=by_gateway,
    )
    peer = known.members[1]
    caller.set_peers([peer])
    try:
        busy_bytes, seconds = await caller.probe(peer)
        assert busy_bytes > 0
        assert seconds > 0
        async with asyncio.timeout(WITHIN_S):
            await beside.news.wait()
    finally:
        await caller.close()


def test_a_name_without_a_route_reaches_nothing(
    job: Job, proofs: list[WorkerCredentials], tmp_path: Path
) -> None:
    """The gateway knows only the right sidecar, under another job's name."""

    async def measure() -> None:
        ports, peer = ports_of_sites(), Measured(Rank(1))
        service = MeasuringService(job=job, rank=Rank(1), worker=peer, credentials=proofs[1])
        port = await service.start("127.0.0.1", preferred_port=0)
        address, other_job = f"127.0.0.1:{port}", job_named("other")
        other = {ports[PLANT_B]: routes(other_job, other_job.worker(Rank(1)), measuring=address)}
        known = membership(job, ports)
        try:
            with gateways(tmp_path, other), pytest.raises(UnavailableError, match="UNAVAILABLE"):
                await call(job, proofs[0], Measured(Rank(0)), known, by_gateway=True)
        finally:
            await service.stop()
        assert peer.peers == {}

    asyncio.run(measure())
