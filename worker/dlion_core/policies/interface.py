"""The interface between a policy and its driver: events in, instructions out.

Shape suffixes: D the flat gradient (all variables, in the layout's order), K kept entries, L
variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.refusals import PeerRefusal, refusal_kind
from dlion_api.reasons import EventReason

Flat = NDArray[np.float32]
"""Flat float32 vector over all trainable variables, shape [D]."""

Value = NDArray[np.generic] | int | float | str
"""One named value of a policy's state."""

TAKEN_OVER = "taken_over"
"""State key. If present on restore, the weights are those of a peer at the state's `iteration`."""


@dataclass(frozen=True)
class Layout:
    """Position of each variable in the flat vector."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """D, the number of entries over all variables."""
        return sum(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return one slice of the flat vector per variable, in order."""
        ends = np.cumsum(self.sizes)
        return tuple(slice(int(e) - s, int(e)) for e, s in zip(ends, self.sizes, strict=True))


class MessageKind(IntEnum):
    """Kind of a message. The numbers are wire values (exchange.proto)."""

    GRADIENT = 1
    PROGRESS = 2
    LOSS = 3
    WEIGHTS_REQUEST = 4
    WEIGHTS = 5
    STOP = 6
    MEET = 7
    HELD = 8
    FOLD_REQUEST = 9
    FOLD = 10
    REACH = 11
    HELD_REQUEST = 12
    MISSED_STEPS_REQUEST = 13
    FORWARDED_STEP = 14
    MISSED_STEPS_SENT = 15
    FEATURES = 16
    FEATURES_REQUEST = 17


STEP_KINDS = frozenset({MessageKind.GRADIENT, MessageKind.PROGRESS})
"""Kinds of messages that report an iteration."""


@dataclass(frozen=True)
class Message:
    """One message on one link. `payload` is encoded (`dlion_core.codecs`) and untrusted on
    arrival."""

    kind: MessageKind
    iteration: int
    local_batch_size: int = 0
    weights_version: int = 0
    payload: bytes | memoryview = b""

    @property
    def is_own_step(self) -> bool:
        """Whether it reports a step that its sender has made."""
        return self.kind in STEP_KINDS and self.local_batch_size > 0

    @property
    def size_bytes(self) -> int:
        """Size of the payload. The exchange counts the headers."""
        return len(self.payload)


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalFeatures:
    """Encoded samples of a worker that sends features instead of gradients (`staged`)."""

    first: int
    """Number of the first of these samples, from 0."""
    total: int
    """Samples that this worker has."""
    features_B: NDArray[np.float32]
    """Shape [B, ...]."""
    labels_B: NDArray[np.int32]


@dataclass(frozen=True)
class LocalStepDone:
    """The local gradient of an iteration (counted from 1). The policy may keep the array."""

    iteration: int
    gradient_D: Flat
    local_batch_size: int
    loss: float
    global_batch_size: int = 0
    """Samples of all workers in that iteration, as the sidecar reports it; 0: unknown."""
    features: LocalFeatures | None = None
    """Features in place of a gradient, which then has no entries."""


@dataclass(frozen=True)
class IterationReplayed:
    """Replaces a local step while a late worker catches up.

    The other workers made this update without this worker. It now makes the same update from their
    messages and sends nothing. Only policies with `replays` (`catalogue.Policy`) receive this
    event, once per missed iteration.
    """

    iteration: int


@dataclass(frozen=True)
class MessageArrived:
    """A complete message from a peer. Size and checksum are checked, the content is not."""

    sender: Rank
    message: Message


@dataclass(frozen=True)
class MemberJoined:
    """A peer's link is up in both directions. `iteration` is the last one that the peer finished.

    Before this worker's first step, the peer is waited for from the first iteration on. Later it is
    waited for once it has sent a message and has caught up.
    """

    rank: Rank
    iteration: int = 0


@dataclass(frozen=True)
class MemberLeft:
    """A peer has left or its link is down. Do not wait for it."""

    rank: Rank


@dataclass(frozen=True)
class BudgetsChanged:
    """Measured capacity of each link per iteration. A link without an entry is unbounded."""

    budget_bytes: Mapping[Rank, int]
    delay_steps: Mapping[Rank, float] = field(default_factory=dict)
    """One-way delay of the idle link in iterations of this worker, where known."""
    bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    """Measured rate of each link, where known."""


@dataclass(frozen=True)
class UpdateApplied:
    """The driver has applied this worker's `ApplyGradient` to the weights."""


@dataclass(frozen=True)
class TopologyChanged:
    """New neighbours of each worker, under `exchange.topology: clustered`.

    `MemberLeft` and `MemberJoined` follow for the links that change. A policy needs this event only
    if the number of a neighbour's neighbours matters to it.
    """

    graph: Mapping[Rank, frozenset[Rank]]


@dataclass(frozen=True)
class ReminderDue:
    """The time of the policy's `RemindAfter` is over."""


Event = (
    LocalStepDone
    | IterationReplayed
    | MessageArrived
    | MemberJoined
    | MemberLeft
    | BudgetsChanged
    | UpdateApplied
    | TopologyChanged
    | ReminderDue
)

# ---- instructions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ApplyGradient:
    """Pass this gradient to the optimizer: one update of the weights.

    `samples` is the known global batch size by which the contributions are weighted; the learning
    rate may scale with it. If only some workers contribute, the learning rate scales with
    `global_batch_size` instead (0: all contribute). The driver owns the array; the policy must not
    keep it.
    """

    gradient_D: Flat
    samples: int
    global_batch_size: int = 0


@dataclass(frozen=True)
class AverageWeights:
    """w <- (1 - fraction) w + fraction * weights_D; optimizer moments do not change.

    `since_D` is the value of w to compare with `weights_D`. Updates applied after that value are
    kept in full: w <- w + fraction (weights_D - since_D). None: compare with the current w.
    """

    weights_D: Flat
    fraction: float
    sender: Rank
    since_D: Flat | None = None


@dataclass(frozen=True)
class MergeReplicas:
    """w <- w + m2 / (m1 + m2) (weights_D - since_D): the sample-weighted mean of two partitions.

    m1 is `own_samples` and m2 `their_samples`: the samples that one side has trained on and the
    other has not. `since_D` is this worker's value when it requested the peer's. Both vectors are
    resting weights (`ReplicaView.resting_D`), so optimizer moments do not change. Updates applied
    after the request are kept in full, as in `AverageWeights`.
    """

    weights_D: Flat
    own_samples: int
    their_samples: int
    sender: Rank
    since_D: Flat


@dataclass(frozen=True)
class AddUpdate:
    """w <- w + update_D, without the optimizer."""

    update_D: Flat


@dataclass(frozen=True)
class ReplaceWeights:
    """w <- weights_D; optimizer moments do not change."""

    weights_D: Flat


@dataclass(frozen=True)
class SendMessage:
    """Queue this message on the link to that peer."""

    peer: Rank
    message: Message


@dataclass(frozen=True)
class SendWeights:
    """Encode the weights (`weights_D`, else the current ones) and queue them as a `WEIGHTS`
    message."""

    peer: Rank
    iteration: int
    weights_D: Flat | None = None


@dataclass(frozen=True)
class AddSamples:
    """Train on these samples, too, from the next batch on. Those of an equal key are replaced."""

    key: str
    x_B: NDArray[np.float32]
    y_B: NDArray[np.int32]


@dataclass(frozen=True)
class WithholdUpdate:
    """Exclude `update_D` from the weights that this worker gives to a worker that takes over its
    state.

    All peers, including that worker, still receive this update as a message. The policy must not
    keep the array.
    """

    update_D: Flat


@dataclass(frozen=True)
class RejectMessage:
    """The peer sent an invalid message. Count it, raise an event, quarantine the peer if it
    repeats."""

    peer: Rank
    reason: str
    kind: PeerRefusal = PeerRefusal.MALFORMED
    is_violation: bool = True
    """False: the message may be honest. It is reported and counted, and shuts no peer out."""

    @classmethod
    def of(cls, peer: Rank, error: ContractError) -> "RejectMessage":
        """Return the rejection of a message that caused that error."""
        return cls(peer, str(error), refusal_kind(error))


@dataclass(frozen=True)
class ReportEvent:
    """Report what the policy has done, and why."""

    reason: EventReason
    text: str


@dataclass(frozen=True)
class RemindAfter:
    """Send `ReminderDue` once so many seconds have passed. A later one replaces it."""

    seconds: float


Instruction = (
    ApplyGradient
    | AverageWeights
    | MergeReplicas
    | AddUpdate
    | ReplaceWeights
    | SendMessage
    | SendWeights
    | AddSamples
    | WithholdUpdate
    | RejectMessage
    | ReportEvent
    | RemindAfter
)


class ReplicaView(Protocol):
    """Read-only view of this worker's weights."""

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """The current weights, shape [D]. They change in place: copy them to keep them."""

    @property
    def resting_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """The weights after the optimizer's moments have decayed with zero gradients; a copy."""


@runtime_checkable
class MeasuredReplica(Protocol):
    """A replica that can measure weights on this worker's own held-out samples."""

    @property
    def untrained_loss(self) -> float | None:
        """Mean loss of the weights that a peer's replaced before the first step; None: unknown."""

    def loss_of(self, weights_D: Flat | None) -> float | None:
        """Return the mean loss of these weights, of the current ones for None; None: unknown."""


class PolicyMachine(Protocol):
    """All policies of one worker combined; driven by the trainer and the simulator."""

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; return instructions in execution order."""

    def waiting_for(self) -> frozenset[Rank]:
        """Return the peers to wait for before the next local step; empty: start it."""

    def next_iteration(self) -> int:
        """Return the number of the next local step. It is one more than the last, or the other
        workers' current iteration if they continued without this worker."""

    def state(self) -> dict[str, Value]:
        """Return everything that a restart needs, as flat named values for a checkpoint."""

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned. With `TAKEN_OVER`, the weights are those of a peer."""
