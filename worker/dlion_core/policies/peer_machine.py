"""Common base of the machines of all policies.

`PeerMachine` dispatches events, tracks members and their batch sizes, and rejects invalid messages.
Subclasses define the reaction to a local step, an applied update and each kind of message. Those
that exchange weights or updates ignore `spec.synchronization`, `knowledgeTransfer` and link
budgets; each has its own rule.
"""

from collections.abc import Mapping

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.codecs import decode_weights
from dlion_core.codecs.payload import Payload
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.claims.deviations import DeviationDetector
from dlion_core.policies.claims.magnitudes import (
    RecentPeaks,
    check_weights,
    excessive,
    peak_of_weights,
)
from dlion_core.policies.claims.samples import check_samples
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
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
    ReportEvent,
    SendMessage,
    UpdateApplied,
    Value,
)
from dlion_core.policies.state_values import ints_by_rank
from dlion_core.policies.synchronization import Synchronizer, SyncRule

_BATCH_OF = "batch_of_"
"""Prefix of checkpoint keys, followed by a rank: last known local batch size of that peer."""


class PeerMachine:
    """A `PolicyMachine` that calls the hooks below for each event, `advance` last."""

    def __init__(self, context: PolicyContext, rule: SyncRule) -> None:
        self.context = context
        self.rank, self.size = context.rank, context.layout.size
        self.neighbours = context.neighbours
        self.robustness = context.spec.exchange.robustness
        self.synchronizer = Synchronizer(rule)
        self.links = BudgetsChanged({})
        self.local_batch_size = 1
        self.reported_batch_size = 0
        """Global batch size that the driver reported; 0: unknown."""
        self._batch_of: dict[Rank, int] = {}
        self._peaks = RecentPeaks()
        self._deviations: DeviationDetector | None = None
        self._finished: dict[Rank, int] = {}
        """Last iteration that each peer reported, member or not."""

    @property
    def max_lead(self) -> int | None:
        """The most iterations by which a peer can be ahead of this worker; None: any number."""
        return self.synchronizer.rule.max_lead if self.context.exchanges_with_all else None

    # ---- hooks of a policy -----------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Handle a local step. Notify members here or in `update_applied`."""
        raise NotImplementedError

    def update_applied(self) -> list[Instruction]:
        """Handle the application of this worker's own update to the weights."""
        return []

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Handle a `WEIGHTS` message. Raises ContractError if it is invalid."""
        raise NotImplementedError

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Handle a `PROGRESS`. With zero samples, no other message of that step follows."""

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:  # noqa: ARG002
        """Handle a message that was rejected. Do not wait for a replacement."""
        return []

    def joined(self, rank: Rank, iteration: int) -> None:
        """Handle a member that joins or returns."""

    def left(self, rank: Rank) -> None:
        """Handle a member that left; expect nothing from it."""

    def advance(self) -> list[Instruction]:
        """Do what has become possible. Called after every event."""
        return []

    def greeting(self) -> Message:
        """Return the message for a new member: this worker's iteration, with nothing to follow."""
        return Message(MessageKind.PROGRESS, self.synchronizer.own)

    def blocking_peers(self) -> frozenset[Rank]:
        """Return peers to wait for, in addition to those of the synchronizer."""
        return frozenset()

    # ---- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; return instructions in execution order. Raises ValueError for a local
        step that was not allowed, or values to send that are not finite."""
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
                self._finished.pop(rank, None)
                self._batch_of.pop(rank, None)
                self.synchronizer.left(rank)
                if self._deviations is not None:
                    self._deviations.forget(rank)
                self.left(rank)
            case BudgetsChanged():
                self.links = event
        return instructions + self.advance()

    def waiting_for(self) -> frozenset[Rank]:
        return self.synchronizer.waiting_for() | self.blocking_peers()

    def next_iteration(self) -> int:
        return self.synchronizer.next_iteration()

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender == self.rank or not (self.context.grows or sender in self.neighbours):
            reason = f"message from worker {sender}; allowed: {sorted(self.neighbours)}"
            return [RejectMessage(sender, reason)]
        try:
            return self.received(sender, message)
        except ContractError as error:
            return [RejectMessage.of(sender, error), *self.passed_over(sender, message)]

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        """Handle a message of a possible peer. Raises ContractError if it is invalid."""
        match message.kind:
            case MessageKind.PROGRESS:
                self.check_header(message)
                self.record_step(sender, message)
                self.progress_arrived(sender, message)
            case MessageKind.WEIGHTS:
                self.check_header(message)
                return self.weights_arrived(sender, message)
            case MessageKind.GRADIENT:
                policy = self.context.spec.exchange.policy
                raise ContractError(f"GRADIENT under policy {policy}; allowed: PROGRESS, WEIGHTS")
        return []  # handled by the driver, or unused by these policies

    def check_header(self, message: Message) -> None:
        """Check the fields of a message about a step. Raises ContractError if they are invalid."""
        if message.iteration < 1:
            msg = f"{message.kind.name} of iteration {message.iteration}; allowed: 1 on"
            raise ContractError(msg)
        least = 1 if message.kind is MessageKind.GRADIENT else 0
        what = f"{message.kind.name} with a local batch"
        check_samples(
            what,
            message.local_batch_size,
            self.context.max_batch_at(message.iteration),
            least=least,
        )
        if message.kind is MessageKind.PROGRESS and message.payload:
            raise ContractError("PROGRESS with a payload; allowed: none")

    def record_step(self, sender: Rank, message: Message) -> None:
        """Record the iteration and the batch size that a checked message reports."""
        self._finished[sender] = max(self._finished.get(sender, 0), message.iteration)
        if message.local_batch_size:
            self._batch_of[sender] = message.local_batch_size
        self.synchronizer.heard(sender, message.iteration)

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        self.synchronizer.joined(rank, iteration)
        if rank in self._finished:  # its first message arrived before MemberJoined
            self.synchronizer.heard(rank, self._finished[rank])
        self.joined(rank, iteration)
        return [SendMessage(rank, self.greeting())] if self.synchronizer.stepped else []

    # ---- for the policies ------------------------------------------------------------------------

    def peer_weights(self, payload: Payload) -> Flat:
        """Decode a peer's weights. Raises ContractError if they are invalid, or too large."""
        replica = self.context.replica
        own_D = None if replica is None else replica.weights_D
        return check_weights(decode_weights(payload, self.size), own_D)

    def excessive(self, peaks: Mapping[Rank, float]) -> list[RejectMessage]:
        """Return the rejections of contributions to one update that would destroy the weights."""
        return excessive(peaks, self.rank, self.largest_weight, self._peaks.largest)

    def largest_weight(self) -> float:
        """Return the largest magnitude of the weights that updates are made to; 0: unknown."""
        replica = self.context.replica
        return 0.0 if replica is None else peak_of_weights(replica.weights_D)

    def unusual(self, peaks: Mapping[Rank, float]) -> list[Instruction]:
        """Record the peaks of accepted contributions. Report peers whose values are far larger than
        their earlier ones.

        Where one makes those of all grow, only it is named: the largest counts first, and no other
        is reported once this worker's own have grown as much.
        """
        largest_first = sorted(peaks.items(), key=lambda one: -one[1])
        texts = {rank: self._peaks.add(rank, peak) for rank, peak in largest_first}
        if texts.pop(self.rank, "") or self.rank in self._peaks.grown:
            return []
        return [ReportEvent(EventReason.UNUSUAL_VALUES, text) for text in texts.values() if text]

    def deviating(self, contributions: Mapping[Rank, Contribution]) -> list[Instruction]:
        """Report peers whose contributions to one update, of all workers at once, deviate from the
        others'. Policies with a barrier call it before they combine them."""
        if self.robustness == "off":
            return []
        if self._deviations is None:  # policies without a barrier need no memory for it
            self._deviations = DeviationDetector(self.context)
        texts = self._deviations.detect(contributions)
        return [ReportEvent(EventReason.UNUSUAL_VALUES, text) for text in texts]

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        if self.context.replica is None:
            raise ValueError(f"policy {self.context.spec.exchange.policy} needs the replica")
        return self.context.replica.weights_D

    def progress(self, *, weights_version: int = 0) -> list[Instruction]:
        """Report the local step just done to every member."""
        return self.step_messages({}, weights_version)

    def step_messages(
        self, payloads: Mapping[Rank, Payload], weights_version: int
    ) -> list[Instruction]:
        """Report the local step just done to every member, with its payload as a `GRADIENT`."""
        return [
            SendMessage(peer, self._step_message(payloads.get(peer), weights_version))
            for peer in self.synchronizer.active
        ]

    def _step_message(self, payload: Payload | None, weights_version: int) -> Message:
        kind = MessageKind.PROGRESS if payload is None else MessageKind.GRADIENT
        own, size = self.synchronizer.own, self.local_batch_size
        return Message(kind, own, size, weights_version, b"" if payload is None else payload)

    def batch_sizes(self) -> dict[Rank, int]:
        """Last known local batch size of each member; this worker's own if unknown."""
        own = self.local_batch_size
        known = {rank: self._batch_of.get(rank, own) for rank in self.synchronizer.active}
        return {self.rank: own, **known}

    def global_batch_size(self) -> int:
        """Return the sum of this worker's batch and the last known batches of all members.

        If some members have not reported theirs, assume that the sum is the manifest's initial
        global batch size.
        """
        sizes = [self._batch_of.get(rank, 0) for rank in self.synchronizer.active]
        known, unknown = self.local_batch_size + sum(sizes), sizes.count(0)
        initial = self.context.spec.batching.global_batch_size.initial
        return max(known + unknown, initial) if unknown else known

    def update(self, gradient_D: Flat) -> ApplyGradient:
        """Pass the gradient to the optimizer, for the batches of this worker and its members."""
        reported_batch_size = 0 if self.context.exchanges_with_all else self.reported_batch_size
        return ApplyGradient(gradient_D, self.global_batch_size(), reported_batch_size)

    def update_alone(self, gradient_D: Flat) -> ApplyGradient:
        """Pass the gradient to the optimizer, for this worker's batch only."""
        return ApplyGradient(gradient_D, self.local_batch_size, self.reported_batch_size)

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
        self._batch_of = ints_by_rank(state, _BATCH_OF)
