"""Policy `hop`: workers exchange their weights and average them, apart by a bounded gap.

In iteration t a worker takes its own gradient's step and sends its weights, tagged with (t, its
rank), to all members; receivers keep them in a queue for each sender. Then it averages its own
weights and each member's newest of iterations t - s to t. It waits for members of whom it has
none, but not for the last b of them (backup workers). Of weights i iterations old each counts
s - i + 1 (as recalled); with s = 0 the average is the plain mean.

Token queues: a member's `PROGRESS` of t is a token for that iteration; nobody may be more than
`maxGap` finished steps ahead of a member. A laggard that all members are `skipBehind` steps ahead
of averages their weights of the slowest one's iteration instead (its own count by their age, or
no more) and goes on from there: the iterations between are skipped.

Source: Luo et al., Hop: heterogeneity-aware decentralized training, ASPLOS 2019. Deviations: the
gradient is applied before the exchange (the paper's serial order); weights within the staleness
count again until newer ones come; where neighbours differ in number, each counts by
Metropolis-Hastings weights beside (`topology.likeness`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_worker.codecs import encode_weights
from dlion_worker.policies.interface import (
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    Regrouped,
    Replace,
    Send,
    Value,
)
from dlion_worker.policies.synchronization import Rule
from dlion_worker.policies.topology import likeness
from dlion_worker.policies.weight_queues import QueuedWeightsMachine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.names import Rank
    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import Event
    from dlion_worker.policies.weight_parameters import HopParameters


def hop(context: Context, parameters: HopParameters) -> Hop:
    """Weights to every peer, averaged by their iterations."""
    return Hop(context, parameters)


class Hop(QueuedWeightsMachine):
    """One worker's update queues, and the average that it is about to make."""

    def __init__(self, context: Context, parameters: HopParameters) -> None:
        gap = parameters.max_gap
        longest = gap + parameters.staleness + 1
        super().__init__(context, Rule(slack=gap - 1, spare=0, barrier=False), longest)
        self._parameters = parameters
        self._likeness = likeness(context.graph, context.rank)
        self._is_descending = False
        self._is_averaging = False
        self._level = 0
        """The iteration of the last average: past its own step where this worker has skipped."""

    def handle(self, event: Event) -> list[Instruction]:
        """Where the graph changes, what its neighbours count changes with it."""
        if isinstance(event, Regrouped):
            self._likeness = likeness(event.graph, self.context.rank)
        return super().handle(event)

    def next_iteration(self) -> int:
        """One more than the last average's."""
        return max(super().next_iteration(), self._level + 1)

    # ---- own steps -----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """The own gradient is applied first."""
        self._is_descending = True
        return [self.update(step.gradient_D)]

    def descended(self) -> list[Instruction]:
        """The weights go to all, a token before them."""
        if not self._is_descending:
            return []
        self._is_descending, self._is_averaging = False, True
        peers = self.synchronizer.active
        if not peers:
            return []
        payload = encode_weights(self.weights_D, self.context.coding)
        own = self.synchronizer.own
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, payload=payload)
        return [*self.progress(), *(Send(peer, message) for peer in peers)]

    # ---- the average ---------------------------------------------------------------------------

    def go_on(self) -> list[Instruction]:
        """The average, once enough is there."""
        if not self._is_averaging or self.held_for():
            return []
        self._is_averaging = False
        self._level = self._iteration_to_average()
        average_D = self._average(self._level)
        self._queues.forget_before(self._level + 1 - self._parameters.staleness)
        return [] if average_D is None else [Replace(average_D)]

    def held_for(self) -> frozenset[Rank]:
        """Members whose weights are missing, if they are more than the backup workers."""
        if not self._is_averaging:
            return frozenset()
        last = self._iteration_to_average()
        first = last - self._parameters.staleness
        in_step = self.synchronizer.in_step()
        missing = [rank for rank in in_step if self._queues.is_missing(rank, first, last)]
        if len(missing) <= self._parameters.backup_workers:
            return frozenset()
        return frozenset(missing)

    def _iteration_to_average(self) -> int:
        """Its own, or for a laggard that of the slowest member."""
        own, behind = self.synchronizer.own, self._parameters.skip_behind
        finished = [self.synchronizer.finished(rank) for rank in self.synchronizer.in_step()]
        if behind and finished and min(finished) >= own + behind:
            return min(finished)
        return own

    def _average(self, last: int) -> Flat | None:
        """In rank order, in float32; None: there is nothing but this worker's own."""
        first = last - self._parameters.staleness
        found: dict[Rank, tuple[int, Flat]] = {}
        for rank in self.synchronizer.active:
            newest = self._queues.newest(rank, first, last)
            if newest is not None:
                found[rank] = newest
        if not found:
            return None
        found[self.context.rank] = (self.synchronizer.own, self.weights_D)
        counts = {
            rank: max(0, iteration - first + 1) * self._likeness.get(rank, 1.0)
            for rank, (iteration, _) in found.items()
        }
        total = sum(counts.values())
        average_D = np.zeros(self.size, np.float32)
        for rank in sorted(found):
            if counts[rank]:
                average_D += np.float32(counts[rank] / total) * found[rank][1]
        return average_D

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """The queues too. Taken while weights are awaited, that average is passed over."""
        return {**super().state(), "hop_level": self._level}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        super().restore(state)
        self._level = int(state["hop_level"])
