"""Policy `gaia`: updates of the weights, accumulated until they are significant.

An update is the difference of the weights around this worker's own `Descend` (learning rate and
momentum applied) of LBS_k/GBS g_k. An entry v of the accumulated updates is sent, to every member,
where |accumulated_v / w_v| > T or w_v = 0, and leaves the accumulator; receivers add it (a sum, no
average: the shares LBS_k/GBS make it a mean of gradients). At threshold 0 that is `full`.

Approximate synchronous parallel: with its `PROGRESS` (weights version 1) a worker announces that
significant entries follow; whoever has heard that begins no step before it has them: every step
reads every weight, so a barrier on some indices is one on the step. The clock bound holds a worker
that is more than so many iterations ahead of a member. With a bound of 0 what is of a later
iteration than this worker's is added after its own step.

Who takes over a worker's state gets the weights without what that one has accumulated: it comes to
it as to all others.

Entries travel as `WEIGHTS` messages (of some entries, in the form of gradients), which never give
way to newer ones. What a codec rounds off stays in the accumulator.

Source: Hsieh et al., Gaia: geo-distributed machine learning approaching LAN speeds, NSDI 2017, and
its authors' code. Deviations: one threshold for all workers (theirs differ between and inside sites
only where parameter servers stand), the barrier announces iterations instead of indices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_worker.codecs import GradientPart, decode_gradient, require_finite
from dlion_worker.policies.entries import Residual
from dlion_worker.policies.interface import (
    TAKEN_OVER,
    Add,
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    Send,
    Value,
    Withhold,
)
from dlion_worker.policies.peer_machine import PeerMachine, flat
from dlion_worker.policies.synchronization import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.weight_parameters import GaiaParameters

_FOLLOWS = 1
"""Weights version of a `PROGRESS` behind which significant entries follow."""

_EARLY = "gaia_early_"
_EARLY_EACH = 2
"""Messages of later iterations kept for each worker; a peer at the barrier is not further."""


def gaia(context: Context, parameters: GaiaParameters) -> Gaia:
    """Significant updates to every peer."""
    return Gaia(context, parameters)


def is_significant(accumulated_D: Flat, weights_D: Flat, threshold: float) -> NDArray[np.bool_]:
    """Where an update counts: |accumulated / w| > threshold, or w = 0. Nothing is divided.

    >>> is_significant(np.array([2, 1, 3], np.float32), np.array([-100, 0, 200], np.float32), 0.015)
    array([ True,  True, False])
    """
    bound_D = np.abs(weights_D, dtype=np.float64)
    bound_D *= threshold
    found_D: NDArray[np.bool_] = (np.abs(accumulated_D) > bound_D) | (weights_D == 0)
    return found_D


class Gaia(PeerMachine):
    """One worker's accumulator, and what it has heard is under way."""

    def __init__(self, context: Context, parameters: GaiaParameters) -> None:
        super().__init__(context, Rule(slack=parameters.clock_bound, spare=0, barrier=False))
        self._parameters = parameters
        self._codec = context.coding
        self._accumulated = Residual(self.size)
        self._before_D: Flat | None = None
        """The weights before the descent under way."""
        self._steps = 0
        self._samples = 0
        self._is_restored = False
        self._taken_over = 0
        """The iteration of a peer's weights that this worker went on from."""
        self._announced: dict[Rank, int] = {}
        self._arrived: dict[Rank, int] = {}
        self._early: dict[tuple[int, Rank], GradientPart] = {}

    def threshold(self) -> float:
        """T, for the update just made."""
        initial = self._parameters.threshold
        if self._parameters.decay == "inv_sqrt":
            return initial / math.sqrt(max(1, self._steps))
        if self._parameters.decay == "lr":
            return initial * self._learning_rate_factor()
        return initial

    def _learning_rate_factor(self) -> float:
        """What the manifest's scaling makes of the learning rate, as the driver's optimizer."""
        optimizer = self.context.spec.trainer.optimizer
        samples = self._samples if self.context.hears_all else self.of_all or self._samples
        ratio = samples / self.context.spec.batching.global_batch_size.initial
        power = {"linear": 1.0, "sqrt": 0.5}.get(optimizer.learning_rate_scaling, 0.0)
        most: float = optimizer.learning_rate_max_factor
        return min(most, max(1 / most, math.pow(ratio, power)))

    # ---- own steps -----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """This worker's share of the iteration's mean gradient to the optimizer."""
        self._steps += 1
        self._samples = self.global_batch_size()
        share = np.float32(step.local_batch_size / self._samples)
        self._before_D = self.weights_D.copy()
        return [self.update(step.gradient_D * share)]

    def descended(self) -> list[Instruction]:
        """The update is accumulated; what has become significant goes to all."""
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
        kept = Withhold(self._accumulated.value_D.copy())
        if payload is None:
            return [kept, *self.progress()]
        own = self.synchronizer.own
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, payload=payload)
        return [
            kept,
            *self.progress(weights_version=_FOLLOWS),
            *(Send(peer, message) for peer in peers),
        ]

    # ---- others' -------------------------------------------------------------------------------

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Notes what is announced."""
        if message.weights_version == _FOLLOWS:
            latest = max(self._announced.get(sender, 0), message.iteration)
            self._announced[sender] = latest

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Entries to add, once; such as make no sense are not waited for either."""
        if message.iteration <= self._arrived.get(sender, 0):
            return []
        self._arrived[sender] = message.iteration
        self._early[message.iteration, sender] = decode_gradient(message.payload, self.size)
        return []

    def go_on(self) -> list[Instruction]:
        """Adds what has come, in the order of iterations and ranks."""
        if self._before_D is not None:
            return []  # between `Descend` and `Descended` the weights' change is this worker's own
        told: list[Instruction] = []
        if self._is_restored:
            told.append(Withhold(self._accumulated.value_D.copy()))
            self._is_restored = False
        ready = sorted(self._early)
        if self.synchronizer.rule.slack == 0:
            most = _EARLY_EACH * len(self.context.ranks)
            too_many = max(0, len(ready) - most)
            own = self.synchronizer.own
            ready = [key for at, key in enumerate(ready) if key[0] <= own or at < too_many]
        return told + [Add(self._early.pop(key).weighted(np.float32(1))) for key in ready]

    def held_for(self) -> frozenset[Rank]:
        """Members whose significant entries are announced and have not come."""
        return frozenset(
            rank
            for rank in self.synchronizer.active
            if self._announced.get(rank, 0) > self._arrived.get(rank, 0)
        )

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Nothing is expected of it before it announces something. What is of iterations up to
        those of weights that were taken over is in them, but for what was on its way to the giver.
        """
        self._arrived[rank] = max(self._taken_over, self._arrived.get(rank, 0))

    def left(self, rank: Rank) -> None:
        """What it has announced will not come; what has come counts."""
        self._announced.pop(rank, None)
        self._arrived.pop(rank, None)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """The accumulator, and what came early."""
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
        """Takes back what `state` gave."""
        super().restore(state)
        self._steps = int(state["gaia_steps"])
        self._accumulated.value_D = flat(state["gaia_accumulated_D"])
        self._is_restored = True
        self._taken_over = self.synchronizer.own if TAKEN_OVER in state else 0
        self._early = {}
        for name, value in state.items():
            if name.startswith(_EARLY):
                iteration, rank = map(int, name.removeprefix(_EARLY).split("_"))
                self._early[iteration, Rank(rank)] = GradientPart(flat(value))
                self._arrived[Rank(rank)] = max(iteration, self._arrived.get(Rank(rank), 0))
