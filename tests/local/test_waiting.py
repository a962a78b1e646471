"""Test the reports of a worker that waits to join, with real exchanges.

At first it reports nothing, then the state of its links. It names each unreachable peer with
address and reason after a minute, and again only after ten. A peer that is reached but does not
reach back is reported separately. It does not name linked workers, workers that are not neighbours,
or those that have not joined.

Left out: what the operator makes of it (`tests/unit/operator`), pods (`tests/cluster`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import EventRecord, LinkRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.trainer.admission import JoinWaitReporter
from linked_workers import JOB, PLANT_A, PLANT_B, Worker, credentials, identity, introduce, until
from operator_process import free_ports

AUTHORITIES = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}
OWN, OTHER = Rank(0), Rank(1)


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    """Start one worker of each site; neither is known to the other."""
    identities = identity(0, PLANT_A), identity(1, PLANT_B)
    # Exposed: a peer of another site is dialled at its address in the membership only.
    made = [Worker(who, credentials(who, AUTHORITIES), is_exposed=True) for who in identities]
    with closing(made[0].exchange), closing(made[1].exchange):
        yield made[0], made[1]


class Wait:
    """The first worker's wait, on its own clock, and what it reports."""

    def __init__(
        self,
        worker: Worker,
        membership: Membership,
        neighbours: Callable[[], Collection[Rank]] | None = None,
    ) -> None:
        self.now_s = 1000.0
        self.records: list[ProgressRecord] = []
        reporter = Reporter(
            rank=worker.who.rank,
            incarnation=1,
            start_monotonic_s=1000.0,
            send=self.records.extend,
            clock_s=lambda: self.now_s,
        )
        self._waiting = JoinWaitReporter(
            worker.who.rank,
            worker.exchange,
            reporter,
            lambda: membership,
            neighbours,
            clock_s=lambda: self.now_s,
        )

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            self._waiting.report(3)

    def messages(self) -> list[str]:
        events = [each for each in self.records if isinstance(each, EventRecord)]
        assert {each.reason for each in events} <= {EventReason.PEERS_UNREACHED}
        assert all(each.warning and each.iteration == 3 for each in events)
        return [each.message for each in events]

    def links(self) -> list[LinkRecord]:
        return [each for each in self.records if isinstance(each, LinkRecord)]


def closed_to(worker: Worker, peer: Worker) -> Membership:
    """Give that worker its peer at a port on which no process listens."""
    (port,) = free_ports(1)
    member = Member(peer.who, 1, MemberState.READY, f"127.0.0.1:{port}")
    membership = Membership(1, JOB, 2, (worker.member(), member))
    worker.exchange.set_members(membership)
    return membership


def problem(worker: Worker, peer: Rank) -> str:
    states = worker.exchange.link_counters()
    return states[peer].problem if peer in states else ""


def is_linked(worker: Worker, peer: Rank) -> bool:
    states = worker.exchange.link_counters()
    return peer in states and states[peer].connected


def test_an_unreachable_peer_is_reported_with_address_and_reason(
    pair: tuple[Worker, Worker],
) -> None:
    own, other = pair
    membership = closed_to(own, other)
    until(lambda: "refused" in problem(own, OTHER))
    wait = Wait(own, membership)
    wait.advance(4.5)
    assert wait.records == []
    wait.advance(59.5)
    assert wait.messages() == []
    wait.advance(1.5)
    (words,) = wait.messages()
    address = membership.members[1].exchange_address
    begins = f"not linked for 60 s with plant-b/small-1 (not reached at {address}: "
    assert words.startswith(begins)
    assert "onnection refused" in words
    wait.advance(599)
    assert len(wait.messages()) == 1
    wait.advance(1)
    assert len(wait.messages()) == 2
    links = wait.links()
    assert 0.9 * 660 < len(links) <= 662  # one per second
    assert not any(link.connected for link in links)


def test_a_peer_that_does_not_reach_back_is_reported_separately(
    pair: tuple[Worker, Worker],
) -> None:
    own, other = pair
    closed_to(other, own)
    membership = Membership(1, JOB, 2, (own.member(), other.member()))
    own.exchange.set_members(membership)
    until(lambda: "does not reach this worker" in problem(own, OTHER))
    wait = Wait(own, membership)
    wait.advance(70)
    (words,) = wait.messages()
    assert words == (
        "not linked for 60 s with plant-b/small-1"
        f" (reached at {other.exchange.address}, but it does not reach this worker)"
    )


def test_a_linked_peer_is_not_reported(pair: tuple[Worker, Worker]) -> None:
    membership = introduce(*pair)
    until(lambda: is_linked(pair[0], OTHER))
    assert problem(pair[0], OTHER) == ""
    wait = Wait(pair[0], membership)
    wait.advance(100)
    assert wait.messages() == []
    assert all(link.connected for link in wait.links())


@pytest.mark.parametrize(
    ("state", "neighbours"), [(MemberState.LOST, None), (MemberState.READY, frozenset)]
)
def test_absent_peers_and_those_that_are_not_neighbours_are_not_reported(
    state: MemberState,
    neighbours: Callable[[], Collection[Rank]] | None,
    pair: tuple[Worker, Worker],
) -> None:
    own, other = pair
    there = Member(other.who, 1, state, "127.0.0.1:9")
    wait = Wait(own, Membership(1, JOB, 2, (own.member(), there)), neighbours)
    wait.advance(100)
    assert wait.messages() == []
