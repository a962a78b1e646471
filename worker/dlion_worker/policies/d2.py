"""Policy `d2`: decentralised training whose error does not grow with the skew of the data.

w+ = W (2w - w_prev - eta g + eta g_prev), in lock step with the neighbours in W. With z, the
weights after this worker's own `Descend` (so learning rate and momentum are applied), that is
w+ = W (z + w - z_prev): each worker sends h = z + correction, averages what came by its row of W,
and keeps the correction w+ - z for the next iteration. The first iteration has none: plain gossip.

W is symmetric, each row summing to 1: `complete` gives each of n members just now 1/n; `ring`, over
all workers that may ever take part, the self weight to itself and the rest to the workers beside
it, whose smallest eigenvalue is at least 2 selfWeight - 1: above -1/3, as D2 needs, for a self
weight above 1/3. On another topology than all-to-all W is over its graph, with the same bound
(`topology.lazy_row`). On a ring or a graph the part of a neighbour that is not there is the
worker's own: who is beside whom does not hang on whom each has lost, of which no two need agree.
What a member has not sent counts for the receiver's own. Whenever the contributors change, the
correction is void and the next iteration is plain gossip.

Receivers average (by W). What a codec or float32 rounds off stays with its worker, and sums are in
float64: errors of the mean would add up twice over.

Source: Tang et al., D2: decentralized training over decentralized data, ICML 2018. Momentum, and
members that come and go, are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_worker.codecs import decode_weights, encode_weights
from dlion_worker.policies.interface import (
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    Replace,
    Send,
    Value,
)
from dlion_worker.policies.synchronization import Rule
from dlion_worker.policies.topology import beside, lazy_row
from dlion_worker.policies.weight_queues import QueuedWeightsMachine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_worker.codecs.payload import Payload
    from dlion_worker.policies.building import Context
    from dlion_worker.policies.weight_parameters import D2Parameters

Exact = NDArray[np.float64]

_QUEUE_LENGTH = 4
"""Iterations kept of a neighbour; one in lock step is at most one ahead."""


def d2(context: Context, parameters: D2Parameters) -> D2:
    """Gossip of weights, corrected by the step before."""
    return D2(context, parameters)


def mixing_row(
    members: Sequence[Rank], rank: Rank, mixing: str, self_weight: float
) -> dict[Rank, float]:
    """That worker's row of W over those members (in rank order), without zeros.

    >>> mixing_row([0, 1, 2, 3], 0, "ring", 0.5)
    {0: 0.5, 1: 0.25, 3: 0.25}
    """
    count = len(members)
    if mixing == "complete" or count == 1:
        return dict.fromkeys(members, 1 / count)
    others = beside(members, rank)
    row = dict.fromkeys(others, (1 - self_weight) / len(others))
    return dict(sorted({rank: self_weight, **row}.items()))


class D2(QueuedWeightsMachine):
    """One worker's correction, and the mixing that it is about to do."""

    def __init__(self, context: Context, parameters: D2Parameters) -> None:
        # On a ring workers that are far from each other may be apart by their distance.
        self._is_complete = context.spec.exchange.topology == "allToAll"
        is_level = self._is_complete and parameters.mixing == "complete"
        slack = 0 if is_level else len(context.ranks)
        super().__init__(context, Rule(slack=slack, spare=0, barrier=False), _QUEUE_LENGTH)
        self._parameters = parameters
        self._is_descending = False
        self._correction_D: Exact | None = None
        self._half_D: Exact | None = None
        """What is to be mixed, while neighbours' are awaited."""
        self._payload: Payload = b""
        self._sent_to: set[Rank] = set()
        self._contributors: tuple[int, ...] = ()

    def _row(self) -> dict[Rank, float]:
        context, parameters = self.context, self._parameters
        members = sorted([*self.synchronizer.active, context.rank])
        if not self._is_complete:
            row = lazy_row(context.graph, context.rank, parameters.self_weight)
        elif parameters.mixing == "ring":
            everybody = sorted(context.ranks)
            row = mixing_row(everybody, context.rank, "ring", parameters.self_weight)
        else:
            return mixing_row(members, context.rank, "complete", parameters.self_weight)
        away = sum(weight for peer, weight in row.items() if peer not in members)
        there = {peer: weight for peer, weight in row.items() if peer in members}
        return {**there, context.rank: row[context.rank] + away}

    # ---- own steps -----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """The own gradient is applied first."""
        self._is_descending = True
        return [*self.progress(), self.update(step.gradient_D)]

    def descended(self) -> list[Instruction]:
        """What is to be mixed: the weights now, corrected."""
        if self._is_descending:
            self._is_descending = False
            self._half_D = self.weights_D.astype(np.float64)
            if self._correction_D is not None:
                self._half_D += self._correction_D
            half_D = self._half_D.astype(np.float32)
            self._payload = encode_weights(half_D, self.context.coding)
        return []

    # ---- mixing --------------------------------------------------------------------------------

    def go_on(self) -> list[Instruction]:
        """To each neighbour of now this worker's part, once; the mixing when all theirs are in."""
        if self._half_D is None:
            return []
        row, own = self._row(), self.synchronizer.own
        new = [peer for peer in row if peer != self.context.rank and peer not in self._sent_to]
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, payload=self._payload)
        self._sent_to.update(new)
        told: list[Instruction] = [Send(peer, message) for peer in new]
        if not self.held_for():
            told.append(self._mix(row, self._half_D))
        return told

    def held_for(self) -> frozenset[Rank]:
        """Neighbours whose part of this iteration is missing."""
        if self._half_D is None:
            return frozenset()
        own = self.synchronizer.own
        return frozenset(
            rank
            for rank in self.synchronizer.in_step()
            if rank in self._row() and self._queues.is_missing(rank, own, own)
        )

    def _mix(self, row: Mapping[Rank, float], half_D: Exact) -> Replace:
        own = self.synchronizer.own
        ours_D = decode_weights(self._payload, self.size)
        mixed_D: Exact = half_D - ours_D
        contributors = []
        for rank, weight in row.items():
            found = self._queues.newest(rank, own, own)
            mixed_D += weight * (ours_D if found is None else found[1]).astype(np.float64)
            if found is not None:
                contributors.append(int(rank))
        is_changed = bool(self._contributors) and self._contributors != tuple(contributors)
        self._correction_D = None if is_changed else mixed_D - self.weights_D
        self._contributors = tuple(contributors)
        self._half_D, self._payload = None, b""
        self._sent_to.clear()
        self._queues.forget_before(own + 1)
        return Replace(mixed_D.astype(np.float32))

    # ---- others' -------------------------------------------------------------------------------

    def left(self, rank: Rank) -> None:
        """Its queue is void, and so is that it had our part."""
        super().left(rank)
        self._sent_to.discard(rank)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Taken while parts are awaited: that mixing is passed over, and plain gossip follows."""
        state = super().state()
        if self._half_D is None and self._correction_D is not None:
            state["d2_correction_D"] = self._correction_D.copy()
            state["d2_contributors"] = np.array(self._contributors, np.int64)
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        super().restore(state)
        self._correction_D, self._contributors = None, ()
        if "d2_correction_D" in state:
            self._correction_D = np.array(state["d2_correction_D"], np.float64)
            contributors = np.asarray(state["d2_contributors"]).tolist()
            self._contributors = tuple(int(rank) for rank in contributors)
