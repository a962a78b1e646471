"""How a worker joins a run: with all the others, or late. A state machine without I/O.

If no worker trains yet, all wait for the expected workers and then start from the furthest state.
If others train, the latecomer adopts a state from one of them. At a barrier it either catches up
afterwards (`catch_up`), or first agrees on an iteration to join at (`join_barrier`). A worker that
was paused while others trained rejoins in the same way.

Call `advance` whenever something arrived or `wake_at_s` has come, and execute the instructions in
order. After `PullState` the driver reports the result with `pulled`, and calls `advance` meanwhile
only if a link may have changed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum, auto

from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.spec import Job
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.catch_up import MAX_BUFFERED_BYTES
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_core.policies.catalogue import is_fully_synchronous, may_catch_up, may_step_concurrently
from dlion_core.policies.interface import SendMessage
from dlion_core.policies.iteration_guard import MAX_LEAD

Acceptance = Callable[[StateSnapshot], "StateSnapshot | None"]


@dataclass(frozen=True)
class PullState:
    """Pull that peer's state, and report it with `Admission.pulled`."""

    peer: Rank
    wanted: StateRequest


@dataclass(frozen=True)
class AdoptState:
    """Begin with a peer's state. The admission is over."""

    snapshot: StateSnapshot


@dataclass(frozen=True)
class KeepOwnState:
    """Begin with this worker's own state. The admission is over."""


AdmissionInstruction = SendMessage | PullState | AdoptState | KeepOwnState


class AdmissionPhase(Enum):
    """What the admission is waiting for."""

    PEERS = auto()  # the expected workers, none of which trains
    LINKS = auto()  # links with the ready workers, because some train
    BARRIER = auto()  # an iteration at which all training peers wait
    STATE = auto()  # a peer's state
    DONE = auto()


TRANSITIONS = {
    AdmissionPhase.PEERS: frozenset(
        {AdmissionPhase.LINKS, AdmissionPhase.STATE, AdmissionPhase.DONE}
    ),
    AdmissionPhase.LINKS: frozenset(
        {AdmissionPhase.PEERS, AdmissionPhase.BARRIER, AdmissionPhase.STATE, AdmissionPhase.DONE}
    ),
    AdmissionPhase.BARRIER: frozenset(
        {AdmissionPhase.PEERS, AdmissionPhase.STATE, AdmissionPhase.DONE}
    ),
    AdmissionPhase.STATE: frozenset(
        {AdmissionPhase.PEERS, AdmissionPhase.LINKS, AdmissionPhase.BARRIER, AdmissionPhase.DONE}
    ),
    AdmissionPhase.DONE: frozenset[AdmissionPhase](),
}
"""Phase -> the phases that may follow. A pull that failed returns to the phase before it."""

RETRY_S = 0.1
"""Delay before the next attempt after a state that was not given or not suitable."""

REPORT_WAIT_S = 5.0
"""Longest wait for the coordinator's report of linked peers: it may be away."""

CLOCK_RESOLUTION_S = 1e-6


@dataclass
class _Pull:
    """A pull in progress."""

    donors: list[Rank]
    """The peer that is asked, and those to ask if it gives nothing."""
    wanted: StateRequest
    accept: Acceptance
    """Returns the state to adopt, or None where it does not suit."""
    link_epoch: int | None
    """The epoch of the donor's link when it was asked."""
    before: AdmissionPhase
    is_last_chance: bool
    """Whether this worker begins with its own state where no donor gives one."""


class Admission:
    """Admits one worker to the run."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        inbox: EventInbox,
        *,
        membership: Callable[[], Membership | None],
        now_s: float,
        state_bytes: int,
        is_rejoin: bool = False,
        neighbours: Callable[[], Collection[Rank]] | None = None,
    ) -> None:
        """`state_bytes`: size of a full state. `is_rejoin`: others trained while this worker was
        paused. `neighbours`: the peers to link with now; None: all."""
        self._job, self._rank, self._inbox = job, rank, inbox
        self._membership, self._neighbours = membership, neighbours
        self._is_rejoin = is_rejoin
        deadline_s: float | None = job.spec.start_deadline_seconds
        if is_rejoin and deadline_s is None:
            deadline_s = join_barrier.TRAINING_PEER_WAIT_S
        self._deadline_s = None if deadline_s is None else now_s + deadline_s
        self._is_synchronous = is_fully_synchronous(job.spec)
        self._may_pull_early = may_step_concurrently(job.spec)
        max_peers = MAX_BUFFERED_BYTES // max(1, state_bytes)
        self._max_peers_ahead = max_peers if may_catch_up(job.spec) and not is_rejoin else 0
        self.phase = AdmissionPhase.PEERS
        self.wake_at_s: float | None = now_s
        """When to call `advance` although nothing arrived; None: not before."""
        self._links_by_s: float | None = None
        """Time until which links with all ready workers are awaited."""
        self._reported_by_s: float | None = None
        """Time until which the coordinator's report of linked peers is awaited."""
        self._barrier: join_barrier.JoinBarrier | None = None
        self._pull: _Pull | None = None

    def advance(self, now_s: float) -> list[AdmissionInstruction]:
        self.wake_at_s = None
        if self._pull is not None:
            epoch = self._inbox.link_epochs.get(self._pull.donors[0])
            if epoch == self._pull.link_epoch:
                return []
            return self.pulled(None, now_s) or self.advance(now_s)
        if self.phase is AdmissionPhase.DONE:
            return []
        if self._inbox.stop_reason is not None:
            return self._pull_from(self._inbox.stopped, _any_state, is_last_chance=True)
        training = self._training_peers()
        if training:
            return self._join_training(training, now_s)
        if self.phase is not AdmissionPhase.PEERS:
            return self._ask_again()
        if self._may_start_together(now_s):
            return self._start_together()
        return []

    def pulled(self, snapshot: StateSnapshot | None, now_s: float) -> list[AdmissionInstruction]:
        """Handle the result of the last `PullState`; None: the peer gave no state."""
        pull, self._pull = self._pull, None
        assert pull is not None
        accepted = None if snapshot is None else pull.accept(snapshot)
        if accepted is not None:
            self._enter(AdmissionPhase.DONE)
            return [AdoptState(accepted)]
        if snapshot is None and len(pull.donors) > 1:
            self._pull = replace(
                pull, donors=pull.donors[1:], link_epoch=self._inbox.link_epochs.get(pull.donors[1])
            )
            return [PullState(pull.donors[1], pull.wanted)]
        if pull.is_last_chance:
            return self._keep_own_state()
        self._enter(pull.before)
        self.wake_at_s = now_s + RETRY_S
        return []

    def _enter(self, phase: AdmissionPhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _keep_own_state(self) -> list[AdmissionInstruction]:
        self._enter(AdmissionPhase.DONE)
        return [KeepOwnState()]

    def _pull_from(
        self,
        donors: Collection[Rank],
        accept: Acceptance,
        *,
        wanted: StateRequest = StateRequest(),  # noqa: B008 - frozen
        is_last_chance: bool = False,
    ) -> list[AdmissionInstruction]:
        """Ask the donors in order of rank."""
        if not donors:
            return self._keep_own_state() if is_last_chance else []
        first, *others = sorted(donors)
        epoch = self._inbox.link_epochs.get(first)
        self._pull = _Pull([first, *others], wanted, accept, epoch, self.phase, is_last_chance)
        self._enter(AdmissionPhase.STATE)
        return [PullState(first, wanted)]

    # ---- no worker trains yet --------------------------------------------------------------------

    def _ask_again(self) -> list[AdmissionInstruction]:
        """Ask all peers again after the training peers are gone. Another latecomer may have adopted
        their state and joined since it answered. No worker may start from scratch beside it."""
        self._enter(AdmissionPhase.PEERS)
        self._barrier = self._links_by_s = None
        self._inbox.discard_announcements()
        self._inbox.answers.clear()
        request = join_barrier.join_request()
        return [SendMessage(peer, request) for peer in sorted(self._inbox.linked)]

    def _may_start_together(self, now_s: float) -> bool:
        linked, answers = self._inbox.linked, self._inbox.answers
        if not all(peer in answers and not answers[peer].asked for peer in linked):
            return False
        if any(answer.lacks_quorum for answer in answers.values()):
            return False
        if self._all_are_linked():
            return self._are_reported(linked, now_s)
        if self._deadline_s is None or not self._has_come(self._deadline_s, now_s):
            return False
        return self._enough_sites()  # after startDeadlineSeconds, minSites sites are enough

    def _all_are_linked(self) -> bool:
        membership, linked = self._membership(), self._inbox.linked
        workers = len(self._job.workers()) if membership is None else membership.expected_count
        if self._neighbours is None:
            return len(linked) >= workers - 1
        joined = 0 if membership is None else len(membership.members)
        return joined >= workers and linked >= set(self._neighbours())

    def _are_reported(self, linked: Collection[Rank], now_s: float) -> bool:
        """Whether the coordinator has reported the return of these peers, or is late with it.

        A link may come up before the report. From the first step on, the sidecar divides the batch
        among the reported workers only. A rejoining worker has made that step.
        """
        membership = self._membership()
        members = () if membership is None else membership.members
        lost = {m.identity.rank for m in members if m.state is MemberState.LOST}
        if self._is_rejoin or lost.isdisjoint(linked):
            return True
        if self._reported_by_s is None:
            self._reported_by_s = now_s + REPORT_WAIT_S
        return self._has_come(self._reported_by_s, now_s)

    def _enough_sites(self) -> bool:
        membership, ranks = self._membership(), self._inbox.linked
        if self._neighbours is not None and membership is not None:
            ranks = {member.identity.rank for member in membership.ready()}
        sites = {self._job.worker(rank).site for rank in (*ranks, self._rank)}
        return len(sites) >= self._job.spec.min_sites

    def _start_together(self) -> list[AdmissionInstruction]:
        """Start from the furthest state: checkpoints may differ after a resume. At a barrier all
        start from equal weights; elsewhere only a worker without any adopts others'."""
        answers, own = self._inbox.answers, self._inbox.iteration
        furthest = max((answer.done for answer in answers.values()), default=0)
        if furthest <= own or (own > 0 and not self._is_synchronous):
            return self._keep_own_state()
        donors = [peer for peer, answer in answers.items() if answer.done == furthest]
        return self._pull_from(donors, _any_state)

    # ---- others train already --------------------------------------------------------------------

    def _training_peers(self) -> list[Rank]:
        return sorted(rank for rank, answer in self._inbox.answers.items() if answer.is_training)

    def _join_training(self, training: list[Rank], now_s: float) -> list[AdmissionInstruction]:
        if self._barrier is not None:
            return self._negotiate(training, self._barrier)
        if self.phase is AdmissionPhase.PEERS:
            self._enter(AdmissionPhase.LINKS)
            self._links_by_s = now_s + join_barrier.ALL_LINKS_WAIT_S
        assert self._links_by_s is not None
        if not self._has_all_links() and not self._has_come(self._links_by_s, now_s):
            return []
        if not self._is_synchronous:
            return self._pull_from(training, _any_state)
        others = self._inbox.linked - set(training)
        if others & self._inbox.answers.keys() or len(training) > self._max_peers_ahead:
            return self._wait_at_barrier(training)
        return [] if others else self._pull_ahead(training)

    def _has_all_links(self) -> bool:
        """Whether this worker is linked with every peer that is ready.

        An unlinked peer does not wait at a proposed iteration, so all would wait twice. A rejoining
        worker's membership may be older than the split; it expects all workers.
        """
        if self._is_rejoin:
            return self._all_are_linked()
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        peers = {member.identity.rank for member in ready} - {self._rank}
        if self._neighbours is not None:
            peers &= set(self._neighbours())
        return peers <= self._inbox.linked

    def _pull_ahead(self, training: list[Rank]) -> list[AdmissionInstruction]:
        """Pull a state while all peers train on; their later messages lead from it to theirs."""
        firsts, link_epochs = self._inbox.first_steps(), self._inbox.link_epochs
        if not set(training) <= firsts.keys():
            return []
        min_iteration = max(firsts[peer] for peer in training) - 1
        if min_iteration > min(firsts[peer] for peer in training) + MAX_LEAD:
            return self._wait_at_barrier(training)  # a peer reports an impossible step
        peers_ahead = {peer: link_epochs[peer] for peer in training}

        def accept(snapshot: StateSnapshot) -> StateSnapshot | None:
            if snapshot.iteration < min_iteration:
                return None
            self._inbox.peers_ahead = peers_ahead
            return snapshot

        return self._pull_from(training[:1], accept, wanted=StateRequest(at_least=min_iteration))

    def _wait_at_barrier(self, training: list[Rank]) -> list[AdmissionInstruction]:
        """Agree on an iteration F that no training peer passes alone."""
        self._enter(AdmissionPhase.BARRIER)
        self._barrier = join_barrier.JoinBarrier()
        return self._negotiate(training, self._barrier)

    def _negotiate(
        self, training: list[Rank], barrier: join_barrier.JoinBarrier
    ) -> list[AdmissionInstruction]:
        """Adopt the state before F, early or once a peer waits at F."""
        inbox = self._inbox
        asked = barrier.peers_to_ask(inbox.link_epochs, inbox.answers)
        instructions: list[AdmissionInstruction] = [
            SendMessage(peer, join_barrier.join_request(barrier.iteration)) for peer in asked
        ]
        before = barrier.iteration - 1
        inbox.discard_steps(before - 1)
        if not barrier.is_agreed(inbox.link_epochs, inbox.answers):
            return instructions
        if self._may_pull_early and barrier.should_pull_early(
            training, inbox.peers_with_step(before)
        ):
            # All peers make the step F meanwhile, and this worker computes its gradient beside it.
            return instructions + self._pull_from(
                training[:1],
                lambda snapshot: snapshot if snapshot.iteration == before else None,
                wanted=StateRequest(at_least=before),
            )

        def accept(snapshot: StateSnapshot) -> StateSnapshot | None:
            is_before = barrier.accepts(snapshot.iteration)
            return replace(snapshot, iteration=before) if is_before else None

        waiting = inbox.peers_with_step(barrier.iteration) & set(training)
        return instructions + self._pull_from(waiting, accept)

    def _has_come(self, due_s: float, now_s: float) -> bool:
        """Whether that time has come; if not, `advance` must be called then."""
        if now_s >= due_s - CLOCK_RESOLUTION_S:
            return True
        self.wake_at_s = due_s
        return False


def _any_state(snapshot: StateSnapshot) -> StateSnapshot:
    return snapshot
