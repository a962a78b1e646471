"""A worker's policies put together: the `Machine` that the trainer and the simulator drive.

Owns the order of things: what is sent when a local step is done, when the update is made, and what
each arriving message leads to. The parts' own rules are in `sending`, `combining`,
`synchronization` and `knowledge_transfer`.

How to drive it: hand over `MemberJoined` for the peers known at the start; then, for each
iteration, wait (handing over what arrives) until `waiting_for` is empty, compute the local
gradient, hand over `LocalStepDone`, carry out what comes back, in order, and so on for whatever
arrives meanwhile. Every local step gives each member a message, `GRADIENT` or `PROGRESS`. A
`PROGRESS` of no samples only says how far its sender is, and contributes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import decode_gradient
from dlion_worker.policies.combining import (
    AHEAD,
    ArrivedSum,
    Contribution,
    Round,
    Weighting,
    descend,
)
from dlion_worker.policies.interface import (
    BudgetsChanged,
    Descend,
    Event,
    Instruction,
    IterationPassed,
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
from dlion_worker.policies.knowledge_transfer import SETTLING_STEPS, KnowledgeTransfer, Peers
from dlion_worker.policies.synchronization import Synchronizer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlion_worker.policies.sending import Sending

_BATCH_OF = "batch_of_"
"""Before a rank, in a checkpoint: that peer's last known local batch size."""


@dataclass
class _Heard:
    """What a peer has said of itself, member yet or not."""

    iteration: int = 0
    gradient_iteration: int = 0
    local_batch_size: int | None = None


class WorkerMachine:
    """One worker's exchange policy, synchronisation and knowledge transfer."""

    def __init__(
        self,
        *,
        rank: Rank,
        ranks: Collection[Rank],
        size: int,
        most_samples: int,
        sending: Sending,
        weighting: Weighting,
        synchronizer: Synchronizer,
        transfer: KnowledgeTransfer,
        hears_all: bool = True,
        grows: bool = False,
    ) -> None:
        """`ranks`: who may take part; `grows`: and others, whom the exchange knows. `hears_all`:
        these are all workers of the job."""
        self._rank = rank
        self._ranks = frozenset(ranks)
        self._grows = grows
        self._counts_all = hears_all and sending.combines
        self._size = size
        self._most_samples = most_samples
        self._sending = sending
        self._weighting = weighting
        self._synchronizer = synchronizer
        self._transfer = transfer
        self._heard: dict[Rank, _Heard] = {}
        self._budget_bytes: Mapping[Rank, int] = {}
        self._arrived = ArrivedSum()
        self._round = Round()
        self._local_batch_size = 1
        self._global_batch_size = 0
        self._updates = 0

    # ---- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event; what is to be done about it, in order.

        Raises:
            ValueError: a local step that was not allowed, or whose gradient is not finite.
        """
        match event:
            case LocalStepDone():
                return self._step_done(event)
            case IterationPassed(iteration=iteration):
                return self._update_if(self._synchronizer.step_done(iteration))
            case MessageArrived(sender=sender, message=message):
                return self._message_arrived(sender, message)
            case MemberJoined(rank=rank, iteration=iteration):
                return self._joined(rank, iteration)
            case MemberLeft(rank=rank):
                return self._left(rank)
            case BudgetsChanged(budget_bytes=budget_bytes):
                self._budget_bytes = dict(budget_bytes)
        return []

    def waiting_for(self) -> frozenset[Rank]:
        """Peers that must be heard before the next local step may begin; empty: begin."""
        return self._synchronizer.waiting_for()

    def next_iteration(self) -> int:
        """Number of the next local step."""
        return self._synchronizer.next_iteration()

    def _step_done(self, step: LocalStepDone) -> list[Instruction]:
        peers = self._synchronizer.active
        outgoing = self._sending.prepare(step.gradient_D, peers, self._budget_bytes)
        self._local_batch_size = step.local_batch_size
        self._global_batch_size = step.global_batch_size
        released = self._synchronizer.step_done(step.iteration)
        told: list[Instruction] = [
            Send(peer, self._step_message(outgoing.payloads.get(peer))) for peer in peers
        ]
        told += self._transfer.step_done(step.iteration, step.loss, self._counted_on())
        own = Contribution(step.local_batch_size, outgoing.own)
        if self._synchronizer.rule.barrier:
            self._round.add(step.iteration, self._rank, own)
            return told + self._update_if(released)
        sizes = self._local_batch_sizes()
        late_D = self._arrived.take()
        return [*told, self._update([own], late_D, sizes)]

    def _step_message(self, payload: bytes | memoryview | None) -> Message:
        return Message(
            kind=MessageKind.PROGRESS if payload is None else MessageKind.GRADIENT,
            iteration=self._synchronizer.own,
            local_batch_size=self._local_batch_size,
            weights_version=self._updates,
            payload=b"" if payload is None else payload,
        )

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        heard = self._heard.setdefault(rank, _Heard())
        released = self._synchronizer.joined(rank, iteration)
        if heard.iteration:  # its first words came before the word that its link is up
            released |= self._synchronizer.heard(rank, heard.iteration)
        told: list[Instruction] = []
        if self._synchronizer.stepped:
            greeting = Message(MessageKind.PROGRESS, self._synchronizer.own)
            told.append(Send(rank, greeting))
        return told + self._update_if(released)

    def _left(self, rank: Rank) -> list[Instruction]:
        """Nobody waits for it; what it has contributed already still counts."""
        self._heard.pop(rank, None)
        self._sending.forget(rank)
        self._transfer.left(rank)
        released = self._synchronizer.left(rank)
        return self._transfer.decide(self._counted_on()) + self._update_if(released)

    def fold(self, under_way: bool) -> None:
        """The weights are on their way to where two sides meet, or that is over: a merge of before
        or of one side alone would move them once more."""
        if under_way:
            self._transfer.suspend()
        else:
            self._transfer.resume(SETTLING_STEPS)

    # ---- messages ------------------------------------------------------------------------------

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender == self._rank or not (self._grows or sender in self._ranks):
            allowed = sorted(self._ranks - {self._rank})
            return [Refuse(sender, f"message from worker {sender}; allowed: {allowed}")]
        try:
            match message.kind:
                case MessageKind.GRADIENT | MessageKind.PROGRESS:
                    return self._step_heard(sender, message)
                case MessageKind.LOSS:
                    self._transfer.loss_arrived(sender, message)
                    return self._transfer.decide(self._counted_on())
                case MessageKind.WEIGHTS_REQUEST:
                    return self._transfer.weights_requested(sender, message)
                case MessageKind.WEIGHTS:
                    mixes = self._transfer.weights_arrived(sender, message)
                    self._updates += len(mixes)
                    return mixes
                case MessageKind.STOP | MessageKind.MEET | MessageKind.REACH:
                    return []  # the driver's business
                case _:
                    raise ContractError(f"{message.kind.name}: nobody folds here")
        except ContractError as error:
            return [Refuse(sender, str(error)), *self._passed_over(sender, message)]

    def _passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """A gradient that makes no sense contributes nothing, but nobody waits for a better one."""
        if message.kind is not MessageKind.GRADIENT or message.iteration < 1:
            return []
        return self._update_if(self._synchronizer.heard(sender, message.iteration))

    def _step_heard(self, sender: Rank, message: Message) -> list[Instruction]:
        self._check_header(message)
        contribution = self._contribution(sender, message)
        heard = self._heard.setdefault(sender, _Heard())
        heard.iteration = max(heard.iteration, message.iteration)
        heard.local_batch_size = message.local_batch_size or heard.local_batch_size
        if contribution is not None:
            self._keep(sender, message.iteration, contribution)
        released = self._synchronizer.heard(sender, message.iteration)
        return self._transfer.decide(self._counted_on()) + self._update_if(released)

    def _check_header(self, message: Message) -> None:
        least = 0 if message.kind is MessageKind.PROGRESS else 1
        if not least <= message.local_batch_size <= self._most_samples:
            msg = (
                f"{message.kind.name} with a local batch of {message.local_batch_size} samples; "
                f"allowed: {least} to {self._most_samples}"
            )
            raise ContractError(msg)
        if message.iteration < 1:
            raise ContractError(
                f"{message.kind.name} of iteration {message.iteration}; allowed: 1 on"
            )

    def _contribution(self, sender: Rank, message: Message) -> Contribution | None:
        """What the message contributes; None: it says what has been said before.

        Raises:
            ContractError: a gradient that does not fit.
        """
        if message.kind is MessageKind.PROGRESS:
            if message.payload:
                raise ContractError("PROGRESS with a payload; allowed: none")
            known = self._heard.get(sender)
            is_news = known is None or message.iteration > known.iteration
            if not (is_news and message.local_batch_size):
                return None
            return Contribution(message.local_batch_size, None)
        heard = self._heard.setdefault(sender, _Heard())
        if message.iteration <= heard.gradient_iteration:
            return None
        part = decode_gradient(message.payload, self._size)
        heard.gradient_iteration = message.iteration
        return Contribution(message.local_batch_size, part if self._sending.combines else None)

    def _keep(self, sender: Rank, iteration: int, contribution: Contribution) -> None:
        """For its iteration's barrier where it is in time for one; else for the next update."""
        rule = self._synchronizer.rule
        next_update = self._next_update()
        if rule.barrier and next_update <= iteration <= next_update + AHEAD:
            self._round.add(iteration, sender, contribution)
        elif not rule.barrier or rule.spare:
            self._arrived.add(contribution)

    # ---- updates -------------------------------------------------------------------------------

    def _next_update(self) -> int:
        """At a barrier, the iteration whose update is made next."""
        held = bool(self._synchronizer.waiting_for())
        return self._synchronizer.own if held else self._synchronizer.own + 1

    def _update_if(self, released: bool) -> list[Instruction]:
        """At a barrier, the update of an iteration whose contributions are in."""
        if not (released and self._synchronizer.rule.barrier):
            return []
        passed = self._round.take_before(self._synchronizer.own)
        contributions = self._round.take(self._synchronizer.own)
        sizes = {rank: one.local_batch_size for rank, one in contributions.items()}
        if self._synchronizer.rule.spare:
            sizes = self._local_batch_sizes() | sizes
            for contribution in passed:
                self._arrived.add(contribution)
        if not contributions:  # this worker passes it, and all who would have made it are gone
            return []
        return [self._update(list(contributions.values()), self._arrived.take(), sizes)]

    def _update(
        self,
        contributions: list[Contribution],
        late_D: NDArray[np.float32] | None,
        sizes: Mapping[Rank, int],
    ) -> Descend:
        if not self._sending.combines:
            sizes = {self._rank: self._local_batch_size}
        self._updates += 1
        return descend(
            contributions,
            late_D,
            size=self._size,
            divisor=self._weighting.divisor(sizes, self._rank),
            samples=sum(sizes.values()),
            global_batch_size=0 if self._counts_all else self._global_batch_size,
        )

    def _local_batch_sizes(self) -> dict[Rank, int]:
        """Last known local batch sizes of all members; where unknown, this worker's own."""
        sizes = {self._rank: self._local_batch_size}
        for rank in self._synchronizer.active:
            known = self._heard[rank].local_batch_size
            sizes[rank] = self._local_batch_size if known is None else known
        return sizes

    def _counted_on(self) -> Peers:
        return Peers(self._synchronizer.in_step(), self._synchronizer.finished)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Everything that a restart must bring back.

        Members, budgets and what is under way come anew as events. Taken while held at a barrier,
        it is the state before that iteration, whose update has not been made.
        """
        return {
            "iteration": self._next_update() - 1
            if self._synchronizer.rule.barrier
            else self._synchronizer.own,
            "updates": self._updates,
            "local_batch_size": self._local_batch_size,
            **{
                f"{_BATCH_OF}{rank}": heard.local_batch_size
                for rank, heard in self._heard.items()
                if heard.local_batch_size is not None
            },
            **self._arrived.state(),
            **self._sending.state(),
            **self._transfer.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        self._synchronizer = Synchronizer(
            self._synchronizer.rule, iteration=int(state["iteration"])
        )
        self._updates = int(state["updates"])
        self._local_batch_size = int(state["local_batch_size"])
        self._heard = {
            Rank(int(name.removeprefix(_BATCH_OF))): _Heard(local_batch_size=int(value))
            for name, value in state.items()
            if name.startswith(_BATCH_OF)
        }
        arrived_D = state.get("arrived_D")
        self._arrived.restore(None if arrived_D is None else np.asarray(arrived_D, np.float32))
        self._sending.restore(state)
        self._transfer.restore(state)
