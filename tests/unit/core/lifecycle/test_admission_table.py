"""Tests of the table of admissions with the entrances of a real and of a simulated worker.

Both send the same instructions to peers, ask the same donors and begin with the same state. A peer
with an impossible iteration is awaited at a barrier. A state that is too old is not adopted. If a
donor gives nothing, the next one is asked. Workers that start together start from the furthest
state.

Left out: real loops and links (`test_loop_cluster.py`); catching up (`tests/simulated`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.admission import Admission
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.join_barrier import FIRST_MARGIN, JoinRole
from dlion_core.links.events import LinkDown, LinkUp, StateRequest, StateSnapshot
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_core.policies.iteration_guard import MAX_LEAD
from dlion_simulator.admission import VirtualAdmission
from dlion_simulator.clock import VirtualClock
from dlion_worker.trainer.admission import join_run
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from loop_cluster import synchronous_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_api.spec import Job

OWN, A, B = Rank(0), Rank(1), Rank(2)
SMALL, LARGE = 100, 2**40
"""Size of a state in bytes: many peers may be caught up with, or none."""


def up(peer: Rank) -> LinkUp:
    return LinkUp(peer, 1, 0)


def out(peer: Rank, done: int = 0) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(0, done=done, role=JoinRole.OUT))


def trains(peer: Rank, done: int, requests: int = 0) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(requests, done=done, role=JoinRole.IN))


def without_quorum(peer: Rank) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(0, done=3, role=JoinRole.NO_QUORUM))


def step(peer: Rank, iteration: int) -> MessageArrived:
    message = Message(MessageKind.GRADIENT, iteration, local_batch_size=8, payload=b"-")
    return MessageArrived(peer, message)


@dataclass(frozen=True)
class Entry:
    """One row: the arrivals, part by part; the states of peers; the actions of this worker."""

    arrivals: list[list[Any]]
    begins: str
    """`own state`, `state of PEER at ITERATION`, or `waits`."""
    states: dict[Rank, list[int]] = field(default_factory=dict)
    """For each donor the iterations of the states that it sends, in order; then none."""
    requests: tuple[tuple[Rank, int], ...] = ()
    """Peers that are asked to wait at an iteration, in order."""
    own_iteration: int = 0
    state_bytes: int = LARGE
    mode: str = "synchronous"
    policy: str = "full"
    is_rejoin: bool = False
    lost: tuple[Rank, ...] = ()


F = 7 + FIRST_MARGIN
BOTH_TRAIN = [up(A), up(B), trains(A, 7), trains(B, 7)]
AGREED = [trains(A, 7, F), trains(B, 7, F)]

TABLE = {
    "all are present and none trains": Entry([[up(A), up(B), out(A), out(B)]], "own state"),
    "one has not answered": Entry([[up(A), up(B), out(A)]], "waits"),
    "one is missing": Entry([[up(A), out(A)]], "waits"),
    "one is paused without a quorum": Entry([[up(A), up(B), out(A), without_quorum(B)]], "waits"),
    "checkpoints differ": Entry(
        [[up(A), up(B), out(A, 4), out(B, 9)]],
        "state of 2 at 9",
        states={A: [4], B: [9]},
        own_iteration=5,
    ),
    "the furthest is this worker": Entry(
        [[up(A), up(B), out(A, 4), out(B, 5)]], "own state", own_iteration=5
    ),
    "the furthest gives its state at the second attempt": Entry(
        [[up(A), up(B), out(A, 4), out(B, 9)], [], []],
        "waits",
        states={A: [4]},
        own_iteration=5,
    ),
    "after a pause, workers that start together start from the furthest": Entry(
        [[up(A), up(B), out(A, 4), out(B, 9)]],
        "state of 2 at 9",
        states={A: [4], B: [9]},
        own_iteration=5,
        is_rejoin=True,
    ),
    "without a barrier any training peer's state does": Entry(
        [BOTH_TRAIN], "state of 1 at 7", states={A: [7], B: [7]}, mode="bounded"
    ),
    "without a barrier the next peer is asked when one gives nothing": Entry(
        [BOTH_TRAIN], "state of 2 at 6", states={B: [6]}, mode="bounded"
    ),
    "a worker with weights keeps them if none waits": Entry(
        [[up(A), up(B), out(A, 9), out(B, 9)]], "own state", own_iteration=3, mode="bounded"
    ),
    "links with all ready workers come first": Entry([[up(A), trains(A, 7)]], "waits"),
    "a lost worker's link is not awaited": Entry(
        [[up(A), trains(A, 7)]], "waits", requests=((A, F),), lost=(B,)
    ),
    "peers wait at the iteration that they agreed on": Entry(
        [BOTH_TRAIN, AGREED, [step(A, F)]],
        f"state of 1 at {F - 1}",
        states={A: [F - 1]},
        requests=((A, F), (B, F)),
    ),
    "a state from after the iteration is not adopted": Entry(
        [BOTH_TRAIN, AGREED, [step(A, F)]], "waits", states={A: [F]}, requests=((A, F), (B, F))
    ),
    "a state before the iteration is pulled early": Entry(
        [BOTH_TRAIN, AGREED, [step(A, F - 1), step(B, F - 1)]],
        f"state of 1 at {F - 1}",
        states={A: [F - 1]},
        requests=((A, F), (B, F)),
    ),
    "a peer that was past the iteration gets a later one": Entry(
        [BOTH_TRAIN, [trains(A, F, F)]],
        "waits",
        requests=((A, F), (B, F), (A, F + 2 * FIRST_MARGIN), (B, F + 2 * FIRST_MARGIN)),
    ),
    "a latecomer catches up with the peers' steps": Entry(
        [BOTH_TRAIN, [step(A, 9), step(B, 10)]],
        "state of 1 at 9",
        states={A: [9]},
        state_bytes=SMALL,
        policy="dlion",
    ),
    "a state that lacks the steps before the first one is too old": Entry(
        [BOTH_TRAIN, [step(A, 9), step(B, 10)], [], []],
        "waits",
        states={A: [8]},
        state_bytes=SMALL,
        policy="dlion",
    ),
    "an impossible step leads to the barrier": Entry(
        [BOTH_TRAIN, [step(A, 9), step(B, 9 + 2 * MAX_LEAD)]],
        "waits",
        states={A: [9], B: [9]},
        requests=((A, F), (B, F)),
        state_bytes=SMALL,
        policy="dlion",
    ),
    "beside another latecomer it meets at the barrier": Entry(
        [[up(A), up(B), trains(A, 7), out(B)]],
        "waits",
        requests=((A, F), (B, F)),
        state_bytes=SMALL,
        policy="dlion",
    ),
    "once the training peers are gone all are asked again": Entry(
        [[up(A), up(B), trains(A, 7), out(B)], [LinkDown(A, 1, "killed")], [up(A), out(A), out(B)]],
        "own state",
        requests=((A, F), (B, F), (B, 0)),
    ),
}


def job_of(entry: Entry) -> Job:
    return synchronous_job(3, 100, mode=entry.mode, policy=entry.policy)


def membership_of(entry: Entry, job: Job) -> Membership:
    members = tuple(
        Member(
            worker, 1, MemberState.LOST if worker.rank in entry.lost else MemberState.READY, "a:1"
        )
        for worker in job.workers()
    )
    return Membership(1, job.key, len(members), members)


class Peers:
    """The peers of a row: they give their states and record the requests to them."""

    def __init__(self, entry: Entry) -> None:
        self._states = {rank: list(states) for rank, states in entry.states.items()}
        self.requests: list[tuple[Rank, int]] = []

    def send(self, peer: Rank, message: Message) -> None:
        self.requests.append((peer, message.iteration))

    def give(self, peer: Rank) -> StateSnapshot | None:
        states = self._states.get(peer)
        return StateSnapshot(states.pop(0), 1, peer.to_bytes()) if states else None


def describe(snapshot: StateSnapshot | None) -> str:
    if snapshot is None:
        return "own state"
    return f"state of {snapshot.payload[0]} at {snapshot.iteration}"


def real(entry: Entry) -> tuple[str, Peers]:
    """Return the outcome at the entrance of a real worker."""
    job, peers, to_come = job_of(entry), Peers(entry), list(entry.arrivals)
    inbox = WaitingInbox(lambda peer, message, epoch: None)  # the inbox asks at link-up
    inbox.iteration = entry.own_iteration

    def pull(peer: Rank, _: StateRequest) -> StateSnapshot:
        if (snapshot := peers.give(peer)) is None:
            raise UnavailableError("gone")
        return snapshot

    def arrive() -> str | None:
        if not to_come:
            return "nothing more comes"
        for arrival in to_come.pop(0):
            inbox.put(arrival)
        return None

    admission = Admission(
        job,
        OWN,
        inbox,
        membership=lambda: membership_of(entry, job),
        now_s=time.monotonic(),
        state_bytes=entry.state_bytes,
        is_rejoin=entry.is_rejoin,
    )
    exchange = SimpleNamespace(send=peers.send, pull_state=pull)
    try:
        snapshot = join_run(admission, cast("Any", exchange), inbox, stopped=arrive)
    except Interrupted:
        return "waits", peers
    return describe(snapshot), peers


def simulated(entry: Entry) -> tuple[str, Peers]:
    """Return the outcome at the entrance of a simulated worker."""
    job, peers, clock = job_of(entry), Peers(entry), VirtualClock()
    inbox = EventInbox(lambda peer, message, epoch: None, clock_s=lambda: clock.now_s)
    inbox.iteration = entry.own_iteration
    links = {
        peer: SimpleNamespace(push=lambda message, peer=peer: peers.send(peer, message))
        for peer in (A, B)
    }
    begun: list[StateSnapshot | None] = []
    weights = SimpleNamespace(nbytes=entry.state_bytes // 2)
    replica = SimpleNamespace(model=SimpleNamespace(weights_D=weights))
    worker = SimpleNamespace(
        rank=OWN, inbox=inbox, neighbours={A, B}, admission=None,
        parts=SimpleNamespace(job=job, links=links, replica=replica),
    )  # fmt: skip

    def pull(peer: Rank, _: StateRequest, take: Callable[[StateSnapshot], None]) -> None:
        if (snapshot := peers.give(peer)) is not None:
            clock.after(0.01, lambda: take(snapshot))
        else:  # the peer's process ends, and its link too
            clock.after(0.01, lambda: lose(peer))

    def lose(peer: Rank) -> None:
        inbox.put(LinkDown(peer, 1, "gone"))
        entrance.advance(inbox.drain())

    entrance = _Entrance(
        cast("Any", worker), clock, membership=lambda: membership_of(entry, job), pull=pull,
        retry=lambda: None,
        before=cast("Any", object()) if entry.is_rejoin else None,
    )  # fmt: skip
    entrance.begun = begun
    worker.admission = entrance
    for arrivals in entry.arrivals:
        for arrival in arrivals:
            inbox.put(arrival)
        entrance.advance(inbox.drain())
        run_for(clock, 1.0)
    return describe(begun[0]) if begun else "waits", peers


class _Entrance(VirtualAdmission):
    """A simulated entrance without a model: it records the state that it would begin with."""

    begun: list[StateSnapshot | None]
    """The state that it began with; None: its own."""

    def _adopt(self, snapshot: StateSnapshot) -> None:
        self.begun.append(snapshot)

    def _keep(self) -> None:
        self.begun.append(None)


def run_for(clock: VirtualClock, seconds: float) -> None:
    over: list[bool] = []
    clock.after(seconds, lambda: over.append(True))
    while not over:
        clock.advance()


@pytest.mark.parametrize("entrance", [real, simulated])
@pytest.mark.parametrize("case", TABLE)
def test_both_entrances_follow_the_table(
    entrance: Callable[[Entry], tuple[str, Peers]], case: str
) -> None:
    entry = TABLE[case]
    begins, peers = entrance(entry)
    assert begins == entry.begins
    assert tuple(peers.requests) == entry.requests
