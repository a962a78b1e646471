"""Transfers on all links and their rates: every pipe is shared fairly.

A transfer uses the pipes of its link: the uplinks of the sender and its site, and the downlinks of
the receiver and its site (`plan`). Rates are max-min fair, as for TCP streams in fair queues. A
lossy link has one more pipe of its own. Used by `links`, transfer by transfer.

Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2 (progressive filling). Shape
suffixes: F transfers, P pipes, M memberships of transfers in pipes.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_environments.plan import Conditions, Pipe, PipeKey
from dlion_simulator.clock import ScheduledEvent, VirtualClock

WIRE_EFFICIENCY = 1448 / 1514
"""Payload of a full TCP segment over the size of its Ethernet frame, which `Pipe` rates count."""

MIN_BYTES = 1e-3
"""Smaller remainders are rounding errors."""

_EQUAL_SHARE_FACTOR = 1 + 1e-9


@dataclass(eq=False)
class VirtualTransfer:
    """A transfer over one link; the network's arrays hold its remaining bytes."""

    sender: Rank
    receiver: Rank
    done: Callable[[], object]
    position: int
    """Index in those arrays."""


class VirtualNetwork:
    """All transfers of a run. Changes made at one time take effect together.

    State per transfer is in arrays, in order of start, because hundreds of workers have thousands
    of transfers.
    """

    def __init__(self, clock: VirtualClock, conditions: Conditions) -> None:
        self._clock = clock
        self._conditions = conditions
        self._transfers: list[VirtualTransfer] = []
        self._remaining_bytes_F = np.zeros(0)
        self._bytes_per_s_F = np.zeros(0)
        self._is_cut_F = np.zeros(0, bool)
        self._pipes_F: list[tuple[int, ...]] = []
        self._pipes: dict[tuple[Rank, Rank], tuple[int, ...]] = {}
        self._pipe_bytes_per_s: list[float] = []
        self._index: dict[PipeKey, int] = {}
        self._settled_s = 0.0
        self._next: ScheduledEvent | None = None
        self._replanning: ScheduledEvent | None = None

    def begin(
        self, sender: Rank, receiver: Rank, size_bytes: int, done: Callable[[], object]
    ) -> VirtualTransfer:
        """Start a transfer; `done` is called when its last byte has left the link."""
        self._settle()
        transfer = VirtualTransfer(sender, receiver, done, len(self._transfers))
        self._transfers.append(transfer)
        self._remaining_bytes_F = np.append(self._remaining_bytes_F, float(size_bytes))
        self._bytes_per_s_F = np.append(self._bytes_per_s_F, 0.0)
        self._is_cut_F = np.append(self._is_cut_F, self._is_cut(transfer))
        self._pipes_F.append(self._pipes_of(sender, receiver))
        self._replan_soon()
        return transfer

    def end(self, transfer: VirtualTransfer) -> None:
        """Cancel a transfer; `done` is not called."""
        self._settle()
        done_F = np.zeros(len(self._transfers), bool)
        done_F[transfer.position] = True
        self._remove_transfers(done_F)
        self._replan_soon()

    def remaining_bytes(self, transfer: VirtualTransfer) -> float:
        """Bytes of it that have not arrived."""
        self._settle()
        return float(self._remaining_bytes_F[transfer.position])

    def latency_s(self, sender: Rank, receiver: Rank) -> float:
        """Current one-way latency."""
        return self._conditions.worker(sender).latency_s.get(receiver, 0.0)

    def round_trip_s(self, one: Rank, other: Rank) -> float:
        """Current round-trip time."""
        return self.latency_s(one, other) + self.latency_s(other, one)

    def set_conditions(self, conditions: Conditions) -> None:
        """Apply other rates from now on."""
        self._settle()
        self._conditions = conditions
        self._pipes.clear()
        self._index.clear()
        self._pipe_bytes_per_s.clear()
        self._pipes_F = [self._pipes_of(t.sender, t.receiver) for t in self._transfers]
        self._is_cut_F = np.array([self._is_cut(t) for t in self._transfers], bool)
        self._replan_soon()

    def _settle(self) -> None:
        """Update the remaining bytes of each transfer to the current time."""
        passed_s = self._clock.now_s - self._settled_s
        self._settled_s = self._clock.now_s
        if passed_s > 0:
            self._remaining_bytes_F -= self._bytes_per_s_F * passed_s
            np.maximum(self._remaining_bytes_F, 0.0, out=self._remaining_bytes_F)

    def _replan_soon(self) -> None:
        if self._replanning is None:
            self._replanning = self._clock.after(0.0, self._replan)

    def _replan(self) -> None:
        """Compute new rates, and schedule the next completion."""
        self._replanning = None
        self._settle()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self._transfers:
            return
        self._bytes_per_s_F = self._rates()
        soonest_s = _next_completion_s(self._remaining_bytes_F, self._bytes_per_s_F)
        if soonest_s < float("inf"):
            self._next = self._clock.after(soonest_s, self._complete_transfers)

    def _complete_transfers(self) -> None:
        """Complete finished transfers, in order of their start."""
        self._next = None
        self._settle()
        # The clock rounds to nanoseconds.
        done_F = self._remaining_bytes_F <= MIN_BYTES + 2e-9 * self._bytes_per_s_F
        through = [self._transfers[position] for position in np.flatnonzero(done_F)]
        self._remove_transfers(done_F)
        self._replan_soon()
        for transfer in through:
            transfer.done()

    def _remove_transfers(self, done_F: NDArray[np.bool_]) -> None:
        stays_F = ~done_F
        self._remaining_bytes_F = self._remaining_bytes_F[stays_F]
        self._bytes_per_s_F = self._bytes_per_s_F[stays_F]
        self._is_cut_F = self._is_cut_F[stays_F]
        stays = np.flatnonzero(stays_F).tolist()
        self._pipes_F = [self._pipes_F[position] for position in stays]
        self._transfers = [self._transfers[position] for position in stays]
        for position, transfer in enumerate(self._transfers):
            transfer.position = position

    def _rates(self) -> NDArray[np.float64]:
        """Bytes per second of each transfer, by progressive filling."""
        counts_F = np.fromiter(map(len, self._pipes_F), np.intp, len(self._pipes_F))
        member_M = np.repeat(np.arange(len(counts_F)), counts_F)
        pipes = itertools.chain.from_iterable(self._pipes_F)
        pipe_M = np.fromiter(pipes, np.intp, len(member_M))
        rate_F = np.where(self._is_cut_F, 0.0, np.inf)
        return _max_min_fair_rates(
            np.array(self._pipe_bytes_per_s), member_M, pipe_M, rate_F, ~self._is_cut_F
        )

    def _pipes_of(self, sender: Rank, receiver: Rank) -> tuple[int, ...]:
        known = self._pipes.get((sender, receiver))
        if known is None:
            pipes = [self._pipe(*one) for one in self._conditions.pipes(sender, receiver)]
            loss_limit_bytes_per_s = self._conditions.loss_bytes_per_s(sender, receiver)
            if loss_limit_bytes_per_s < float("inf"):
                pipes.append(len(self._pipe_bytes_per_s))
                self._pipe_bytes_per_s.append(loss_limit_bytes_per_s)
            known = self._pipes[sender, receiver] = tuple(pipes)
        return known

    def _pipe(self, key: PipeKey, pipe: Pipe) -> int:
        if key not in self._index:
            self._index[key] = len(self._pipe_bytes_per_s)
            self._pipe_bytes_per_s.append(pipe.bytes_per_s * WIRE_EFFICIENCY)
        return self._index[key]

    def _is_cut(self, transfer: VirtualTransfer) -> bool:
        return transfer.receiver in self._conditions.worker(transfer.sender).cut_peers


def _max_min_fair_rates(
    capacity_P: NDArray[np.float64],
    member_M: NDArray[np.intp],
    pipe_M: NDArray[np.intp],
    rate_F: NDArray[np.float64],
    rises_F: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Max-min fair rates: repeatedly fix the transfers in the pipe with the smallest fair share."""
    capacity_P = capacity_P.copy()
    rises_M = rises_F[member_M]
    member_M, pipe_M = member_M[rises_M], pipe_M[rises_M]
    while len(member_M):
        count_P = np.bincount(pipe_M, minlength=len(capacity_P))
        share_P = np.full(len(capacity_P), np.inf)
        np.divide(capacity_P, count_P, out=share_P, where=count_P > 0)
        share = max(0.0, float(share_P.min()))
        stops_F = np.zeros(len(rate_F), bool)
        stops_F[member_M[share_P[pipe_M] <= share * _EQUAL_SHARE_FACTOR]] = True
        rate_F[stops_F] = share
        stops_M = stops_F[member_M]
        capacity_P -= share * np.bincount(pipe_M[stops_M], minlength=len(capacity_P))
        member_M, pipe_M = member_M[~stops_M], pipe_M[~stops_M]
    return rate_F


def _next_completion_s(
    remaining_bytes_F: NDArray[np.float64], bytes_per_s_F: NDArray[np.float64]
) -> float:
    """Seconds until the first transfer completes; inf if none progresses."""
    seconds_F = np.full(len(remaining_bytes_F), np.inf)
    np.divide(remaining_bytes_F, bytes_per_s_F, out=seconds_F, where=bytes_per_s_F > 0)
    seconds_F[(remaining_bytes_F <= MIN_BYTES) | np.isinf(bytes_per_s_F)] = 0.0
    return float(seconds_F.min())
