"""Test the links of a worker that the membership lists as revoked, with real exchanges and TLS.

Its peers close both streams within a second and accept no later message. They refuse its streams
and pulls with the reason `Revoked`, also pulls that have begun, pull none of its state, and do not
call it. For the trainer it
has left, and its loss is reported once. It stays refused under another number, with its valid
certificate, and at a worker that restarts with the stored membership. Other links continue. When
the revocation ends, the link returns.

Left out: the revoked worker itself (test_coordination.py), the distribution of revocations
(tests/unit/operator, tests/cluster/test_federation.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, Rank
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.links.events import LinkDown, LinkUp, Refused, StateRequest, StateSnapshot
from dlion_core.policies.interface import MemberLeft, Message, MessageArrived, MessageKind
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.coordination.saved_state import (
    SavedMembership,
    load_membership,
    save_membership,
)
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

A, B, C = identity(0), identity(1), identity(2, PLANT_B)
BAD = Rank(2)
GRADIENT = Message(MessageKind.GRADIENT, 1, 8, payload=b"x" * 1000)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    authorities = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}
    made = [Worker(who, credentials(who, authorities)) for who in (A, B, C)]
    try:
        introduce(*made)
        for worker in made:
            for other in made:
                if other is not worker:
                    rank = other.who.rank
                    until(lambda w=worker, r=rank: connected(w, r))
        yield made
    finally:
        for worker in made:
            worker.exchange.close()


def connected(worker: Worker, peer: Rank) -> bool:
    counters = worker.exchange.link_counters().get(peer)
    return counters is not None and counters.connected


def membership(workers: list[Worker], *, revoked: bool, version: int = 2) -> Membership:
    members = [worker.member() for worker in workers]
    if revoked:
        members[2] = replace(members[2], state=MemberState.FINISHED, revoked=True)
    return Membership(version, JOB, 2 if revoked else 3, tuple(members))


def revoke(workers: list[Worker]) -> None:
    for worker in workers[:2]:
        worker.exchange.set_members(membership(workers, revoked=True))


def test_links_of_a_revoked_worker_are_closed_and_refused(workers: list[Worker]) -> None:
    a, b, bad = workers
    began_s = time.monotonic()
    revoke(workers)
    for worker in (a, b):
        worker.wait_for(LinkDown, lambda event: event.peer == BAD)
    assert time.monotonic() - began_s < 10.0, "certificates are valid for longer"
    refused = bad.wait_for(Refused, lambda event: event.outgoing)
    assert refused.kind is PeerRefusal.REVOKED
    assert a.exchange.quarantined() == b.exchange.quarantined() == {BAD}
    assert connected(a, B.rank)
    assert connected(b, A.rank)
    a.exchange.send(B.rank, GRADIENT)
    b.wait_for(MessageArrived, lambda event: event.sender == A.rank)


def test_later_messages_of_a_revoked_worker_reach_no_trainer(workers: list[Worker]) -> None:
    a, _, bad = workers
    revoke(workers)
    a.wait_for(LinkDown, lambda event: event.peer == BAD)
    for _ in range(20):
        bad.exchange.send(A.rank, GRADIENT)
        time.sleep(0.02)
    arrived = [each for each in list(a.events.queue) if isinstance(each, MessageArrived)]
    assert [each for each in arrived if each.sender == BAD] == []


def test_a_revoked_worker_neither_gets_nor_gives_state(workers: list[Worker]) -> None:
    a, _, bad = workers
    revoke(workers)
    a.wait_for(LinkDown, lambda event: event.peer == BAD)
    with pytest.raises(UnavailableError, match="is revoked"):
        bad.exchange.pull_state(A.rank)
    with pytest.raises(UnavailableError, match="is revoked"):
        a.exchange.pull_state(BAD)
    assert a.wanted == bad.wanted == []


def test_a_pull_that_began_before_the_revocation_gets_no_state(workers: list[Worker]) -> None:
    a, _, bad = workers
    asked, go_on = threading.Event(), threading.Event()

    def give_late(_: StateRequest) -> StateSnapshot:
        asked.set()
        go_on.wait(WITHIN_S)
        return a.state

    a.exchange._service._pulls._provider = give_late
    with ThreadPoolExecutor(1) as thread:
        pulled = thread.submit(bad.exchange.pull_state, A.rank)
        assert asked.wait(WITHIN_S)
        revoke(workers)
        a.wait_for(LinkDown, lambda event: event.peer == BAD)
        go_on.set()
        with pytest.raises(UnavailableError, match="is revoked"):
            pulled.result(WITHIN_S)


def test_a_revoked_worker_is_refused_under_another_number(workers: list[Worker]) -> None:
    a, b, bad = workers
    revoke(workers)
    a.wait_for(LinkDown, lambda event: event.peer == BAD)
    proof = bad.exchange._config.credentials
    bad.exchange.close()
    again = Worker(C, proof, incarnation=int(time.time()))
    try:
        again.exchange.set_members(Membership(9, JOB, 3, (a.member(), b.member())))
        refused = again.wait_for(Refused, lambda event: event.outgoing)
        assert refused.kind is PeerRefusal.REVOKED
        assert not connected(a, BAD)
    finally:
        again.exchange.close()


def test_the_link_returns_when_the_revocation_ends(workers: list[Worker]) -> None:
    a, b, _ = workers
    revoke(workers)
    for worker in (a, b):
        worker.wait_for(LinkDown, lambda event: event.peer == BAD)
    for worker in (a, b):
        worker.exchange.set_members(membership(workers, revoked=False, version=3))
        worker.wait_for(LinkUp, lambda event: event.peer == BAD)
    assert a.exchange.quarantined() == set()


def test_a_revoked_worker_has_left_for_the_trainer(workers: list[Worker]) -> None:
    """No barrier waits longer for it, and its last announcement does not end the run."""
    a, _, bad = workers
    revoked = membership(workers, revoked=True)
    inbox = EventInbox(lambda *_: None, lambda: revoked, clock_s=time.monotonic)

    def linked() -> bool:
        while not a.events.empty():
            inbox.put(a.events.get())
        inbox.drain()
        return BAD in inbox.linked

    until(linked)  # reported a moment after the exchange counts the link as connected
    inbox.start(0)
    bad.exchange.send(A.rank, Message(MessageKind.STOP, 5, payload=b"maxSteps 5 reached"))
    inbox.put(a.wait_for(MessageArrived))
    inbox.doubt = lambda _claim, **_: "no other worker confirms it"
    inbox.drain()
    revoke(workers)
    inbox.put(a.wait_for(LinkDown, lambda event: event.peer == BAD))
    assert inbox.drain() == [MemberLeft(BAD)]
    assert inbox.stop_reason is None


def test_a_restarted_worker_keeps_the_revocation(tmp_path: Path) -> None:
    job = JobKey("default", "cifar10", "1")
    authority = CertificateAuthority(PLANT_A)
    worker = Worker(A, credentials(A, {PLANT_A: authority}))
    try:
        members = membership([worker, worker, worker], revoked=True)
        save_membership(tmp_path, SavedMembership(members, 0.0))
        saved = load_membership(tmp_path, job)
        assert saved is not None
        assert [member.revoked for member in saved.membership.members] == [False, False, True]
    finally:
        worker.exchange.close()
