"""What policies that exchange weights or updates have in common: who is there, and what fits.

`PeerMachine` sorts events out, keeps members and their batches, refuses nonsense; a policy says
what a local step, a descent and a `WEIGHTS` message lead to. Called by `adpsgd`, `eventgrad`,
`fedat`, `gaia`, `hierarchical`, `localsgd`, `weight_queues`. `spec.synchronization`,
`knowledgeTransfer` and link budgets have no part in these policies: each brings its own rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.policies.interface import (
    Descend,
    Descended,
    Event,
    Flat,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    Refuse,
    Send,
    Value,
)
from dlion_worker.policies.synchronization import Rule, Synchronizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_worker.policies.building import Context

_BATCH_OF = "batch_of_"


class PeerMachine(ABC):
    """A `Machine` whose parts are the hooks below, called in this order for each event."""

    def __init__(self, context: Context, rule: Rule) -> None:
        self.context = context
        self.size = context.layout.size
        self.synchronizer = Synchronizer(rule)
        self.local_batch_size = 1
        self.of_all = 0
        """The global batch size, as the driver has told it; 0: not known."""
        self._batch_of: dict[Rank, int] = {}
        self._finished: dict[Rank, int] = {}
        """Last iteration that each peer has told, member yet or not."""

    # ---- what a policy says --------------------------------------------------------------------

    @abstractmethod
    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """A local step is done; members are to be told of it, here or in `descended`."""

    @abstractmethod
    def descended(self) -> list[Instruction]:
        """The weights have taken this worker's own update."""

    @abstractmethod
    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """A `WEIGHTS` message. Raises: ContractError where it makes no sense."""

    @abstractmethod
    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """A peer's `PROGRESS`; without samples it is a greeting: nothing of that step follows."""

    @abstractmethod
    def joined(self, rank: Rank, iteration: int) -> None:
        """A member is there, anew."""

    @abstractmethod
    def left(self, rank: Rank) -> None:
        """A member is gone: nothing is expected of it."""

    @abstractmethod
    def go_on(self) -> list[Instruction]:
        """What has become possible; called after every event."""

    def greeting(self) -> Message:
        """What a newcomer is told: how far this worker is, and that no more of it will follow."""
        return Message(MessageKind.PROGRESS, self.synchronizer.own)

    def held_for(self) -> frozenset[Rank]:
        """Peers for whose messages the next local step waits, beside the synchroniser's."""
        return frozenset()

    # ---- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event; what is to be done about it, in order.

        Raises:
            ValueError: a local step that was not allowed, or values to send that are not finite.
        """
        told: list[Instruction] = []
        match event:
            case LocalStepDone():
                if held := self.held_for():
                    msg = f"local step {event.iteration} done while held for {sorted(held)}"
                    raise ValueError(msg)
                self.synchronizer.step_done(event.iteration)
                self.local_batch_size = event.local_batch_size
                self.of_all = event.global_batch_size
                told = self.stepped(event)
            case Descended():
                told = self.descended()
            case MessageArrived(sender=sender, message=message):
                told = self._message_arrived(sender, message)
            case MemberJoined(rank=rank, iteration=iteration):
                told = self._joined(rank, iteration)
            case MemberLeft(rank=rank):
                self._left(rank)
        return told + self.go_on()

    def waiting_for(self) -> frozenset[Rank]:
        """Peers that must be heard before the next local step may begin; empty: begin."""
        return self.synchronizer.waiting_for() | self.held_for()

    def next_iteration(self) -> int:
        """Number of the next local step."""
        return self.synchronizer.next_iteration()

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender not in self.context.neighbours:
            allowed = sorted(self.context.neighbours)
            return [Refuse(sender, f"message from worker {sender}; allowed: {allowed}")]
        if message.kind not in (MessageKind.PROGRESS, MessageKind.WEIGHTS):
            return self._unused(sender, message)
        try:
            self._check_header(message)
            if message.kind is MessageKind.WEIGHTS:
                return self.weights_arrived(sender, message)
            if message.payload:
                raise ContractError("PROGRESS with a payload; allowed: none")
        except ContractError as error:
            return [Refuse(sender, str(error))]
        self._finished[sender] = max(self._finished.get(sender, 0), message.iteration)
        if message.local_batch_size:
            self._batch_of[sender] = message.local_batch_size
        self.progress_arrived(sender, message)
        self.synchronizer.heard(sender, message.iteration)
        return []

    def _unused(self, sender: Rank, message: Message) -> list[Instruction]:
        if message.kind is not MessageKind.GRADIENT:
            return []  # the driver's business, or a section's that has no part here
        policy = self.context.spec.exchange.policy
        return [Refuse(sender, f"GRADIENT under policy {policy}; allowed: PROGRESS, WEIGHTS")]

    def _check_header(self, message: Message) -> None:
        most = self.context.most_samples
        if not 0 <= message.local_batch_size <= most:
            msg = (
                f"{message.kind.name} with a local batch of {message.local_batch_size} samples; "
                f"allowed: 0 to {most}"
            )
            raise ContractError(msg)
        if message.iteration < 1:
            msg = f"{message.kind.name} of iteration {message.iteration}; allowed: 1 on"
            raise ContractError(msg)

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        self.synchronizer.joined(rank, iteration)
        if rank in self._finished:  # its first words came before the word that its link is up
            self.synchronizer.heard(rank, self._finished[rank])
        self.joined(rank, iteration)
        if not self.synchronizer.stepped:
            return []
        return [Send(rank, self.greeting())]

    def _left(self, rank: Rank) -> None:
        self._finished.pop(rank, None)
        self._batch_of.pop(rank, None)
        self.synchronizer.left(rank)
        self.left(rank)

    # ---- for the policies ----------------------------------------------------------------------

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """This worker's weights, as they are now."""
        if self.context.replica is None:
            raise ValueError(f"policy {self.context.spec.exchange.policy} needs the replica")
        return self.context.replica.weights_D

    def furthest_told(self) -> int:
        """The last iteration that any peer has said to have finished; 0: none has."""
        return max(self._finished.values(), default=0)

    def progress(self, *, weights_version: int = 0) -> list[Instruction]:
        """Tells every member of the local step just done."""
        message = Message(
            MessageKind.PROGRESS, self.synchronizer.own, self.local_batch_size, weights_version
        )
        return [Send(peer, message) for peer in self.synchronizer.active]

    def global_batch_size(self) -> int:
        """This worker's local batch and the last known ones of all members.

        Of members that have not told theirs yet, this one and those make up the manifest's initial
        global batch.
        """
        known = self.local_batch_size
        unknown = 0
        for rank in self.synchronizer.active:
            known += self._batch_of.get(rank, 0)
            unknown += rank not in self._batch_of
        initial = self.context.spec.batching.global_batch_size.initial
        return max(known + unknown, initial) if unknown else known

    def update(self, gradient_D: Flat) -> Descend:
        """To the optimizer, for the batches of this worker and of all whom it hears."""
        of_all = 0 if self.context.hears_all else self.of_all
        return Descend(gradient_D, self.global_batch_size(), of_all)

    def update_alone(self, gradient_D: Flat) -> Descend:
        """To the optimizer, for this worker's own batch."""
        return Descend(gradient_D, self.local_batch_size, self.of_all)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Everything that a restart must bring back; members come anew as events.

        What is awaited when it is taken is not awaited after a restart: that iteration ends with
        the weights as they are.
        """
        return {
            "iteration": self.synchronizer.own,
            "local_batch_size": self.local_batch_size,
            **{f"{_BATCH_OF}{rank}": size for rank, size in self._batch_of.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        rule = self.synchronizer.rule
        self.synchronizer = Synchronizer(rule, iteration=int(state["iteration"]))
        self.local_batch_size = int(state["local_batch_size"])
        self._batch_of = {
            Rank(int(name.removeprefix(_BATCH_OF))): int(value)
            for name, value in state.items()
            if name.startswith(_BATCH_OF)
        }


def flat(value: Value) -> Flat:
    """A vector out of a state, a copy."""
    return np.array(value, np.float32)
