"""Reports links and unreachable peers while a worker waits to join a run.

`Admission` calls it several times a second. A firewall or network policy between peers would
otherwise go unnoticed, and the worker would wait without limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

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


class JoinWaitReporter:
    """Reports one worker's wait."""

    def __init__(
        self,
        rank: Rank,
        exchange: PeerExchange,
        reporter: Reporter,
        membership: Callable[[], Membership | None],
        neighbours: Callable[[], Collection[Rank]] | None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`neighbours`: the peers to link with; None: all."""
        self._rank, self._exchange, self._reporter = rank, exchange, reporter
        self._membership, self._neighbours = membership, neighbours
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._unlinked_since_s: dict[Rank, float] = {}
        self._reported_s = float("-inf")

    def report(self, iteration: int) -> None:
        """Report what is due. `iteration`: the last one that this worker finished."""
        now_s = self._clock_s()
        if now_s - self._began_s < QUIET_S:
            return
        states = self._exchange.link_counters()
        self._reporter.links(lambda: states, None, iteration)
        late = self._unreached(states, now_s)
        if late and now_s - self._reported_s >= REPEAT_AFTER_S:
            self._reported_s = now_s
            message = _message(late, states)
            self._reporter.event(
                EventReason.PEERS_UNREACHED, message, iteration=iteration, warning=True
            )

    def _unreached(self, states: dict[Rank, LinkCounters], now_s: float) -> list[Member]:
        """Ready peers that should be linked with this worker and have not been for too long."""
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        members = {member.identity.rank: member for member in ready}
        wanted = members.keys() - {self._rank}
        if self._neighbours is not None:
            wanted &= set(self._neighbours())
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
