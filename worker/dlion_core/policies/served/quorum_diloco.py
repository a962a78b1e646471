"""Policy `quorum-diloco`: DiLoCo whose outer step is made with a quorum, after a grace window.

Each worker makes H local steps from the global weights and sends its change to the server
(`served_worker`). Once a quorum of the workers has sent one, the server waits for the others, but
only while that delays no worker. Workers continue computing for `overlapSteps` steps (t) after they
sent; with the time x of an answer on its way, in steps, the window ends

    grace (t - x)  steps after the first change of the round,

so the time until the quorum shortens it. No policy has a clock: the steps of the server, which
trains too, are its clock. Then the server makes the outer step with the mean of the changes, with
the weights n_k (n_k / s_k), n_k samples in s_k steps, and answers the workers that wait.

A change that comes later is answered at once, with the present global weights, and counts in the
next outer step. A worker that counts twice in one has both of its changes summed.

Source: Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026 (quorum,
window from the slack of the overlap, weights by tokens times tokens per step; as recalled, with the
values of all parameters ours). Ours: the server trains and its steps are the clock; only waiting
workers get an answer; weights travel whole, not in fragments; means, not radial-directional ones.
"""

from collections.abc import Mapping
from math import ceil

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import GradientPart
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import Flat, Instruction, Value
from dlion_core.policies.round_parameters import QuorumDilocoParameters
from dlion_core.policies.served.outer_optimizer import DelayedNesterov
from dlion_core.policies.served.served_worker import Change, Form, ServedWorker, as_vector
from dlion_core.policies.state_values import vector_or_none

_OUTER = "outer_"
"""Prefix of checkpoint keys of the outer optimizer."""


class QuorumDiloco(ServedWorker):
    """One worker, and what it does as the server of all."""

    def __init__(self, context: PolicyContext, parameters: QuorumDilocoParameters) -> None:
        super().__init__(
            context,
            local_steps=parameters.local_steps,
            overlap_steps=parameters.overlap_steps,
        )
        self._parameters = parameters
        self._outer = self._new_outer()
        self._global_D: Flat | None = None
        self._version = 0
        self._given: dict[Rank, int] = {}
        """Version of the global weights that each worker continued from last; 0: the first ones."""
        self._changes: dict[Rank, Change] = {}
        """Changes of the open round, in the order of arrival."""
        self._due: dict[Rank, int] = {}
        """Workers to answer at the end of the round, and the iterations of their changes."""
        self._opened_at = 0
        """Own iteration when the first change of the round came."""

    def _new_outer(self) -> DelayedNesterov:
        return DelayedNesterov(
            self._parameters.outer_learning_rate, self._parameters.outer_momentum
        )

    def server(self) -> Rank:
        return self.lowest()

    def model_for(self, form: Form) -> Flat:  # noqa: ARG002 - there is one model
        if self._global_D is None:
            self._global_D = self.own_weights()
        return self._global_D

    def take(self, form: Form, sender: Rank, change: Change) -> list[Instruction]:
        """Count a worker's change in the open round."""
        if form is not Form.CHANGE:
            raise ContractError(f"change of a site, of worker {sender}; allowed: of a worker")
        self.model_for(form)
        if not self._changes:
            self._opened_at = self.synchronizer.own
        if (earlier := self._changes.get(sender)) is not None:
            change = _sum_of(earlier, change)
        self._changes[sender] = change
        self._due[sender] = change.iteration
        return []

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its change counts."""
        super().left(rank)
        self._given.pop(rank, None)
        self._due.pop(rank, None)

    def begin_serving(self) -> None:
        if not self._changes:
            self._global_D, self._outer = None, self._new_outer()

    def _workers(self) -> frozenset[Rank]:
        return frozenset({self.rank, *self.synchronizer.in_step()})

    def blocking_peers(self) -> frozenset[Rank]:
        blocking = super().blocking_peers()
        return self._workers() - self._changes.keys() if self.rank in blocking else blocking

    # ---- the server ------------------------------------------------------------------------------

    def advance(self) -> list[Instruction]:
        """End the round if it is complete. Else answer those whose change is late."""
        instructions = super().advance()
        if self.is_mid_step:  # an own answer would be without that step
            return instructions
        if self._changes and self._is_complete():
            instructions += self._end_round()
        for rank in [one for one in self._due if self._given.get(one, 0) < self._version]:
            self._given[rank] = self._version
            instructions += self.answer(Form.CHANGE, rank, self._due.pop(rank))
        return instructions

    def _is_complete(self) -> bool:
        workers = self._workers()
        if self.server() != self.rank:
            return True  # a change for the server of a part of the workers: others send theirs
        if workers <= self._changes.keys():
            return True
        quorum = ceil(self._parameters.quorum * len(workers))
        waited = self.synchronizer.own - self._opened_at
        return len(self._changes) >= quorum and waited >= self._window()

    def _window(self) -> int:
        """Return the steps from the first change of a round to the end of the window."""
        answer = max((self._answer_steps(rank) for rank in self._due), default=0.0)
        free = self._parameters.overlap_steps - answer
        return max(0, round(self._parameters.grace * free))

    def _answer_steps(self, rank: Rank) -> float:
        """Return how long an answer is under way to that worker, in own steps; 0: unknown."""
        budget, delay = self.links.budget_bytes.get(rank), self.links.delay_steps.get(rank, 0.0)
        if budget is None:
            return delay
        size = self.context.coding.for_weights.values.bytes_of(self.size)
        return delay + size * self.context.spec.network.bandwidth_fraction / max(1, budget)

    def _end_round(self) -> list[Instruction]:
        """Make the outer step; answer the workers that wait."""
        form = Form.CHANGE
        global_D = self.model_for(form)
        weighed = [
            Contribution(_weight(one, self._parameters.weights), one.part)
            for _, one in sorted(self._changes.items())
        ]
        self._global_D = global_D - self._outer.step(-sample_mean(weighed, self.size))
        self._version += 1
        due, self._due, self._changes = self._due, {}, {}
        self._given.update(dict.fromkeys(due, self._version))
        answers = [one for rank, at in sorted(due.items()) for one in self.answer(form, rank, at)]
        if self.server() != self.rank:  # the others' server has newer weights
            self.begin_serving()
        return answers

    def state(self) -> dict[str, Value]:
        state: dict[str, Value] = {
            **super().state(),
            **self._outer.state(_OUTER),
            "version": self._version,
        }
        if self._global_D is not None:
            state["global_D"] = self._global_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore as all policies. The open round is lost; workers that waited for it continue
        alone."""
        super().restore(state)
        self._outer.restore(state, _OUTER)
        self._version = int(state["version"])
        self._given = {self.rank: self._version}
        self._global_D = vector_or_none(state, "global_D")


def _weight(change: Change, weights: str) -> int:
    """Return the weight of a change; of samples, or of samples times samples per step."""
    return change.samples * (change.local_batch_size if weights == "rate" else 1)


def _sum_of(earlier: Change, later: Change) -> Change:
    total_D = as_vector(earlier.part)
    later.part.add_to(total_D, np.float32(1))
    samples = earlier.samples + later.samples
    return Change(GradientPart(total_D), samples, later.local_batch_size, later.iteration)
