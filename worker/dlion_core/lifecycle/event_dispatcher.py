"""Dispatches events to the quorum gate, to latecomers' negotiation and to the policy.

`loop` and `worker` pass every event, in order. The quorum gate gets all events,
latecomers get answers, and the policy gets the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dlion_api.names import Rank
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.instruction_executor import InstructionExecutor, WorkerComponents
from dlion_core.lifecycle.join_barrier import JoinRole
from dlion_core.lifecycle.quorum_gate import QuorumGate
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.policies.catalogue import has_barrier
from dlion_core.policies.interface import Event, Message, MessageArrived, MessageKind
from dlion_core.policies.iteration_guard import IterationGuard


class EventDispatcher:
    """Dispatches one worker's events; owns its `instructions` and its `quorum_gate`."""

    def __init__(
        self,
        parts: WorkerComponents,
        progress: JobProgress,
        *,
        send: Callable[[Rank, Message], None],
        refuse: Callable[[Rank, str, int], None],
        due: Callable[[float], object] = lambda _after_s: None,
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """The arguments are those of `InstructionExecutor` and `QuorumGate`."""
        self._parts, self._progress, self._send = parts, progress, send
        self.has_barrier = has_barrier(parts.job.spec)
        """Whether an iteration's update waits for the peers' gradients."""
        self.is_training = True
        """Whether this worker trains; False while it catches up."""
        self.instructions = InstructionExecutor(
            parts, progress, send=send, refuse=refuse, cpu_s=cpu_s
        )
        self.quorum_gate = QuorumGate(
            parts.job, parts.reporter, progress, carry_out=self.instructions.carry_out, due=due
        )

    def reset(self, machine: IterationGuard) -> None:
        """Prepare to rejoin, with a machine that has received no events yet."""
        self._parts.machine = machine
        self.is_training = True
        self.quorum_gate.reset()

    def handle(self, events: Iterable[Event]) -> None:
        """Process events and their consequences."""
        for event in events:
            is_withheld = self.quorum_gate.take(event)
            if is_withheld and self.quorum_gate.is_closed:
                self._answer_without_quorum(event)
            for earlier in self.quorum_gate.released():
                self._process(earlier)
            if not is_withheld:
                self._process(event)
        self.quorum_gate.update()

    def _process(self, event: Event) -> None:
        if isinstance(event, MessageArrived) and event.message.kind is MessageKind.MEET:
            self._answer_latecomer(event.sender, event.message.iteration)
        else:
            self.instructions.handle(event)

    def _answer_latecomer(self, peer: Rank, asked: int) -> None:
        """Count on the latecomer from now on, and answer with this worker's progress."""
        if (progress := join_barrier.as_progress(asked)) is not None and self.has_barrier:
            self.instructions.handle(MessageArrived(peer, progress))
        role = JoinRole.IN if self.is_training else JoinRole.OUT
        self._send(peer, join_barrier.join_answer(asked, done=self._progress.iteration, role=role))

    def _answer_without_quorum(self, event: Event) -> None:
        """Answer a latecomer while paused; it gets another answer afterwards."""
        if isinstance(event, MessageArrived) and event.message.kind is MessageKind.MEET:
            asked, done = event.message.iteration, self._progress.iteration
            self._send(
                event.sender, join_barrier.join_answer(asked, done=done, role=JoinRole.NO_QUORUM)
            )
