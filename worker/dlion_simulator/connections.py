"""Opens, closes and reopens the links of a virtual run, and notifies the workers.

Keeps the state of every pair, as the handshake and clients in `exchange` do on real links. Peers
detect a dead process at once, and silence after the time-out of `links.deadline`. Pairs that can
reach each other reconnect.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from dlion_api.names import Rank
from dlion_core.links.deadline import (
    HEARTBEAT_S,
    MAX_RECONNECT_WAIT_S,
    MIN_MISSED_HEARTBEATS,
    RECONNECT_WAIT_S,
)
from dlion_core.links.events import LinkDown, LinkUp
from dlion_environments.plan import Conditions
from dlion_simulator.clock import NANOSECONDS_PER_S, ScheduledEvent, VirtualClock
from dlion_simulator.links import VirtualLink
from dlion_simulator.network import VirtualNetwork

SILENCE_S = MIN_MISSED_HEARTBEATS * HEARTBEAT_S
"""A silent peer is disconnected after this. Real links with rare or irregular frames wait
longer."""

REDIAL_S = MAX_RECONNECT_WAIT_S / 2
"""Delay from the end of a cut to the next attempt: on average half of the client's longest wait."""

HANDSHAKE_ROUND_TRIPS = 3
"""TCP, TLS, and an acknowledged hello."""

NO_LONGER_NEIGHBOURS = "no neighbour any more"

Pair = tuple[Rank, Rank]


class VirtualConnections:
    """All pairs of neighbours, each as (lower rank, higher rank)."""

    def __init__(
        self,
        clock: VirtualClock,
        network: VirtualNetwork,
        conditions: Conditions,
        graph: Mapping[Rank, frozenset[Rank]],
        *,
        link: Callable[[Rank, Rank], VirtualLink],
        notify: Callable[[Rank, LinkUp | LinkDown], None],
        iteration_of: Callable[[Rank], int],
    ) -> None:
        """Set up the pairs of `graph`, with all links down.

        `link(sender, receiver)` returns one direction. `notify(rank, event)` delivers an event to a
        worker. `iteration_of` returns the last finished iteration of a worker, for its hello.
        """
        self._clock, self._network = clock, network
        self._conditions, self._graph = conditions, dict(graph)
        self._link, self._notify, self._iteration_of = link, notify, iteration_of
        self._present: set[Rank] = set()
        self._up: set[Pair] = set()
        self._silence_timers: dict[Pair, ScheduledEvent] = {}
        """When the silence of a cut ends a link that is still up, by pair."""
        self._pending_link_down: dict[Pair, tuple[ScheduledEvent, LinkDown]] = {}
        """Pending LinkDown events by (receiver of the event, peer)."""

    def linked(self, rank: Rank) -> list[Rank]:
        """Linked peers of a worker, in order."""
        pairs = [pair for pair in self._up if rank in pair]
        return sorted(one if other == rank else other for one, other in pairs)

    def begin(self, ranks: Iterable[Rank]) -> None:
        """Link all workers before the run begins, without notifying them."""
        self._present = set(ranks)
        for pair in self._pairs(self._present):
            if not self._is_cut(pair):
                self._open(pair)

    def process_started(self, rank: Rank) -> None:
        """Link a new process with all reachable neighbours after the handshake time."""
        self._present.add(rank)
        peers = sorted(self._present & self._mutual(rank))
        farthest_s = max((self._network.round_trip_s(rank, peer) for peer in peers), default=0.0)
        for peer in peers:
            connect = partial(self._connect, _pair(rank, peer))
            self._clock.after(HANDSHAKE_ROUND_TRIPS * farthest_s, connect)

    def set_neighbours(self, rank: Rank, neighbours: frozenset[Rank]) -> None:
        """Change a worker's neighbours.

        Links to other peers close at once. A new link opens after a handshake if both ends want it.
        """
        self._graph[rank] = neighbours
        for peer in self.linked(rank):
            if peer not in neighbours:
                self._break(rank, peer, NO_LONGER_NEIGHBOURS)
                self._schedule_link_down(rank, peer, NO_LONGER_NEIGHBOURS, after_s=0.0)
        if rank in self._present:
            for peer in sorted(self._present & self._mutual(rank) - set(self.linked(rank))):
                self._dial(_pair(rank, peer))

    def process_ended(self, rank: Rank, reason: str) -> None:
        """Close the links of an ended process. Peers behind a cut learn of it by silence."""
        self._present.discard(rank)
        for peer in self.linked(rank):
            self._break(rank, peer, reason)
        for link in [link for link in self._pending_link_down if link[0] == rank]:
            due, _ = self._pending_link_down.pop(link)
            due.cancel()

    def disconnect(self, rank: Rank, peer: Rank, reason: str) -> None:
        """Close a link on request of `rank`, and redial at once."""
        pair = _pair(rank, peer)
        if pair not in self._up:
            return
        self._break(rank, peer, reason)
        self._schedule_link_down(rank, peer, reason, after_s=0.0)
        self._dial(pair, after_s=RECONNECT_WAIT_S)

    def _dial(self, pair: Pair, *, after_s: float = 0.0) -> None:
        handshake_s = HANDSHAKE_ROUND_TRIPS * self._network.round_trip_s(*pair)
        self._clock.after(after_s + handshake_s, partial(self._connect, pair))

    def change(self, conditions: Conditions) -> None:
        """Apply cuts that begin and end."""
        self._conditions = conditions
        for pair in self._pairs(self._graph.keys()):
            if self._is_cut(pair) and pair in self._up:
                if pair not in self._silence_timers:
                    self._silence_timers[pair] = self._clock.after(
                        SILENCE_S, partial(self._drop_silent, pair)
                    )
            elif not self._is_cut(pair):
                self._restore(pair)

    def _pairs(self, ranks: Collection[Rank]) -> list[Pair]:
        """Pairs of mutual neighbours within `ranks`, in order."""
        return sorted(
            (one, other)
            for one in ranks
            for other in self._mutual(one)
            if one < other and other in ranks
        )

    def _mutual(self, rank: Rank) -> frozenset[Rank]:
        """Neighbours of `rank` that also list it as a neighbour."""
        return frozenset(peer for peer in self._graph[rank] if rank in self._graph[peer])

    def _restore(self, pair: Pair) -> None:
        """End a cut: keep the link if it is still up, else redial."""
        if (timer := self._silence_timers.pop(pair, None)) is not None:
            timer.cancel()
        if self._present.issuperset(pair) and pair not in self._up:
            self._dial(pair, after_s=REDIAL_S)

    def _drop_silent(self, pair: Pair) -> None:
        """Disconnect both ends of a pair after too long a silence."""
        del self._silence_timers[pair]
        self._close(pair)
        reason = f"silent for {SILENCE_S:g} s"
        for rank, peer in (pair, pair[::-1]):
            self._schedule_link_down(rank, peer, reason, after_s=0.0)

    def _break(self, rank: Rank, peer: Rank, reason: str) -> None:
        """Close a link; the peer learns of it a latency later or, behind a cut, by silence."""
        pair = _pair(rank, peer)
        after_s = self._network.latency_s(rank, peer)
        if (timer := self._silence_timers.pop(pair, None)) is not None:
            timer.cancel()
            after_s = timer.due_ns / NANOSECONDS_PER_S - self._clock.now_s
        self._close(pair)
        self._schedule_link_down(peer, rank, reason, after_s=after_s)

    def _connect(self, pair: Pair) -> None:
        if pair in self._up or not self._present.issuperset(pair) or self._is_cut(pair):
            return
        if pair[1] not in self._mutual(pair[0]):
            return
        self._open(pair)
        for rank, peer in (pair, pair[::-1]):
            self._deliver_link_down((rank, peer))
            epoch = self._link(rank, peer).epoch
            self._notify(rank, LinkUp(peer, epoch, self._iteration_of(peer)))

    def _open(self, pair: Pair) -> None:
        self._up.add(pair)
        for sender, receiver in (pair, pair[::-1]):
            self._link(sender, receiver).open()

    def _close(self, pair: Pair) -> None:
        self._up.discard(pair)
        for sender, receiver in (pair, pair[::-1]):
            self._link(sender, receiver).close()

    def _schedule_link_down(self, rank: Rank, peer: Rank, reason: str, *, after_s: float) -> None:
        event = LinkDown(peer, self._link(rank, peer).epoch, reason)
        due = self._clock.after(after_s, partial(self._deliver_link_down, (rank, peer)))
        self._pending_link_down[rank, peer] = (due, event)

    def _deliver_link_down(self, link: Pair) -> None:
        """Deliver a pending LinkDown: when it is due, or just before the link is up again."""
        if (pending := self._pending_link_down.pop(link, None)) is not None:
            due, event = pending
            due.cancel()
            if link[0] in self._present:
                self._notify(link[0], event)

    def _is_cut(self, pair: Pair) -> bool:
        one, other = pair
        return other in self._conditions.worker(one).cut_peers


def _pair(one: Rank, other: Rank) -> Pair:
    return (one, other) if one < other else (other, one)
