"""A machine that applies gradients one by one on arrival, however old they are.

Used by `async`, `adacomp` and `twostep`. Their `StalenessRule` defines what is sent of a gradient
and how its age changes it. There are two modes:

- peer to peer (no server): each gradient goes to every member. Own and received gradients are
  separate updates (receivers *add*, weighted as below).
- with a server: the other workers send theirs only to the server. It applies each and answers with
  its weights, which the sender takes over before its next local step. The server trains as well.

A sender has *read* the local weights when its last gradient was applied or when it joined. This is
exact with a server. Peer to peer it ignores messages in transit.

Weight of a gradient: with `share`, by the manifest's weighting, so that a round of all workers
moves the weights as far as their mean would. Otherwise 1, a full step each. The manifest's
`synchronization` and `knowledgeTransfer` are ignored; the staleness bound is the policy's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import GradientPart, decode_gradient, decode_weights
from dlion_core.policies.aggregation import Weighting
from dlion_core.policies.gradient.staleness import StalenessRule, WeightReads
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Event,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    ReplaceWeights,
    SendMessage,
    SendWeights,
    UpdateApplied,
    Value,
)
from dlion_core.policies.message_checks import (
    check_step_message,
    ints_by_rank,
    reject_unknown_sender,
)
from dlion_core.policies.synchronization import Synchronizer, SyncRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_core.policies.factory import PolicyContext

_BATCH_OF = "batch_of_"
"""Prefix of checkpoint keys, followed by a rank."""

_NONE_TAKEN = -1


class DelayedGradientMachine:
    """One worker that neither sends nor applies gradients in rounds."""

    def __init__(
        self,
        context: PolicyContext,
        delays: StalenessRule,
        *,
        bound: int,
        server: int | None,
        share: bool,
    ) -> None:
        self._rank, self._size = context.rank, context.layout.size
        self._ranks = frozenset({context.rank, *context.neighbours})
        self._server = None if server is None else Rank(server)
        self._partners = self._ranks - {self._rank}
        if self._is_client:
            self._partners &= {self._server}
        self._max_samples = context.max_samples
        self._weighting = Weighting(context.spec.exchange.weighting) if share else None
        self._delays = delays
        self._own_as_peers = delays.own_as_peers and self._server is None
        self._synchronizer = Synchronizer(SyncRule(slack=bound, spare=0, barrier=False))
        self._links = BudgetsChanged({})
        self._exchanges_with_all = context.exchanges_with_all
        self._global_batch_size = context.spec.batching.global_batch_size.initial
        self._batch_size = max(1, self._global_batch_size // len(context.ranks))
        self._batch_of: dict[Rank, int] = {}
        self._gradient_of: dict[Rank, int] = {}  # iteration of the last received gradient
        self._readers = WeightReads()
        self._applying: tuple[Rank, GradientPart] | None = None
        self._awaits_weights = False
        self._taken = _NONE_TAKEN  # version of the last weights from the server

    @property
    def _is_client(self) -> bool:
        return self._server is not None and self._server != self._rank

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; return instructions in execution order.

        Raises:
            ValueError: a local step that was not allowed, or whose gradient is not finite.
        """
        match event:
            case LocalStepDone():
                return self._step_done(event)
            case MessageArrived(sender=sender, message=message):
                return self._message_arrived(sender, message)
            case MemberJoined(rank=rank, iteration=iteration):
                return self._joined(rank, iteration)
            case MemberLeft(rank=rank):
                self._left(rank)
            case BudgetsChanged():
                self._links = event
            case UpdateApplied():
                return self._update_applied()
        return []

    def waiting_for(self) -> frozenset[Rank]:
        """Return peers that lag too far, and the server if it owes its weights."""
        owing = {self._server} if self._awaits_weights and self._server is not None else set()
        return self._synchronizer.waiting_for() | owing

    def next_iteration(self) -> int:
        return self._synchronizer.next_iteration()

    # ---- steps and members -----------------------------------------------------------------------

    def _step_done(self, step: LocalStepDone) -> list[Instruction]:
        members = self._synchronizer.active
        receivers = [] if self._server == self._rank else members
        outgoing = self._delays.prepare(step.gradient_D, receivers, self._links)
        self._synchronizer.step_done(step.iteration)
        self._batch_size = step.local_batch_size
        self._global_batch_size = step.global_batch_size
        instructions: list[Instruction] = [
            SendMessage(peer, self._step_message(outgoing.payloads.get(peer))) for peer in members
        ]
        if self._is_client and members:
            self._awaits_weights = bool(outgoing.payloads)
            return instructions
        return [*instructions, self._apply(self._rank, outgoing.own, step.local_batch_size)]

    def _step_message(self, payload: bytes | memoryview | None) -> Message:
        return Message(
            kind=MessageKind.PROGRESS if payload is None else MessageKind.GRADIENT,
            iteration=self._synchronizer.own,
            local_batch_size=self._batch_size,
            weights_version=self._readers.updates,
            payload=b"" if payload is None else payload,
        )

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        if rank not in self._partners:
            return []
        self._synchronizer.joined(rank, iteration)
        if rank == self._server:
            self._taken = _NONE_TAKEN
        instructions: list[Instruction] = []
        if self._synchronizer.stepped:
            instructions.append(
                SendMessage(rank, Message(MessageKind.PROGRESS, self._synchronizer.own))
            )
        if self._readers.is_back(rank):
            return instructions
        self._note_read(rank)
        if self._server == self._rank and self._readers.updates:
            instructions.append(SendWeights(rank, self._readers.updates))
        return instructions

    def _left(self, rank: Rank) -> None:
        self._synchronizer.left(rank)
        self._batch_of.pop(rank, None)
        self._gradient_of.pop(rank, None)
        self._readers.left(rank)
        self._delays.forget(rank)
        if rank == self._server:
            self._awaits_weights = False

    # ---- messages --------------------------------------------------------------------------------

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        refusal = reject_unknown_sender(sender, self._rank, self._ranks)
        if refusal is not None:
            return [refusal]
        try:
            match message.kind:
                case MessageKind.GRADIENT | MessageKind.PROGRESS:
                    return self._step_heard(sender, message)
                case MessageKind.WEIGHTS:
                    return self._weights_arrived(sender, message)
            return []  # unused here, or handled by the driver
        except ContractError as error:
            return [RejectMessage(sender, str(error)), *self._passed_over(sender, message)]

    def _passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Do not wait for a replacement of an invalid message."""
        if message.kind is MessageKind.WEIGHTS and sender == self._server:
            self._awaits_weights = False
        if message.kind is not MessageKind.GRADIENT or message.iteration < 1:
            return []
        self._synchronizer.heard(sender, message.iteration)
        return self._answer(sender)

    def _step_heard(self, sender: Rank, message: Message) -> list[Instruction]:
        check_step_message(message, self._max_samples)
        is_gradient = message.kind is MessageKind.GRADIENT
        if is_gradient and (sender not in self._partners or self._is_client):
            raise ContractError(
                f"gradient sent to worker {self._rank}; the server is {self._server}"
            )
        instructions: list[Instruction] = []
        if is_gradient and message.iteration > self._gradient_of.get(sender, 0):
            part = decode_gradient(message.payload, self._size)
            self._gradient_of[sender] = message.iteration
            instructions = [self._apply(sender, part, message.local_batch_size)]
        if message.local_batch_size:
            self._batch_of[sender] = message.local_batch_size
        self._synchronizer.heard(sender, message.iteration)
        return instructions

    def _weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if not self._is_client or sender != self._server:
            raise ContractError(f"weights from worker {sender}, which is not the server")
        weights_D = decode_weights(message.payload, self._size)
        self._awaits_weights = False  # the server also answers a gradient that it rejected
        if message.iteration <= self._taken:
            return []
        self._taken = message.iteration
        return [ReplaceWeights(weights_D)]

    # ---- updates ---------------------------------------------------------------------------------

    def _apply(self, sender: Rank, part: GradientPart, batch_size: int) -> ApplyGradient:
        gradient_D = part.weighted(np.float32(1))
        if sender != self._rank or self._own_as_peers:
            with np.errstate(over="ignore", invalid="ignore"):
                self._delays.correct(gradient_D, part, sender)
            if not np.isfinite(gradient_D).all():
                raise ContractError("gradient that is not finite once corrected for its delay")
        if sender != self._rank:
            self._readers.count_age(sender)
        sizes = self._batch_sizes() | {sender: batch_size}
        if self._weighting is not None:
            gradient_D *= np.float32(batch_size / self._weighting.divisor(sizes, self._rank))
        self._applying = (sender, part)
        reported_batch_size = 0 if self._exchanges_with_all else self._global_batch_size
        return ApplyGradient(gradient_D, sum(sizes.values()), reported_batch_size)

    def _update_applied(self) -> list[Instruction]:
        if self._applying is None:
            return []
        (sender, part), self._applying = self._applying, None
        self._readers.updates += 1
        self._delays.applied(part)
        if sender == self._rank:
            if self._own_as_peers:
                self._delays.read(sender)
            return []
        return self._answer(sender)

    def _answer(self, sender: Rank) -> list[Instruction]:
        """Answer a sender after its gradient was applied to the weights."""
        if sender not in self._partners:
            return []
        self._note_read(sender)
        answers = self._server == self._rank and sender in self._synchronizer.active
        return [SendWeights(sender, self._readers.updates)] if answers else []

    def _note_read(self, rank: Rank) -> None:
        self._readers.read(rank)
        self._delays.read(rank)

    def _batch_sizes(self) -> dict[Rank, int]:
        """Last known batch sizes of all members; this worker's own if unknown."""
        known = {self._rank: self._batch_size}
        for rank in self._synchronizer.active:
            known[rank] = self._batch_of.get(rank, self._batch_size)
        return known

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        return {
            "iteration": self._synchronizer.own,
            "local_batch_size": self._batch_size,
            **{f"{_BATCH_OF}{rank}": size for rank, size in self._batch_of.items()},
            **self._readers.state(),
            **self._delays.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self._synchronizer = Synchronizer(
            self._synchronizer.rule, iteration=int(state["iteration"])
        )
        self._batch_size = int(state["local_batch_size"])
        self._batch_of = ints_by_rank(state, _BATCH_OF)
        self._readers.restore(state)
        self._delays.restore(state)
