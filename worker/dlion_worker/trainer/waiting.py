"""What a worker tells while it waits to come into a run: its links, and whom it does not reach.

Called by `Entrance`, several times a second. A worker that waits for peers has nothing else to say,
and where a firewall or a policy of the network is in their way it waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from dlion_api.membership import Member, Membership
from dlion_api.names import Rank
from dlion_api.reasons import EventReason

if TYPE_CHECKING:
    from dlion_worker.exchange import Exchange
    from dlion_worker.exchange.events import LinkState
    from dlion_worker.trainer.reporting import Reporter

SILENT_FOR_S = 5.0
"""Whoever comes in within that time has had nothing to tell."""
UNREACHED_AFTER_S = 60.0
"""From when both have joined; a connection that nothing answers is given up after 20 s."""
AGAIN_AFTER_S = 600.0
MOST_NAMED = 3


class Waiting:
    """One wait of one worker."""

    def __init__(
        self,
        rank: Rank,
        exchange: Exchange,
        reporter: Reporter,
        membership: Callable[[], Membership | None],
        neighbours: Callable[[], Collection[Rank]] | None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`neighbours`: with whom this worker is to be linked; None: with everybody."""
        self._rank, self._exchange, self._reporter = rank, exchange, reporter
        self._membership, self._neighbours = membership, neighbours
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._unlinked_since_s: dict[Rank, float] = {}
        self._told_s = float("-inf")

    def tell(self, iteration: int) -> None:
        """What is due now; `iteration` is the last one that this worker has finished."""
        now_s = self._clock_s()
        if now_s - self._began_s < SILENT_FOR_S:
            return
        states = self._exchange.link_states()
        self._reporter.links(lambda: states, None, iteration)
        late = self._unreached(states, now_s)
        if late and now_s - self._told_s >= AGAIN_AFTER_S:
            self._told_s = now_s
            words = _words(late, states)
            self._reporter.event(
                EventReason.PEERS_UNREACHED, words, iteration=iteration, warning=True
            )

    def _unreached(self, states: dict[Rank, LinkState], now_s: float) -> list[Member]:
        """Who has joined, is to be linked with this worker, and has not been for too long."""
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        there = {member.identity.rank: member for member in ready}
        wanted = there.keys() - {self._rank}
        if self._neighbours is not None:
            wanted &= set(self._neighbours())
        unlinked = {rank for rank in wanted if rank not in states or not states[rank].connected}
        since_s = self._unlinked_since_s
        self._unlinked_since_s = {rank: since_s.get(rank, now_s) for rank in unlinked}
        return [
            there[rank]
            for rank, s in sorted(self._unlinked_since_s.items())
            if now_s - s >= UNREACHED_AFTER_S
        ]


def _words(late: list[Member], states: dict[Rank, LinkState]) -> str:
    named = [_problem(member, states.get(member.identity.rank)) for member in late[:MOST_NAMED]]
    more = [f"{len(late) - MOST_NAMED} more"] if len(late) > MOST_NAMED else []
    return f"not linked for {UNREACHED_AFTER_S:.0f} s with " + "; ".join([*named, *more])


def _problem(member: Member, state: LinkState | None) -> str:
    why = state.problem if state is not None else ""
    return f"{member.identity.name} ({why or 'not dialled yet'})"
