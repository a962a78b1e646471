"""Policy `localsgd`: every worker trains alone for H steps, then all average their changes.

At each multiple of H a worker sends its weights to every member and waits for those of all members.
Receivers *average*, weighted by the samples since the last round. The change from the weights of
the last round (the anchor) to the mean is the outer gradient:

    delta = anchor - mean;  v = momentum v + delta
    anchor <- anchor - rate (delta + momentum v)      (Nesterov; without: rate v)

Every worker continues from the anchor. Rate 1 and momentum 0 is plain local SGD. Weights are sent
instead of changes, so that a worker with an old anchor realigns after some rounds. This worker uses
its own weights as the peers decode them.

Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019; Douillard et al.,
"DiLoCo", 2023 (outer Nesterov; rate 0.7, momentum 0.9 over 500 steps, as recalled; over few steps
that diverges: the default of 0.5 is ours). Ours: weights by samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_core.codecs import decode_weights, encode_weights, require_finite
from dlion_core.policies.interface import Message, MessageKind, ReplaceWeights, SendMessage
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.synchronization import SyncRule
from dlion_core.policies.weights.round_results import RoundResult, mean_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.names import Rank
    from dlion_core.policies.factory import PolicyContext
    from dlion_core.policies.interface import Flat, Instruction, LocalStepDone, Value
    from dlion_core.policies.parameters import LocalsgdParameters

_KEPT_AHEAD = 2
"""Rounds of a peer that are kept until due. It waits for this worker in the second."""


class LocalSteps(PeerMachine):
    """One worker's local steps and rounds; round r is due at iteration r H."""

    def __init__(self, context: PolicyContext, parameters: LocalsgdParameters) -> None:
        super().__init__(context, SyncRule(slack=parameters.local_steps))
        self._parameters = parameters
        self._codec = context.coding
        self._anchor_D: Flat | None = None
        self._velocity_D: Flat | None = None
        self._samples = 0  # since the last round
        self._round = 0  # the last one that was opened
        self._own: RoundResult | None = None  # while it is open
        self._message: Message | None = None
        self._expected: set[Rank] = set()
        self._newcomers: set[Rank] = set()
        self._shares: dict[Rank, dict[int, RoundResult]] = {}

    # ---- a local step ----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Apply the own gradient only; report the iteration to the others."""
        require_finite(step.gradient_D, "gradient")
        if self._anchor_D is None:
            self._anchor_D = self.weights_D.copy()
        self._samples += step.local_batch_size
        return [*self.progress(), self.update_alone(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Open the round if one is due: send the weights to every member."""
        now = self.synchronizer.own // self._parameters.local_steps
        if now <= self._round:
            return []
        self._round = now
        payload = encode_weights(self.weights_D, self._codec)
        samples = min(self._samples, self._max_samples)  # may be more if a restart skipped a round
        self._own = RoundResult(samples, decode_weights(payload, self.size).copy())
        due = now * self._parameters.local_steps
        self._message = Message(MessageKind.WEIGHTS, due, self.local_batch_size, samples, payload)
        self._expected = {  # a worker past it has continued without this one
            rank
            for rank in self.synchronizer.in_step()
            if self.synchronizer.finished(rank) <= self.synchronizer.own
        }
        return [SendMessage(peer, self._message) for peer in self.synchronizer.active]

    @property
    def _max_samples(self) -> int:
        return self._parameters.local_steps * self.context.max_samples

    # ---- rounds ----------------------------------------------------------------------------------

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Store a peer's contribution until its round is closed here."""
        steps, samples = self._parameters.local_steps, message.weights_version
        if message.iteration % steps:
            msg = f"weights of iteration {message.iteration}; allowed: multiples of {steps}"
            raise ContractError(msg)
        most = self._max_samples
        if not 1 <= samples <= most:
            raise ContractError(f"weights after {samples} samples; allowed: 1 to {most}")
        shares = self._shares.setdefault(sender, {})
        number = message.iteration // steps
        first_open = self._round if self._own is not None else self._round + 1
        if number >= first_open and number not in shares:
            shares[number] = RoundResult(samples, decode_weights(message.payload, self.size).copy())
            if len(shares) > _KEPT_AHEAD:
                del shares[min(shares)]
        return []

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members that may still send their contribution to the open round."""
        if self._own is None:
            return frozenset()
        return frozenset(
            rank
            for rank in self._expected
            if not any(number >= self._round for number in self._shares.get(rank, ()))
        )

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Wait for it from the next round on. Send it this round: it may take part."""
        if self._own is not None:
            self._newcomers.add(rank)

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its contribution to the open round counts."""
        self._expected.discard(rank)
        self._newcomers.discard(rank)
        if self._own is None:
            self._shares.pop(rank, None)

    def advance(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        if self._message is not None:
            instructions = [SendMessage(rank, self._message) for rank in sorted(self._newcomers)]
            self._newcomers.clear()
        if self._own is None or self._anchor_D is None or self.blocking_peers():
            return instructions
        shares = {self.rank: self._own}
        for rank, by_round in list(self._shares.items()):
            if self._round in by_round:
                shares[rank] = by_round[self._round]
            kept = {number: one for number, one in by_round.items() if number > self._round}
            self._shares[rank] = kept
        mean_D = mean_weights([result for _, result in sorted(shares.items())])
        self._anchor_D = self._outer_step(self._anchor_D, mean_D)
        self._own = self._message = None
        self._samples = 0
        return [*instructions, ReplaceWeights(self._anchor_D.copy())]

    def _outer_step(self, anchor_D: Flat, mean_D: Flat) -> Flat:
        rate = np.float32(self._parameters.outer_learning_rate)
        momentum = np.float32(self._parameters.outer_momentum)
        if not momentum:  # in this form, rate 1 gives exactly the mean
            return (np.float32(1) - rate) * anchor_D + rate * mean_D
        delta_D = anchor_D - mean_D
        if self._velocity_D is None:
            self._velocity_D = np.zeros_like(delta_D)
        self._velocity_D = momentum * self._velocity_D + delta_D
        ahead = self._parameters.nesterov
        step_D = delta_D + momentum * self._velocity_D if ahead else self._velocity_D
        stepped_D: Flat = anchor_D - rate * step_D
        return stepped_D

    def state(self) -> dict[str, Value]:
        state = {**super().state(), "round": self._round, "round_samples": self._samples}
        for name, vector_D in (("anchor_D", self._anchor_D), ("velocity_D", self._velocity_D)):
            if vector_D is not None:
                state[name] = vector_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        # With the state of a peer, its rounds have passed.
        passed = self.synchronizer.own // self._parameters.local_steps
        self._round, self._samples = max(passed, int(state["round"])), int(state["round_samples"])
        self._anchor_D = vector_or_none(state, "anchor_D")
        self._velocity_D = vector_or_none(state, "velocity_D")
