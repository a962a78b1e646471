"""Tests of admission: what a latecomer agrees with peers while another worker vanishes.

A peer names an iteration to the latecomer. Then the only worker that trained vanishes, and all
three start again. The latecomer waits for that peer from the first iteration on. It does not start
again beside a peer that already has the state of the vanished worker. If a worker starts while
another joins late at a peer that has just started, it keeps the named iteration. A linked peer that
the coordinator reports as lost is awaited for a few seconds. A state that cannot be adopted counts
against the peer that gave it, and another peer is asked.

Left out: real loops, other orders of loss and return (`test_loop_cluster.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.admission import REPORT_WAIT_S, Admission, KeepOwnState
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.join_barrier import JoinRole
from dlion_core.links.events import LinkDown, LinkUp, StateRequest, StateSnapshot
from dlion_core.policies.interface import MemberJoined, Message, MessageArrived, MessageKind
from dlion_worker.trainer.admission import join_run
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.snapshot import OtherProgramError
from loop_cluster import synchronous_job

if TYPE_CHECKING:
    from collections.abc import Callable

ONLY, OWN, OTHER = Rank(0), Rank(1), Rank(2)
BOTH = (ONLY, OWN)


def out(peer: Rank) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(0, done=0, role=JoinRole.OUT))


def joining(
    inbox: WaitingInbox, arrivals: list[list[Any]], membership: Membership | None = None
) -> tuple[Callable[[], StateSnapshot | None], list[tuple[Rank, Message]]]:
    """One of three workers that joins while these parts arrive one by one; the messages that it
    sends.
    """
    sent: list[tuple[Rank, Message]] = []

    def arrive() -> str | None:
        for arrival in arrivals.pop(0) if arrivals else ():
            inbox.put(arrival)
        return None if arrivals else "nothing more comes"

    admission = Admission(
        synchronous_job(3, 100),
        OWN,
        inbox,
        membership=lambda: membership,
        now_s=time.monotonic(),
        state_bytes=2**40,  # more than the link can carry before the start
    )
    exchange = cast("Any", SimpleNamespace(send=lambda *message: sent.append(message)))
    return lambda: join_run(admission, exchange, inbox, stopped=arrive), sent


VANISHES = [
    [
        LinkUp(ONLY, 1, 7),
        MessageArrived(ONLY, join_barrier.join_answer(0, done=7, role=JoinRole.IN)),
    ],
    [LinkUp(OTHER, 1, 0), out(OTHER)],
    [MessageArrived(OTHER, join_barrier.join_request(12))],
    [LinkDown(ONLY, 1, "killed")],
    [LinkUp(ONLY, 2, 0), out(ONLY)],
]


def test_an_agreed_iteration_is_void_once_all_workers_start_again() -> None:
    inbox = WaitingInbox(lambda peer, message, epoch: None)
    entrance, _ = joining(inbox, [*VANISHES, [out(ONLY), out(OTHER)], []])
    assert entrance() is None
    assert inbox.start(0) == [MemberJoined(ONLY, 0), MemberJoined(OTHER, 0)]


def test_an_iteration_agreed_with_a_worker_that_has_just_started_is_kept() -> None:
    """The peer answered before its start. So this worker starts with it and waits for no other."""
    inbox, named = (
        WaitingInbox(lambda peer, message, epoch: None),
        MessageArrived(OTHER, join_barrier.join_request(12)),
    )
    begun = [[LinkUp(ONLY, 1, 0), out(ONLY)], [LinkUp(OTHER, 2, 0), named, out(OTHER)], []]
    entrance, _ = joining(inbox, begun)
    assert entrance() is None
    promise = MessageArrived(OTHER, Message(MessageKind.PROGRESS, 11))
    assert inbox.start(0) == [MemberJoined(ONLY, 0), MemberJoined(OTHER, 0), promise]


def test_a_peer_with_the_state_of_the_vanished_worker_is_joined() -> None:
    """The peer first answered that it does not train. It has received the state since."""
    is_training = MessageArrived(OTHER, join_barrier.join_answer(0, done=12, role=JoinRole.IN))
    entrance, sent = joining(
        WaitingInbox(lambda peer, message, epoch: None), [*VANISHES, [is_training], [], []]
    )
    with pytest.raises(Interrupted):
        entrance()
    assert sent[-1] == (OTHER, join_barrier.join_request(12 + join_barrier.FIRST_MARGIN))


@dataclass
class Donors:
    """An exchange with two peers that have a state, of which `check` refuses some."""

    errors: dict[Rank, ContractError]
    violations: list[tuple[Rank, str]] = field(default_factory=list)

    def send(self, *_: object) -> None:
        """Join messages matter to the peers alone."""

    def pull_state(self, peer: Rank, _: StateRequest) -> StateSnapshot:
        return StateSnapshot(7, 1, peer.to_bytes())

    def record_violation(self, peer: Rank, text: str) -> None:
        self.violations.append((peer, text))

    def check(self, snapshot: StateSnapshot) -> None:
        if (error := self.errors.get(Rank(int.from_bytes(snapshot.payload)))) is not None:
            raise error

    def join(self) -> StateSnapshot | None:
        inbox = WaitingInbox(lambda peer, message, epoch: None)
        for peer in (ONLY, OTHER):
            has_state = MessageArrived(peer, join_barrier.join_answer(0, done=7, role=JoinRole.OUT))
            for arrival in (LinkUp(peer, 1, 7), has_state):
                inbox.put(arrival)
        job = synchronous_job(3, 100)
        admission = Admission(job, OWN, inbox, membership=lambda: None, now_s=0.0, state_bytes=8)
        return join_run(admission, cast("Any", self), inbox, lambda: None, check=self.check)


def test_another_peer_is_asked_for_a_state_that_can_be_adopted() -> None:
    """Its restart would end in the same way, as it asks the same peer first."""
    donors = Donors({ONLY: ContractError("values that are not finite")})
    assert donors.join() == StateSnapshot(7, 1, OTHER.to_bytes())
    assert donors.violations == [(ONLY, "values that are not finite")]


def test_a_state_of_another_length_counts_against_no_peer() -> None:
    donors = Donors({ONLY: OtherProgramError("another length")})
    assert donors.join() == StateSnapshot(7, 1, OTHER.to_bytes())
    assert donors.violations == []


def test_a_worker_whose_program_differs_from_all_others_ends() -> None:
    """It would have its honest peers quarantined, and wait without end."""
    donors = Donors(dict.fromkeys((ONLY, OTHER), OtherProgramError("another length")))
    with pytest.raises(OtherProgramError):
        donors.join()
    assert donors.violations == []


def trains(peer: Rank) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(0, done=7, role=JoinRole.IN))


@pytest.mark.parametrize("state", [MemberState.READY, MemberState.LOST])
def test_no_iteration_is_named_before_all_present_peers_are_linked(state: MemberState) -> None:
    """An unlinked peer would pass that iteration. Then all would wait for another one."""
    job = synchronous_job(3, 100)
    states = {ONLY: MemberState.READY, OTHER: state}
    members = tuple(Member(job.worker(rank), 1, has, "a:1") for rank, has in states.items())
    membership = Membership(1, job.key, 3, members)
    one, both = [LinkUp(ONLY, 1, 7), trains(ONLY)], [LinkUp(OTHER, 1, 7), trains(OTHER)]
    named = join_barrier.join_request(7 + join_barrier.FIRST_MARGIN)
    for arrivals, expected in (
        ([one, [], []], [] if state is MemberState.READY else [(ONLY, named)]),
        ([[*one, *both], [], []], [(ONLY, named), (OTHER, named)]),
    ):
        entrance, sent = joining(
            WaitingInbox(lambda peer, message, epoch: None), arrivals, membership
        )
        with pytest.raises(Interrupted):
            entrance()
        assert sent == expected


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_linked_peer_is_awaited_at_the_coordinator_for_a_while(is_reported: bool) -> None:
    """It was lost with all others, and its link is up before the coordinator reports its return."""
    job, states = synchronous_job(2, 100), dict.fromkeys(BOTH, MemberState.LOST)

    def membership() -> Membership:
        members = tuple(Member(job.worker(rank), 1, has, "a:1") for rank, has in states.items())
        return Membership(1, job.key, 2, members)

    inbox = EventInbox(lambda peer, message, epoch: None, clock_s=float)
    for arrival in (LinkUp(ONLY, 1, 7), out(ONLY)):
        inbox.put(arrival)
    inbox.drain()
    admission = Admission(job, OWN, inbox, membership=membership, now_s=0.0, state_bytes=8)
    assert admission.advance(1.0) == []
    assert admission.wake_at_s == 1.0 + REPORT_WAIT_S
    if is_reported:
        states[ONLY] = MemberState.READY
        assert admission.advance(1.1) == [KeepOwnState()]
    else:
        assert admission.advance(1.0 + REPORT_WAIT_S) == [KeepOwnState()]
