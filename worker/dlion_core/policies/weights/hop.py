"""Policy `hop`: workers send their weights and average them, within a bounded gap.

In iteration t a worker applies its own gradient and sends its weights, tagged with (t, its rank),
to all members. Receivers queue them per sender. Then it averages its own weights and each member's
newest of iterations t - s to t. It waits for members that have none there, except for the last b of
them (backup workers). Weights i iterations old count s - i + 1 (as recalled); with s = 0 the
average is the plain mean.

Token queues: a member's `PROGRESS` of t is a token for that iteration. No worker may be more than
`maxGap` finished steps ahead of a member. A worker that all members are `skipBehind` steps ahead of
averages their weights of the slowest member's iteration instead. Its own weights then count by
their age, or not at all. It continues from that iteration and skips those between.

Source: Luo et al., Hop: heterogeneity-aware decentralized training, ASPLOS 2019. Deviations: the
gradient is applied before the exchange (the paper's serial order). Weights within the staleness
count again until newer ones arrive. If numbers of neighbours differ, each also counts by
Metropolis-Hastings weights (`topology.relative_mixing_weights`).
"""

from collections.abc import Mapping

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import encode_weights
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    Event,
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    SendMessage,
    TopologyChanged,
    Value,
)
from dlion_core.policies.parameters import HopParameters
from dlion_core.policies.synchronization import SyncRule
from dlion_core.policies.weights.weight_queues import QueuedWeightsMachine
from dlion_core.topology.topology import relative_mixing_weights


class Hop(QueuedWeightsMachine):
    """One worker's update queues and pending average."""

    def __init__(self, context: PolicyContext, parameters: HopParameters) -> None:
        gap = parameters.max_gap
        longest = gap + parameters.staleness + 1
        super().__init__(context, SyncRule(slack=gap - 1), longest)
        self._parameters = parameters
        self._likeness = relative_mixing_weights(context.graph, context.rank)
        self._is_descending = False
        self._is_averaging = False
        self._level = 0
        """Iteration of the last average; ahead of the own step if this worker skipped iterations.
        """

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; a new graph changes the weights of neighbours."""
        if isinstance(event, TopologyChanged):
            self._likeness = relative_mixing_weights(event.graph, self.rank)
        return super().handle(event)

    def next_iteration(self) -> int:
        """Return the iteration after the last average."""
        return max(super().next_iteration(), self._level + 1)

    # ---- own steps -------------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        self._is_descending = True
        return [self.update(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Send a token and then the weights to all members."""
        if not self._is_descending:
            return []
        self._is_descending, self._is_averaging = False, True
        peers = self.synchronizer.active
        if not peers:
            return []
        payload = encode_weights(self.weights_D, self.context.coding)
        own = self.synchronizer.own
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, payload=payload)
        return [*self.progress(), *(SendMessage(peer, message) for peer in peers)]

    # ---- the average -----------------------------------------------------------------------------

    def advance(self) -> list[Instruction]:
        if not self._is_averaging or self.blocking_peers():
            return []
        self._is_averaging = False
        self._level = self._iteration_to_average()
        average_D = self._average(self._level)
        self.forget_before(self._level + 1 - self._parameters.staleness)
        return [] if average_D is None else [ReplaceWeights(average_D)]

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members with missing weights, if they are more than the backup workers."""
        if not self._is_averaging:
            return frozenset()
        last = self._iteration_to_average()
        first = last - self._parameters.staleness
        in_step = self.synchronizer.in_step()
        missing = [rank for rank in in_step if self.is_missing(rank, first, last)]
        if len(missing) <= self._parameters.backup_workers:
            return frozenset()
        return frozenset(missing)

    def _iteration_to_average(self) -> int:
        """The own iteration, or for a laggard that of the slowest member."""
        own, behind = self.synchronizer.own, self._parameters.skip_behind
        finished = [self.synchronizer.finished(rank) for rank in self.synchronizer.in_step()]
        if behind and finished and min(finished) >= own + behind:
            return min(finished)
        return own

    def _average(self, last: int) -> Flat | None:
        """Average in rank order in float32; None: only this worker's weights are there."""
        first = last - self._parameters.staleness
        weights_of: dict[Rank, tuple[int, Flat]] = {}
        for rank in self.synchronizer.active:
            newest = self.newest(rank, first, last)
            if newest is not None:
                weights_of[rank] = newest
        if not weights_of:
            return None
        weights_of[self.rank] = (self.synchronizer.own, self.weights_D)
        counts = {
            rank: max(0, iteration - first + 1) * self._likeness.get(rank, 1.0)
            for rank, (iteration, _) in weights_of.items()
        }
        total = sum(counts.values())
        average_D = np.zeros(self.size, np.float32)
        for rank in sorted(weights_of):
            if counts[rank]:
                average_D += np.float32(counts[rank] / total) * weights_of[rank][1]
        return average_D

    def state(self) -> dict[str, Value]:
        """Add the last average's iteration. A pending average is skipped after a restart."""
        return {**super().state(), "hop_level": self._level}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._level = int(state["hop_level"])
