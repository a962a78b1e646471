"""Test that the connections of a link are replaced without loss, over real TLS on loopback.

Messages of both lanes cross both ways while every connection is replaced repeatedly, each time with
a new certificate. No message is lost, duplicated or out of order, and no link goes down. If the new
connection breaks or the peer refuses it, the link continues, or goes down and returns. A link whose
peer's site is no longer trusted ends at once. A link whose peer does not renew its certificate ends
a tenth of its life after the end. If other authorities are trusted, the peer authenticates with
them.

Left out: who renews certificates and when (test_renewals.py); hostile streams (tests/fuzz).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest
from cryptography import x509

from dlion_api.names import Rank, SiteName
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello
from dlion_core.links.events import LinkCounters, LinkDown, LinkUp, Refused
from dlion_core.links.framing import PROTOCOL
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.transport import reauthentication
from dlion_worker.transport.client import PeerConnector, open_channel
from dlion_worker.transport.peer_links import PeerExchangeConfig, PeerLink
from dlion_worker.transport.service import SERVICE, IncomingStream
from linked_workers import (
    JOB,
    PLANT_A,
    PLANT_B,
    Worker,
    credentials,
    identity,
    introduce,
    until,
)

A, B = identity(0), identity(1, PLANT_B)
TO_A, TO_B = Rank(0), Rank(1)
NOTICED_WITHIN_S = 4.0
"""A worker checks once a second; a busy machine delays it."""
AUTHORITIES = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}


def renewed(worker: Worker) -> None:
    """Give that worker a new certificate, as its coordinator does, and replace its links."""
    key, proof = WorkerKey(), worker.exchange._config.credentials
    proof.renew(key, AUTHORITIES[worker.who.site].sign(key.csr_pem(), worker.who, JOB))
    worker.exchange.migrate_links()


def states(worker: Worker) -> list[LinkCounters]:
    return list(worker.exchange.link_counters().values())


def remade(worker: Worker) -> int:
    (state,) = states(worker)
    return state.remade_count


@contextmanager
def linked_by(authorities: dict[SiteName, CertificateAuthority]) -> Iterator[tuple[Worker, Worker]]:
    pair = Worker(A, credentials(A, authorities)), Worker(B, credentials(B, authorities))
    try:
        introduce(*pair)
        for worker in pair:
            worker.wait_for(LinkUp)
        yield pair
    finally:
        for worker in pair:
            worker.exchange.close()


@pytest.fixture
def linked() -> Iterator[tuple[Worker, Worker]]:
    with linked_by(AUTHORITIES) as pair:
        yield pair


def payload(iteration: int, size: int) -> bytes:
    return iteration.to_bytes(4, "little") + os.urandom(size)


def taken(worker: Worker, count: int) -> list[Message]:
    """Return that many messages in order of arrival; fail if the link goes down."""
    messages = []
    while len(messages) < count:
        event = worker.events.get(timeout=20)
        assert isinstance(event, MessageArrived), event
        messages.append(event.message)
    return messages


def test_nothing_is_lost_while_connections_are_replaced(linked: tuple[Worker, Worker]) -> None:
    a, b = linked
    rounds, each = 5, 40
    sent: dict[MessageKind, list[bytes]] = {MessageKind.GRADIENT: [], MessageKind.WEIGHTS: []}
    for worker, to in ((a, TO_B), (b, TO_A)):
        worker.exchange.set_budgets(
            {to: 400_000}
        )  # so that many bytes wait while connections change
    for count in range(1, rounds + 1):
        for number in range(each):
            kind = MessageKind.WEIGHTS if number % 20 == 0 else MessageKind.GRADIENT
            content = payload(number, 300_000 if kind is MessageKind.WEIGHTS else 40_000)
            sent[kind].append(content)
            for worker, to in ((a, TO_B), (b, TO_A)):
                worker.exchange.send(to, Message(kind, count, payload=content))
        for worker in linked:
            renewed(worker)
        for worker in linked:
            until(lambda worker=worker, count=count: remade(worker) == count)
        # A link is given up if more bytes wait than those of two rounds.
        until(lambda: not any(state.queued_bytes for w in linked for state in states(w)))
    for worker in linked:
        got = taken(worker, rounds * each)
        for kind, contents in sent.items():
            assert [bytes(m.payload) for m in got if m.kind is kind] == contents
        (state,) = states(worker)
        assert state.connected
        assert state.dropped_messages == 0
    until(lambda: all(not s.unacknowledged_bytes for w in linked for s in states(w)))
    assert all(worker.events.empty() for worker in linked)


def test_a_new_connection_has_the_new_certificate(linked: tuple[Worker, Worker]) -> None:
    a, b = linked
    renewed(a)
    until(lambda: remade(a) == 1)
    incoming = b.exchange._links.by_rank[TO_A].incoming
    assert isinstance(incoming, IncomingStream)
    assert incoming.proof is not None
    certificate_pem = incoming.proof.certificate_pem
    assert certificate_pem is not None
    _, chain_pem = a.exchange._config.credentials.key_and_chain()
    assert x509.load_pem_x509_certificate(certificate_pem) == x509.load_pem_x509_certificate(
        chain_pem
    )
    assert remade(b) == 0


def both_down_and_up_again(pair: tuple[Worker, Worker]) -> None:
    for worker in pair:
        worker.wait_for(LinkDown)
    for worker in pair:
        worker.wait_for(LinkUp)
    a, b = pair
    for worker, other, to in ((a, b, TO_B), (b, a, TO_A)):
        content = payload(1, 1000)
        worker.exchange.send(to, Message(MessageKind.GRADIENT, 1, payload=content))
        assert bytes(other.wait_for(MessageArrived).message.payload) == content


def test_a_link_goes_down_and_returns_after_a_break_half_way(
    linked: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = linked
    waits = IncomingStream._wait_for_handover

    async def breaks_meanwhile(self: IncomingStream, link: PeerLink, hello: Hello) -> None:
        monkeypatch.setattr(IncomingStream, "_wait_for_handover", waits)
        link.close_streams("it breaks just now")
        await waits(self, link, hello)

    monkeypatch.setattr(IncomingStream, "_wait_for_handover", breaks_meanwhile)
    renewed(a)
    both_down_and_up_again((a, b))
    renewed(a)
    until(lambda: remade(a) == 1)


def test_a_link_is_lost_if_the_peer_stops_after_the_last_frame(
    linked: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = linked
    hand_over = IncomingStream._hand_over

    def forgets(self: IncomingStream, link: PeerLink) -> str:
        monkeypatch.setattr(IncomingStream, "_hand_over", hand_over)
        assert self.successor is not None
        self.successor.end("its connection has broken")
        self.successor = None
        return hand_over(self, link)

    monkeypatch.setattr(IncomingStream, "_hand_over", forgets)
    renewed(a)
    both_down_and_up_again((a, b))


def test_the_old_connection_is_used_until_a_new_one_is_ready(
    linked: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = linked
    reached = threading.Event()
    target = a.exchange._connectors[TO_B]._connection

    def to_nowhere(self: PeerConnector, address: str) -> Any:
        reached.set()
        return target("127.0.0.1:1")

    with monkeypatch.context() as patch:
        patch.setattr(PeerConnector, "_connection", to_nowhere)
        renewed(a)
        assert reached.wait(20)
        for number in range(20):
            a.exchange.send(TO_B, Message(MessageKind.GRADIENT, 1, payload=payload(number, 50_000)))
        assert len(taken(b, 20)) == 20
        assert remade(a) == 0
    until(lambda: remade(a) == 1)
    assert a.events.empty()


async def first_words(port_of: Worker, proof: WorkerCredentials, *frames: Frame) -> Any:
    """Return the answer of worker B, of that address and certificate, to this greeting."""
    me = PeerExchangeConfig(JOB, B, 1, proof)
    async with open_channel(port_of.exchange.address, A, me) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Link")()
        for frame in frames:
            await call.write(frame.SerializeToString())
        async with asyncio.timeout(20):
            data = await call.read()
        return Acknowledgement.FromString(data)


def test_a_stream_that_continues_nothing_is_refused() -> None:
    a, proof = Worker(A, credentials(A, AUTHORITIES)), credentials(B, AUTHORITIES)
    try:
        b = Worker(B, proof)
        introduce(a, b)
        b.exchange.close()
        until(lambda: not any(link.connected for link in states(a)))
        hello = Hello(run=str(JOB), rank=1, incarnation=1, protocol=PROTOCOL, epoch=1)
        hello.continues = True
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            asyncio.run(first_words(a, proof, Frame(hello=hello)))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no stream that this one could continue" in str(raised.value.details())
    finally:
        a.exchange.close()


def trusts(worker: Worker, **bundles_pem: bytes) -> None:
    """Set the bundles of the sites that the worker trusts, as its coordinator does."""
    named = {SiteName(site.replace("_", "-")): pem for site, pem in bundles_pem.items()}
    assert worker.exchange._config.credentials.trust(named)


def test_a_link_ends_when_its_site_is_no_longer_trusted(linked: tuple[Worker, Worker]) -> None:
    a, b = linked
    trusts(a, plant_a=AUTHORITIES[PLANT_A].bundle_pem)  # the key of plant B is stolen
    refused = a.wait_for(Refused)
    assert (refused.peer, refused.outgoing) == (TO_B, False)
    assert refused.kind is PeerRefusal.BAD_CERTIFICATE
    assert "plant-b" in refused.reason
    a.wait_for(LinkDown)
    b.wait_for(LinkDown)
    for number in range(20):  # it continues to dial, and would continue to send
        b.exchange.send(TO_A, Message(MessageKind.GRADIENT, 1, payload=payload(number, 10_000)))
        time.sleep(0.05)
    late = [event for event in list(a.events.queue) if not isinstance(event, Refused)]
    assert late == []
    trusts(a, **{str(s).replace("-", "_"): each.bundle_pem for s, each in AUTHORITIES.items()})
    for worker in linked:
        worker.wait_for(LinkUp)


def test_a_link_ends_a_tenth_after_the_certificate_of_a_peer_that_does_not_renew() -> None:
    life = timedelta(seconds=6)
    authorities = {
        PLANT_A: CertificateAuthority(PLANT_A),
        PLANT_B: CertificateAuthority(PLANT_B, life=life),
    }
    began_s = time.monotonic()
    with linked_by(authorities) as (a, b):
        signed_s = time.monotonic()
        down = a.wait_for(LinkDown)
        ended_s = time.monotonic()
        assert "ended at" in down.reason
        assert ended_s > began_s + 6.0 * 1.1 - 1.0  # certificates are valid for whole seconds
        assert ended_s < signed_s + 6.0 * 1.1 + NOTICED_WITHIN_S
        b.wait_for(LinkDown)
        renewed_by = b.exchange._config.credentials
        key = WorkerKey()
        renewed_by.renew(
            key, CertificateAuthority.sign(authorities[PLANT_B], key.csr_pem(), B, JOB)
        )
        for worker in (a, b):
            worker.wait_for(LinkUp)


def test_a_peer_authenticates_with_the_authorities_that_are_trusted_now(
    linked: tuple[Worker, Worker],
) -> None:
    a, b = linked
    before, other = AUTHORITIES[PLANT_B], CertificateAuthority(PLANT_B)
    own = AUTHORITIES[PLANT_A].bundle_pem
    trusts(a, plant_a=own, plant_b=other.bundle_pem + before.bundle_pem)
    until(lambda: remade(a) == 1)
    key, proof = WorkerKey(), b.exchange._config.credentials
    proof.renew(key, other.sign(key.csr_pem(), B, JOB))
    b.exchange.migrate_links()
    until(lambda: remade(b) == 1)
    trusts(a, plant_a=own, plant_b=other.bundle_pem)
    until(lambda: remade(a) == 2)
    for worker, to in ((a, TO_B), (b, TO_A)):
        worker.exchange.send(to, Message(MessageKind.GRADIENT, 1, payload=payload(1, 1000)))
    for worker in linked:
        taken(worker, 1)
        assert worker.events.empty()


def test_a_dialled_peer_that_does_not_authenticate_again_loses_the_link(
    linked: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = linked
    monkeypatch.setattr(reauthentication, "REAUTHENTICATION_TIMEOUT_S", 1.0)
    own, before, other = AUTHORITIES[PLANT_A], AUTHORITIES[PLANT_B], CertificateAuthority(PLANT_B)
    connector = a.exchange._connectors[TO_B]
    target = connector._connection
    with monkeypatch.context() as patch:
        patch.setattr(connector, "_connection", lambda _: target("127.0.0.1:1"))
        trusts(a, plant_a=own.bundle_pem, plant_b=other.bundle_pem + before.bundle_pem)
        key, proof = WorkerKey(), b.exchange._config.credentials
        proof.renew(key, other.sign(key.csr_pem(), B, JOB))
        b.exchange.migrate_links()
        until(lambda: remade(b) == 1)
        time.sleep(2.0)
        assert a.events.empty(), "no authority was removed"
        trusts(a, plant_a=own.bundle_pem, plant_b=other.bundle_pem)
        assert "has not authenticated again" in a.wait_for(LinkDown).reason
        b.wait_for(LinkDown)
    for worker in linked:
        worker.wait_for(LinkUp)
