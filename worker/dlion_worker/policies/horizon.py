"""How far ahead a peer may say that it is: what lies beyond is refused, whatever the policy.

`Horizon` stands before any machine; `building` puts it there. An iteration that was believed once
could keep whoever believed it from all that comes after. It also begins the machine anew where this
worker takes a peer's weights over (`overtake`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_worker.policies.interface import (
    TAKEN_OVER,
    IterationPassed,
    LocalStepDone,
    MemberJoined,
    MessageArrived,
    MessageKind,
    Refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlion_api.names import Rank
    from dlion_worker.policies.interface import Event, Instruction, Machine, Message, Value

LEAP = 100_000
"""Iterations beyond the furthest that is known of anybody. Nobody does so many between two messages
of a link that is up: each step gives each member one, and of those in a queue the newest stays."""

_STEPS = frozenset({MessageKind.GRADIENT, MessageKind.PROGRESS})


class Horizon:
    """A machine whose peers are held to what they can have come to."""

    def __init__(
        self,
        build: Callable[[], Machine],
        lasting: tuple[str, ...] = (),
        held: tuple[str, ...] = (),
    ) -> None:
        """How names in the machine's state begin. `lasting`: of what stays right whatever the
        weights are; `held`: of what the weights of a checkpoint hold, and a peer's later ones."""
        self._build, self._lasting, self._held = build, lasting, held
        self.machine = build()
        self._furthest = 0
        """Of this worker's own steps, and of what was believed of peers'."""
        self._greeted: dict[Rank, int] = {}
        """How far each peer said that it was when its link came up: nobody else can know."""

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event, as the machine does; an iteration beyond the horizon it never hears."""
        match event:
            case MessageArrived(sender=sender, message=message) if message.kind in _STEPS:
                most = self._most(sender)
                if message.iteration > most:
                    return [Refuse(sender, _beyond(message, most))]
                self._furthest = max(self._furthest, message.iteration)
            case MemberJoined(rank=rank, iteration=iteration):
                self._greeted[rank] = iteration
            case LocalStepDone(iteration=iteration) | IterationPassed(iteration=iteration):
                self._furthest = max(self._furthest, iteration)
        return self.machine.handle(event)

    def _most(self, sender: Rank) -> int:
        return max(self._furthest, self._greeted.get(sender, 0)) + LEAP

    def waiting_for(self) -> frozenset[Rank]:
        """As the machine says."""
        return self.machine.waiting_for()

    def next_iteration(self) -> int:
        """As the machine says."""
        return self.machine.next_iteration()

    def state(self) -> dict[str, Value]:
        """The machine's: how far all are comes anew."""
        return self.machine.state()

    def restore(self, state: Mapping[str, Value]) -> None:
        """Gives the machine back what `state` gave."""
        self.machine.restore(state)
        self._furthest = self.machine.next_iteration() - 1

    def overtake(self, iteration: int) -> None:
        """Before any other event: the weights are a peer's now, of that iteration. What had arrived
        for this worker's own they hold already, and what of its gradients was held back may have
        left since: the machine begins anew, but for what lasts."""
        kept = self._named((*self._lasting, *self._held))
        self.machine = self._build()
        self.restore({**self.machine.state(), **kept, "iteration": iteration, TAKEN_OVER: 1})

    def anew(self) -> Horizon:
        """One that has heard nothing yet, for a worker that comes in once more. It has what lasts,
        but not what this one's weights hold: a peer's may lack what was trained on apart."""
        machine = Horizon(self._build, self._lasting, self._held)
        machine.restore({**machine.state(), **self._named(self._lasting)})
        return machine

    def _named(self, beginnings: tuple[str, ...]) -> dict[str, Value]:
        state = self.machine.state()
        return {name: value for name, value in state.items() if name.startswith(beginnings)}


def _beyond(message: Message, most: int) -> str:
    return f"{message.kind.name} of iteration {message.iteration}; allowed: up to {most}"
