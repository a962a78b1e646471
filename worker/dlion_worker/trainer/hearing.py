"""What has happened, told to whom it concerns: one way for trainer and simulator.

Called by `loop` and `simulation.worker` with every event, in order. The quorum hears all of them,
latecomers get their answers, and the policy hears the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dlion_worker.policies.interface import Event, MessageArrived, MessageKind
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.instructions import Instructions
from dlion_worker.trainer.rendezvous import Role
from dlion_worker.trainer.standstill import Standstill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_api.spec import Job
    from dlion_worker.policies.horizon import Horizon
    from dlion_worker.policies.interface import Message
    from dlion_worker.trainer.gradient_norms import NormMeter
    from dlion_worker.trainer.replica import LocalReplica
    from dlion_worker.trainer.reporting import Reporter
    from dlion_worker.trainer.stopping import JobProgress


class Parts(Protocol):
    """What a worker is put together from, as far as it matters here."""

    job: Job
    machine: Horizon
    replica: LocalReplica
    reporter: Reporter


class Hearing:
    """One worker's, with its `instructions` and its `standstill`."""

    def __init__(
        self,
        parts: Parts,
        progress: JobProgress,
        *,
        send: Callable[[Rank, Message], None],
        refuse: Callable[[Rank, str, int], None],
        norms: NormMeter,
        has_barrier: bool,
        due: Callable[[float], object] = lambda _after_s: None,
    ) -> None:
        """`has_barrier`: an iteration's update is made when the peers' gradients are in. The others
        are as in `Instructions` and `Standstill`."""
        self._parts, self._progress = parts, progress
        self._send, self._has_barrier = send, has_barrier
        self.is_in = True
        """Whether this worker trains; not while it catches up with those who do."""
        self.instructions = Instructions(
            parts.machine,
            parts.replica,
            parts.reporter,
            progress,
            send=send,
            refuse=refuse,
            norms=norms,
        )
        self.standstill = Standstill(
            parts.job, parts.reporter, progress, carry_out=self.instructions.carry_out, due=due
        )

    def begin_anew(self, machine: Horizon) -> None:
        """This worker comes in once more, with a machine that has heard nothing yet."""
        self._parts.machine = machine
        self.is_in = True
        self.instructions.begin_anew(machine)
        self.standstill.begin_anew()

    def handle(self, events: Iterable[Event]) -> None:
        """Takes what has happened, and does what follows from it."""
        for event in events:
            is_kept = self.standstill.take(event)
            if is_kept and self.standstill.holds:
                self._ask_to_wait(event)
            for earlier in self.standstill.released():
                self._hear(earlier)
            if not is_kept:
                self._hear(event)
        self.standstill.look()

    def _hear(self, event: Event) -> None:
        if isinstance(event, MessageArrived) and event.message.kind is MessageKind.MEET:
            self._meet(event.sender, event.message.iteration)
        else:
            self.instructions.handle(event)

    def _meet(self, peer: Rank, asked: int) -> None:
        """A latecomer asks: it is counted on from now on, and told how far this one is."""
        if (progress := rendezvous.as_progress(asked)) is not None and self._has_barrier:
            self.instructions.handle(MessageArrived(peer, progress))
        role = Role.IN if self.is_in else Role.OUT
        self._send(peer, rendezvous.answer(asked, done=self._progress.iteration, role=role))

    def _ask_to_wait(self, event: Event) -> None:
        """A latecomer asks, but this worker holds still: it is answered again when that is over."""
        if isinstance(event, MessageArrived) and event.message.kind is MessageKind.MEET:
            asked, done = event.message.iteration, self._progress.iteration
            self._send(event.sender, rendezvous.answer(asked, done=done, role=Role.STILL))
