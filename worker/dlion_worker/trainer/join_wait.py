"""Reports links and unreachable peers while a worker waits to join a run.

`Admission` calls it several times a second. A firewall or network policy between peers would
otherwise go unnoticed, and the worker would wait without limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.links.events import LinkCounters
from dlion_worker.transport.peer_exchange import PeerExchange

QUIET_S = 5.0
"""A worker that joins within this time reports nothing."""
UNREACHED_AFTER_S = 60.0
"""From when both have joined; an unanswered connection attempt ends after 20 s."""
REPEAT_AFTER_S = 600.0
MAX_NAMED = 3


@dataclass
class JoinWaitReporter:
    """Reports one worker's wait."""

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
