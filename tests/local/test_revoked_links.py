"""Facts: where the membership says that a worker is revoked, its peers close both streams within a
second, take no message of it that arrives later, refuse its streams and pulls of their state with
the reason `Revoked`, pull none of its own, and do not call it; to the trainer it has left, and its
loss is reported once. It stays out under another number and with the certificate that it still has,
also at a worker that restarts with the membership that it has saved; the links of others go on.
Once it is lifted the link comes back. Real exchanges and TLS over loopback.

Left out: the revoked worker itself (test_coordination.py), who is told when (tests/unit/operator,
tests/cluster/test_federation.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, Rank
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.links.events import LinkDown, LinkUp, Refused
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


def test_its_live_links_are_closed_and_it_is_shut_out(workers: list[Worker]) -> None:
    a, b, bad = workers
    began_s = time.monotonic()
    revoke(workers)
    for worker in (a, b):
        worker.wait_for(LinkDown, lambda event: event.peer == BAD)
    assert time.monotonic() - began_s < 4.0, "certificates hold for longer"
    refused = bad.wait_for(Refused, lambda event: event.outgoing)
    assert refused.kind is PeerRefusal.REVOKED
    assert a.exchange.quarantined() == b.exchange.quarantined() == {BAD}
    assert connected(a, B.rank)
    assert connected(b, A.rank)
    a.exchange.send(B.rank, GRADIENT)
    b.wait_for(MessageArrived, lambda event: event.sender == A.rank)


def test_what_it_sends_later_reaches_no_trainer(workers: list[Worker]) -> None:
    a, _, bad = workers
    revoke(workers)
    a.wait_for(LinkDown, lambda event: event.peer == BAD)
    for _ in range(20):
        bad.exchange.send(A.rank, GRADIENT)
        time.sleep(0.02)
    arrived = [each for each in list(a.events.queue) if isinstance(each, MessageArrived)]
    assert [each for each in arrived if each.sender == BAD] == []


def test_it_gets_no_state_and_gives_none(workers: list[Worker]) -> None:
    a, _, bad = workers
    revoke(workers)
    a.wait_for(LinkDown, lambda event: event.peer == BAD)
    with pytest.raises(UnavailableError, match="is revoked"):
        bad.exchange.pull_state(A.rank)
    with pytest.raises(UnavailableError, match="is revoked"):
        a.exchange.pull_state(BAD)
    assert a.wanted == bad.wanted == []


def test_another_number_does_not_help_it(workers: list[Worker]) -> None:
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


def test_once_it_is_lifted_the_link_comes_back(workers: list[Worker]) -> None:
    a, b, _ = workers
    revoke(workers)
    for worker in (a, b):
        worker.wait_for(LinkDown, lambda event: event.peer == BAD)
    for worker in (a, b):
        worker.exchange.set_members(membership(workers, revoked=False, version=3))
        worker.wait_for(LinkUp, lambda event: event.peer == BAD)
    assert a.exchange.quarantined() == set()


def test_to_the_trainer_it_has_left_also_if_it_had_announced_its_end(
    workers: list[Worker],
) -> None:
    """No barrier waits a moment longer for it, and its last announcement does not end the run."""
    a, _, bad = workers
    told = membership(workers, revoked=True)
    inbox = EventInbox(lambda *_: None, lambda: told, clock_s=time.monotonic)
    while not a.events.empty():
        inbox.put(a.events.get())
    inbox.start(0)
    bad.exchange.send(A.rank, Message(MessageKind.STOP, 5, payload=b"maxSteps 5 reached"))
    inbox.put(a.wait_for(MessageArrived))
    inbox.doubt = lambda _claim, **_: "no other worker says so"
    inbox.drain()
    revoke(workers)
    inbox.put(a.wait_for(LinkDown, lambda event: event.peer == BAD))
    assert inbox.drain() == [MemberLeft(BAD)]
    assert inbox.stop_reason is None


def test_a_worker_that_restarts_still_knows_of_it(tmp_path: Path) -> None:
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
