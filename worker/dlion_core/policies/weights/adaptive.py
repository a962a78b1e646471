"""Policy `adaptive`: local steps, then an average of what changed most, as often as links allow.

All workers hold the same anchor, the weights of the last round. Each makes H local steps from it
and then sends its pseudo-gradient, the anchor less its weights, to every peer: only the largest
entries, in a few bits each. What it does not send, and what rounding lost, it adds to the next one
(error feedback). All wait for the pseudo-gradients of all, and with the weights n_k / N, by the
samples of the round, make the same outer step:

    d = sum_k (n_k / N) sent_k;  v <- m v + d
    anchor <- anchor - rate (d + m v)         (Nesterov; without momentum: rate d)

and continue from the anchor. m is the momentum of the optimizer sgd: it belongs to the step that
all make together, from all samples, and local steps have none. Batches follow capacity, so all
reach the end of a round together. `anchored_rounds` has the rounds, and the repair of a worker that
has another anchor.

`round_planner` chooses H for all, and for each worker how much it sends: as much as its narrowest
link carries in a small part of the round. All workers use the largest H that a worker of the last
round has proposed.

Source: Stich, Local SGD converges fast and communicates little, ICLR 2019; Douillard et al.,
DiLoCo, 2023 (outer step); Karimireddy et al., Error feedback fixes SignSGD, ICML 2019; SparseLoCo,
2025 (sparse pseudo-gradients with error feedback and few bits, as recalled). The planner, weights
by samples and the repair are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.reasons import EventReason
from dlion_core.policies.gradient.entries import largest_indices
from dlion_core.policies.interface import ReportEvent
from dlion_core.policies.weights.anchored_rounds import AnchoredRounds
from dlion_core.policies.weights.round_planner import MAX_LOCAL_STEPS, RoundPlanner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlion_core.policies.context import PolicyContext
    from dlion_core.policies.interface import Flat, Instruction
    from dlion_core.policies.round_parameters import AdaptiveParameters


class AdaptiveLocalSteps(AnchoredRounds):
    """One worker's rounds, planned together with the other workers."""

    def __init__(self, context: PolicyContext, parameters: AdaptiveParameters) -> None:
        super().__init__(
            context,
            codec=parameters.codec,
            feedback=float(parameters.error_feedback),
            local_steps=range(1, MAX_LOCAL_STEPS + 1),
        )
        optimizer = context.spec.trainer.optimizer
        usual = optimizer.momentum if optimizer.name == "sgd" else 0.0
        given = parameters.outer_momentum
        self._momentum = np.float32(usual if given is None else given)
        self._rate = np.float32(parameters.outer_learning_rate)
        self._planner = RoundPlanner(
            parameters,
            size=self.size,
            coding=self.coding,
            bandwidth_fraction=context.spec.network.bandwidth_fraction,
        )
        self._plan_text = ""
        """Why it has proposed another H."""

    def chosen(self) -> NDArray[np.intp]:
        """Return the largest entries, as many as the links carry."""
        count = self._planner.count(self.links, self.local_steps)
        return largest_indices(self.residual.value_D, count)

    def proposal(self) -> int:
        proposal = self._planner.local_steps(self.links, self.local_steps)
        if proposal != self.local_steps:
            self._plan_text = self._planner.explanation(self.links, proposal)
        return proposal

    def outer_step(self, mean_D: Flat) -> Flat:
        step_D = self.with_momentum(mean_D, self._momentum)
        step_D *= self._rate
        return step_D

    def steps_changed(self, own_proposal: int, before: int) -> list[Instruction]:
        """Report the plan if it is this worker's proposal."""
        if own_proposal == self.local_steps != before:
            return [ReportEvent(EventReason.ROUNDS_PLANNED, self._plan_text)]
        return []
