"""Reject implausible iteration numbers of peers, whatever the policy.

`factory` puts an `IterationGuard` in front of every machine. A machine that accepted an absurd
iteration could ignore everything after it. The guard also rebuilds the machine when this worker
takes over a peer's weights (`take_over`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlion_api.names import Rank
from dlion_core.policies.interface import (
    STEP_KINDS,
    TAKEN_OVER,
    Event,
    Instruction,
    IterationReplayed,
    LocalStepDone,
    MemberJoined,
    MessageArrived,
    PolicyMachine,
    RejectMessage,
    Value,
)
from dlion_core.policies.weights.local_rounds import LocalRounds

MAX_LEAD = 100_000
"""Accepted iterations beyond the highest known one. No worker does so many between two messages of
a link that is up: each step sends one, and a queue keeps the newest."""


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
        self._greeted: dict[Rank, int] = {}
        """Iteration that each peer reported when its link came up. No other source knows it."""

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event. The machine never receives an implausible iteration."""
        match event:
            case MessageArrived(sender=sender, message=message) if message.kind in STEP_KINDS:
                most = max(self._furthest, self._greeted.get(sender, 0)) + MAX_LEAD
                if message.iteration > most:
                    kind, iteration = message.kind.name, message.iteration
                    reason = f"{kind} of iteration {iteration}; allowed: up to {most}"
                    return [RejectMessage(sender, reason)]
                self._furthest = max(self._furthest, message.iteration)
            case MemberJoined(rank=rank, iteration=iteration):
                self._greeted[rank] = iteration
            case LocalStepDone(iteration=iteration) | IterationReplayed(iteration=iteration):
                self._furthest = max(self._furthest, iteration)
        return self.machine.handle(event)

    def waiting_for(self) -> frozenset[Rank]:
        return self.machine.waiting_for()

    def next_iteration(self) -> int:
        return self.machine.next_iteration()

    @property
    def is_mid_round(self) -> bool:
        """Whether the weights are those of local steps that the end of a round replaces."""
        return isinstance(self.machine, LocalRounds) and self.machine.is_mid_round

    def state(self) -> dict[str, Value]:
        return self.machine.state()

    def restore(self, state: Mapping[str, Value]) -> None:
        self.machine.restore(state)
        self._furthest = self.machine.next_iteration() - 1

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
