"""A machine that applies gradients one by one, as they come, however old they are.

Made by the policies `async`, `adacomp` and `twostep`, whose `Delays` says what is sent of a
gradient and what its age does to it. It owns the order of things and the two shapes:

- peer to peer (no server): each gradient goes to every member; own and arrived ones are each an
  update of their own (receivers *add*, weighted as below);
- with a server: the others send theirs to that worker only, which applies it and answers with its
  weights; they take those over before their next local step. The server trains as well.

A sender is taken to have *read* the weights here when its last gradient had been applied, or when
it joined: exact with a server; peer to peer it leaves out what was under way just then.

Weight of a gradient: `share` by the manifest's weighting, so that a round of all workers moves the
weights as far as their mean would; otherwise 1, a whole step for each. The manifest's
`synchronization` and `knowledgeTransfer` have no part in it: the bound is the policy's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import GradientPart, decode_gradient, decode_weights
from dlion_worker.policies.combining import Weighting
from dlion_worker.policies.delays import Delays, Readers
from dlion_worker.policies.headers import by_rank, check_step, stranger
from dlion_worker.policies.interface import (
    BudgetsChanged,
    Descend,
    Descended,
    Event,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    Refuse,
    Replace,
    Send,
    SendWeights,
    Value,
)
from dlion_worker.policies.synchronization import Rule, Synchronizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_worker.policies.building import Context

_BATCH_OF = "batch_of_"
"""Before a rank, in a checkpoint."""

_NONE_TAKEN = -1


class DelayedMachine:
    """One worker that neither sends nor applies in rounds."""

    def __init__(
        self, context: Context, delays: Delays, *, bound: int, server: int | None, share: bool
    ) -> None:
        self._rank, self._size = context.rank, context.layout.size
        self._ranks = frozenset({context.rank, *context.neighbours})
        self._server = None if server is None else Rank(server)
        self._partners = self._ranks - {self._rank}
        if self._is_client:
            self._partners &= {self._server}
        self._most_samples = context.most_samples
        self._weighting = Weighting(context.spec.exchange.weighting) if share else None
        self._delays = delays
        self._own_as_peers = delays.own_as_peers and self._server is None
        self._synchronizer = Synchronizer(Rule(slack=bound, spare=0, barrier=False))
        self._links = BudgetsChanged({})
        self._hears_all = context.hears_all
        self._global_batch_size = context.spec.batching.global_batch_size.initial
        self._batch_size = max(1, self._global_batch_size // len(context.ranks))
        self._batch_of: dict[Rank, int] = {}
        self._gradient_of: dict[Rank, int] = {}  # the last iteration whose gradient has come
        self._readers = Readers()
        self._applying: tuple[Rank, GradientPart] | None = None
        self._awaits_weights = False
        self._taken = _NONE_TAKEN  # the server's updates in the weights last taken over

    @property
    def _is_client(self) -> bool:
        return self._server is not None and self._server != self._rank

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event; what is to be done about it, in order.

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
            case Descended():
                return self._descended()
        return []

    def waiting_for(self) -> frozenset[Rank]:
        """Peers too far behind, and the server that owes its weights."""
        owing = {self._server} if self._awaits_weights and self._server is not None else set()
        return self._synchronizer.waiting_for() | owing

    def next_iteration(self) -> int:
        """Number of the next local step."""
        return self._synchronizer.next_iteration()

    # ---- steps and members -----------------------------------------------------------------------

    def _step_done(self, step: LocalStepDone) -> list[Instruction]:
        members = self._synchronizer.active
        receivers = [] if self._server == self._rank else members
        outgoing = self._delays.prepare(step.gradient_D, receivers, self._links)
        self._synchronizer.step_done(step.iteration)
        self._batch_size = step.local_batch_size
        self._global_batch_size = step.global_batch_size
        told: list[Instruction] = [
            Send(peer, self._step_message(outgoing.payloads.get(peer))) for peer in members
        ]
        if self._is_client and members:
            self._awaits_weights = bool(outgoing.payloads)
            return told
        return [*told, self._apply(self._rank, outgoing.own, step.local_batch_size)]

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
        told: list[Instruction] = []
        if self._synchronizer.stepped:
            told.append(Send(rank, Message(MessageKind.PROGRESS, self._synchronizer.own)))
        if self._readers.is_back(rank):
            return told
        self._note_read(rank)
        if self._server == self._rank and self._readers.updates:
            told.append(SendWeights(rank, self._readers.updates))
        return told

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
        refusal = stranger(sender, self._rank, self._ranks)
        if refusal is not None:
            return [refusal]
        try:
            match message.kind:
                case MessageKind.GRADIENT | MessageKind.PROGRESS:
                    return self._step_heard(sender, message)
                case MessageKind.WEIGHTS:
                    return self._weights_arrived(sender, message)
            return []  # nobody's business here, or the driver's
        except ContractError as error:
            return [Refuse(sender, str(error)), *self._passed_over(sender, message)]

    def _passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Nobody waits for a better one of what makes no sense."""
        if message.kind is MessageKind.WEIGHTS and sender == self._server:
            self._awaits_weights = False
        if message.kind is not MessageKind.GRADIENT or message.iteration < 1:
            return []
        self._synchronizer.heard(sender, message.iteration)
        return self._answer(sender)

    def _step_heard(self, sender: Rank, message: Message) -> list[Instruction]:
        check_step(message, self._most_samples)
        is_gradient = message.kind is MessageKind.GRADIENT
        if is_gradient and (sender not in self._partners or self._is_client):
            raise ContractError(f"gradient at worker {self._rank}, whose server is {self._server}")
        told: list[Instruction] = []
        if is_gradient and message.iteration > self._gradient_of.get(sender, 0):
            part = decode_gradient(message.payload, self._size)
            self._gradient_of[sender] = message.iteration
            told = [self._apply(sender, part, message.local_batch_size)]
        if message.local_batch_size:
            self._batch_of[sender] = message.local_batch_size
        self._synchronizer.heard(sender, message.iteration)
        return told

    def _weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if not self._is_client or sender != self._server:
            raise ContractError(f"weights of worker {sender}, who is no server here")
        weights_D = decode_weights(message.payload, self._size)
        self._awaits_weights = False  # the server goes on without a gradient that it refused, too
        if message.iteration <= self._taken:
            return []
        self._taken = message.iteration
        return [Replace(weights_D)]

    # ---- updates ---------------------------------------------------------------------------------

    def _apply(self, sender: Rank, part: GradientPart, batch_size: int) -> Descend:
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
        of_all = 0 if self._hears_all else self._global_batch_size
        return Descend(gradient_D, sum(sizes.values()), of_all)

    def _descended(self) -> list[Instruction]:
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
        """What a worker does for a sender whose gradient is in the weights now."""
        if sender not in self._partners:
            return []
        self._note_read(sender)
        answers = self._server == self._rank and sender in self._synchronizer.active
        return [SendWeights(sender, self._readers.updates)] if answers else []

    def _note_read(self, rank: Rank) -> None:
        self._readers.read(rank)
        self._delays.read(rank)

    def _batch_sizes(self) -> dict[Rank, int]:
        """Last known of all members; where unknown, this worker's own."""
        known = {self._rank: self._batch_size}
        for rank in self._synchronizer.active:
            known[rank] = self._batch_of.get(rank, self._batch_size)
        return known

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Everything that a restart must bring back, with the ages of gradients in updates."""
        return {
            "iteration": self._synchronizer.own,
            "local_batch_size": self._batch_size,
            **{f"{_BATCH_OF}{rank}": size for rank, size in self._batch_of.items()},
            **self._readers.state(),
            **self._delays.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        self._synchronizer = Synchronizer(
            self._synchronizer.rule, iteration=int(state["iteration"])
        )
        self._batch_size = int(state["local_batch_size"])
        self._batch_of = by_rank(state, _BATCH_OF)
        self._readers.restore(state)
        self._delays.restore(state)
