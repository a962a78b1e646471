"""Policy `d2`: decentralised training whose error does not grow with the skew of the data.

w+ = W (2w - w_prev - eta g + eta g_prev), in lock step with the neighbours in W. Let z be the
weights after this worker's own `ApplyGradient` (with learning rate and momentum). Then w+ = W (z +
w - z_prev). Each worker sends h = z + correction, averages the received values by its row of W, and
keeps the correction w+ - z for the next iteration. The first iteration has none: plain gossip.

W is symmetric with row sums of 1, over all n workers that may ever take part. `complete` gives each
1/n. `ring` gives the self weight to the worker itself and the rest to its ring neighbours. The
smallest eigenvalue is at least 2 selfWeight - 1. D2 needs more than -1/3, so the self weight must
exceed 1/3. On other topologies than all-to-all, W follows the graph, with the same bound
(`topology.lazy_mixing_row`). The weight of an absent neighbour goes to the worker itself, so W
stays symmetric and no eigenvalue falls. The receiver's own value replaces one that a member has not
sent.

The corrections of all workers must sum to 0: their sum acts as a permanent extra gradient. Mixing
by a symmetric W keeps the sum. It changes if a worker leaves, continues from a checkpoint, or mixes
a value while the other side does not. Then some worker mixes with a different set of workers than
before, or with weights from elsewhere. If this happens in iteration t, that worker announces a
*restart*: in iteration t + n all workers drop their corrections and do plain gossip.

Each message contains the last restart that its sender knows, as iterations ahead (1 to n - 1), and
receivers repeat it. A worker d links away knows it before its step t + d + 1, and d is at most n -
1. A change meanwhile causes a later restart; a worker makes all that it knows. Until then
corrections stay: near the optimum, dropping one would move all others away from it.

Receivers average (by W). Rounding errors of codec and float32 stay with their worker, and sums are
in float64, because errors of the mean would accumulate quadratically.

Source: Tang et al., D2: decentralized training over decentralized data, ICML 2018. Ours: momentum,
and restarts for members that join and leave.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import decode_weights, encode_weights
from dlion_core.codecs.payload import Payload
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    SendMessage,
    Value,
)
from dlion_core.policies.parameters import D2Parameters
from dlion_core.policies.synchronization import SyncRule
from dlion_core.policies.weights.weight_queues import QueuedWeightsMachine
from dlion_core.topology.topology import lazy_mixing_row, ring_neighbours

Exact = NDArray[np.float64]

_QUEUE_LENGTH = 4
"""Iterations kept per neighbour; one in lock step is at most one ahead."""


def mixing_row(
    members: Sequence[Rank], rank: Rank, mixing: str, self_weight: float
) -> dict[Rank, float]:
    """Return the worker's row of W over the members (in rank order), without zeros.

    >>> mixing_row([0, 1, 2, 3], 0, "ring", 0.5)
    {0: 0.5, 1: 0.25, 3: 0.25}
    """
    count = len(members)
    if mixing == "complete" or count == 1:
        return dict.fromkeys(members, 1 / count)
    others = ring_neighbours(members, rank)
    row = dict.fromkeys(others, (1 - self_weight) / len(others))
    return dict(sorted({rank: self_weight, **row}.items()))


class D2(QueuedWeightsMachine):
    """One worker's correction and pending mixing."""

    def __init__(self, context: PolicyContext, parameters: D2Parameters) -> None:
        # On a ring, iterations of two workers may differ by their distance.
        is_complete = context.spec.exchange.topology == "allToAll"
        is_level = is_complete and parameters.mixing == "complete"
        slack = 0 if is_level else len(context.ranks)
        super().__init__(context, SyncRule(slack=slack), _QUEUE_LENGTH)
        self._whole_row = (
            mixing_row(context.ranks, context.rank, parameters.mixing, parameters.self_weight)
            if is_complete
            else lazy_mixing_row(context.graph, context.rank, parameters.self_weight)
        )
        """This worker's row of W if all workers are present."""
        self._workers = len(context.ranks)
        self._is_descending = False
        self._correction_D: Exact | None = None
        self._half_D: Exact | None = None
        """The value to mix, while those of neighbours are awaited."""
        self._payload: Payload = b""
        self._sent_to: set[Rank] = set()
        self._contributors: frozenset[Rank] | None = frozenset(self._whole_row) - {context.rank}
        """Members of the last mixing; initially all. None: the weights came from elsewhere."""
        self._restarts: set[int] = set()
        """Future iterations in which corrections are dropped."""

    def _row(self) -> dict[Rank, float]:
        there = {self.rank, *self.synchronizer.active}
        row = {peer: weight for peer, weight in self._whole_row.items() if peer in there}
        away = sum(weight for peer, weight in self._whole_row.items() if peer not in there)
        return {**row, self.rank: row[self.rank] + away}

    # ---- own steps -------------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        self._is_descending = True
        return [*self.progress(), self.update(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Compute the value to mix: the current weights plus the correction."""
        if self._is_descending:
            self._is_descending = False
            self._restart_if_due()
            self._half_D = self.weights_D.astype(np.float64)
            if self._correction_D is not None:
                self._half_D += self._correction_D
            half_D = self._half_D.astype(np.float32)
            self._payload = encode_weights(half_D, self.context.coding)
        return []

    # ---- mixing ----------------------------------------------------------------------------------

    def advance(self) -> list[Instruction]:
        """Send the value once to each current neighbour; mix when all values have arrived."""
        if self._half_D is None:
            return []
        row, own = self._row(), self.synchronizer.own
        new = [peer for peer in row if peer != self.rank and peer not in self._sent_to]
        message = Message(
            MessageKind.WEIGHTS,
            own,
            self.local_batch_size,
            weights_version=self._last_restart_in(),
            payload=self._payload,
        )
        self._sent_to.update(new)
        instructions: list[Instruction] = [SendMessage(peer, message) for peer in new]
        if not self.blocking_peers():
            instructions.append(self._mix(row, self._half_D))
        return instructions

    def blocking_peers(self) -> frozenset[Rank]:
        if self._half_D is None:
            return frozenset()
        own = self.synchronizer.own
        return frozenset(
            rank
            for rank in self.synchronizer.in_step()
            if rank in self._whole_row and self.is_missing(rank, own, own)
        )

    def _mix(self, row: Mapping[Rank, float], half_D: Exact) -> ReplaceWeights:
        own = self.synchronizer.own
        ours_D = decode_weights(self._payload, self.size)
        parts = {rank: self.newest(rank, own, own) for rank in row}
        mixed_D: Exact = half_D - ours_D
        for rank, weight in row.items():
            part = parts[rank]
            mixed_D += weight * (ours_D if part is None else part[1]).astype(np.float64)
        self._correction_D = mixed_D - self.weights_D
        contributors = frozenset(rank for rank, part in parts.items() if part is not None)
        if contributors != self._contributors:
            self._restarts.add(own + self._workers)
        self._contributors = contributors
        self._half_D, self._payload = None, b""
        self._sent_to.clear()
        self.forget_before(own + 1)
        return ReplaceWeights(mixed_D.astype(np.float32))

    # ---- restarts --------------------------------------------------------------------------------

    def _restart_if_due(self) -> None:
        """Call before the weights of the finished iteration are corrected."""
        due = {at for at in self._restarts if at <= self.synchronizer.own}
        if due:
            self._correction_D = None
        self._restarts -= due

    def _last_restart_in(self) -> int:
        """Iterations until the last restart that may be announced now; 0: none. A later restart is
        announced in a later message."""
        ahead = (at - self.synchronizer.own for at in self._restarts)
        return max((count for count in ahead if count < self._workers), default=0)

    # ---- messages from peers ---------------------------------------------------------------------

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Queue the value, and record the restart that the sender announces."""
        ahead, own = message.weights_version, self.synchronizer.own
        if not 0 <= ahead < self._workers:
            self.give_up(sender, message.iteration)
            raise ContractError(
                f"WEIGHTS with a restart in {ahead} iterations; allowed: 0 to {self._workers - 1}"
            )
        instructions = super().weights_arrived(sender, message)
        restart = message.iteration + ahead
        if ahead and own < restart <= own + 2 * self._workers:  # a neighbour cannot know any other
            self._restarts.add(restart)
        return instructions

    def left(self, rank: Rank) -> None:
        """Drop its queue, and forget that it has received the value."""
        super().left(rank)
        self._sent_to.discard(rank)

    def state(self) -> dict[str, Value]:
        """Add the correction. A pending mixing is skipped after a restart."""
        state = super().state()
        if self._correction_D is not None:
            state["d2_correction_D"] = self._correction_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned. The next restart is later than any known before."""
        super().restore(state)
        self._contributors, self._restarts = None, set()
        self._correction_D = None
        if "d2_correction_D" in state:
            self._correction_D = np.array(state["d2_correction_D"], np.float64)
