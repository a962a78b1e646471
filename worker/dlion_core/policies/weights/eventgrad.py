"""Policy `eventgrad`: send a variable to the neighbours only once its norm has changed enough.

At each step t, for each variable i with weights w_i and d = | ||w_i|| - ||w_i|| when last sent |:

    thr_i <- horizon * thr_i
    send w_i to all neighbours if d >= thr_i, during the warm-up, or after too long a silence
    where sent: thr_i <- mean of d / (t - t when last sent) of this and the previous sending

Then w_i becomes the plain mean of this worker's value and each neighbour's last sent value
(receivers *average*, with equal weights). The own value replaces values that have not arrived. The
gradient, computed before, is applied afterwards. At threshold 0 this is gossip at every step.

Neighbours are those of `graph`. On topologies other than all-to-all they are all linked members: a
ring of each worker's own members would differ between workers and be one-way.

With a bound of 0 workers run in lock step. A `PROGRESS` with weights version 1 announces values,
and a worker averages only when those of the iteration have arrived. Otherwise it averages at once
with what has arrived, and only the bound holds it. A new neighbour is sent every variable.

Values travel as `WEIGHTS` messages: the variables' entries in order, then a bitmap of the
variables.

Source: Ghosh, Aquino, Gupta, "EventGraD: event-triggered communication in parallel machine
learning", Neurocomputing 2021, and its authors' code (rule, order, ring, warm-up, history of two,
horizon of 1). Ours: the longest silence, the clock bound, the complete graph, members that join and
leave. The history starts with zeros as theirs; the neighbours' weights do not.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, decode_weights, encode_weights
from dlion_core.policies.claims.magnitudes import check_weights
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.gradient_selectors import Payload
from dlion_core.policies.interface import (
    Flat,
    Instruction,
    Layout,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    SendMessage,
    Value,
)
from dlion_core.policies.parameters import EventgradParameters
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import by_rank, vectors_by_rank
from dlion_core.policies.synchronization import SyncRule
from dlion_core.topology.topology import ring_neighbours

VariableMask = NDArray[np.bool_]
"""Mask of variables, shape [L]."""

_HISTORY = 2
"""Number of sendings whose changes per step give the next threshold."""

_FOLLOWS = 1
"""Weights version of a `PROGRESS` that values follow."""

_EARLY_EACH = 2
"""Messages of later iterations kept per neighbour; one in lock step is not further ahead."""

_LAST, _HAS = "eventgrad_last_of_", "eventgrad_has_of_"
_SERVED = "eventgrad_served"
_TRIGGER = "eventgrad_trigger_"


def averaging_neighbours(members: Sequence[Rank], rank: Rank, graph: str) -> list[Rank]:
    """Return the neighbours of the worker among the members (in rank order, including it).

    >>> averaging_neighbours([0, 1, 2, 3], 0, "ring"), averaging_neighbours([0, 2], 2, "ring")
    ([1, 3], [0])
    """
    if graph == "complete":
        return [peer for peer in members if peer != rank]
    return sorted(ring_neighbours(members, rank) - {rank})


class NormTrigger:
    """Norms when last sent, and the threshold of each variable."""

    def __init__(self, layout: Layout, parameters: EventgradParameters) -> None:
        self._slices, self._parameters = layout.slices(), parameters
        count = len(layout.sizes)
        self._steps = 0
        self._norm_L = np.zeros(count)
        self._sent_at_L = np.zeros(count, np.int64)
        self._slope_HL = np.zeros((_HISTORY, count))
        self.threshold_L = np.zeros(count)

    def fired(self, weights_D: Flat) -> VariableMask:
        """Count one step; return the variables to send."""
        self._steps += 1
        wide = [weights_D[where].astype(np.float64) for where in self._slices]
        norm_L = np.array([float(np.sqrt(np.dot(part, part))) for part in wide])
        change_L, since_L = np.abs(norm_L - self._norm_L), self._steps - self._sent_at_L
        fixed, silent = self._parameters.threshold, self._parameters.max_silent_steps
        if fixed is None:
            self.threshold_L *= self._parameters.horizon
        else:
            self.threshold_L[:] = fixed
        fired_L: VariableMask = change_L >= self.threshold_L
        if self._steps < self._parameters.warmup_steps:
            fired_L[:] = True
        if silent:
            fired_L |= since_L >= silent
        self._sent(fired_L, norm_L, change_L / since_L)
        return fired_L

    def _sent(
        self, fired_L: VariableMask, norm_L: NDArray[np.float64], slope_L: NDArray[np.float64]
    ) -> None:
        self._slope_HL[:-1, fired_L] = self._slope_HL[1:, fired_L]
        self._slope_HL[-1, fired_L] = slope_L[fired_L]
        self.threshold_L[fired_L] = self._slope_HL.mean(0)[fired_L]
        self._norm_L[fired_L] = norm_L[fired_L]
        self._sent_at_L[fired_L] = self._steps

    def state(self) -> dict[str, Value]:
        return {
            f"{_TRIGGER}steps": self._steps,
            f"{_TRIGGER}norm_L": self._norm_L.copy(),
            f"{_TRIGGER}sent_at_L": self._sent_at_L.copy(),
            f"{_TRIGGER}slope_HL": self._slope_HL.copy(),
            f"{_TRIGGER}threshold_L": self.threshold_L.copy(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self._steps = int(state[f"{_TRIGGER}steps"])
        self._norm_L = np.array(state[f"{_TRIGGER}norm_L"], np.float64)
        self._sent_at_L = np.array(state[f"{_TRIGGER}sent_at_L"], np.int64)
        self._slope_HL = np.array(state[f"{_TRIGGER}slope_HL"], np.float64)
        self.threshold_L = np.array(state[f"{_TRIGGER}threshold_L"], np.float64)


class VariableCodec:
    """Encodes and decodes the values of some variables."""

    def __init__(self, layout: Layout, codec: AnyCoding) -> None:
        self._sizes_L = np.array(layout.sizes, np.int64)
        self._codec = codec

    def encoded(self, value_D: Flat, chosen_L: VariableMask) -> Payload:
        """Encode. Raises ValueError if a value is not finite."""
        values = encode_weights(value_D[self.entries(chosen_L)], self._codec)
        return bytes(values) + np.packbits(chosen_L).tobytes()

    def decoded(self, payload: Payload) -> tuple[VariableMask, Flat]:
        """Return the mask of variables, and their values in order. Raises ContractError if it is
        not a payload of `encoded` for this model."""
        count = self._sizes_L.size
        bitmap_bytes = (count + 7) // 8
        if len(payload) <= bitmap_bytes:
            msg = f"variables in {len(payload)} bytes; their bitmap alone has {bitmap_bytes}"
            raise ContractError(msg)
        bits = np.unpackbits(np.frombuffer(payload[-bitmap_bytes:], np.uint8)).astype(np.bool_)
        chosen_L = bits[:count]
        if bits[count:].any() or not chosen_L.any():
            raise ContractError(f"bitmap of none of {count} variables, or of more")
        size = int(self._sizes_L[chosen_L].sum())
        return chosen_L, decode_weights(payload[:-bitmap_bytes], size)

    def entries(self, chosen_L: VariableMask) -> VariableMask:
        """Return the mask of the entries of those variables, shape [D]."""
        return np.repeat(chosen_L, self._sizes_L)


class EventGrad(PeerMachine):
    """One worker, its neighbours' last values, and its pending average."""

    def __init__(self, context: PolicyContext, parameters: EventgradParameters) -> None:
        super().__init__(context, SyncRule(slack=parameters.bound))
        self._parameters = parameters
        self._in_lock_step = parameters.bound == 0
        self._is_complete = context.spec.exchange.topology == "allToAll"
        self._variables = VariableCodec(context.layout, context.coding)
        self._trigger = NormTrigger(context.layout, parameters)
        self._gradient_D: Flat | None = None
        """Gradient of the finished step, until the average is made."""
        self._last: dict[Rank, Flat] = {}
        self._has: dict[Rank, VariableMask] = {}
        """Entries received from each neighbour so far."""
        self._early: dict[tuple[int, Rank], tuple[VariableMask, Flat]] = {}
        self._announced: dict[Rank, int] = {}
        self._arrived: dict[Rank, int] = {}
        self._served: set[Rank] = set()
        """Neighbours that have received every variable."""
        self._kept: set[Rank] = set()
        """Neighbours from a checkpoint that have not rejoined."""

    def _neighbours(self) -> list[Rank]:
        if not self._is_complete:
            return self.synchronizer.active
        members = sorted([*self.synchronizer.active, self.rank])
        return averaging_neighbours(members, self.rank, self._parameters.graph)

    # ---- own steps -------------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Send changed variables; the gradient waits for the average."""
        self._gradient_D = step.gradient_D
        weights_D, own = self.weights_D, self.synchronizer.own
        fired_L, near = self._trigger.fired(weights_D), self._neighbours()
        chosen = {peer: fired_L | (peer not in self._served) for peer in near}
        payload_of = {
            peer: self._variables.encoded(weights_D, chosen_L)
            for peer, chosen_L in chosen.items()
            if chosen_L.any()
        }
        self._served = set(near)
        instructions: list[Instruction] = []
        for peer in self.synchronizer.active:
            payload = payload_of.get(peer)
            version = 0 if payload is None else _FOLLOWS
            head = Message(MessageKind.PROGRESS, own, self.local_batch_size, version)
            instructions.append(SendMessage(peer, head))
            if payload is not None:
                body = Message(MessageKind.WEIGHTS, own, self.local_batch_size, payload=payload)
                instructions.append(SendMessage(peer, body))
        return instructions

    def advance(self) -> list[Instruction]:
        """Average when possible, then apply the own gradient."""
        if self._gradient_D is None or self.blocking_peers():
            return []
        if self._in_lock_step and self.synchronizer.waiting_for():
            return []
        for key in sorted(self._early):
            if key[0] <= self.synchronizer.own or not self._in_lock_step:
                self._take(key)
        gradient_D, self._gradient_D = self._gradient_D, None
        return [ReplaceWeights(self._average()), self.update(gradient_D)]

    def blocking_peers(self) -> frozenset[Rank]:
        """In lock step, return neighbours with announced values that are missing."""
        if self._gradient_D is None or not self._in_lock_step:
            return frozenset()
        return frozenset(
            rank
            for rank in self.synchronizer.active
            if self._announced.get(rank, 0) > self._arrived.get(rank, 0)
        )

    def _average(self) -> Flat:
        """Average in float64 in rank order."""
        own_D, near = self.weights_D, self._neighbours()
        sum_D = np.zeros(self.size)
        for rank in sorted([*near, self.rank]):
            if rank in self._last:
                sum_D += np.where(self._has[rank], self._last[rank], own_D)
            else:
                sum_D += own_D
        average_D: Flat = (sum_D / (len(near) + 1)).astype(np.float32)
        return average_D

    # ---- messages from peers ---------------------------------------------------------------------

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        if message.weights_version == _FOLLOWS:
            self._announced[sender] = max(self._announced.get(sender, 0), message.iteration)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Store values, once per message. Do not wait for a replacement of invalid ones."""
        if message.iteration <= self._arrived.get(sender, 0):
            return []
        self._arrived[sender] = message.iteration
        chosen_L, value_K = self._variables.decoded(message.payload)
        check_weights(value_K, self.weights_D)
        self._early[message.iteration, sender] = (chosen_L, value_K)
        waiting = sorted(key for key in self._early if key[1] == sender)
        for key in waiting[:-_EARLY_EACH]:
            self._take(key)
        return []

    def _take(self, key: tuple[int, Rank]) -> None:
        chosen_L, values = self._early.pop(key)
        where, rank = self._variables.entries(chosen_L), key[1]
        last_D = self._last.setdefault(rank, np.zeros(self.size, np.float32))
        last_D[where] = values
        self._has[rank] = self._has.get(rank, np.zeros(self.size, np.bool_)) | where

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Send it everything, unless it had that before this worker's restart."""
        if rank in self._kept:
            self._kept.discard(rank)
        else:
            self._served.discard(rank)

    def left(self, rank: Rank) -> None:
        """Expect nothing. Keep its last values for its return, but do not use them now."""
        self._announced.pop(rank, None)
        self._arrived.pop(rank, None)
        self._served.discard(rank)
        self._kept.discard(rank)
        for key in [key for key in self._early if key[1] == rank]:
            self._take(key)

    def state(self) -> dict[str, Value]:
        """Add the neighbours' last values, early ones included, but not their iterations: a
        neighbour may resume from an earlier one. A pending average is skipped after a restart."""
        state = {**super().state(), **self._trigger.state()}
        state[_SERVED] = np.array(sorted(self._served), np.int64)
        for rank in {*self._last, *(rank for _, rank in self._early)}:
            last_D = self._last.get(rank, np.zeros(self.size, np.float32)).copy()
            has_D = self._has.get(rank, np.zeros(self.size, np.bool_)).copy()
            for key in sorted(key for key in self._early if key[1] == rank):
                chosen_L, values = self._early[key]
                where = self._variables.entries(chosen_L)
                last_D[where], has_D[where] = values, True
            state[f"{_LAST}{rank}"], state[f"{_HAS}{rank}"] = last_D, has_D
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._trigger.restore(state)
        served = np.asarray(state[_SERVED], np.int64).tolist()
        self._served = {Rank(int(rank)) for rank in served}
        self._kept = set(self._served)
        self._last, self._early = vectors_by_rank(state, _LAST), {}
        self._has = {
            rank: np.array(has_D, np.bool_) for rank, has_D in by_rank(state, _HAS).items()
        }
