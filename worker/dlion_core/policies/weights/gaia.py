"""Policy `gaia`: accumulate weight updates and send them once they are significant.

An update is the change of the weights by this worker's own `ApplyGradient` (with learning rate and
momentum) of LBS_k/GBS g_k. An entry v of the accumulator is sent to every member, and cleared, if
|accumulated_v / w_v| > T or w_v = 0. Receivers add it (a sum, not an average: the shares LBS_k/GBS
make it a mean of gradients). At threshold 0 this is `full`.

Approximate synchronous parallel: a `PROGRESS` with weights version 1 announces significant entries.
A receiver starts no step before it has them. Every step reads every weight, so a barrier on some
indices is a barrier on the step. The clock bound holds a worker that is too many iterations ahead
of a member. With a bound of 0, entries of a later iteration are added after the own step.

A worker that takes over this worker's state gets the weights without the accumulator. It receives
those entries as all others do.

Entries travel as `WEIGHTS` messages (of some entries, in gradient format) that newer ones never
supersede. Codec rounding errors stay in the accumulator.

Source: Hsieh et al., Gaia: geo-distributed machine learning approaching LAN speeds, NSDI 2017, and
its authors' code. Deviations: one threshold for all workers (theirs differ between and inside sites
only where parameter servers stand); the barrier announces iterations instead of indices.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import GradientPart, decode_gradient, require_finite
from dlion_core.policies.claims.magnitudes import check_peak
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import Residual
from dlion_core.policies.interface import (
    TAKEN_OVER,
    AddUpdate,
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    SendMessage,
    Value,
    WithholdUpdate,
)
from dlion_core.policies.parameters import GaiaParameters
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_from_state
from dlion_core.policies.synchronization import SyncRule

_FOLLOWS = 1
"""Weights version of a `PROGRESS` that significant entries follow."""

_EARLY = "gaia_early_"
_EARLY_EACH = 2
"""Messages of later iterations kept per worker; a peer at the barrier is not further ahead."""


def is_significant(accumulated_D: Flat, weights_D: Flat, threshold: float) -> NDArray[np.bool_]:
    """Return where |accumulated / w| > threshold or w = 0, computed without division.

    >>> is_significant(np.array([2, 1, 3], np.float32), np.array([-100, 0, 200], np.float32), 0.015)
    array([ True,  True, False])
    """
    bound_D = np.abs(weights_D, dtype=np.float64)
    bound_D *= threshold
    significant_D: NDArray[np.bool_] = (np.abs(accumulated_D) > bound_D) | (weights_D == 0)
    return significant_D


class Gaia(PeerMachine):
    """One worker's accumulator and announced updates."""

    def __init__(self, context: PolicyContext, parameters: GaiaParameters) -> None:
        super().__init__(context, SyncRule(slack=parameters.clock_bound))
        self._parameters = parameters
        self._codec = context.coding
        self._accumulated = Residual.zeros(self.size)
        self._before_D: Flat | None = None
        """The weights before the pending update."""
        self._steps = 0
        self._samples = 0
        self._is_restored = False
        self._taken_over = 0
        """Iteration of the peer's weights from which this worker continued."""
        self._announced: dict[Rank, int] = {}
        self._arrived: dict[Rank, int] = {}
        self._early: dict[tuple[int, Rank], GradientPart] = {}

    def threshold(self) -> float:
        """Return T for the update just made."""
        initial = self._parameters.threshold
        if self._parameters.decay == "inv_sqrt":
            return initial / math.sqrt(max(1, self._steps))
        if self._parameters.decay == "lr":
            return initial * self._learning_rate_factor()
        return initial

    def _learning_rate_factor(self) -> float:
        """Learning rate factor of the manifest's scaling, as in the driver's optimizer."""
        optimizer = self.context.spec.trainer.optimizer
        reported = 0 if self.context.exchanges_with_all else self.reported_batch_size
        samples = reported or self._samples
        ratio = samples / self.context.spec.batching.global_batch_size.initial
        power = {"linear": 1.0, "sqrt": 0.5}.get(optimizer.learning_rate_scaling, 0.0)
        most: float = optimizer.learning_rate_max_factor
        return min(most, max(1 / most, math.pow(ratio, power)))

    # ---- own steps -------------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Pass this worker's share of the mean gradient to the optimizer."""
        self._steps += 1
        self._samples = self.global_batch_size()
        share = np.float32(step.local_batch_size / self._samples)
        self._before_D = self.weights_D.copy()
        return [self.update(step.gradient_D * share)]

    def update_applied(self) -> list[Instruction]:
        """Accumulate the update; send significant entries to all members."""
        if self._before_D is None:
            return []
        self._accumulated.value_D += self.weights_D - self._before_D
        self._before_D = None
        require_finite(self._accumulated.value_D, "accumulated update")
        peers = self.synchronizer.active
        payload = None
        if peers:
            where_D = is_significant(self._accumulated.value_D, self.weights_D, self.threshold())
            payload = self._accumulated.send(where_D, self._codec).payload
        kept = WithholdUpdate(self._accumulated.value_D.copy())
        if payload is None:
            return [kept, *self.progress()]
        own = self.synchronizer.own
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, payload=payload)
        return [
            kept,
            *self.progress(weights_version=_FOLLOWS),
            *(SendMessage(peer, message) for peer in peers),
        ]

    # ---- messages from peers ---------------------------------------------------------------------

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        if message.weights_version == _FOLLOWS:
            latest = max(self._announced.get(sender, 0), message.iteration)
            self._announced[sender] = latest

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Queue entries to add, once per message. Do not wait for a replacement of invalid ones."""
        if message.iteration <= self._arrived.get(sender, 0):
            return []
        self._arrived[sender] = message.iteration
        part = decode_gradient(message.payload, self.size)
        check_peak(part.peak, self.weights_D)  # a change of the weights
        self._early[message.iteration, sender] = part
        return []

    def advance(self) -> list[Instruction]:
        """Add the received entries in order of iterations and ranks."""
        if self._before_D is not None:
            return []  # until `UpdateApplied`, only this worker's own update may change the weights
        instructions: list[Instruction] = []
        if self._is_restored:
            instructions.append(WithholdUpdate(self._accumulated.value_D.copy()))
            self._is_restored = False
        ready = sorted(self._early)
        if self.synchronizer.rule.slack == 0:
            most = _EARLY_EACH * len(self.context.ranks)
            too_many = max(0, len(ready) - most)
            own = self.synchronizer.own
            ready = [key for at, key in enumerate(ready) if key[0] <= own or at < too_many]
        return instructions + [
            AddUpdate(self._early.pop(key).weighted(np.float32(1))) for key in ready
        ]

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members with announced entries that are missing."""
        return frozenset(
            rank
            for rank in self.synchronizer.active
            if self._announced.get(rank, 0) > self._arrived.get(rank, 0)
        )

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Expect nothing from the member before it announces something. Weights that were taken
        over contain the entries up to their iteration, except those in transit to the giver."""
        self._arrived[rank] = max(self._taken_over, self._arrived.get(rank, 0))

    def left(self, rank: Rank) -> None:
        """Do not expect announced entries; received ones count."""
        self._announced.pop(rank, None)
        self._arrived.pop(rank, None)

    def state(self) -> dict[str, Value]:
        early = {
            f"{_EARLY}{iteration}_{rank}": part.weighted(np.float32(1))
            for (iteration, rank), part in self._early.items()
        }
        return {
            **super().state(),
            "gaia_steps": self._steps,
            "gaia_accumulated_D": self._accumulated.value_D.copy(),
            **early,
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._steps = int(state["gaia_steps"])
        self._accumulated.value_D = vector_from_state(state["gaia_accumulated_D"])
        self._is_restored = True
        self._taken_over = self.synchronizer.own if TAKEN_OVER in state else 0
        self._early = {}
        for name, value in state.items():
            if name.startswith(_EARLY):
                iteration, rank = map(int, name.removeprefix(_EARLY).split("_"))
                self._early[iteration, Rank(rank)] = GradientPart(vector_from_state(value))
                self._arrived[Rank(rank)] = max(iteration, self._arrived.get(Rank(rank), 0))
