"""Weights that peers have sent, by the iteration that they are of, until they are averaged.

Called by `hop` and `d2`. A peer's weights come in the order of its iterations, in a lane of their
own, so whose later weights are here has sent all earlier ones that it ever will.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import decode_weights
from dlion_worker.policies.peer_machine import PeerMachine, flat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import Flat, Instruction, Message, Value
    from dlion_worker.policies.synchronization import Rule

_QUEUED = "queued_"


class WeightQueues:
    """At most `longest` weights of each peer: of more, the oldest give way."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._by_peer: dict[Rank, dict[int, Flat]] = {}
        self._over: dict[Rank, int] = {}

    def add(self, peer: Rank, iteration: int, weights_D: Flat) -> None:
        """Weights of that iteration; of an earlier one than the last they say nothing new."""
        if iteration <= max(self._by_peer.get(peer, {}), default=0):
            return
        queue = self._by_peer.setdefault(peer, {})
        queue[iteration] = weights_D
        if len(queue) > self._longest:
            del queue[min(queue)]
        self.give_up(peer, iteration)

    def give_up(self, peer: Rank, iteration: int) -> None:
        """Of iterations up to that one nothing more is expected of the peer."""
        self._over[peer] = max(self._over.get(peer, 0), iteration)

    def newest(self, peer: Rank, first: int, last: int) -> tuple[int, Flat] | None:
        """The peer's latest weights of iterations `first` to `last`, with their iteration."""
        found = [at for at in self._by_peer.get(peer, {}) if first <= at <= last]
        return (max(found), self._by_peer[peer][max(found)]) if found else None

    def is_missing(self, peer: Rank, first: int, last: int) -> bool:
        """Whether weights of those iterations are still to come, and none of them is here."""
        return self._over.get(peer, 0) < last and self.newest(peer, first, last) is None

    def forget_before(self, first: int) -> None:
        """Drops what is of earlier iterations."""
        for queue in self._by_peer.values():
            for iteration in [at for at in queue if at < first]:
                del queue[iteration]

    def left(self, peer: Rank) -> None:
        """A peer is gone, and its weights with it."""
        self._by_peer.pop(peer, None)
        self._over.pop(peer, None)

    def state(self) -> dict[str, Value]:
        """All weights that wait; a restart expects nothing of before it."""
        return {
            f"{_QUEUED}{iteration}_{peer}": weights_D.copy()
            for peer, queue in self._by_peer.items()
            for iteration, weights_D in queue.items()
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        self._by_peer, self._over = {}, {}
        for name in sorted(state, key=lambda name: (len(name), name)):
            if name.startswith(_QUEUED):
                iteration, peer = map(int, name.removeprefix(_QUEUED).split("_"))
                self.add(Rank(peer), iteration, flat(state[name]))


class QueuedWeightsMachine(PeerMachine):
    """A machine that averages weights by iteration: what its peers say ends in their queues."""

    def __init__(self, context: Context, rule: Rule, longest_queue: int) -> None:
        super().__init__(context, rule)
        self._queues = WeightQueues(longest_queue)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Into the sender's queue; nonsense is not waited for."""
        try:
            weights_D = decode_weights(message.payload, self.size)
        except ContractError:
            self._queues.give_up(sender, message.iteration)
            raise
        self._queues.add(sender, message.iteration, weights_D)
        return []

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """A greeting: weights of that iteration went with the link before this one."""
        if not message.local_batch_size:
            self._queues.give_up(sender, message.iteration)

    def joined(self, rank: Rank, iteration: int) -> None:
        """What it has finished is not waited for."""
        self._queues.give_up(rank, iteration)

    def left(self, rank: Rank) -> None:
        """Its queue is void."""
        self._queues.left(rank)

    def state(self) -> dict[str, Value]:
        """The queues too."""
        return {**super().state(), **self._queues.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        super().restore(state)
        self._queues.restore(state)
