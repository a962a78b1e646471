"""Which workers are linked: what opens, closes and reopens the links of a run, and who hears of it.

Owns the state of every pair, as `exchange.links`, its handshake and its diallers do on real links:
a process that dies is noticed at once, silence after as long as `exchange.deadline` allows, and
whoever can reach each other is linked again. Called by `run` and, where a queue is full, by
`links`. Knows nothing of what links carry.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlion_worker.exchange import LinkDown, LinkUp
from dlion_worker.exchange.client import FIRST_WAIT_S, LONGEST_WAIT_S
from dlion_worker.exchange.deadline import HEARTBEAT_S, SPAN_FLOOR
from dlion_worker.simulation.clock import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dlion_api.names import Rank
    from dlion_worker.environments.plan import Conditions
    from dlion_worker.simulation.clock import Appointment, VirtualClock
    from dlion_worker.simulation.links import VirtualLink
    from dlion_worker.simulation.network import Network

SILENCE_S = SPAN_FLOOR * HEARTBEAT_S
"""After which a silent peer is let go. A real link on which frames come more seldom or less evenly
than its heartbeats waits longer."""

REDIAL_S = LONGEST_WAIT_S / 2
"""From the end of a cut to the next attempt: half of a dialler's longest wait, as it is on the
average."""

HANDSHAKE_ROUND_TRIPS = 3
"""TCP, TLS, and a hello that is acknowledged."""

NO_NEIGHBOUR = "no neighbour any more"

Pair = tuple["Rank", "Rank"]


class Connections:
    """All pairs of neighbours in a run, each by its lower and its higher rank."""

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        conditions: Conditions,
        graph: Mapping[Rank, frozenset[Rank]],
        *,
        link: Callable[[Rank, Rank], VirtualLink],
        tell: Callable[[Rank, LinkUp | LinkDown], None],
        iteration_of: Callable[[Rank], int],
    ) -> None:
        """`graph`: who is linked with whom, until they are regrouped. `link(sender, receiver)` is
        one direction. `tell(rank, event)`: that worker hears of it. `iteration_of`: the last one
        that a worker has finished, for its hellos."""
        self._clock, self._network = clock, network
        self._conditions, self._graph = conditions, dict(graph)
        self._link, self._tell, self._iteration_of = link, tell, iteration_of
        self._present: set[Rank] = set()
        self._up: set[Pair] = set()
        self._silent: dict[Pair, Appointment] = {}
        self._lives: dict[Pair, int] = {}
        """Counts the times that a pair was linked."""
        self._unsaid: dict[Pair, tuple[Appointment, LinkDown]] = {}
        """What a worker (first) will hear of a peer (second)."""

    def linked(self, rank: Rank) -> list[Rank]:
        """Peers that a worker is linked with, in order."""
        pairs = [pair for pair in self._up if rank in pair]
        return sorted(one if other == rank else other for one, other in pairs)

    def begin(self, ranks: Iterable[Rank]) -> None:
        """All of them are linked before the run begins; nobody is told."""
        self._present = set(ranks)
        for pair in self._pairs(self._present):
            if not self._is_cut(pair):
                self._open(pair)

    def came(self, rank: Rank) -> None:
        """A process is ready: it is linked with its neighbours that it reaches, all at once."""
        self._present.add(rank)
        peers = sorted(self._present & self._mutual(rank))
        farthest_s = max((self._network.round_trip_s(rank, peer) for peer in peers), default=0.0)
        for peer in peers:
            connect = partial(self._connect, _pair(rank, peer))
            self._clock.after(HANDSHAKE_ROUND_TRIPS * farthest_s, connect)

    def regroup(self, rank: Rank, neighbours: frozenset[Rank]) -> None:
        """A worker is to be linked with those from now on: with whom also wants it, a dial later;
        its other links end at once."""
        self._graph[rank] = neighbours
        for peer in self.linked(rank):
            if peer not in neighbours:
                self._break(rank, peer, NO_NEIGHBOUR)
                self._tell_down(rank, peer, NO_NEIGHBOUR, after_s=0.0)
        for peer in sorted(self._present & self._mutual(rank) - set(self.linked(rank))):
            if rank in self._present:
                round_trips_s = HANDSHAKE_ROUND_TRIPS * self._network.round_trip_s(rank, peer)
                self._clock.after(round_trips_s, partial(self._connect, _pair(rank, peer)))

    def died(self, rank: Rank, reason: str) -> None:
        """A process is gone: its peers hear of it at once, but not those behind a cut."""
        self._present.discard(rank)
        for peer in self.linked(rank):
            self._break(rank, peer, reason)
        for link in [link for link in self._unsaid if link[0] == rank]:
            due, _ = self._unsaid.pop(link)
            due.cancel()

    def broken_off(self, rank: Rank, peer: Rank, reason: str) -> None:
        """A worker gives a link up; it is dialled again at once."""
        pair = _pair(rank, peer)
        if pair not in self._up:
            return
        self._break(rank, peer, reason)
        self._tell_down(rank, peer, reason, after_s=0.0)
        round_trips_s = HANDSHAKE_ROUND_TRIPS * self._network.round_trip_s(rank, peer)
        self._clock.after(FIRST_WAIT_S + round_trips_s, partial(self._connect, pair))

    def change(self, conditions: Conditions) -> None:
        """Cuts begin and end."""
        self._conditions = conditions
        for pair in self._pairs(self._graph.keys()):
            if self._is_cut(pair) and pair in self._up:
                if pair not in self._silent:
                    self._silent[pair] = self._clock.after(SILENCE_S, partial(self._let_go, pair))
            elif not self._is_cut(pair):
                self._restore(pair)

    def _pairs(self, ranks: Collection[Rank]) -> list[Pair]:
        """Neighbours of whom both are among these, in order."""
        return sorted(
            (one, other)
            for one in ranks
            for other in self._mutual(one)
            if one < other and other in ranks
        )

    def _mutual(self, rank: Rank) -> frozenset[Rank]:
        """With whom it is to be linked, as both ends have it."""
        return frozenset(peer for peer in self._graph[rank] if rank in self._graph[peer])

    def _restore(self, pair: Pair) -> None:
        """What was cut passes again; what was let go meanwhile is dialled."""
        one, other = pair
        if (silent := self._silent.pop(pair, None)) is not None:
            silent.cancel()
        if self._present.issuperset(pair) and pair not in self._up:
            round_trips_s = HANDSHAKE_ROUND_TRIPS * self._network.round_trip_s(one, other)
            self._clock.after(REDIAL_S + round_trips_s, partial(self._connect, pair))

    def _let_go(self, pair: Pair) -> None:
        """The silence was too long, for both."""
        del self._silent[pair]
        self._close(pair)
        reason = f"silent for {SILENCE_S:g} s"
        for rank, peer in (pair, pair[::-1]):
            self._tell_down(rank, peer, reason, after_s=0.0)

    def _break(self, rank: Rank, peer: Rank, reason: str) -> None:
        """Closes a link; the peer hears of it a latency later or, behind a cut, by the silence."""
        pair = _pair(rank, peer)
        after_s = self._network.latency_s(rank, peer)
        if (silent := self._silent.pop(pair, None)) is not None:
            silent.cancel()
            after_s = silent.due_ns / NANOSECONDS - self._clock.now_s
        self._close(pair)
        self._tell_down(peer, rank, reason, after_s=after_s)

    def _connect(self, pair: Pair) -> None:
        if pair in self._up or not self._present.issuperset(pair) or self._is_cut(pair):
            return
        if pair[1] not in self._mutual(pair[0]):
            return
        self._open(pair)
        for rank, peer in (pair, pair[::-1]):
            self._say_down((rank, peer))
            self._tell(rank, LinkUp(peer, self._lives[pair], self._iteration_of(peer)))

    def _open(self, pair: Pair) -> None:
        self._up.add(pair)
        self._lives[pair] = self._lives.get(pair, 0) + 1
        for sender, receiver in (pair, pair[::-1]):
            self._link(sender, receiver).open()

    def _close(self, pair: Pair) -> None:
        self._up.discard(pair)
        for sender, receiver in (pair, pair[::-1]):
            self._link(sender, receiver).close()

    def _tell_down(self, rank: Rank, peer: Rank, reason: str, *, after_s: float) -> None:
        event = LinkDown(peer, self._lives[_pair(rank, peer)], reason)
        due = self._clock.after(after_s, partial(self._say_down, (rank, peer)))
        self._unsaid[rank, peer] = (due, event)

    def _say_down(self, link: Pair) -> None:
        """Tells what has not been told yet: at its time, or where the link is up again before."""
        if (unsaid := self._unsaid.pop(link, None)) is not None:
            due, event = unsaid
            due.cancel()
            if link[0] in self._present:
                self._tell(link[0], event)

    def _is_cut(self, pair: Pair) -> bool:
        one, other = pair
        return other in self._conditions.worker(one).cut_peers


def _pair(one: Rank, other: Rank) -> Pair:
    return (one, other) if one < other else (other, one)
