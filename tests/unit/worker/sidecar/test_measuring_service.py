"""Tests of the service between sidecars.

A peer's sidecar is served on a connection only as long as its certificate is valid and its site is
trusted. With a newer certificate it is served again. Each end counts its sent bytes. TLS over
loopback is real.

Left out: capacities (test_capacity_messages.py); requests for them (tests/local).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from datetime import timedelta
from typing import Any, cast

import grpc
import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName
from dlion_api.protocol.measurements import Capacity, CapacitySource
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.spec import load_job
from dlion_api.wire import measuring_pb2, measuring_pb2_grpc
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.sidecar.capacity_messages import PROBE_CHUNK_BYTES, to_wire
from dlion_worker.sidecar.measuring_service import MAX_PROBES_PER_CALLER, MeasuringService
from dlion_worker.sidecar.peer_client import PeerSidecarClient
from local_run import job_document

JOB = load_job(job_document({"plant-a": 1, "plant-b": 1}))
HERE, THERE = (JOB.worker(Rank(rank)) for rank in (0, 1))
LIFE = timedelta(seconds=3)


class SidecarWorker:
    """The worker of a sidecar at either end of a connection."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = Rank(rank)
        self.heard_speeds: list[float] = []
        self.refusals: Counter[PeerRefusal] = Counter()
        self.sent_bytes: list[tuple[Rank, int]] = []

    def own(self) -> Capacity:
        return Capacity(self._rank, 100.0, 1.0, CapacitySource.RATE, 1)

    def incarnation(self) -> int:
        return 1

    def is_revoked(self, _rank: Rank) -> bool:
        return False

    def handle_capacity(self, capacity: Capacity, _incarnation: int) -> None:
        self.heard_speeds.append(capacity.samples_per_s)

    def count_sent(self, peer: Rank, sent_bytes: int) -> None:
        self.sent_bytes.append((peer, sent_bytes))

    def refused(self, kind: PeerRefusal, _words: str, *, dialled: bool) -> None:
        assert not dialled
        self.refusals[kind] += 1


class ServedSidecar:
    """A sidecar's port, and the peer's connection to it."""

    def __init__(self, life: timedelta = LIFE) -> None:
        """`life`: life of the peer's certificate."""
        self.sites: dict[SiteName, CertificateAuthority] = {
            HERE.site: CertificateAuthority(HERE.site),
            THERE.site: CertificateAuthority(THERE.site, life=life),
        }
        self.bundles = {site: authority.bundle_pem for site, authority in self.sites.items()}
        self.worker = SidecarWorker()
        self.mine, self.theirs = self._signed(HERE.site, 0), self._signed(THERE.site, 1)
        self.service = MeasuringService(
            job=JOB, rank=Rank(0), worker=self.worker, credentials=self.mine
        )

    def _signed(self, site: SiteName, rank: int) -> WorkerCredentials:
        key = WorkerKey()
        chain = self.sites[site].sign(key.csr_pem(), JOB.worker(Rank(rank)), JOB.key)
        return WorkerCredentials(key, chain, dict(self.bundles))

    def renew(self) -> None:
        key = WorkerKey()
        self.theirs.renew(key, self.sites[THERE.site].sign(key.csr_pem(), THERE, JOB.key))

    def connection(self, port: int) -> grpc.aio.Channel:
        credentials = self.theirs.channel(HERE.site)
        assert credentials is not None
        name = HERE.measuring_dns_name(JOB.key)
        options = [*self.theirs.target_options(name), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


async def share(channel: grpc.aio.Channel, speed: float) -> measuring_pb2.CapacityShare:
    stub = measuring_pb2_grpc.MeasuringStub(channel)  # type: ignore[no-untyped-call]
    message = to_wire(Capacity(Rank(1), speed, 1.0, CapacitySource.RATE, 1), JOB.key, 1)
    answer: measuring_pb2.CapacityShare = await stub.Share(message, timeout=10)
    return answer


async def refused(channel: grpc.aio.Channel, text: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await share(channel, 1.0)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in str(raised.value.details())


def test_a_peer_without_a_renewal_is_served_until_its_certificate_ends() -> None:
    async def body() -> None:
        served = ServedSidecar()
        signed_s = time.monotonic()
        port = await served.service.start("127.0.0.1", preferred_port=0)
        async with served.connection(port) as open_connection:
            for speed in (10.0, 20.0):
                await share(open_connection, speed)
            assert served.worker.heard_speeds == [10.0, 20.0]
            await asyncio.sleep(signed_s + LIFE.total_seconds() + 0.1 - time.monotonic())
            for _ in range(2):
                await refused(open_connection, "certificate")
        served.renew()
        async with served.connection(port) as remade:
            await share(remade, 30.0)
        assert served.worker.heard_speeds == [10.0, 20.0, 30.0]
        assert served.worker.refusals == {PeerRefusal.BAD_CERTIFICATE: 2}
        await served.service.stop()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_peer_of_a_site_that_is_no_longer_trusted_is_refused() -> None:
    async def body() -> None:
        served = ServedSidecar(life=timedelta(minutes=5))
        port = await served.service.start("127.0.0.1", preferred_port=0)
        async with served.connection(port) as open_connection:
            first = await share(open_connection, 10.0)
            served.mine.trust({HERE.site: served.bundles[HERE.site]})
            for _ in range(2):
                await refused(open_connection, "not by the authority of site plant-b")
            served.mine.trust(served.bundles)
            second = await share(open_connection, 20.0)
        assert served.worker.heard_speeds == [10.0, 20.0]
        answers = [first.ByteSize(), second.ByteSize()]
        assert served.worker.sent_bytes == [(Rank(1), each) for each in answers]
        await served.service.stop()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_the_caller_counts_its_capacity_and_its_probes() -> None:
    async def body() -> None:
        served, worker = ServedSidecar(life=timedelta(minutes=5)), SidecarWorker(1)
        port = await served.service.start("127.0.0.1", preferred_port=0)
        caller = PeerSidecarClient(
            job=JOB.key,
            rank=Rank(1),
            worker=cast("Any", worker),
            credentials=served.theirs,
            dial=lambda _: f"127.0.0.1:{port}",
        )
        member = Member(HERE, 1, MemberState.READY, "h:1", "h:2")
        caller.set_peers([member])
        await caller.probe(member)
        await caller.close()
        await served.service.stop()
        payload = bytes(PROBE_CHUNK_BYTES)
        chunk = measuring_pb2.ProbeChunk(run=str(JOB.key), rank=1, payload=payload)
        capacity = to_wire(worker.own(), JOB.key, worker.incarnation())
        found = {(Rank(0), 16 * chunk.ByteSize()), (Rank(0), capacity.ByteSize())}
        assert set(worker.sent_bytes) == found

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_probe_fails_if_its_peer_leaves() -> None:
    """The membership changes while a peer does not answer: the channel is closed under the call."""

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            caller = PeerSidecarClient(
                job=JOB.key,
                rank=Rank(1),
                worker=cast("Any", SidecarWorker(1)),
                credentials=ServedSidecar().theirs,
                dial=lambda _: f"127.0.0.1:{port}",
            )
            member = Member(HERE, 1, MemberState.READY, "h:1", "h:2")
            caller.set_peers([member])
            probe = asyncio.create_task(caller.probe(member))
            await asyncio.sleep(0.1)
            caller.set_peers([])
            with pytest.raises(UnavailableError, match="worker 0: it left"):
                await probe
            await caller.close()

    asyncio.run(asyncio.wait_for(body(), 30))


async def begun_probe(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall:
    """A probe that sends only its first chunk."""
    stub = measuring_pb2_grpc.MeasuringStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Probe()
    chunk = measuring_pb2.ProbeChunk(run=str(JOB.key), rank=1, payload=b"x")
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # refused already
        await call.write(chunk)
    return call


async def end_of(call: grpc.aio.StreamUnaryCall) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return str(raised.value.details())


def test_a_peer_has_few_concurrent_probes_of_bounded_time() -> None:
    async def body() -> None:
        served = ServedSidecar(life=timedelta(minutes=5))
        served.service.probe_within_s = 2.0
        port = await served.service.start("127.0.0.1", preferred_port=0)
        async with served.connection(port) as first, served.connection(port) as second:
            held = [await begun_probe(first) for _ in range(MAX_PROBES_PER_CALLER)]
            ends = [await end_of(call) for call in (await begun_probe(second), *held)]
            refused_at_once = [each for each in ends if "probes at once" in each]
            too_slow = [each for each in ends if "a probe of more than 2 s" in each]
            # Either probe may be refused: those of two connections arrive in any order.
            assert (len(refused_at_once), len(too_slow)) == (1, MAX_PROBES_PER_CALLER), ends
            await share(second, 10.0)
            call = await begun_probe(second)
            await call.done_writing()
            assert (await call).busy_bytes == 0
        assert served.worker.heard_speeds == [10.0]
        assert served.worker.refusals == {PeerRefusal.MALFORMED: MAX_PROBES_PER_CALLER + 1}
        await served.service.stop()

    asyncio.run(asyncio.wait_for(body(), 30))
