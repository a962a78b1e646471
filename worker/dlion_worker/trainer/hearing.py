"""What has happened, told to whom it concerns: one way for trainer and simulator.

Called by `loop` and `simulation.worker` with every event, in order. The quorum hears all of them,
latecomers get their answers, and the policy hears the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_worker.policies.interface import Event, MessageArrived, MessageKind
from dlion_worker.trainer import rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_worker.policies.interface import Message
    from dlion_worker.trainer.instructions import Instructions
    from dlion_worker.trainer.standstill import Standstill
    from dlion_worker.trainer.stopping import JobProgress


class Hearing:
    """One worker's."""

    def __init__(
        self,
        instructions: Instructions,
        standstill: Standstill,
        progress: JobProgress,
        *,
        send: Callable[[Rank, Message], None],
        has_barrier: bool,
    ) -> None:
        """`has_barrier`: an iteration's update is made when the peers' gradients are in."""
        self._instructions, self._standstill = instructions, standstill
        self._progress, self._send, self._has_barrier = progress, send, has_barrier

    def handle(self, events: Iterable[Event]) -> None:
        """Takes what has happened, and does what follows from it."""
        for event in events:
            if self._standstill.take(event):
                continue
            if isinstance(event, MessageArrived) and event.message.kind is MessageKind.MEET:
                self._meet(event.sender, event.message.iteration)
            else:
                self._instructions.handle(event)
        self._standstill.look()

    def _meet(self, peer: Rank, asked: int) -> None:
        """A latecomer asks: it is counted on from now on, and told how far this one is."""
        if (progress := rendezvous.as_progress(asked)) is not None and self._has_barrier:
            self._instructions.handle(MessageArrived(peer, progress))
        self._send(peer, rendezvous.answer(asked, done=self._progress.iteration, is_in=True))
