"""Common base of policies that exchange weights or updates.

`PeerMachine` dispatches events, tracks members and their batch sizes, and rejects invalid messages.
Subclasses define the reaction to a local step, an applied update and a `WEIGHTS` message. Used by
`adpsgd`, `eventgrad`, `fedat`, `gaia`, `hierarchical`, `localsgd`, `weight_queues`. These policies
ignore `spec.synchronization`, `knowledgeTransfer` and link budgets; each has its own rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.policies.interface import (
    ApplyGradient,
    Event,
    Flat,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
    UpdateApplied,
    Value,
)
from dlion_core.policies.synchronization import Synchronizer, SyncRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_core.policies.factory import PolicyContext

_BATCH_OF = "batch_of_"


class PeerMachine(ABC):
    """A `PolicyMachine` that calls the hooks below for each event, `advance` last."""

    def __init__(self, context: PolicyContext, rule: SyncRule) -> None:
        self.context = context
        self.size = context.layout.size
        self.synchronizer = Synchronizer(rule)
        self.local_batch_size = 1
        self.reported_batch_size = 0
        """Global batch size that the driver reported; 0: unknown."""
        self._batch_of: dict[Rank, int] = {}
        self._finished: dict[Rank, int] = {}
        """Last iteration that each peer reported, member or not."""

    # ---- hooks of a policy -----------------------------------------------------------------------

    @abstractmethod
    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Handle a local step. Notify members here or in `update_applied`."""

    @abstractmethod
    def update_applied(self) -> list[Instruction]:
        """Handle the application of this worker's own update to the weights."""

    @abstractmethod
    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Handle a `WEIGHTS` message. Raises ContractError if it is invalid."""

    @abstractmethod
    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Handle a `PROGRESS`. With zero samples, no other message of that step follows."""

    @abstractmethod
    def joined(self, rank: Rank, iteration: int) -> None:
        """Handle a member that joins or returns."""

    @abstractmethod
    def left(self, rank: Rank) -> None:
        """Handle a member that left; expect nothing from it."""

    @abstractmethod
    def advance(self) -> list[Instruction]:
        """Do what has become possible. Called after every event."""

    def greeting(self) -> Message:
        """Return the message for a new member: this worker's iteration, with nothing to follow."""
        return Message(MessageKind.PROGRESS, self.synchronizer.own)

    def blocking_peers(self) -> frozenset[Rank]:
        """Return peers to wait for, in addition to those of the synchronizer."""
        return frozenset()

    # ---- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; return instructions in execution order.

        Raises:
            ValueError: a local step that was not allowed, or values to send that are not finite.
        """
        instructions: list[Instruction] = []
        match event:
            case LocalStepDone():
                if held := self.blocking_peers():
                    msg = f"local step {event.iteration} done while held for {sorted(held)}"
                    raise ValueError(msg)
                self.synchronizer.step_done(event.iteration)
                self.local_batch_size = event.local_batch_size
                self.reported_batch_size = event.global_batch_size
                instructions = self.stepped(event)
            case UpdateApplied():
                instructions = self.update_applied()
            case MessageArrived(sender=sender, message=message):
                instructions = self._message_arrived(sender, message)
            case MemberJoined(rank=rank, iteration=iteration):
                instructions = self._joined(rank, iteration)
            case MemberLeft(rank=rank):
                self._left(rank)
        return instructions + self.advance()

    def waiting_for(self) -> frozenset[Rank]:
        return self.synchronizer.waiting_for() | self.blocking_peers()

    def next_iteration(self) -> int:
        return self.synchronizer.next_iteration()

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender not in self.context.neighbours:
            allowed = sorted(self.context.neighbours)
            return [RejectMessage(sender, f"message from worker {sender}; allowed: {allowed}")]
        if message.kind not in (MessageKind.PROGRESS, MessageKind.WEIGHTS):
            return self._unused(sender, message)
        try:
            self._check_header(message)
            if message.kind is MessageKind.WEIGHTS:
                return self.weights_arrived(sender, message)
            if message.payload:
                raise ContractError("PROGRESS with a payload; allowed: none")
        except ContractError as error:
            return [RejectMessage(sender, str(error))]
        self._finished[sender] = max(self._finished.get(sender, 0), message.iteration)
        if message.local_batch_size:
            self._batch_of[sender] = message.local_batch_size
        self.progress_arrived(sender, message)
        self.synchronizer.heard(sender, message.iteration)
        return []

    def _unused(self, sender: Rank, message: Message) -> list[Instruction]:
        if message.kind is not MessageKind.GRADIENT:
            return []  # handled by the driver, or unused by these policies
        policy = self.context.spec.exchange.policy
        return [
            RejectMessage(sender, f"GRADIENT under policy {policy}; allowed: PROGRESS, WEIGHTS")
        ]

    def _check_header(self, message: Message) -> None:
        most = self.context.max_samples
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
        if rank in self._finished:  # its first message arrived before MemberJoined
            self.synchronizer.heard(rank, self._finished[rank])
        self.joined(rank, iteration)
        if not self.synchronizer.stepped:
            return []
        return [SendMessage(rank, self.greeting())]

    def _left(self, rank: Rank) -> None:
        self._finished.pop(rank, None)
        self._batch_of.pop(rank, None)
        self.synchronizer.left(rank)
        self.left(rank)

    # ---- for the policies ------------------------------------------------------------------------

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        if self.context.replica is None:
            raise ValueError(f"policy {self.context.spec.exchange.policy} needs the replica")
        return self.context.replica.weights_D

    def max_reported_iteration(self) -> int:
        """The highest iteration that any peer reported as finished; 0: none."""
        return max(self._finished.values(), default=0)

    def progress(self, *, weights_version: int = 0) -> list[Instruction]:
        """Report the local step just done to every member."""
        message = Message(
            MessageKind.PROGRESS, self.synchronizer.own, self.local_batch_size, weights_version
        )
        return [SendMessage(peer, message) for peer in self.synchronizer.active]

    def global_batch_size(self) -> int:
        """Return the sum of this worker's batch and the last known batches of all members.

        If some members have not reported theirs, assume that the sum is the manifest's initial
        global batch size.
        """
        known = self.local_batch_size
        unknown = 0
        for rank in self.synchronizer.active:
            known += self._batch_of.get(rank, 0)
            unknown += rank not in self._batch_of
        initial = self.context.spec.batching.global_batch_size.initial
        return max(known + unknown, initial) if unknown else known

    def update(self, gradient_D: Flat) -> ApplyGradient:
        """Pass the gradient to the optimizer, for the batches of this worker and its members."""
        reported_batch_size = 0 if self.context.exchanges_with_all else self.reported_batch_size
        return ApplyGradient(gradient_D, self.global_batch_size(), reported_batch_size)

    def update_alone(self, gradient_D: Flat) -> ApplyGradient:
        """Pass the gradient to the optimizer, for this worker's batch only."""
        return ApplyGradient(gradient_D, self.local_batch_size, self.reported_batch_size)

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Return everything that a restart needs; members arrive again as events.

        A restored worker does not wait for messages that were pending. That iteration ends with the
        current weights.
        """
        return {
            "iteration": self.synchronizer.own,
            "local_batch_size": self.local_batch_size,
            **{f"{_BATCH_OF}{rank}": size for rank, size in self._batch_of.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        rule = self.synchronizer.rule
        self.synchronizer = Synchronizer(rule, iteration=int(state["iteration"]))
        self.local_batch_size = int(state["local_batch_size"])
        self._batch_of = {
            Rank(int(name.removeprefix(_BATCH_OF))): int(value)
            for name, value in state.items()
            if name.startswith(_BATCH_OF)
        }


def vector_from_state(value: Value) -> Flat:
    """Return a vector of a state, as a copy."""
    return np.array(value, np.float32)
