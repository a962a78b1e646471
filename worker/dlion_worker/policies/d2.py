"""Policy `d2`: decentralised training whose error does not grow with the skew of the data.

w+ = W (2w - w_prev - eta g + eta g_prev), in lock step with the neighbours in W. With z, the
weights after this worker's own `Descend` (so learning rate and momentum are applied), that is
w+ = W (z + w - z_prev): each worker sends h = z + correction, averages what came by its row of W,
and keeps the correction w+ - z for the next iteration. The first iteration has none: plain gossip.

W is symmetric, each row summing to 1, over all workers that may ever take part, n of them:
`complete` gives each of them 1/n; `ring` the self weight to the worker itself and the rest to those
beside it, whose smallest eigenvalue is at least 2 selfWeight - 1: above -1/3, as D2 needs, for a
self weight above 1/3. On another topology than all-to-all W is over its graph, with the same bound
(`topology.lazy_row`). The part of a neighbour that is not there is the worker's own: W stays
symmetric whoever has lost whom, of which no two others need agree, and no eigenvalue falls. What a
member has not sent counts for the receiver's own, too.

The corrections of all workers must sum to 0: their sum acts as one more gradient for ever. Mixing
by a symmetric W keeps it. It changes where a worker leaves with its correction or goes on from a
checkpoint, or where of two one is mixed with the other and not the other way round. Each of these
shows at some worker, which mixes with others than the time before, or for the first time since its
weights came from elsewhere. If that was in iteration t, it announces a *restart*: in iteration
t + n every worker's correction is void, and all do plain gossip, whose corrections sum to 0. Each
part names the last restart that its sender knows of, by how many iterations (1 to n - 1) it is
ahead, and who hears of one names it in turn. So who is d links away knows of it before its step
t + d + 1, and d is at most n - 1. What changes on the way is a change itself, with a restart still
later; who knows of several makes all. Until then corrections stay: near the optimum each is right
by itself, and where one is missing the others hold all at the optimum that they had with it.

Receivers average (by W). What a codec or float32 rounds off stays with its worker, and sums are in
float64: errors of the mean would add up twice over.

Source: Tang et al., D2: decentralized training over decentralized data, ICML 2018. Momentum, and
members that come and go, with restarts, are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
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


def whole_row(context: Context, parameters: D2Parameters) -> dict[Rank, float]:
    """This worker's row of W when all are there."""
    if context.spec.exchange.topology != "allToAll":
        return lazy_row(context.graph, context.rank, parameters.self_weight)
    return mixing_row(context.ranks, context.rank, parameters.mixing, parameters.self_weight)


class D2(QueuedWeightsMachine):
    """One worker's correction, and the mixing that it is about to do."""

    def __init__(self, context: Context, parameters: D2Parameters) -> None:
        # On a ring workers that are far from each other may be apart by their distance.
        is_complete = context.spec.exchange.topology == "allToAll"
        is_level = is_complete and parameters.mixing == "complete"
        slack = 0 if is_level else len(context.ranks)
        super().__init__(context, Rule(slack=slack, spare=0, barrier=False), _QUEUE_LENGTH)
        self._whole_row = whole_row(context, parameters)
        self._workers = len(context.ranks)
        self._is_descending = False
        self._correction_D: Exact | None = None
        self._half_D: Exact | None = None
        """What is to be mixed, while neighbours' are awaited."""
        self._payload: Payload = b""
        self._sent_to: set[Rank] = set()
        self._contributors: frozenset[Rank] | None = frozenset(self._whole_row) - {context.rank}
        """With whom the last mixing was, of the first iteration all; None: weights from elsewhere.
        """
        self._restarts: set[int] = set()
        """Iterations to come in which corrections are void."""

    def _row(self) -> dict[Rank, float]:
        """Over those who are there."""
        there = {self.context.rank, *self.synchronizer.active}
        row = {peer: weight for peer, weight in self._whole_row.items() if peer in there}
        away = sum(weight for peer, weight in self._whole_row.items() if peer not in there)
        return {**row, self.context.rank: row[self.context.rank] + away}

    # ---- own steps -----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """The own gradient is applied first."""
        self._is_descending = True
        return [*self.progress(), self.update(step.gradient_D)]

    def descended(self) -> list[Instruction]:
        """What is to be mixed: the weights now, corrected."""
        if self._is_descending:
            self._is_descending = False
            self._restart_if_due()
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
        message = Message(
            MessageKind.WEIGHTS,
            own,
            self.local_batch_size,
            weights_version=self._last_restart_in(),
            payload=self._payload,
        )
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
            if rank in self._whole_row and self._queues.is_missing(rank, own, own)
        )

    def _mix(self, row: Mapping[Rank, float], half_D: Exact) -> Replace:
        own = self.synchronizer.own
        ours_D = decode_weights(self._payload, self.size)
        found = {rank: self._queues.newest(rank, own, own) for rank in row}
        mixed_D: Exact = half_D - ours_D
        for rank, weight in row.items():
            part = found[rank]
            mixed_D += weight * (ours_D if part is None else part[1]).astype(np.float64)
        self._correction_D = mixed_D - self.weights_D
        contributors = frozenset(rank for rank, part in found.items() if part is not None)
        if contributors != self._contributors:
            self._restarts.add(own + self._workers)
        self._contributors = contributors
        self._half_D, self._payload = None, b""
        self._sent_to.clear()
        self._queues.forget_before(own + 1)
        return Replace(mixed_D.astype(np.float32))

    # ---- restarts ------------------------------------------------------------------------------

    def _restart_if_due(self) -> None:
        """Before the weights of the iteration just done are corrected."""
        due = {at for at in self._restarts if at <= self.synchronizer.own}
        if due:
            self._correction_D = None
        self._restarts -= due

    def _last_restart_in(self) -> int:
        """Iterations from the own one to the last restart that it may name yet; 0: there is none.
        One that comes later is for the parts to come."""
        ahead = (at - self.synchronizer.own for at in self._restarts)
        return max((count for count in ahead if count < self._workers), default=0)

    # ---- others' -------------------------------------------------------------------------------

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Into the sender's queue, and the restart that it knows of to those to come."""
        ahead, own = message.weights_version, self.synchronizer.own
        if not 0 <= ahead < self._workers:
            self._queues.give_up(sender, message.iteration)
            raise ContractError(
                f"WEIGHTS with a restart in {ahead} iterations; allowed: 0 to {self._workers - 1}"
            )
        told = super().weights_arrived(sender, message)
        restart = message.iteration + ahead
        if ahead and own < restart <= own + 2 * self._workers:  # of no other can a neighbour know
            self._restarts.add(restart)
        return told

    def left(self, rank: Rank) -> None:
        """Its queue is void, and so is that it had our part."""
        super().left(rank)
        self._sent_to.discard(rank)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Taken while parts are awaited: that mixing is passed over."""
        state = super().state()
        if self._correction_D is not None:
            state["d2_correction_D"] = self._correction_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave. The restart that follows is later than any known before."""
        super().restore(state)
        self._contributors, self._restarts = None, set()
        self._correction_D = None
        if "d2_correction_D" in state:
            self._correction_D = np.array(state["d2_correction_D"], np.float64)
