"""Test real links over loopback with mutual TLS: admission and delivery.

A link that one end no longer wants ends, and returns when both want it. Calls of one connection and
of all connections are bounded, and messages of a peer. A failure of one link does not affect the
watch over the others.

Left out: processes that die (test_link_deaths.py); shaped links (test_network*.py); frames
themselves (tests/unit/core/links).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import SentBytes
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.progress import LinkRecord
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.links import message_rate
from dlion_core.links.events import (
    ExchangeEvent,
    LinkDown,
    LinkUp,
    Refused,
    StateRequest,
    StateSnapshot,
)
from dlion_core.links.link_budget import QueueRule
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.trainer import waiting_inbox
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.transport import peer_exchange as exchange
from dlion_worker.transport.peer_exchange import MAX_CALLS_PER_CONNECTION
from dlion_worker.transport.peer_links import MAX_VIOLATIONS, PeerLink
from dlion_worker.transport.service import MAX_STREAMS_PER_CERTIFICATE, SERVICE, IncomingStream
from dlion_worker.transport.state_server import MAX_PULLS_PER_PEER
from linked_workers import (
    JOB,
    PLANT_A,
    PLANT_B,
    WITHIN_S,
    Worker,
    credentials,
    identity,
    introduce,
    until,
)

A = identity(0)
B = identity(1, PLANT_B)
C = identity(2)
TO_A, TO_B = Rank(0), Rank(1)


@pytest.fixture(scope="module")
def authorities() -> dict[SiteName, CertificateAuthority]:
    return {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}


Start = Callable[..., Worker]


@pytest.fixture
def start(authorities: dict[SiteName, CertificateAuthority]) -> Iterator[Start]:
    """Start workers; at the end close all quickly and check that no thread is left."""
    before = set(threading.enumerate())
    workers: list[Worker] = []

    def _start(who: WorkerIdentity, proof: WorkerCredentials | None = None, **more: Any) -> Worker:
        workers.append(Worker(who, proof or credentials(who, authorities), **more))
        return workers[-1]

    yield _start
    began_s = time.monotonic()
    for worker in workers:
        worker.exchange.close()
    assert time.monotonic() - began_s < 5
    ours = [t for t in set(threading.enumerate()) - before if t.name == "exchange"]
    assert not ours


def gradient(iteration: int, size: int) -> Message:
    return Message(MessageKind.GRADIENT, iteration, 32, iteration - 1, os.urandom(size))


def arrived(worker: Worker) -> Message:
    event: MessageArrived = worker.wait_for(MessageArrived)
    return event.message


def test_a_link_that_brings_too_much_before_the_start_is_opened_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is bounded, and the peer is not quarantined: it may be a fast one."""
    monkeypatch.setattr(waiting_inbox, "MAX_EARLY_BYTES", 1_000_000)
    a, b = start(A), start(B)
    inbox = WaitingInbox(b.exchange.send)

    def put(event: ExchangeEvent) -> None:
        inbox.put(event)
        b.events.put(event)

    b.exchange._links.emit = put
    introduce(a, b)
    for epoch in range(2 * MAX_VIOLATIONS):
        a.wait_for(LinkUp)
        for number in range(20):
            a.exchange.send(TO_B, gradient(1 + 20 * epoch + number, 100_000))
            came = b.wait_for(object, lambda event: isinstance(event, MessageArrived | LinkDown))
            if isinstance(came, LinkDown):
                break
        inbox.drain()
        kept = sum(each.message.size_bytes for each in inbox.early_messages)
        assert kept <= 16 * 100_100
    assert b.exchange.quarantined() == set()


def reported(worker: Worker) -> LinkRecord:
    """Return the record of the worker's only link, over all its traffic."""
    records: list[Any] = []
    reporter = Reporter(
        rank=Rank(0), incarnation=1, start_monotonic_s=0.0, send=records.extend,
        clock_s=time.monotonic,
    )  # fmt: skip
    reporter.links(worker.exchange.link_counters, None, 1, now=True)
    (record,) = records
    assert isinstance(record, LinkRecord)
    return record


@pytest.mark.parametrize("proof", [None, WorkerCredentials.insecure()], ids=["mtls", "disabled"])
def test_messages_of_every_kind_and_size_cross_both_ways(
    start: Start, proof: WorkerCredentials | None
) -> None:
    a, b = start(A, proof), start(B, proof)
    a.exchange.set_iteration(6)
    introduce(a, b)
    a.wait_for(LinkUp)
    assert b.wait_for(LinkUp).iteration == 6
    sent = [
        gradient(7, 3_000_000),
        Message(MessageKind.PROGRESS, 8),
        Message(MessageKind.LOSS, 8, payload=bytes(8)),
        Message(MessageKind.STOP, 8, payload=b"target accuracy"),
    ]
    for sender, receiver, to in ((a, b, TO_B), (b, a, TO_A)):
        for message in sent:
            sender.exchange.send(to, message)
        for message in sent:
            got = arrived(receiver)
            assert (got.kind, got.iteration) == (message.kind, message.iteration)
            assert bytes(got.payload) == bytes(message.payload)
    until(lambda: a.exchange.link_counters()[TO_B].unacknowledged_bytes == 0)
    state = a.exchange.link_counters()[TO_B]
    assert state.acknowledged_total == state.sent_total == sum(m.size_bytes for m in sent)
    assert state.sent_total < state.wire_sent_bytes < 1.01 * state.sent_total
    deliveries = a.exchange.take_deliveries()
    assert [d.acknowledged_bytes for d in deliveries] == [state.sent_total]
    assert 0 < deliveries[0].busy_bytes <= 3_000_000
    assert deliveries[0].receiver_busy_s > 0
    by_kind = deliveries[0].sent
    assert (by_kind.gradient_bytes, by_kind.control_bytes) == (3_000_000, 23)
    assert 0 < by_kind.header_bytes < 30_000
    a.exchange.count_probe(TO_B, 77)
    (later,) = a.exchange.take_deliveries()  # it may also have acknowledged frames since
    assert later.sent == SentBytes(probe_bytes=77, header_bytes=later.sent.header_bytes)
    record = reported(a)
    assert record.sent_bytes - record.weights_bytes - record.control_bytes == 3_000_000
    assert (record.weights_bytes, record.control_bytes) == (0, 23)
    assert (record.state_bytes, record.probe_bytes) == (0, 77)
    assert record.header_bytes >= by_kind.header_bytes + later.sent.header_bytes


def test_bytes_to_a_worker_that_is_not_a_neighbour_count(start: Start) -> None:
    a, b = start(A), start(B)
    membership = Membership(1, JOB, 2, (a.member(), b.member()))
    for worker in (a, b):
        worker.exchange.set_members(membership, linked=())
    b.exchange.pull_state(TO_A)
    a.exchange.count_probe(TO_B, 77)
    record = reported(a)
    assert (record.neighbour, record.connected) == (False, False)
    assert record.probe_bytes == 77
    assert record.state_bytes >= len(a.state.payload) > 0


def test_cpu_includes_the_threads_of_grpc_and_never_falls(start: Start) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    a.wait_for(LinkUp)
    b.wait_for(LinkUp)
    measured_s = [a.exchange.cpu_s()]
    for iteration in range(1, 20):
        a.exchange.send(TO_B, gradient(iteration, 1_000_000))
        arrived(b)
        measured_s.append(a.exchange.cpu_s())
    assert measured_s == sorted(measured_s)
    ident = a.exchange._thread.ident
    assert ident is not None
    own_s = time.clock_gettime(time.pthread_getcpuclockid(ident))
    assert own_s < measured_s[-1] <= time.process_time()
    a.exchange.close()
    assert a.exchange.cpu_s() >= measured_s[-1]


def test_a_numpy_payload_is_sent_without_a_copy(start: Start) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    a.wait_for(LinkUp)
    import numpy as np

    gradient_D = np.arange(100_000, dtype=np.float32)
    a.exchange.send(TO_B, Message(MessageKind.GRADIENT, 1, payload=memoryview(gradient_D)))
    np.testing.assert_array_equal(np.frombuffer(arrived(b).payload, np.float32), gradient_D)


def test_state_is_pulled_completely(start: Start) -> None:
    a, b = start(A), start(B)
    a.state = StateSnapshot(9, 900, os.urandom(5_000_001))
    introduce(a, b)
    wanted = StateRequest(weights_only=True, at_least=9)
    pulled = b.exchange.pull_state(TO_A, wanted)
    assert a.wanted == [wanted]
    assert (pulled.iteration, pulled.samples) == (9, 900)
    assert bytes(pulled.payload) == a.state.payload


def test_an_equal_state_arrives_without_its_bytes(start: Start) -> None:
    a, b = start(A), start(B)
    a.state = StateSnapshot(9, 900, b"", is_equal=True)
    introduce(a, b)
    wanted = StateRequest(weights_only=True, unless_hash="0f")
    assert b.exchange.pull_state(TO_A, wanted) == a.state
    assert a.wanted == [wanted]
    with pytest.raises(ContractError, match="not named"):
        b.exchange.pull_state(TO_A)


def test_a_slow_state_is_awaited(start: Start) -> None:
    a, b = start(A), start(B)
    ready = threading.Event()
    a.exchange._service._pulls._provider = lambda _: (ready.wait(WITHIN_S), a.state)[1]
    introduce(a, b)
    threading.Timer(1.5, ready.set).start()
    assert b.exchange.pull_state(TO_A).iteration == a.state.iteration


def test_a_worker_closes_at_once_while_its_state_is_still_being_gathered(start: Start) -> None:
    a, b = start(A), start(B)
    asked, never = threading.Event(), threading.Event()

    def _stuck(wanted: StateRequest) -> StateSnapshot:
        asked.set()
        never.wait(WITHIN_S)
        raise UnavailableError("too late")

    a.exchange._service._pulls._provider = _stuck
    introduce(a, b)
    refused: list[UnavailableError] = []

    def _pull() -> None:
        with pytest.raises(UnavailableError) as error:
            b.exchange.pull_state(TO_A)
        refused.append(error.value)

    pulling = threading.Thread(target=_pull)
    pulling.start()
    assert asked.wait(WITHIN_S)
    began_s = time.monotonic()
    a.exchange.close()
    assert time.monotonic() - began_s < 2.0
    pulling.join(WITHIN_S)
    assert refused
    never.set()


def gathering() -> int:
    """Return the threads that currently gather a state."""
    return sum(thread.name == "exchange-state" for thread in threading.enumerate())


def slow_state(worker: Worker) -> tuple[list[StateRequest], threading.Event]:
    """Provide the state once the event is set; return the requests until then."""
    asked: list[StateRequest] = []
    go_on = threading.Event()

    def give(wanted: StateRequest) -> StateSnapshot:
        asked.append(wanted)
        go_on.wait(WITHIN_S)
        return worker.state

    worker.exchange._service._pulls._provider = give
    return asked, go_on


def test_repeated_pulls_of_a_peer_gather_one_state_at_a_time(start: Start) -> None:
    a, b = start(A), start(B)
    asked, go_on = slow_state(a)
    introduce(a, b)
    b.wait_for(LinkUp)
    got: list[StateSnapshot | UnavailableError] = []

    def _pull() -> None:
        try:
            got.append(b.exchange.pull_state(TO_A, StateRequest(at_least=2**63)))
        except UnavailableError as error:
            got.append(error)

    pulling = [threading.Thread(target=_pull) for _ in range(20)]
    for thread in pulling:
        thread.start()
    until(lambda: len(got) == 20 - MAX_PULLS_PER_PEER)
    assert all("allowed: 3" in str(refused) for refused in got)
    time.sleep(0.5)
    assert len(asked) == gathering() == 1
    go_on.set()
    for thread in pulling:
        thread.join(WITHIN_S)
    assert [bytes(each.payload) for each in got if isinstance(each, StateSnapshot)] == [
        a.state.payload
    ] * MAX_PULLS_PER_PEER
    assert len(asked) == MAX_PULLS_PER_PEER


def test_a_broken_pull_ends_with_its_thread(start: Start) -> None:
    a, b = start(A), start(B)
    asked, go_on = slow_state(a)
    introduce(a, b)
    b.wait_for(LinkUp)
    loop, lines = b.exchange._loop, a.exchange._service._pulls._queues
    assert loop is not None
    for number in range(5):  # each disconnects before it has its state
        pull = b.exchange._pull(TO_A, StateRequest(at_least=number))
        call = asyncio.run_coroutine_threadsafe(pull, loop)
        until(lambda: bool(asked) and lines[TO_B].length == 1)
        call.cancel()
        until(lambda: lines[TO_B].length == 0)
    assert len(asked) == gathering() == 1
    threading.Timer(0.5, go_on.set).start()
    assert b.exchange.pull_state(TO_A).iteration == a.state.iteration
    assert len(asked) == 2


def test_a_quarantined_or_replaced_worker_gets_no_state(start: Start) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    for worker in (a, b):
        worker.wait_for(LinkUp)
    for _ in range(MAX_VIOLATIONS):
        a.exchange.record_violation(TO_B, "nonsense")
    a.wait_for(LinkDown)
    with pytest.raises(UnavailableError, match="incarnation 1 is in quarantine"):
        b.exchange.pull_state(TO_A)
    refused = a.wait_for(Refused, lambda event: "pull of state" in event.reason)
    assert refused.kind is PeerRefusal.QUARANTINED
    again = start(B, incarnation=2)
    introduce(a, again, version=2)
    again.wait_for(LinkUp)
    assert again.exchange.pull_state(TO_A).iteration == a.state.iteration
    with pytest.raises(UnavailableError, match="replaced by 2"):
        b.exchange.pull_state(TO_A)
    assert a.wanted == [StateRequest()]


def test_state_of_an_unknown_or_dead_peer_is_unavailable(start: Start) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    b.wait_for(LinkUp)
    with pytest.raises(UnavailableError, match="rank 7"):
        b.exchange.pull_state(Rank(7))
    a.exchange.close()
    with pytest.raises(UnavailableError):
        b.exchange.pull_state(TO_A)
    b.exchange.close()
    with pytest.raises(UnavailableError, match="not running"):
        b.exchange.pull_state(TO_A)


def test_a_worker_of_a_foreign_authority_is_refused(start: Start) -> None:
    a = start(A)
    foreign = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}
    key = WorkerKey()
    # It trusts our sites, so the refusal is ours.
    honest = credentials(B, {PLANT_A: CertificateAuthority(PLANT_A), PLANT_B: foreign[PLANT_B]})
    assert honest.key is not None
    stranger = start(
        B, WorkerCredentials(key, foreign[PLANT_B].sign(key.csr_pem(), B, JOB), {
            **a.exchange._config.credentials.site_bundles_pem,
        }),
    )  # fmt: skip
    introduce(a, stranger)
    # A also refuses to dial it: A's side has the reason.
    refused = a.wait_for(Refused)
    assert refused.outgoing
    assert "andshake" in refused.reason or "CERTIFICATE" in refused.reason
    assert not a.exchange.link_counters()[TO_B].connected
    assert stranger.events.empty() or not stranger.exchange.link_counters()[TO_A].connected


@pytest.mark.parametrize("tls", [True, False])
def test_a_worker_of_another_run_is_refused(
    start: Start, authorities: dict[SiteName, CertificateAuthority], *, tls: bool
) -> None:
    other = JobKey("default", "cifar10", "2")
    off = WorkerCredentials.insecure()
    a = start(A, None if tls else off)
    b = start(B, credentials(B, authorities, other) if tls else off, job=other)
    introduce(a, b)
    for worker in (a, b):
        refused = worker.wait_for(Refused, lambda event: event.outgoing)
        assert ("cannot prove" if tls else "this worker takes part in") in refused.reason
        assert not next(iter(worker.exchange.link_counters().values())).connected


def test_a_site_is_linked_once_its_authority_is_known(
    start: Start, authorities: dict[SiteName, CertificateAuthority]
) -> None:
    mine = credentials(A, authorities)
    mine.trust({PLANT_A: authorities[PLANT_A].bundle_pem})
    a, b = start(A, mine), start(B)
    introduce(a, b)
    refused = a.wait_for(Refused)
    assert (refused.outgoing, refused.kind) == (True, PeerRefusal.UNKNOWN_AUTHORITY)
    time.sleep(1.0)  # it dials several times, which is not a violation by the peer
    mine.trust({site: each.bundle_pem for site, each in authorities.items()})
    for worker in (a, b):
        worker.wait_for(LinkUp)


def test_a_site_that_claims_another_name_is_refused(
    start: Start, authorities: dict[SiteName, CertificateAuthority]
) -> None:
    # Plant A's authority signs a certificate with the names of plant B's worker. TLS lets it in:
    # the server trusts both authorities. The second check does not.
    a = start(A)
    key = WorkerKey()
    gone_bad = authorities[PLANT_A]
    gone_bad.site = PLANT_B
    try:
        forged = gone_bad.sign(key.csr_pem(), B, JOB)
    finally:
        gone_bad.site = PLANT_A
    bundles = {site: authority.bundle_pem for site, authority in authorities.items()}
    liar = start(B, WorkerCredentials(key, forged, bundles))
    introduce(a, liar)
    refused = a.wait_for(Refused, lambda event: not event.outgoing)
    assert "not by the authority of site plant-b" in refused.reason
    assert not a.exchange.link_counters()[TO_B].connected
    assert "plant-b" in liar.wait_for(Refused).reason


def test_an_older_incarnation_is_refused_and_a_newer_one_replaces(start: Start) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    assert a.wait_for(LinkUp).epoch == 1
    again = start(B, incarnation=2)
    # A learns of it only from its hello, which includes its address.
    again.exchange.set_members(Membership(2, JOB, 2, (a.member(), again.member())))
    assert a.wait_for(LinkDown).epoch == 1
    assert a.wait_for(LinkUp).epoch == 2
    assert "replaced" in b.wait_for(Refused).reason
    again.wait_for(LinkUp)
    a.exchange.send(TO_B, gradient(7, 100), epoch=1)  # addressed to the replaced one
    a.exchange.send(TO_B, gradient(1, 100), epoch=2)
    assert arrived(again).iteration == 1


def test_messages_on_a_link_that_is_down_are_lost_and_counted(start: Start) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    a.wait_for(LinkUp)
    b.exchange.close()
    a.wait_for(LinkDown)
    a.exchange.send(TO_B, gradient(1, 100))
    a.exchange.send(Rank(9), gradient(1, 100))
    until(lambda: a.exchange.link_counters()[TO_B].dropped_messages == 1)


def slow_down(worker: Worker, monkeypatch: pytest.MonkeyPatch, gate: asyncio.Event) -> None:
    """Make that worker's receiving side accept nothing until the gate opens."""
    from dlion_worker.transport.service import IncomingStream

    take = IncomingStream._handle_frame

    async def _slow(self: IncomingStream, *arguments: Any) -> None:
        if self._local.identity == worker.who:
            await gate.wait()
        await take(self, *arguments)

    monkeypatch.setattr(IncomingStream, "_handle_frame", _slow)


def test_newer_gradients_replace_those_that_wait_for_a_slow_receiver(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(A, queue_rule=QueueRule.NEWEST), start(B)
    introduce(a, b)
    a.wait_for(LinkUp)
    b.wait_for(LinkUp)
    gate = asyncio.Event()
    slow_down(b, monkeypatch, gate)
    budget = 50_000
    a.exchange.set_budgets({TO_B: budget})
    a.exchange.send(TO_B, gradient(1, 400_000))
    until(lambda: a.exchange.link_counters()[TO_B].sent_total > 0)
    for iteration in range(2, 21):
        a.exchange.send(TO_B, gradient(iteration, 400_000))
        state = a.exchange.link_counters()[TO_B]
        assert state.unacknowledged_bytes <= 2 * budget
    until(lambda: a.exchange.link_counters()[TO_B].dropped_messages == 18)
    state = a.exchange.link_counters()[TO_B]
    assert state.window_bytes == 2 * budget
    assert state.queued_bytes <= 800_000
    loop = b.exchange._loop
    assert loop is not None
    loop.call_soon_threadsafe(gate.set)
    assert [arrived(b).iteration, arrived(b).iteration] == [1, 20]


def test_gradients_are_sent_during_a_transfer_of_weights(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(A), start(B)
    introduce(a, b)
    a.wait_for(LinkUp)
    b.wait_for(LinkUp)
    gate = asyncio.Event()
    slow_down(b, monkeypatch, gate)  # the transfer does not end before the gradients are sent
    a.exchange.set_budgets({TO_B: 100_000})
    a.exchange.send(TO_B, Message(MessageKind.WEIGHTS, 1, payload=os.urandom(4_000_000)))
    until(lambda: a.exchange.link_counters()[TO_B].sent_total > 0)
    for iteration in range(2, 12):
        a.exchange.send(TO_B, gradient(iteration, 100_000))
    loop = b.exchange._loop
    assert loop is not None
    loop.call_soon_threadsafe(gate.set)
    kinds = [arrived(b).kind for _ in range(11)]
    assert kinds == [MessageKind.GRADIENT] * 10 + [MessageKind.WEIGHTS]


def test_a_peer_that_violates_the_protocol_is_refused_then_quarantined(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(A), start(B)
    from dlion_core.links.send_queue import SendQueue

    leave = SendQueue._record_frame

    def _spoil(self: SendQueue, data: bytes, size: int, lane: object, now_s: float) -> bytes:
        if size and self is b.exchange._links.by_rank[TO_A].send_queue:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return leave(self, data, size, lane, now_s)

    monkeypatch.setattr(SendQueue, "_record_frame", _spoil)
    introduce(a, b)
    for _ in range(3):
        b.wait_for(LinkUp)
        b.exchange.send(TO_A, gradient(1, 1000))
        assert "checksum" in a.wait_for(Refused).reason
        assert "checksum" in b.wait_for(Refused, lambda event: event.outgoing).reason
    assert "quarantined" in a.wait_for(Refused).reason
    assert "quarantine" in b.wait_for(Refused, lambda e: "quarantine" in e.reason).reason
    assert not a.exchange.link_counters()[TO_B].connected
    again = start(B, incarnation=2)  # a restart clears it
    introduce(a, again, version=2)
    a.wait_for(LinkUp)


def test_a_peer_that_floods_its_link_is_refused_then_quarantined(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_rate, "MAX_BURST", 20)
    monkeypatch.setattr(message_rate, "MESSAGES_PER_S", 0.0)
    a, b = start(A), start(B)
    introduce(a, b)
    a.wait_for(LinkUp)
    for iteration in range(1, 21):
        b.exchange.send(TO_A, gradient(iteration, 10))
        assert arrived(a).iteration == iteration
    for iteration in range(21, 24):
        b.wait_for(LinkUp)
        b.exchange.send(TO_A, gradient(iteration, 10))
        assert "messages a second" in a.wait_for(Refused).reason
    assert "quarantined" in a.wait_for(Refused).reason


def connections(proof: WorkerCredentials, address: str, count: int) -> list[grpc.Channel]:
    secure = proof.channel(PLANT_A)
    assert secure is not None
    options = [*proof.target_options(A.dns_name(JOB)), ("grpc.use_local_subchannel_pool", 1)]
    return [grpc.secure_channel(address, secure, options) for _ in range(count)]


def silent(channel: grpc.Channel) -> grpc.Call:
    """Open a stream of a link that sends nothing."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(WITHIN_S)
        yield from ()

    call: grpc.Call = channel.stream_stream(f"/{SERVICE}/Link")(nothing())
    call.add_callback(over.set)
    return call


def test_calls_of_all_peers_are_bounded(
    start: Start, authorities: dict[SiteName, CertificateAuthority], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_CALLS", 4)
    a = start(A)
    channels = [
        channel
        for _ in range(6)  # certificates
        for channel in connections(credentials(B, authorities), a.exchange.address, 1)
    ]
    calls = [silent(channel) for channel in channels]
    until(lambda: sum(not call.is_active() for call in calls) == 2)
    refused = {call.code() for call in calls if not call.is_active()}
    assert refused == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    for call in calls:
        call.cancel()
    for channel in channels:
        channel.close()
    b = start(B)
    introduce(a, b)
    a.wait_for(LinkUp)


def test_a_caller_with_too_many_streams_is_refused_and_blocks_no_other(
    start: Start, authorities: dict[SiteName, CertificateAuthority]
) -> None:
    a, proof = start(A), credentials(B, authorities)
    channels = connections(proof, a.exchange.address, MAX_STREAMS_PER_CERTIFICATE + 3)
    calls = [silent(channel) for channel in channels]
    until(lambda: sum(not call.is_active() for call in calls) == 3)
    refused = {call.code() for call in calls if not call.is_active()}
    assert refused == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert "by this certificate" in a.wait_for(Refused).reason
    c = start(C)
    introduce(a, c)
    a.wait_for(LinkUp)  # while those streams are open
    for call in calls:
        call.cancel()
    for channel in channels:
        channel.close()
    until(lambda: len(a.exchange._service._open.by_caller) <= 1)


def test_calls_of_one_connection_are_queued(
    start: Start, authorities: dict[SiteName, CertificateAuthority], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    reached = IncomingStream.run

    async def _run(stream: IncomingStream) -> tuple[grpc.StatusCode, str]:
        heard.append(stream)
        return await reached(stream)

    monkeypatch.setattr(IncomingStream, "run", _run)
    a, proof = start(A), credentials(B, authorities)
    (channel,) = connections(proof, a.exchange.address, 1)
    with channel:
        calls = [silent(channel) for _ in range(3 * MAX_CALLS_PER_CONNECTION)]
        until(lambda: len(heard) == MAX_CALLS_PER_CONNECTION)
        time.sleep(0.5)
        assert len(heard) == MAX_CALLS_PER_CONNECTION
        calls[0].cancel()
        until(lambda: len(heard) > MAX_CALLS_PER_CONNECTION)


def test_a_failing_watch_of_a_link_does_not_affect_others(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked_at: list[Rank] = []

    def _watch(link: PeerLink, *_: object) -> None:
        if link._shared.local.identity == A:
            looked_at.append(link.rank)
            if link.rank == TO_B:
                raise ValueError("a defect")

    monkeypatch.setattr(exchange, "check_link", _watch)
    a, b, c = start(A), start(B), start(C)
    introduce(a, b, c)
    until(lambda: looked_at.count(TO_B) > 2 and looked_at.count(C.rank) > 2)
    assert caplog.text.count("defect: the link to rank 1 is not checked") == 1


def test_a_link_exists_only_while_both_ends_want_it(
    start: Start,
) -> None:
    a, b = start(A), start(B)
    membership = introduce(a, b)
    for worker in (a, b):
        worker.wait_for(LinkUp)
    a.exchange.send(TO_B, gradient(1, 10_000))
    assert arrived(b).iteration == 1
    for _ in range(3):  # as after several regroupings
        a.exchange.set_members(membership, linked=())
        for worker in (a, b):
            worker.wait_for(LinkDown)
        time.sleep(0.3)  # the other one dials, and is refused
        assert a.exchange.link_counters()[TO_B].connected is False
        assert a.exchange.link_counters()[TO_B].sent_total >= 10_000
        a.exchange.set_members(membership, linked={TO_B})
        for worker in (a, b):
            worker.wait_for(LinkUp)
        a.exchange.send(TO_B, gradient(2, 10_000))
        assert arrived(b).iteration == 2
    assert a.events.empty()
    assert not [event for event in list(b.events.queue) if isinstance(event, Refused)]
