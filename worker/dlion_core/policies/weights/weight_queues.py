"""Queues of received weights by peer and iteration, until they are averaged.

Used by `hop` and `d2`. A peer's weights arrive in the order of its iterations, on their own lane.
So when later weights of a peer are here, it sends no earlier ones.
"""

from collections.abc import Mapping

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import Flat, Instruction, Message, Value
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_from_state
from dlion_core.policies.synchronization import SyncRule

_QUEUED = "queued_"


class QueuedWeightsMachine(PeerMachine):
    """Base of machines that average weights by iteration; a queue drops its oldest weights."""

    def __init__(self, context: PolicyContext, rule: SyncRule, longest_queue: int) -> None:
        super().__init__(context, rule)
        self._longest_queue = longest_queue
        self._queues: dict[Rank, dict[int, Flat]] = {}
        self._over: dict[Rank, int] = {}
        """The iteration up to which nothing more is expected, by peer."""

    def enqueue(self, peer: Rank, iteration: int, weights_D: Flat) -> None:
        """Add weights of that iteration; ignore iterations before the last one."""
        if iteration <= max(self._queues.get(peer, {}), default=0):
            return
        queue = self._queues.setdefault(peer, {})
        queue[iteration] = weights_D
        if len(queue) > self._longest_queue:
            del queue[min(queue)]
        self.give_up(peer, iteration)

    def give_up(self, peer: Rank, iteration: int) -> None:
        """Expect nothing more from the peer for iterations up to that one."""
        self._over[peer] = max(self._over.get(peer, 0), iteration)

    def newest(self, peer: Rank, first: int, last: int) -> tuple[int, Flat] | None:
        """Return the peer's latest weights of iterations `first` to `last` and their iteration."""
        iterations = [at for at in self._queues.get(peer, {}) if first <= at <= last]
        return (max(iterations), self._queues[peer][max(iterations)]) if iterations else None

    def is_missing(self, peer: Rank, first: int, last: int) -> bool:
        """Whether weights of those iterations may still arrive and none is here."""
        return self._over.get(peer, 0) < last and self.newest(peer, first, last) is None

    def forget_before(self, first: int) -> None:
        for queue in self._queues.values():
            for iteration in [at for at in queue if at < first]:
                del queue[iteration]

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Queue the weights. Do not wait for a replacement of invalid ones."""
        try:
            weights_D = self.peer_weights(message.payload)
        except ContractError:
            self.give_up(sender, message.iteration)
            raise
        self.enqueue(sender, message.iteration, weights_D)
        return []

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """For a greeting: earlier weights were lost with the previous link."""
        if not message.local_batch_size:
            self.give_up(sender, message.iteration)

    def joined(self, rank: Rank, iteration: int) -> None:
        """Do not wait for iterations that the peer has finished."""
        self.give_up(rank, iteration)

    def left(self, rank: Rank) -> None:
        self._queues.pop(rank, None)
        self._over.pop(rank, None)

    def state(self) -> dict[str, Value]:
        queued: dict[str, Value] = {
            f"{_QUEUED}{iteration}_{peer}": weights_D.copy()
            for peer, queue in self._queues.items()
            for iteration, weights_D in queue.items()
        }
        return {**super().state(), **queued}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._queues, self._over = {}, {}
        for name in sorted(state, key=lambda name: (len(name), name)):
            if name.startswith(_QUEUED):
                iteration, peer = map(int, name.removeprefix(_QUEUED).split("_"))
                self.enqueue(Rank(peer), iteration, vector_from_state(state[name]))
