"""The `PolicyMachine` for policies that exchange gradients.

It defines the order of operations: what is sent after a local step, when the update is made, and
how each message is handled. The rules of its parts are in `gradient_selectors`, `aggregation`,
`synchronization` and `knowledge_transfer`.

To drive it, pass `MemberJoined` for the peers known at the start. For each iteration, pass arriving
messages until `waiting_for` is empty, compute the local gradient, and pass `LocalStepDone`. Execute
the returned instructions in order. After every local step each member receives one message,
`GRADIENT` or `PROGRESS`. A `PROGRESS` with zero samples only reports the sender's iteration and
contributes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import decode_gradient
from dlion_core.policies.aggregation import (
    MAX_ITERATIONS_AHEAD,
    ArrivedGradientSum,
    BarrierContributions,
    Contribution,
    Weighting,
    combined_update,
)
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Event,
    Instruction,
    IterationReplayed,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
    Value,
)
from dlion_core.policies.knowledge_transfer import (
    SETTLING_STEPS,
    DirectKnowledgeTransfer,
    PeerProgress,
)
from dlion_core.policies.synchronization import Synchronizer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlion_core.policies.gradient.gradient_selectors import GradientSelector

_BATCH_OF = "batch_of_"
"""Prefix of checkpoint keys, followed by a rank: last known local batch size of that peer."""


@dataclass
class _PeerProgress:
    """What a peer has reported about itself, member or not."""

    iteration: int = 0
    gradient_iteration: int = 0
    local_batch_size: int | None = None


class GradientMachine:
    """One worker's exchange policy, synchronisation and knowledge transfer."""

    def __init__(
        self,
        *,
        rank: Rank,
        ranks: Collection[Rank],
        size: int,
        max_samples: int,
        selector: GradientSelector,
        weighting: Weighting,
        synchronizer: Synchronizer,
        transfer: DirectKnowledgeTransfer,
        exchanges_with_all: bool = True,
        grows: bool = False,
    ) -> None:
        """`ranks`: workers that may take part. With `grows`, others may join that only the exchange
        knows. `exchanges_with_all`: `ranks` are all workers of the job."""
        self._rank = rank
        self._ranks = frozenset(ranks)
        self._grows = grows
        self._counts_all = exchanges_with_all and selector.combines
        self._size = size
        self._max_samples = max_samples
        self._selector = selector
        self._weighting = weighting
        self._synchronizer = synchronizer
        self._transfer = transfer
        self._heard: dict[Rank, _PeerProgress] = {}
        self._budget_bytes: Mapping[Rank, int] = {}
        self._arrived = ArrivedGradientSum()
        self._round = BarrierContributions()
        self._local_batch_size = 1
        self._global_batch_size = 0
        self._updates = 0

    # ---- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; return instructions in execution order.

        Raises:
            ValueError: a local step that was not allowed, or whose gradient is not finite.
        """
        match event:
            case LocalStepDone():
                return self._step_done(event)
            case IterationReplayed(iteration=iteration):
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
        return self._synchronizer.waiting_for()

    def next_iteration(self) -> int:
        return self._synchronizer.next_iteration()

    def _step_done(self, step: LocalStepDone) -> list[Instruction]:
        peers = self._synchronizer.active
        outgoing = self._selector.prepare(step.gradient_D, peers, self._budget_bytes)
        self._local_batch_size = step.local_batch_size
        self._global_batch_size = step.global_batch_size
        released = self._synchronizer.step_done(step.iteration)
        instructions: list[Instruction] = [
            SendMessage(peer, self._step_message(outgoing.payloads.get(peer))) for peer in peers
        ]
        instructions += self._transfer.step_done(step.iteration, step.loss, self._counted_on())
        own = Contribution(step.local_batch_size, outgoing.own)
        if self._synchronizer.rule.barrier:
            self._round.add(step.iteration, self._rank, own)
            return instructions + self._update_if(released)
        sizes = self._local_batch_sizes()
        late_D = self._arrived.take()
        return [*instructions, self._update([own], late_D, sizes)]

    def _step_message(self, payload: bytes | memoryview | None) -> Message:
        return Message(
            kind=MessageKind.PROGRESS if payload is None else MessageKind.GRADIENT,
            iteration=self._synchronizer.own,
            local_batch_size=self._local_batch_size,
            weights_version=self._updates,
            payload=b"" if payload is None else payload,
        )

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        heard = self._heard.setdefault(rank, _PeerProgress())
        released = self._synchronizer.joined(rank, iteration)
        if heard.iteration:  # its first message arrived before MemberJoined
            released |= self._synchronizer.heard(rank, heard.iteration)
        instructions: list[Instruction] = []
        if self._synchronizer.stepped:
            greeting = Message(MessageKind.PROGRESS, self._synchronizer.own)
            instructions.append(SendMessage(rank, greeting))
        return instructions + self._update_if(released)

    def _left(self, rank: Rank) -> list[Instruction]:
        """Stop waiting for the peer. Its earlier contributions still count."""
        self._heard.pop(rank, None)
        self._selector.forget(rank)
        self._transfer.left(rank)
        released = self._synchronizer.left(rank)
        return self._transfer.decide(self._counted_on()) + self._update_if(released)

    def set_merging(self, under_way: bool) -> None:
        """Suspend knowledge transfer during a partition merge; resume it afterwards.

        Comparing weights from before the merge, or of only one side, would move the weights twice.
        """
        if under_way:
            self._transfer.suspend()
        else:
            self._transfer.resume(SETTLING_STEPS)

    # ---- messages --------------------------------------------------------------------------------

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender == self._rank or not (self._grows or sender in self._ranks):
            allowed = sorted(self._ranks - {self._rank})
            return [RejectMessage(sender, f"message from worker {sender}; allowed: {allowed}")]
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
                    return []  # the driver handles these
                case _:
                    raise ContractError(f"{message.kind.name}: partitions are not merged here")
        except ContractError as error:
            return [RejectMessage(sender, str(error)), *self._passed_over(sender, message)]

    def _passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """An invalid gradient contributes nothing, but ends the wait for it."""
        if message.kind is not MessageKind.GRADIENT or message.iteration < 1:
            return []
        return self._update_if(self._synchronizer.heard(sender, message.iteration))

    def _step_heard(self, sender: Rank, message: Message) -> list[Instruction]:
        self._check_header(message)
        contribution = self._contribution(sender, message)
        heard = self._heard.setdefault(sender, _PeerProgress())
        heard.iteration = max(heard.iteration, message.iteration)
        heard.local_batch_size = message.local_batch_size or heard.local_batch_size
        if contribution is not None:
            self._keep(sender, message.iteration, contribution)
        released = self._synchronizer.heard(sender, message.iteration)
        return self._transfer.decide(self._counted_on()) + self._update_if(released)

    def _check_header(self, message: Message) -> None:
        least = 0 if message.kind is MessageKind.PROGRESS else 1
        if not least <= message.local_batch_size <= self._max_samples:
            msg = (
                f"{message.kind.name} with a local batch of {message.local_batch_size} samples; "
                f"allowed: {least} to {self._max_samples}"
            )
            raise ContractError(msg)
        if message.iteration < 1:
            raise ContractError(
                f"{message.kind.name} of iteration {message.iteration}; allowed: 1 on"
            )

    def _contribution(self, sender: Rank, message: Message) -> Contribution | None:
        """Return the message's contribution; None if the message is a repetition.

        Raises:
            ContractError: the gradient does not fit the model.
        """
        if message.kind is MessageKind.PROGRESS:
            if message.payload:
                raise ContractError("PROGRESS with a payload; allowed: none")
            known = self._heard.get(sender)
            is_new = known is None or message.iteration > known.iteration
            if not (is_new and message.local_batch_size):
                return None
            return Contribution(message.local_batch_size, None)
        heard = self._heard.setdefault(sender, _PeerProgress())
        if message.iteration <= heard.gradient_iteration:
            return None
        part = decode_gradient(message.payload, self._size)
        heard.gradient_iteration = message.iteration
        return Contribution(message.local_batch_size, part if self._selector.combines else None)

    def _keep(self, sender: Rank, iteration: int, contribution: Contribution) -> None:
        """Store the contribution for its barrier if it is in time, else for the next update."""
        rule = self._synchronizer.rule
        next_update = self._next_update()
        if rule.barrier and next_update <= iteration <= next_update + MAX_ITERATIONS_AHEAD:
            self._round.add(iteration, sender, contribution)
        elif not rule.barrier or rule.spare:
            self._arrived.add(contribution)

    # ---- updates ---------------------------------------------------------------------------------

    def _next_update(self) -> int:
        held = bool(self._synchronizer.waiting_for())
        return self._synchronizer.own if held else self._synchronizer.own + 1

    def _update_if(self, released: bool) -> list[Instruction]:
        """At a barrier, make the update once the contributions have arrived."""
        if not (released and self._synchronizer.rule.barrier):
            return []
        passed = self._round.take_before(self._synchronizer.own)
        contributions = self._round.take(self._synchronizer.own)
        sizes = {rank: one.local_batch_size for rank, one in contributions.items()}
        if self._synchronizer.rule.spare:
            sizes = self._local_batch_sizes() | sizes
            for contribution in passed:
                self._arrived.add(contribution)
        if not contributions:  # this worker skips it, and all contributors have left
            return []
        return [self._update(list(contributions.values()), self._arrived.take(), sizes)]

    def _update(
        self,
        contributions: list[Contribution],
        late_D: NDArray[np.float32] | None,
        sizes: Mapping[Rank, int],
    ) -> ApplyGradient:
        if not self._selector.combines:
            sizes = {self._rank: self._local_batch_size}
        self._updates += 1
        return combined_update(
            contributions,
            late_D,
            size=self._size,
            divisor=self._weighting.divisor(sizes, self._rank),
            samples=sum(sizes.values()),
            global_batch_size=0 if self._counts_all else self._global_batch_size,
        )

    def _local_batch_sizes(self) -> dict[Rank, int]:
        """Last known local batch size of each member; this worker's own if unknown."""
        sizes = {self._rank: self._local_batch_size}
        for rank in self._synchronizer.active:
            known = self._heard[rank].local_batch_size
            sizes[rank] = self._local_batch_size if known is None else known
        return sizes

    def _counted_on(self) -> PeerProgress:
        return PeerProgress(self._synchronizer.in_step(), self._synchronizer.finished)

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """Return everything that a restart needs.

        Members, budgets and pending requests arrive again as events. While the worker waits at a
        barrier, the state is the one before that iteration, because its update is not made yet.
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
            **self._selector.state(),
            **self._transfer.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self._synchronizer = Synchronizer(
            self._synchronizer.rule, iteration=int(state["iteration"])
        )
        self._updates = int(state["updates"])
        self._local_batch_size = int(state["local_batch_size"])
        self._heard = {
            Rank(int(name.removeprefix(_BATCH_OF))): _PeerProgress(local_batch_size=int(value))
            for name, value in state.items()
            if name.startswith(_BATCH_OF)
        }
        arrived_D = state.get("arrived_D")
        self._arrived.restore(None if arrived_D is None else np.asarray(arrived_D, np.float32))
        self._selector.restore(state)
        self._transfer.restore(state)
