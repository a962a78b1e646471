"""Reject implausible iteration numbers of peers, whatever the policy.

A peer can be far ahead: it has trained apart, or never waits. But it can have made only so many
times the steps of this worker, and this worker follows it only so far. Where this worker was paused
for hours, or resumes from an old checkpoint, honest peers may be further. So that is not a
violation: with each own step the bound rises, until the peer is within it.

`factory` puts an `IterationGuard` in front of every machine. A machine that accepted an absurd
iteration could ignore everything after it. The guard also rebuilds the machine when this worker
takes over a peer's weights (`take_over`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dlion_api.names import Rank
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.policies.gradient.gradient_exchange import GradientMachine
from dlion_core.policies.interface import (
    STEP_KINDS,
    TAKEN_OVER,
    AddSamples,
    Event,
    Instruction,
    IterationReplayed,
    LocalStepDone,
    MemberJoined,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    Value,
)
from dlion_core.policies.partitions.partition_merge import PartitionMerge
from dlion_core.policies.staged.machines import Decoder
from dlion_core.policies.weights.local_rounds import LastRound, LocalRounds

MAX_LEAD = 100_000
"""Accepted iterations beyond the highest known one. No worker does so many between two messages of
a link that is up: each step sends one, and a queue keeps the newest."""


MAX_PACE_RATIO = 1000
"""Maximum ratio of a peer's iterations to the steps that this worker has made or taken over."""

MAX_ITERATION = 10**10
"""Four months of steps that take a millisecond. What is beyond breaks the protocol."""

MAX_FOLLOWED_RATIO, MAX_FOLLOWED_LEAD = 100, 10_000
"""The same, and iterations beyond, for a jump to where a peer is. A worker that is further ahead is
not followed at once."""

_CHECKED_KINDS = STEP_KINDS | {
    MessageKind.LOSS,
    MessageKind.WEIGHTS,
    MessageKind.WEIGHTS_REQUEST,
    MessageKind.HELD,
    MessageKind.FOLD,
    MessageKind.FOLD_REQUEST,
}


class IterationGuard:
    """A machine that rejects messages with implausible iterations."""

    def __init__(
        self,
        build: Callable[[], PolicyMachine],
        lasting: tuple[str, ...] = (),
        held: tuple[str, ...] = (),
    ) -> None:
        """Both tuples are prefixes of state keys. `lasting`: state that stays valid with any
        weights. `held`: state that describes a checkpoint's weights, and also a peer's later ones.
        """
        self._build, self._lasting, self._held = build, lasting, held
        self.machine = build()
        self._furthest = 0
        """Highest iteration of own steps and of accepted messages."""
        self._own = self._steps = 0
        """Steps that this worker has made, or that its first weights contain. A jump to another
        iteration adds one, so that no peer can drive it up."""
        self._greeted: dict[Rank, int] = {}
        """Iteration that each peer reported when its link came up. No other source knows it."""

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event. The machine never receives an implausible iteration."""
        match event:
            case MessageArrived(sender=sender, message=message) if message.kind in _CHECKED_KINDS:
                known = max(self._furthest, self._greeted.get(sender, 0)) + MAX_LEAD
                if message.iteration > min(known, self._max_iteration()):
                    return [self._rejected(sender, message.kind.name, message.iteration, known)]
                if message.kind in STEP_KINDS:
                    self._furthest = max(self._furthest, message.iteration)
            case MemberJoined(rank=rank, iteration=iteration):
                self._greeted[rank] = min(iteration, MAX_ITERATION)
                if iteration > self._max_iteration():
                    joined = self.machine.handle(MemberJoined(rank, self._max_iteration()))
                    return [self._rejected(rank, "hello", iteration, MAX_ITERATION), *joined]
            case LocalStepDone(iteration=iteration) | IterationReplayed(iteration=iteration):
                self._furthest = max(self._furthest, iteration)
                self._own, self._steps = iteration, self._steps + 1
        return self.machine.handle(event)

    def _max_iteration(self) -> int:
        """The furthest iteration that any worker can have come to."""
        return MAX_LEAD + MAX_PACE_RATIO * self._steps

    def _rejected(self, sender: Rank, what: str, iteration: int, known: int) -> RejectMessage:
        """Reject an iteration. It is a violation beyond `known`, which the peer itself reported."""
        reason = (
            f"{what} of iteration {iteration}; allowed: up to {min(known, self._max_iteration())}"
        )
        is_violation = iteration > min(known, MAX_ITERATION)
        return RejectMessage(sender, reason, PeerRefusal.IMPLAUSIBLE, is_violation=is_violation)

    def waiting_for(self) -> frozenset[Rank]:
        return self.machine.waiting_for()

    def next_iteration(self) -> int:
        """Return the machine's, but do not follow a peer further than it can have come."""
        most = MAX_FOLLOWED_LEAD + MAX_FOLLOWED_RATIO * self._steps
        return min(self.machine.next_iteration(), max(most, self._own + 1))

    @property
    def max_lead(self) -> int | None:
        """The most iterations by which a peer can be ahead of this worker; None: any number."""
        if isinstance(self.machine, PartitionMerge | GradientMachine | LocalRounds):
            return self.machine.max_lead
        return None

    @property
    def is_mid_round(self) -> bool:
        """Whether the weights are those of local steps that the end of a round replaces."""
        return isinstance(self.machine, LocalRounds) and self.machine.is_mid_round

    def round_at(self, iteration: int | None) -> LastRound | None:
        """The last round if it ended at that iteration, and this worker is within the next."""
        last = self.machine.last_round if isinstance(self.machine, LocalRounds) else None
        return last if last is not None and last.iteration == iteration else None

    def collected_samples(self) -> Iterable[AddSamples]:
        """Return the samples of peers that the machine's state has; most policies keep none."""
        return self.machine.collected_samples() if isinstance(self.machine, Decoder) else ()

    @property
    def max_kept_bytes(self) -> int:
        """The most bytes of these samples in a checkpoint."""
        return self.machine.max_kept_bytes if isinstance(self.machine, Decoder) else 0

    def state(self) -> dict[str, Value]:
        return self.machine.state()

    def restore(self, state: Mapping[str, Value]) -> None:
        self.machine.restore(state)
        self._furthest = self._own = self._steps = self.machine.next_iteration() - 1

    def take_over(self, iteration: int) -> None:
        """Rebuild the machine for a peer's weights of that iteration. Call it before any event.

        Only the `lasting` and `held` state is kept. Received gradients are in these weights
        already, and withheld gradients may have been sent since.
        """
        kept = self._named((*self._lasting, *self._held))
        self.machine = self._build()
        self.restore({**self.machine.state(), **kept, "iteration": iteration, TAKEN_OVER: 1})

    def restarted(self) -> IterationGuard:
        """Return a new guard for a worker that joins again. It keeps the `lasting` state. It drops
        the `held` state, since a peer's weights may lack what this worker trained on alone."""
        machine = IterationGuard(self._build, self._lasting, self._held)
        machine.restore({**machine.state(), **self._named(self._lasting)})
        return machine

    def _named(self, beginnings: tuple[str, ...]) -> dict[str, Value]:
        state = self.machine.state()
        return {name: value for name, value in state.items() if name.startswith(beginnings)}
