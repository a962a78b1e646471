"""Rounds of local steps: what workers send at the end of one, and for which they wait.

Base of the policies whose workers train alone for some steps and then combine what they have found:
`localsgd`, and `adaptive` and `sparseloco` (`anchored_rounds`). A round ends at the same iteration
for all. A worker there sends its contribution to every member, and waits until each member that was
in step has sent one, or has continued without it. Then `close_round` combines the contributions.

The *anchor* is the weights of the last round, from which all have started.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import require_finite
from dlion_core.policies.claims.magnitudes import peak_of_weights
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    SendMessage,
    Value,
)
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.synchronization import SyncRule

C = TypeVar("C")
"""A worker's contribution to a round."""

_KEPT_ROUNDS = 2
"""Contributions of a peer that are kept until due. It waits for this worker in the second."""


@dataclass(frozen=True)
class OpenRound(Generic[C]):
    """A round that waits for contributions of others."""

    end: int
    """The iteration at which it ended for all."""
    own: C
    message: Message
    """The own contribution, as sent."""
    expected: set[Rank]


@dataclass(frozen=True)
class LastRound:
    """The last round that closed."""

    iteration: int
    """Its end."""
    samples_since: int
    """This worker's samples since then."""
    anchor_D: Flat


class LocalRounds(PeerMachine, Generic[C]):
    """One worker's rounds. Subclasses decide when one ends, what is sent, and what follows."""

    def __init__(self, context: PolicyContext, *, max_local_steps: int) -> None:
        super().__init__(context, SyncRule(slack=max_local_steps))
        self._max_local_steps = max_local_steps
        self.anchor_D: Flat | None = None
        self.velocity_D: Flat | None = None
        """Velocity of the outer momentum; None: not used yet."""
        self.samples = 0
        """Samples since the last round; more than a round's if a restart skipped one."""
        self.closed = 0
        """The end of the last round."""
        self.open: OpenRound[C] | None = None
        self._newcomers: set[Rank] = set()
        self._received: dict[Rank, dict[int, C]] = {}
        self._contributed: dict[Rank, int] = {}
        """End of the last round to which each linked peer has contributed."""
        self._refused: dict[Rank, int] = {}
        """The same of contributions that were invalid: no other one follows."""

    def close_round(self, contributions: Mapping[Rank, C], end: int) -> list[Instruction]:
        """Combine the contributions, this worker's included, in rank order."""
        raise NotImplementedError

    def largest_weight(self) -> float:
        """The largest weight of the anchor: all have the same, and take the outer step from it."""
        return 0.0 if self.anchor_D is None else peak_of_weights(self.anchor_D)

    def count_step(self, step: LocalStepDone) -> None:
        """Count a local step's samples. The first one defines the anchor. Raises NotFiniteError if
        its gradient is not finite."""
        require_finite(step.gradient_D, "gradient")
        if self.anchor_D is None:
            self.anchor_D = self.weights_D.copy()
        self.samples += step.local_batch_size

    def open_round(self, end: int, own: C, message: Message) -> list[Instruction]:
        """Send the own contribution to every member, and wait for theirs."""
        expected = {  # a worker past it has continued without this one
            rank
            for rank in self.synchronizer.in_step()
            if self.synchronizer.finished(rank) <= self.synchronizer.own
            and self._refused.get(rank, 0) < end
        }
        self.open = OpenRound(end, own, message, expected)
        return [SendMessage(peer, message) for peer in self.synchronizer.active]

    @property
    def is_mid_round(self) -> bool:
        """Whether this worker has made local steps since the last round, so that its weights differ
        from the others'."""
        return self.synchronizer.own != self.closed

    @property
    def last_round(self) -> LastRound | None:
        """What the others have that stopped at the end of the last round; None: none has closed
        here, or this worker has made no step since."""
        if not (self.closed and self.is_mid_round) or self.anchor_D is None:
            return None
        return LastRound(self.closed, self.samples, self.anchor_D)

    @property
    def first_wanted(self) -> int:
        """The first iteration whose round has not closed here."""
        return self.closed + 1 if self.open is None else self.open.end

    def has(self, sender: Rank, end: int) -> bool:
        """Whether that peer's contribution to the round of that end has arrived."""
        return end in self._received.get(sender, ())

    def max_samples(self, end: int, sender: Rank | None = None) -> int:
        """The largest number of samples that a contribution to the round of that end may report.

        A worker counts them from zero after each round. So a linked peer has made no more steps
        than there are iterations since its last contribution.
        """
        steps = self._max_local_steps
        if sender in self._contributed:
            steps = max(1, min(steps, end - self._contributed[sender]))
        return steps * self.context.max_batch_at(end)

    def keep(self, sender: Rank, end: int, contribution: C) -> None:
        """Store a peer's contribution until its round closes here. Over one link, the first for
        each round counts."""
        if end <= self._contributed.get(sender, 0):
            return
        self._contributed[sender] = end
        rounds = self._received.setdefault(sender, {})
        rounds[end] = contribution
        if len(rounds) > _KEPT_ROUNDS:
            del rounds[min(rounds)]

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members that may still contribute to the open round."""
        if self.open is None:
            return frozenset()
        end = self.open.end
        # A worker that is further has continued elsewhere: it owes this round nothing.
        last = end + (self.synchronizer.rule.slack or 0)
        return frozenset(
            rank
            for rank in self.open.expected
            if self.synchronizer.finished(rank) <= last
            and not any(at >= end for at in self._received.get(rank, ()))
        )

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Do not wait for a replacement of an invalid contribution, also if its round opens later
        here."""
        if message.kind is MessageKind.WEIGHTS:
            self._refused[sender] = max(self._refused.get(sender, 0), message.iteration)
            if self.open is not None:
                self.open.expected.discard(sender)
        return []

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Wait for it from the next round on. Send it this round: it may take part."""
        if self.open is not None:
            self._newcomers.add(rank)

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its contribution to the open round counts."""
        self._newcomers.discard(rank)
        self._contributed.pop(rank, None)
        self._refused.pop(rank, None)
        if self.open is None:
            self._received.pop(rank, None)
        else:
            self.open.expected.discard(rank)

    def advance(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        if self.open is not None:
            message = self.open.message
            instructions = [SendMessage(rank, message) for rank in sorted(self._newcomers)]
            self._newcomers.clear()
        if self.open is None or self.blocking_peers():
            return instructions
        end, contributions = self.open.end, {self.rank: self.open.own}
        for rank, rounds in self._received.items():
            if end in rounds:
                contributions[rank] = rounds[end]
            self._received[rank] = {at: one for at, one in rounds.items() if at > end}
        self.open, self.samples, self.closed = None, 0, end
        return [*instructions, *self.close_round(dict(sorted(contributions.items())), end)]

    def with_momentum(self, delta_D: Flat, momentum: np.float32, *, nesterov: bool = True) -> Flat:
        """v <- m v + delta. Return delta + m v (Nesterov), or v; without momentum delta."""
        if not momentum:
            return delta_D
        if self.velocity_D is None:
            self.velocity_D = np.zeros_like(delta_D)
        self.velocity_D = momentum * self.velocity_D + delta_D
        return delta_D + momentum * self.velocity_D if nesterov else self.velocity_D

    def state(self) -> dict[str, Value]:
        state = {**super().state(), "round_samples": self.samples}
        for name, vector_D in (("anchor_D", self.anchor_D), ("velocity_D", self.velocity_D)):
            if vector_D is not None:
                state[name] = vector_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self.samples = int(state["round_samples"])
        self.anchor_D = vector_or_none(state, "anchor_D")
        self.velocity_D = vector_or_none(state, "velocity_D")
