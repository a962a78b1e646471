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

from collections.abc import Mapping, Sequence

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import GradientPart, decode_gradient
from dlion_core.policies.aggregation import divisor
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    SendWeights,
    Value,
)
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import ints_by_rank
from dlion_core.policies.synchronization import SyncRule

_NONE_TAKEN = -1

_READ_AT = "read_at_"
"""Prefix of checkpoint keys, followed by a rank."""


class StalenessRule:
    """What a policy sends of a gradient, and how it corrects old ones (by default not at all)."""

    own_as_peers = False
    """Whether an own gradient is corrected as peers correct it (peer to peer only)."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], links: BudgetsChanged
    ) -> OutgoingPayloads:
        """Return payloads for those peers (none for a missing peer), and the part that counts
        locally. Raises ValueError if an entry is not finite."""
        raise NotImplementedError

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:
        """Correct a received gradient in place for the updates since its sender read weights."""

    def applied(self, part: GradientPart) -> None:
        """An update of these entries was applied to the weights."""

    def read(self, reader: Rank) -> None:
        """The peer has the current weights, as far as is known here."""

    def forget(self, reader: Rank) -> None:
        """A peer has left."""

    def state(self) -> dict[str, Value]:
        return {}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; the mapping also holds the machine's state."""


class WeightReads:
    """Counts updates, the updates at each peer's last read, and the staleness of gradients."""

    def __init__(self) -> None:
        self.updates = 0
        self._read_at: dict[Rank, int] = {}
        self._kept: set[Rank] = set()  # from a checkpoint, not rejoined yet
        self._aged = self._age_sum = self._age_max = 0

    def read(self, rank: Rank) -> None:
        """The peer has the current weights."""
        self._read_at[rank] = self.updates

    def is_back(self, rank: Rank) -> bool:
        """Whether a peer of the checkpoint joins for the first time since. It still has the weights
        that it had then."""
        if rank not in self._kept:
            return False
        self._kept.discard(rank)
        return True

    def left(self, rank: Rank) -> None:
        self._read_at.pop(rank, None)
        self._kept.discard(rank)

    def count_age(self, sender: Rank) -> None:
        """Record the staleness of a gradient of that peer, which is applied now."""
        age = self.updates - self._read_at.get(sender, 0)
        self._aged += 1
        self._age_sum += age
        self._age_max = max(self._age_max, age)

    def state(self) -> dict[str, Value]:
        return {
            "updates": self.updates,
            "staleness_count": self._aged,
            "staleness_sum": self._age_sum,
            "staleness_max": self._age_max,
            **{f"{_READ_AT}{rank}": at for rank, at in self._read_at.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self.updates = int(state["updates"])
        self._aged = int(state["staleness_count"])
        self._age_sum = int(state["staleness_sum"])
        self._age_max = int(state["staleness_max"])
        self._read_at = ints_by_rank(state, _READ_AT)
        self._kept = set(self._read_at)


class DelayedGradientMachine(PeerMachine):
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
        super().__init__(context, SyncRule(slack=bound))
        self._server = server
        self._is_server = server == self.rank
        self._is_client = server is not None and not self._is_server
        self._partners = self.neighbours & {server} if self._is_client else self.neighbours
        self._share = share
        self._delays = delays
        self._own_as_peers = delays.own_as_peers and server is None
        self.reported_batch_size = context.spec.batching.global_batch_size.initial
        self.local_batch_size = max(1, self.reported_batch_size // len(context.ranks))
        self._gradient_of: dict[Rank, int] = {}  # iteration of the last received gradient
        self._readers = WeightReads()
        self._applying: tuple[Rank, GradientPart] | None = None
        self._awaits_weights = False
        self._taken = _NONE_TAKEN  # version of the last weights from the server

    def blocking_peers(self) -> frozenset[Rank]:
        """Return the server if it owes its weights."""
        return self._partners if self._awaits_weights else frozenset()

    # ---- steps and members -----------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        members = self.synchronizer.active
        receivers = [] if self._is_server else members
        outgoing = self._delays.prepare(step.gradient_D, receivers, self.links)
        instructions = self.step_messages(outgoing.payloads, self._readers.updates)
        if self._is_client and members:
            self._awaits_weights = bool(outgoing.payloads)
            return instructions
        return [*instructions, self._apply(self.rank, outgoing.own, step.local_batch_size)]

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        if rank not in self._partners:
            return []
        if rank == self._server:
            self._taken = _NONE_TAKEN
        instructions = super()._joined(rank, iteration)
        if self._readers.is_back(rank):
            return instructions
        self._note_read(rank)
        if self._is_server and self._readers.updates:
            instructions.append(SendWeights(rank, self._readers.updates))
        return instructions

    def left(self, rank: Rank) -> None:
        self._gradient_of.pop(rank, None)
        self._readers.left(rank)
        self._delays.forget(rank)
        if rank == self._server:
            self._awaits_weights = False

    # ---- messages --------------------------------------------------------------------------------

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        match message.kind:
            case MessageKind.GRADIENT | MessageKind.PROGRESS:
                return self._step_heard(sender, message)
            case MessageKind.WEIGHTS:
                return self.weights_arrived(sender, message)
        return []  # unused here, or handled by the driver

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Do not wait for a replacement of an invalid message."""
        if message.kind is MessageKind.WEIGHTS and sender == self._server:
            self._awaits_weights = False
        if message.kind is not MessageKind.GRADIENT or message.iteration < 1:
            return []
        self.synchronizer.heard(sender, message.iteration)
        return self._answer(sender)

    def _step_heard(self, sender: Rank, message: Message) -> list[Instruction]:
        self.check_header(message)
        is_gradient = message.kind is MessageKind.GRADIENT
        if is_gradient and (sender not in self._partners or self._is_client):
            raise ContractError(
                f"gradient sent to worker {self.rank}; the server is {self._server}"
            )
        instructions: list[Instruction] = []
        if is_gradient and message.iteration > self._gradient_of.get(sender, 0):
            part = decode_gradient(message.payload, self.size)
            self._gradient_of[sender] = message.iteration
            instructions = [self._apply(sender, part, message.local_batch_size)]
        self.record_step(sender, message)
        return instructions

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if not self._is_client or sender != self._server:
            raise ContractError(f"weights from worker {sender}, which is not the server")
        weights_D = self.peer_weights(message.payload)
        self._awaits_weights = False  # the server also answers a gradient that it rejected
        if message.iteration <= self._taken:
            return []
        self._taken = message.iteration
        return [ReplaceWeights(weights_D)]

    # ---- updates ---------------------------------------------------------------------------------

    def _apply(self, sender: Rank, part: GradientPart, batch_size: int) -> ApplyGradient:
        gradient_D = part.weighted(np.float32(1))
        if sender != self.rank or self._own_as_peers:
            with np.errstate(over="ignore", invalid="ignore"):
                self._delays.correct(gradient_D, part, sender)
            if not np.isfinite(gradient_D).all():
                raise ContractError("gradient that is not finite once corrected for its delay")
        if sender != self.rank:
            self._readers.count_age(sender)
        sizes = self.batch_sizes() | {sender: batch_size}
        if self._share:
            weighting = self.context.spec.exchange.weighting
            gradient_D *= np.float32(batch_size / divisor(weighting, sizes, self.rank))
        self._applying = (sender, part)
        reported_batch_size = 0 if self.context.exchanges_with_all else self.reported_batch_size
        return ApplyGradient(gradient_D, sum(sizes.values()), reported_batch_size)

    def update_applied(self) -> list[Instruction]:
        if self._applying is None:
            return []
        (sender, part), self._applying = self._applying, None
        self._readers.updates += 1
        self._delays.applied(part)
        if sender == self.rank:
            if self._own_as_peers:
                self._delays.read(sender)
            return []
        return self._answer(sender)

    def _answer(self, sender: Rank) -> list[Instruction]:
        """Answer a sender after its gradient was applied to the weights."""
        if sender not in self._partners:
            return []
        self._note_read(sender)
        answers = self._is_server and sender in self.synchronizer.active
        return [SendWeights(sender, self._readers.updates)] if answers else []

    def _note_read(self, rank: Rank) -> None:
        self._readers.read(rank)
        self._delays.read(rank)

    def state(self) -> dict[str, Value]:
        return {**super().state(), **self._readers.state(), **self._delays.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._readers.restore(state)
        self._delays.restore(state)
