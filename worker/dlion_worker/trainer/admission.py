"""Admits a real worker to the run: executes the instructions of `lifecycle.admission`.

Reports links and unreachable peers meanwhile. A firewall or network policy between peers would
otherwise go unnoticed, and the worker would wait without limit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.admission import (
    Admission,
    AdmissionInstruction,
    AdoptState,
    KeepOwnState,
    PullState,
)
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.links.events import LinkCounters, StateSnapshot
from dlion_core.policies.interface import SendMessage
from dlion_worker.trainer.loop import TrainerComponents
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.snapshot import OtherProgramError
from dlion_worker.transport import PeerExchange

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1
STATE_WAIT_S = 0.5
"""Pause before a worker that may not keep its own state looks again for a peer with one."""
QUIET_S = 5.0
"""A worker that joins within this time reports nothing."""
UNREACHED_AFTER_S = 60.0
"""Seconds since both have joined; an unanswered connection attempt ends after 20 s."""
REPEAT_AFTER_S = 600.0
MAX_NAMED = 3


def join_training(
    parts: TrainerComponents,
    stopped: Callable[[], str | None],
    members: Callable[[], Membership | None],
    neighbours: Callable[[], frozenset[Rank]] | None,
    may_keep_own: Callable[[], bool],
    *,
    is_rejoin: bool,
) -> StateSnapshot | None:
    """Let a worker of these parts join the run, and report what it waits for. As `join_run`.

    `may_keep_own`: whether it may begin with its own state; otherwise it waits for a peer with one.
    """
    waiting = JoinWaitReporter(parts.rank, parts.exchange, parts.reporter, members, neighbours)
    while True:
        admission = Admission(
            parts.job,
            parts.rank,
            parts.inbox,
            membership=members,
            now_s=time.monotonic(),
            state_bytes=2 * parts.replica.model.weights_D.nbytes,
            is_rejoin=is_rejoin,
            neighbours=neighbours,
        )
        snapshot = join_run(
            admission,
            parts.exchange,
            parts.inbox,
            stopped,
            waiting.report,
            check=parts.replica.check_state,
        )
        is_over = parts.inbox.stop_reason is not None
        if snapshot is not None or is_over or may_keep_own():
            return snapshot
        if (reason := stopped()) is not None:
            raise Interrupted(reason)
        parts.inbox.wait(STATE_WAIT_S)


def join_run(
    admission: Admission,
    exchange: PeerExchange,
    inbox: WaitingInbox,
    stopped: Callable[[], str | None],
    on_wait: Callable[[int], None] = lambda _iteration: None,
    *,
    check: Callable[[StateSnapshot], None] = lambda _snapshot: None,
) -> StateSnapshot | None:
    """Wait for admission. Return a peer's state to adopt; None: keep the own one.

    Also returns when the run is over; `inbox.stop_reason` is then set. `on_wait` is called
    repeatedly meanwhile, with the last finished iteration. `check` raises ContractError for a state
    that cannot be adopted: it counts against the peer that gave it. Raises: Interrupted when this
    worker is asked to stop; OtherProgramError if the states of all peers that were asked have
    another length, as this worker's program is then the one that differs.
    """
    misfits: list[OtherProgramError | None] = []
    while True:
        instructions: deque[AdmissionInstruction] = deque(admission.advance(time.monotonic()))
        while instructions:
            match instructions.popleft():
                case AdoptState(snapshot):
                    return snapshot
                case KeepOwnState():
                    return None
                case SendMessage(peer, message):
                    exchange.send(peer, message)
                case PullState() as pull:
                    state, misfit = _pull(exchange, pull, check)
                    misfits.append(misfit)
                    following = admission.pulled(state, time.monotonic())
                    if not any(isinstance(each, PullState) for each in following):
                        if misfit is not None and None not in misfits:
                            raise misfit
                        misfits.clear()
                    instructions += following
        if (reason := stopped()) is not None:
            raise Interrupted(reason)
        on_wait(inbox.iteration)
        inbox.wait(SLICE_S)


def _pull(
    exchange: PeerExchange, pull: PullState, check: Callable[[StateSnapshot], None]
) -> tuple[StateSnapshot | None, OtherProgramError | None]:
    """Return the peer's state, or None and why it does not fit where either may be wrong."""
    try:
        snapshot = exchange.pull_state(pull.peer, pull.wanted)
    except (UnavailableError, ContractError) as error:
        _LOG.warning("worker %d gave no state: %s", pull.peer, error)
        return None, None
    try:
        check(snapshot)
    except OtherProgramError as error:
        _LOG.warning("worker %d: %s", pull.peer, error)
        return None, error
    except ContractError as error:
        exchange.record_violation(pull.peer, f"{error}")
        return None, None
    return snapshot, None


@dataclass
class JoinWaitReporter:
    rank: Rank
    exchange: PeerExchange
    reporter: Reporter
    membership: Callable[[], Membership | None]
    neighbours: Callable[[], Collection[Rank]] | None
    """The peers to link with; None: all."""
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began_s = self.clock_s()
        self._unlinked_since_s: dict[Rank, float] = {}
        self._reported_s = float("-inf")

    def report(self, iteration: int) -> None:
        """Report what is due. `iteration`: the last one that this worker finished."""
        now_s = self.clock_s()
        if now_s - self._began_s < QUIET_S:
            return
        states = self.exchange.link_counters()
        self.reporter.links(lambda: states, None, iteration)
        late = self._unreached(states, now_s)
        if late and now_s - self._reported_s >= REPEAT_AFTER_S:
            self._reported_s = now_s
            message = _message(late, states)
            self.reporter.event(
                EventReason.PEERS_UNREACHED, message, iteration=iteration, warning=True
            )

    def _unreached(self, states: dict[Rank, LinkCounters], now_s: float) -> list[Member]:
        """Ready peers that should be linked with this worker and have not been for too long."""
        membership = self.membership()
        ready = () if membership is None else membership.ready()
        members = {member.identity.rank: member for member in ready}
        wanted = members.keys() - {self.rank}
        if self.neighbours is not None:
            wanted &= set(self.neighbours())
        unlinked = {rank for rank in wanted if rank not in states or not states[rank].connected}
        since_s = self._unlinked_since_s
        self._unlinked_since_s = {rank: since_s.get(rank, now_s) for rank in unlinked}
        return [
            members[rank]
            for rank, s in sorted(self._unlinked_since_s.items())
            if now_s - s >= UNREACHED_AFTER_S
        ]


def _message(late: list[Member], states: dict[Rank, LinkCounters]) -> str:
    named = [_problem(member, states.get(member.identity.rank)) for member in late[:MAX_NAMED]]
    more = [f"{len(late) - MAX_NAMED} more"] if len(late) > MAX_NAMED else []
    return f"not linked for {UNREACHED_AFTER_S:.0f} s with " + "; ".join([*named, *more])


def _problem(member: Member, state: LinkCounters | None) -> str:
    why = state.problem if state is not None else ""
    return f"{member.identity.name} ({why or 'not dialled yet'})"
