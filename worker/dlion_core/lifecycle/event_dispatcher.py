"""Dispatches events to the quorum gate, to latecomers' negotiation and to the policy.

`loop` and `worker` pass every event, in order. The quorum gate gets all events, then the agreement
on lost workers. Latecomers get answers, and the policy gets the rest.
"""

import math
from collections.abc import Callable, Iterable

from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.departure_agreement import DepartureAgreement
from dlion_core.lifecycle.inbox import EventInbox, JoinQuestion
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.join_barrier import JoinRole
from dlion_core.lifecycle.quorum_gate import QuorumGate
from dlion_core.policies.catalogue import has_barrier
from dlion_core.policies.interface import Event, MessageArrived
from dlion_core.policies.iteration_guard import IterationGuard


class EventDispatcher:
    """Dispatches one worker's events; owns its `quorum_gate` and `departures`."""

    def __init__(
        self,
        instructions: InstructionExecutor,
        inbox: EventInbox,
        *,
        due: Callable[[float], object] = lambda _after_s: None,
    ) -> None:
        """`due` is that of `QuorumGate`."""
        self.instructions, self._inbox = instructions, inbox
        self.parts, self.progress = instructions.parts, instructions.progress
        self.has_barrier = has_barrier(self.parts.job.spec)
        """Whether an iteration's update waits for the peers' gradients."""
        self.is_training = True
        """Whether this worker trains; False while it catches up."""
        self.quorum_gate = QuorumGate(instructions, due=due)
        self.departures = DepartureAgreement(instructions, self._process)

    def reset(self, machine: IterationGuard) -> None:
        """Prepare to rejoin, with a machine that has received no events yet."""
        self.parts.machine = machine
        self.is_training = True
        self.instructions.reminder_s = math.inf
        self.quorum_gate.reset()
        self.departures.reset()

    def handle(self, events: Iterable[Event]) -> None:
        was_closed = self.quorum_gate.is_closed
        for event in events:
            is_withheld = self.quorum_gate.take(event)
            if is_withheld and self.quorum_gate.is_closed and isinstance(event, JoinQuestion):
                self._answer(event, JoinRole.NO_QUORUM)  # it gets another answer afterwards
            for earlier in self.quorum_gate.released():
                self.departures.handle(earlier)
            if not is_withheld:
                self.departures.handle(event)
        self.quorum_gate.update()
        if self.quorum_gate.is_closed:
            return
        if was_closed:
            self.instructions.postpone_reminder()
        self.instructions.remind()

    def _process(self, event: Event) -> None:
        if not isinstance(event, JoinQuestion):
            self.instructions.handle(event)
            return
        # Count on the latecomer from now on.
        progress = join_barrier.as_progress(event.message.iteration)
        if progress is not None and self.has_barrier:
            self.instructions.handle(MessageArrived(event.sender, progress))
        self._answer(event, JoinRole.IN if self.is_training else JoinRole.OUT)

    def _answer(self, question: JoinQuestion, role: JoinRole) -> None:
        """Answer a latecomer with this worker's progress."""
        self._inbox.answer(question, role, done=self.progress.iteration)
