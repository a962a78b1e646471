"""Transfers on all links and their rates: every pipe is shared fairly.

A transfer uses the pipes of its link: the uplinks of the sender and its site, and the downlinks of
the receiver and its site (`plan`). Rates are max-min fair, as for TCP streams in fair queues
(`fair_rates`). A lossy link has one more pipe of its own. Used by `links`, transfer by transfer.

Shape suffixes: F transfers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_environments.plan import Conditions, Pipe, PipeKey
from dlion_simulator.clock import ScheduledEvent, VirtualClock
from dlion_simulator.fair_rates import max_min_fair_rates

WIRE_EFFICIENCY = 1448 / 1514
"""Payload of a full TCP segment over the size of its Ethernet frame, which `Pipe` rates count."""

MIN_BYTES = 1e-3
"""Smaller remainders are rounding errors."""


@dataclass(eq=False)
class VirtualTransfer:
    """A transfer over one link; the network's arrays hold its remaining bytes."""

    sender: Rank
    receiver: Rank
    done: Callable[[], object]
    size_bytes: float
    number: int
    """Counts the transfers of a run, in order of start."""


class VirtualNetwork:
    """All transfers of a run. Changes made at one time take effect together.

    State per transfer is in arrays, in order of start, because hundreds of workers have thousands
    of transfers.
    """

    def __init__(self, clock: VirtualClock, conditions: Conditions) -> None:
        self._clock = clock
        self._conditions = conditions
        self._transfers: dict[int, VirtualTransfer] = {}
        """Transfers by number, in order of start."""
        self._begun: list[VirtualTransfer] = []
        """The latest of them, which are not in the arrays yet."""
        self._count = 0
        self._number_F = np.zeros(0, np.int64)
        self._remaining_bytes_F = np.zeros(0)
        self._bytes_per_s_F = np.zeros(0)
        self._is_cut_F = np.zeros(0, bool)
        self._pipes_FK = np.zeros((0, 0), np.int64)
        """Pipes of each transfer; -1 fills up a row."""
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
        transfer = VirtualTransfer(sender, receiver, done, float(size_bytes), self._count)
        self._count += 1
        self._transfers[transfer.number] = transfer
        self._begun.append(transfer)
        self._replan_soon()
        return transfer

    def end(self, transfer: VirtualTransfer) -> None:
        """Cancel a transfer; `done` is not called."""
        self._settle()
        self._enter_begun()
        self._remove_transfers(self._number_F == transfer.number)
        self._replan_soon()

    def remaining_bytes(self, transfer: VirtualTransfer) -> float:
        """Bytes of it that have not arrived."""
        self._settle()
        position = int(self._number_F.searchsorted(transfer.number))
        if position == len(self._number_F):  # it has only just begun
            return transfer.size_bytes
        return float(self._remaining_bytes_F[position])

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
        self._enter_begun()
        transfers = list(self._transfers.values())
        self._pipes_FK = self._pipes_of_all(transfers)
        self._is_cut_F = np.array([self._is_cut(t) for t in transfers], bool)
        self._replan_soon()

    def _settle(self) -> None:
        """Update the remaining bytes of each transfer to the current time."""
        passed_s = self._clock.now_s - self._settled_s
        self._settled_s = self._clock.now_s
        if passed_s > 0:
            self._remaining_bytes_F -= self._bytes_per_s_F * passed_s
            np.maximum(self._remaining_bytes_F, 0.0, out=self._remaining_bytes_F)

    def _enter_begun(self) -> None:
        """Add new transfers to the arrays, all of one moment at once."""
        if not (begun := self._begun):
            return
        self._begun = []
        sizes = [transfer.size_bytes for transfer in begun]
        cut = np.array([self._is_cut(transfer) for transfer in begun], bool)
        self._number_F = np.append(self._number_F, [transfer.number for transfer in begun])
        self._remaining_bytes_F = np.append(self._remaining_bytes_F, sizes)
        self._bytes_per_s_F = np.append(self._bytes_per_s_F, np.zeros(len(begun)))
        self._is_cut_F = np.append(self._is_cut_F, cut)
        old_FK, new_FK = self._pipes_FK, self._pipes_of_all(begun)
        width = max(old_FK.shape[1], new_FK.shape[1])
        self._pipes_FK = np.concatenate([_widened(old_FK, width), _widened(new_FK, width)])

    def _replan_soon(self) -> None:
        if self._replanning is None:
            self._replanning = self._clock.after(0.0, self._replan)

    def _replan(self) -> None:
        """Compute new rates, and schedule the next completion."""
        self._replanning = None
        self._settle()
        self._enter_begun()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self._transfers:
            return
        self._bytes_per_s_F = max_min_fair_rates(
            np.array(self._pipe_bytes_per_s), self._pipes_FK, self._is_cut_F
        )
        soonest_s = _next_completion_s(self._remaining_bytes_F, self._bytes_per_s_F)
        if soonest_s < float("inf"):
            self._next = self._clock.after(soonest_s, self._complete_transfers)

    def _complete_transfers(self) -> None:
        """Complete finished transfers, in order of their start."""
        self._next = None
        self._settle()
        self._enter_begun()
        # The clock rounds to nanoseconds.
        done_F = self._remaining_bytes_F <= MIN_BYTES + 2e-9 * self._bytes_per_s_F
        through = self._remove_transfers(done_F)
        self._replan_soon()
        for transfer in through:
            transfer.done()

    def _remove_transfers(self, done_F: NDArray[np.bool_]) -> list[VirtualTransfer]:
        """Remove these; return them in order of start."""
        removed = [self._transfers.pop(number) for number in self._number_F[done_F].tolist()]
        stays_F = ~done_F
        self._number_F = self._number_F[stays_F]
        self._remaining_bytes_F = self._remaining_bytes_F[stays_F]
        self._bytes_per_s_F = self._bytes_per_s_F[stays_F]
        self._is_cut_F = self._is_cut_F[stays_F]
        self._pipes_FK = self._pipes_FK[stays_F]
        return removed

    def _pipes_of_all(self, transfers: Sequence[VirtualTransfer]) -> NDArray[np.int64]:
        pipes = [self._pipes_of(transfer.sender, transfer.receiver) for transfer in transfers]
        width = max(map(len, pipes), default=0)
        filled = [(*each, *(-1,) * (width - len(each))) for each in pipes]
        return np.array(filled, np.int64).reshape(len(pipes), width)

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


def _widened(pipes_FK: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    padding = ((0, 0), (0, width - pipes_FK.shape[1]))
    return np.pad(pipes_FK, padding, constant_values=-1) if padding[1][1] else pipes_FK


def _next_completion_s(
    remaining_bytes_F: NDArray[np.float64], bytes_per_s_F: NDArray[np.float64]
) -> float:
    """Seconds until the first transfer completes; inf if none progresses."""
    seconds_F = np.full(len(remaining_bytes_F), np.inf)
    np.divide(remaining_bytes_F, bytes_per_s_F, out=seconds_F, where=bytes_per_s_F > 0)
    seconds_F[(remaining_bytes_F <= MIN_BYTES) | np.isinf(bytes_per_s_F)] = 0.0
    return float(seconds_F.min())
