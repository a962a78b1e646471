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

from collections.abc import Mapping

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import GradientPart, decode_weights, encode_weights
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.claims.samples import check_samples
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    Value,
)
from dlion_core.policies.round_parameters import LocalsgdParameters
from dlion_core.policies.weights.local_rounds import LocalRounds


class LocalSteps(LocalRounds[Contribution]):
    """One worker's local steps and rounds; round r is due at iteration r H."""

    def __init__(self, context: PolicyContext, parameters: LocalsgdParameters) -> None:
        super().__init__(context, max_local_steps=parameters.local_steps)
        self._parameters = parameters
        self._codec = context.coding
        self._round = 0  # the last one that was opened

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Apply the own gradient only; report the iteration to the others."""
        self.count_step(step)
        return [*self.progress(), self.update_alone(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Open the round if one is due: send the weights to every member."""
        now = self.synchronizer.own // self._parameters.local_steps
        if now <= self._round:
            return []
        self._round = now
        payload = encode_weights(self.weights_D, self._codec)
        due = now * self._parameters.local_steps
        samples = min(self.samples, self.max_samples(due))
        own = Contribution(samples, GradientPart(decode_weights(payload, self.size).copy()))
        message = Message(MessageKind.WEIGHTS, due, self.local_batch_size, samples, payload)
        return self.open_round(due, own, message)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Store a peer's contribution until its round is closed here."""
        steps, samples = self._parameters.local_steps, message.weights_version
        if message.iteration % steps:
            msg = f"weights of iteration {message.iteration}; allowed: multiples of {steps}"
            raise ContractError(msg)
        end = message.iteration
        if self.has(sender, end):
            return []
        check_samples("weights", samples, self.max_samples(end, sender))
        if end >= self.first_wanted:
            weights_D = self.peer_weights(message.payload).copy()
            self.keep(sender, end, Contribution(samples, GradientPart(weights_D)))
        return []

    def close_round(
        self,
        contributions: Mapping[Rank, Contribution],
        end: int,  # noqa: ARG002 - the hook's
    ) -> list[Instruction]:
        """Continue from the anchor after the outer step."""
        assert self.anchor_D is not None
        mean_D = sample_mean(contributions.values(), self.size)
        self.anchor_D = self._outer_step(self.anchor_D, mean_D)
        return [ReplaceWeights(self.anchor_D.copy())]

    def _outer_step(self, anchor_D: Flat, mean_D: Flat) -> Flat:
        rate = np.float32(self._parameters.outer_learning_rate)
        momentum = np.float32(self._parameters.outer_momentum)
        if not momentum:  # in this form, rate 1 gives exactly the mean
            return (np.float32(1) - rate) * anchor_D + rate * mean_D
        delta_D = anchor_D - mean_D
        step_D = self.with_momentum(delta_D, momentum, nesterov=self._parameters.nesterov)
        stepped_D: Flat = anchor_D - rate * step_D
        return stepped_D

    def state(self) -> dict[str, Value]:
        return {**super().state(), "round": self._round}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        # With the state of a peer, its rounds have passed.
        passed = self.synchronizer.own // self._parameters.local_steps
        self._round = max(passed, int(state["round"]))
        self.closed = self._round * self._parameters.local_steps
