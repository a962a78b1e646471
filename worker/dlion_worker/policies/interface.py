"""The words between a policy and whoever drives it: events in, instructions out.

A policy is a state machine without I/O. The trainer and the simulator both drive it: they hand it
events one at a time and carry out the instructions that come back, in order. No policy knows
TensorFlow, gRPC, a clock or a thread.

Shape suffixes: D the flat gradient (all variables, in the layout's order), K kept entries,
L variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank

Flat = NDArray[np.float32]
"""Flat float32 vector over all trainable variables, shape [D]."""

Value = NDArray[np.generic] | int | float | str
"""One named value of a policy's state."""

TAKEN_OVER = "taken_over"
"""In a state that is to be restored: the weights are a peer's, of the state's `iteration`."""


@dataclass(frozen=True)
class Layout:
    """Where each variable stands in the flat vector."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """D, the number of entries over all variables."""
        return sum(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """One slice of the flat vector per variable, in order."""
        ends = np.cumsum(self.sizes)
        return tuple(slice(int(e) - s, int(e)) for e, s in zip(ends, self.sizes, strict=True))


class MessageKind(IntEnum):
    """What a message carries; the numbers are the wire's (exchange.proto)."""

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


@dataclass(frozen=True)
class Message:
    """One message on one link. `payload` is coded (`dlion_worker.codecs`), untrusted on arrival."""

    kind: MessageKind
    iteration: int
    local_batch_size: int = 0
    weights_version: int = 0
    payload: bytes | memoryview = b""

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload; headers are counted by the exchange."""
        return len(self.payload)


# ---- events: what has happened ------------------------------------------------------------------


@dataclass(frozen=True)
class LocalStepDone:
    """The local gradient of an iteration (counted from 1). The policy may keep the array."""

    iteration: int
    gradient_D: Flat
    local_batch_size: int
    loss: float
    global_batch_size: int = 0
    """Samples of all workers in that iteration, as the sidecar says; 0: not known."""


@dataclass(frozen=True)
class IterationPassed:
    """Instead of a local step: the others make this iteration's update without this worker, which
    comes late and makes it as well, from what they send. Nobody hears of it. Only policies that
    `replay` (`catalogue.Policy`) get it, as many as there are to catch up with."""

    iteration: int


@dataclass(frozen=True)
class MessageArrived:
    """A whole message from a peer, checked for size and checksum, not for sense."""

    sender: Rank
    message: Message


@dataclass(frozen=True)
class MemberJoined:
    """A peer's link is up, in both directions. `iteration`: the last one that peer has finished.

    Before this worker's first step such a peer is expected from the first iteration on; later, once
    it has been heard and has caught up.
    """

    rank: Rank
    iteration: int = 0


@dataclass(frozen=True)
class MemberLeft:
    """A peer is gone, or its link is down: nobody should wait for it."""

    rank: Rank


@dataclass(frozen=True)
class BudgetsChanged:
    """What each link carries in an iteration, as measured. A link not named is unbounded."""

    budget_bytes: Mapping[Rank, int]
    delay_steps: Mapping[Rank, float] = field(default_factory=dict)
    """Time from here to there on the idle link, in iterations of this worker, where known."""


@dataclass(frozen=True)
class Descended:
    """The weights have just taken the update of this worker's `Descend`."""


@dataclass(frozen=True)
class Regrouped:
    """Under `exchange.topology: clustered`, with whom each worker exchanges from now on.

    Links follow: what is no neighbour any more leaves, what has become one joins. For policies in
    which it matters how many neighbours a neighbour has; all others may pass it over.
    """

    graph: Mapping[Rank, frozenset[Rank]]


Event = (
    LocalStepDone
    | IterationPassed
    | MessageArrived
    | MemberJoined
    | MemberLeft
    | BudgetsChanged
    | Descended
    | Regrouped
)

# ---- instructions: what is to be done -----------------------------------------------------------


@dataclass(frozen=True)
class Descend:
    """Hand this gradient to the optimizer: one update of the weights.

    `samples` is the global batch size by which the contributions were weighted, as far as it is
    known here. The learning rate may follow it; or `global_batch_size`, where the contributions are
    of some workers only (0: they are of all). The machine forgets the array: it is the driver's.
    """

    gradient_D: Flat
    samples: int
    global_batch_size: int = 0


@dataclass(frozen=True)
class Mix:
    """w <- (1 - fraction) w + fraction * weights_D; optimizer moments are left alone.

    `since_D`: what w was when it was to be compared with `weights_D`. What it has taken since stays
    whole: w <- w + fraction (weights_D - since_D). None: as it is now.
    """

    weights_D: Flat
    fraction: float
    sender: Rank
    since_D: Flat | None = None


@dataclass(frozen=True)
class Fold:
    """w <- w + m2 / (m1 + m2) (weights_D - since_D): to the mean by samples of the two sides, m1
    `own_samples` and m2 `their_samples`, what each has trained on and the other has not.

    `weights_D` and `since_D`, this worker's when the other's were asked for, are where the weights
    come to rest, so that moments stay as they are. What w has taken since then, from both sides,
    stays whole, as in `Mix`.
    """

    weights_D: Flat
    own_samples: int
    their_samples: int
    sender: Rank
    since_D: Flat


@dataclass(frozen=True)
class Add:
    """w <- w + update_D; the optimizer has no part in it."""

    update_D: Flat


@dataclass(frozen=True)
class Replace:
    """w <- weights_D; optimizer moments are left alone."""

    weights_D: Flat


@dataclass(frozen=True)
class Send:
    """Queue this message on the link to that peer."""

    peer: Rank
    message: Message


@dataclass(frozen=True)
class SendWeights:
    """Code the weights, those given or as they are now, and queue them for that peer as a `WEIGHTS`
    message."""

    peer: Rank
    iteration: int
    weights_D: Flat | None = None


@dataclass(frozen=True)
class Withhold:
    """Who takes over this worker's state from now on gets its weights without `update_D`, which all
    peers have still to get, and that one with them. The machine forgets the array."""

    update_D: Flat


@dataclass(frozen=True)
class Refuse:
    """That peer said nonsense: count it, raise an event, quarantine the peer if it goes on."""

    peer: Rank
    reason: str


Instruction = Descend | Mix | Fold | Add | Replace | Send | SendWeights | Withhold | Refuse


class ReplicaView(Protocol):
    """This worker's weights, to be read and never written."""

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """As they are now, shape [D]; they change under whoever keeps them: copy what must stay."""
        ...

    @property
    def resting_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """Where they come to rest if every gradient is zero from now on, as the optimizer's moments
        carry them on; a copy."""
        ...


class Machine(Protocol):
    """What the trainer and the simulator drive: the sum of a worker's policies."""

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event; what is to be done about it, in order."""
        ...

    def waiting_for(self) -> frozenset[Rank]:
        """Peers that must be heard before the next local step may begin; empty: begin."""
        ...

    def next_iteration(self) -> int:
        """Number of the next local step: one more than the last, or where the others have got to,
        if they have gone on without this worker."""
        ...

    def state(self) -> dict[str, Value]:
        """Everything that a restart must bring back, as flat named values for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; with `TAKEN_OVER`, over a peer's weights."""
        ...
