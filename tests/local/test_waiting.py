"""Facts, by real exchanges: a worker that waits to come in says nothing at first, then how its
links are; it names whom it does not reach, where and why, once that has lasted a minute, and says
so again only after ten; one that is reached and does not reach back is told apart; who is linked,
is no neighbour or has not joined is not named.

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
    """One worker of each site, and neither knows of the other."""
    whom = identity(0, PLANT_A), identity(1, PLANT_B)
    # Exposed: a peer of another site is dialled as the membership says, whatever it says itself.
    made = [Worker(who, credentials(who, AUTHORITIES), is_exposed=True) for who in whom]
    with closing(made[0].exchange), closing(made[1].exchange):
        yield made[0], made[1]


class Wait:
    """The first worker's, by a clock of its own; and what it has told."""

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

    def go_on(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            self._waiting.report(3)

    def told(self) -> list[str]:
        events = [each for each in self.records if isinstance(each, EventRecord)]
        assert {each.reason for each in events} <= {EventReason.PEERS_UNREACHED}
        assert all(each.warning and each.iteration == 3 for each in events)
        return [each.message for each in events]

    def links(self) -> list[LinkRecord]:
        return [each for each in self.records if isinstance(each, LinkRecord)]


def closed_to(worker: Worker, peer: Worker) -> Membership:
    """Tells that worker of its peer, at a port where nothing listens."""
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


def test_who_is_not_reached_is_named_with_where_and_why(pair: tuple[Worker, Worker]) -> None:
    own, other = pair
    membership = closed_to(own, other)
    until(lambda: "refused" in problem(own, OTHER))
    wait = Wait(own, membership)
    wait.go_on(4.5)
    assert wait.records == []
    wait.go_on(59.5)
    assert wait.told() == []
    wait.go_on(1.5)
    (words,) = wait.told()
    address = membership.members[1].exchange_address
    begins = f"not linked for 60 s with plant-b/small-1 (not reached at {address}: "
    assert words.startswith(begins)
    assert "onnection refused" in words
    wait.go_on(599)
    assert len(wait.told()) == 1
    wait.go_on(1)
    assert len(wait.told()) == 2
    links = wait.links()
    assert 0.9 * 660 < len(links) <= 662  # one a second
    assert not any(link.connected for link in links)


def test_one_that_is_reached_and_does_not_reach_back_is_told_apart(
    pair: tuple[Worker, Worker],
) -> None:
    own, other = pair
    closed_to(other, own)
    membership = Membership(1, JOB, 2, (own.member(), other.member()))
    own.exchange.set_members(membership)
    until(lambda: "does not reach this worker" in problem(own, OTHER))
    wait = Wait(own, membership)
    wait.go_on(70)
    (words,) = wait.told()
    assert words == (
        "not linked for 60 s with plant-b/small-1"
        f" (reached at {other.exchange.address}, but it does not reach this worker)"
    )


def test_who_is_linked_is_not_named(pair: tuple[Worker, Worker]) -> None:
    membership = introduce(*pair)
    until(lambda: is_linked(pair[0], OTHER))
    assert problem(pair[0], OTHER) == ""
    wait = Wait(pair[0], membership)
    wait.go_on(100)
    assert wait.told() == []
    assert all(link.connected for link in wait.links())


@pytest.mark.parametrize(
    ("state", "neighbours"), [(MemberState.LOST, None), (MemberState.READY, frozenset)]
)
def test_who_is_not_there_or_no_neighbour_is_not_named(
    state: MemberState,
    neighbours: Callable[[], Collection[Rank]] | None,
    pair: tuple[Worker, Worker],
) -> None:
    own, other = pair
    there = Member(other.who, 1, state, "127.0.0.1:9")
    wait = Wait(own, Membership(1, JOB, 2, (own.member(), there)), neighbours)
    wait.go_on(100)
    assert wait.told() == []
