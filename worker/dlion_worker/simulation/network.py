"""What is under way on all links, and how fast: every pipe is shared fairly.

Owns the transfers and their rates. Called by `links`, transfer by transfer. A transfer takes part
in the pipes of its link (the sender's uplink and the receiver's downlink, `environments.plan`);
rates are max-min fair, as TCP streams in fair queues come to. What packet loss leaves of a link is
one more pipe, for that link alone. Nothing is known here of messages.

Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2 (progressive filling).
Shape suffixes: F transfers, P pipes, M memberships of transfers in pipes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dlion_api.names import Rank
    from dlion_worker.environments.plan import Conditions
    from dlion_worker.simulation.clock import Appointment, VirtualClock

WIRE_EFFICIENCY = 1448 / 1514
"""Payload of a full TCP segment over the bytes of its Ethernet frame: what `Pipe` rates count."""

LEAST_BYTES = 1e-3
"""Less than this of a transfer is none: what rounding leaves."""

_ALIKE = 1 + 1e-9


@dataclass(eq=False)
class Transfer:
    """Bytes on their way over one link; how many are left is in the network's arrays."""

    sender: Rank
    receiver: Rank
    done: Callable[[], object]
    place: int
    """Where it stands in those arrays."""


class Network:
    """All transfers of a run. Changes made at one moment take effect together.

    What is counted for every transfer at every moment is in arrays, in the order in which the
    transfers were begun: with hundreds of workers there are thousands.
    """

    def __init__(self, clock: VirtualClock, conditions: Conditions) -> None:
        self._clock = clock
        self._conditions = conditions
        self._transfers: list[Transfer] = []
        self._left_bytes_F = np.zeros(0)
        self._bytes_per_s_F = np.zeros(0)
        self._cut_F = np.zeros(0, bool)
        self._pipes_F: list[tuple[int, ...]] = []
        self._pipes: dict[tuple[Rank, Rank], tuple[int, ...]] = {}
        self._pipe_bytes_per_s: list[float] = []
        self._index: dict[tuple[Rank, bool, int], int] = {}
        self._settled_s = 0.0
        self._next: Appointment | None = None
        self._replanning: Appointment | None = None

    def begin(
        self, sender: Rank, receiver: Rank, size_bytes: int, done: Callable[[], object]
    ) -> Transfer:
        """Starts a transfer; `done` is called when its last byte has left the link."""
        self._settle()
        transfer = Transfer(sender, receiver, done, len(self._transfers))
        self._transfers.append(transfer)
        self._left_bytes_F = np.append(self._left_bytes_F, float(size_bytes))
        self._bytes_per_s_F = np.append(self._bytes_per_s_F, 0.0)
        self._cut_F = np.append(self._cut_F, self._is_cut(transfer))
        self._pipes_F.append(self._pipes_of(sender, receiver))
        self._replan_soon()
        return transfer

    def end(self, transfer: Transfer) -> None:
        """Gives a transfer up; `done` is not called."""
        self._settle()
        gone_F = np.zeros(len(self._transfers), bool)
        gone_F[transfer.place] = True
        self._remove(gone_F)
        self._replan_soon()

    def left_bytes(self, transfer: Transfer) -> float:
        """Bytes of it that have not arrived yet."""
        self._settle()
        return float(self._left_bytes_F[transfer.place])

    def latency_s(self, sender: Rank, receiver: Rank) -> float:
        """One way, as it is now."""
        return self._conditions.worker(sender).latency_s.get(receiver, 0.0)

    def round_trip_s(self, one: Rank, other: Rank) -> float:
        """There and back, as it is now."""
        return self.latency_s(one, other) + self.latency_s(other, one)

    def set_conditions(self, conditions: Conditions) -> None:
        """Other rates from now on."""
        self._settle()
        self._conditions = conditions
        self._pipes.clear()
        self._index.clear()
        self._pipe_bytes_per_s.clear()
        self._pipes_F = [self._pipes_of(t.sender, t.receiver) for t in self._transfers]
        self._cut_F = np.array([self._is_cut(t) for t in self._transfers], bool)
        self._replan_soon()

    def _settle(self) -> None:
        """Brings what is left of each transfer up to now."""
        passed_s = self._clock.now_s - self._settled_s
        self._settled_s = self._clock.now_s
        if passed_s > 0:
            self._left_bytes_F -= self._bytes_per_s_F * passed_s
            np.maximum(self._left_bytes_F, 0.0, out=self._left_bytes_F)

    def _replan_soon(self) -> None:
        if self._replanning is None:
            self._replanning = self._clock.after(0.0, self._replan)

    def _replan(self) -> None:
        """New rates for all, and the next moment at which one is through."""
        self._replanning = None
        self._settle()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self._transfers:
            return
        self._bytes_per_s_F = self._rates()
        soonest_s = _least_seconds_left(self._left_bytes_F, self._bytes_per_s_F)
        if soonest_s < float("inf"):
            self._next = self._clock.after(soonest_s, self._through)

    def _through(self) -> None:
        """Hands over what has arrived, in the order in which it was begun."""
        self._next = None
        self._settle()
        # A nanosecond's worth is within the clock's rounding.
        gone_F = self._left_bytes_F <= LEAST_BYTES + 2e-9 * self._bytes_per_s_F
        through = [self._transfers[place] for place in np.flatnonzero(gone_F)]
        self._remove(gone_F)
        self._replan_soon()
        for transfer in through:
            transfer.done()

    def _remove(self, gone_F: NDArray[np.bool_]) -> None:
        stays_F = ~gone_F
        self._left_bytes_F = self._left_bytes_F[stays_F]
        self._bytes_per_s_F = self._bytes_per_s_F[stays_F]
        self._cut_F = self._cut_F[stays_F]
        stays = np.flatnonzero(stays_F).tolist()
        self._pipes_F = [self._pipes_F[place] for place in stays]
        self._transfers = [self._transfers[place] for place in stays]
        for place, transfer in enumerate(self._transfers):
            transfer.place = place

    def _rates(self) -> NDArray[np.float64]:
        """Bytes per second of each transfer: all rise together, until a pipe is full."""
        counts_F = np.fromiter(map(len, self._pipes_F), np.intp, len(self._pipes_F))
        member_M = np.repeat(np.arange(len(counts_F)), counts_F)
        pipes = itertools.chain.from_iterable(self._pipes_F)
        pipe_M = np.fromiter(pipes, np.intp, len(member_M))
        rate_F = np.where(self._cut_F, 0.0, np.inf)
        return _fair(np.array(self._pipe_bytes_per_s), member_M, pipe_M, rate_F, ~self._cut_F)

    def _pipes_of(self, sender: Rank, receiver: Rank) -> tuple[int, ...]:
        known = self._pipes.get((sender, receiver))
        if known is None:
            own, other = self._conditions.worker(sender), self._conditions.worker(receiver)
            up = [(sender, True, i) for i, p in enumerate(own.uplink) if receiver in p.peers]
            down = [(receiver, False, i) for i, p in enumerate(other.downlink) if sender in p.peers]
            pipes = [self._pipe(key) for key in (*up, *down)]
            left_bytes_per_s = self._conditions.loss_bytes_per_s(sender, receiver)
            if left_bytes_per_s < float("inf"):
                pipes.append(len(self._pipe_bytes_per_s))
                self._pipe_bytes_per_s.append(left_bytes_per_s)
            known = self._pipes[sender, receiver] = tuple(pipes)
        return known

    def _pipe(self, key: tuple[Rank, bool, int]) -> int:
        if key not in self._index:
            rank, is_uplink, place = key
            worker = self._conditions.worker(rank)
            pipe = (worker.uplink if is_uplink else worker.downlink)[place]
            self._index[key] = len(self._pipe_bytes_per_s)
            self._pipe_bytes_per_s.append(pipe.bytes_per_s * WIRE_EFFICIENCY)
        return self._index[key]

    def _is_cut(self, transfer: Transfer) -> bool:
        return transfer.receiver in self._conditions.worker(transfer.sender).cut_peers


def _fair(
    room_P: NDArray[np.float64],
    member_M: NDArray[np.intp],
    pipe_M: NDArray[np.intp],
    rate_F: NDArray[np.float64],
    rises_F: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Max-min fair rates: those that still rise get the share of the fullest pipe, and stop."""
    room_P = room_P.copy()
    rises_M = rises_F[member_M]
    member_M, pipe_M = member_M[rises_M], pipe_M[rises_M]
    while len(member_M):
        count_P = np.bincount(pipe_M, minlength=len(room_P))
        share_P = np.full(len(room_P), np.inf)
        np.divide(room_P, count_P, out=share_P, where=count_P > 0)
        share = max(0.0, float(share_P.min()))
        stops_F = np.zeros(len(rate_F), bool)
        stops_F[member_M[share_P[pipe_M] <= share * _ALIKE]] = True
        rate_F[stops_F] = share
        stops_M = stops_F[member_M]
        room_P -= share * np.bincount(pipe_M[stops_M], minlength=len(room_P))
        member_M, pipe_M = member_M[~stops_M], pipe_M[~stops_M]
    return rate_F


def _least_seconds_left(
    left_bytes_F: NDArray[np.float64], bytes_per_s_F: NDArray[np.float64]
) -> float:
    """Until the first of them is through; inf where none moves."""
    seconds_F = np.full(len(left_bytes_F), np.inf)
    np.divide(left_bytes_F, bytes_per_s_F, out=seconds_F, where=bytes_per_s_F > 0)
    seconds_F[(left_bytes_F <= LEAST_BYTES) | np.isinf(bytes_per_s_F)] = 0.0
    return float(seconds_F.min())
