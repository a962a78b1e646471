"""How a latecomer that adopted a state catches up with workers that trained on.

`loop` and `worker` drive it in the same way. Every later step of the training workers
arrives here, so this worker repeats their updates (`IterationReplayed`). It then proposes an
iteration F just ahead (`join_barrier`), passes everything before F, and makes its own step at F.
Peers wait only for its promise.
"""

from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum

from dlion_api.names import Rank
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.policies.interface import (
    Event,
    IterationReplayed,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
)
from dlion_core.policies.iteration_guard import MAX_LEAD

MAX_BUFFERED_BYTES = 256 * 2**20
"""Limit on messages buffered while a state is transferred.

Each peer may send as much as the state. Above the limit all peers wait for the state instead.
"""


class CatchUpOutcome(StrEnum):
    """The progress of a catch-up."""

    IN_PROGRESS = "UnderWay"
    CAUGHT_UP = "Level"  # the next step is this worker's own
    FAILED = "Lost"
    """The worker must rejoin with a state from a full barrier. A lost worker's last messages may be
    missing here, or two latecomers wait for each other's promise."""


class CatchUp:
    """One worker's catch-up, from `begin` until `advance` returns how it ended."""

    def __init__(
        self,
        inbox: EventInbox,
        *,
        dispatcher: EventDispatcher,
        send: Callable[[Rank, Message], None],
        before_pass: Callable[[int], None],
        after_pass: Callable[[], None],
    ) -> None:
        """Catch up with the peers in `EventInbox.peers_ahead`.

        `before_pass(iteration)` is called before an iteration is passed, to record it in
        `progress`; `after_pass()` once its update has been made.
        """
        self._link_epochs, inbox.peers_ahead = inbox.peers_ahead, {}
        self._inbox, self._dispatcher, self._send = inbox, dispatcher, send
        self._progress, self._machine = dispatcher.progress, dispatcher.parts.machine
        self._passing, self._passed = before_pass, after_pass
        self._barrier = join_barrier.JoinBarrier()
        self._pending: dict[Rank, deque[Event]] = {}
        """Received, unprocessed events of each peer, in order."""
        self._furthest = self._progress.iteration
        """The latest step received from any peer."""
        self._is_open = self._has_failed = False

    def begin(self) -> None:
        """Take everything received so far."""
        self._dispatcher.is_training = False
        self.take(self._inbox.start(self._progress.iteration))
        now = {peer: self._inbox.link_epochs[peer] for peer in self._inbox.members}
        self._has_failed |= any(now.get(peer) != life for peer, life in self._link_epochs.items())

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case MemberJoined(rank=rank) | MemberLeft(rank=rank):
                    self._has_failed |= (
                        isinstance(event, MemberLeft) or rank not in self._link_epochs
                    )
                    self._keep(rank, event)
                case MessageArrived(sender=sender, message=message):
                    self._has_failed |= sender not in self._link_epochs
                    if not message.is_own_step:
                        self._keep(sender, event)
                    elif message.iteration <= self._furthest + MAX_LEAD:
                        self._furthest = max(self._furthest, message.iteration)
                        self._keep(sender, event)
                    else:  # refused at once, as on all workers: no peer can reach it
                        self._dispatcher.handle([event])
                case _:
                    self._dispatcher.handle([event])

    def _keep(self, peer: Rank, event: Event) -> None:
        self._pending.setdefault(peer, deque()).append(event)

    def advance(self) -> CatchUpOutcome:
        """Process as much as the received events allow."""
        while True:
            self._release_due()
            if self._has_failed or self._dispatcher.quorum_gate.is_closed:
                return CatchUpOutcome.FAILED
            if self._machine.waiting_for():
                return CatchUpOutcome.IN_PROGRESS
            self._close()
            self._propose()
            if self._is_caught_up():
                return self._join()
            if (iteration := self._next()) is None:
                return CatchUpOutcome.IN_PROGRESS
            self._pass(iteration)

    def _next(self) -> int | None:
        """Return the iteration to pass now: one for which a step has arrived. There may be gaps: a
        worker that trains alone skips to the iteration at which it waits for a latecomer."""
        following, named = self._following(), self._barrier.iteration
        iteration = min(following, default=None)
        is_before = iteration is not None and (not named or iteration < named)
        return iteration if is_before else None

    def _is_caught_up(self) -> bool:
        """Whether no peer does anything more before F."""
        following, named = self._following(), self._barrier.iteration
        if self._progress.iteration + 1 == named:
            return True
        return len(following) == len(self._link_epochs) and 0 < named <= min(following)

    def _following(self) -> list[int]:
        """The next received step of each peer."""
        heads = [pending[0] for pending in self._pending.values() if pending]
        return [head.message.iteration for head in heads if isinstance(head, MessageArrived)]

    def _propose(self) -> None:
        """Propose the iteration to join at, to all linked peers, once few updates remain."""
        if self._barrier.iteration or self._furthest <= self._progress.iteration + 1:
            answers, link_epochs = self._inbox.answers, self._inbox.link_epochs
            for peer in self._barrier.peers_to_ask(
                link_epochs, answers, latest_known=self._furthest
            ):
                self._send(peer, join_barrier.join_request(self._barrier.iteration))

    def _join(self) -> CatchUpOutcome:
        if not self._barrier.is_agreed(self._link_epochs, self._inbox.answers):
            return CatchUpOutcome.IN_PROGRESS
        if self._progress.iteration + 1 < self._barrier.iteration:
            self._pass(self._barrier.iteration - 1)
        for pending in self._pending.values():
            self._dispatcher.handle(pending)
        self._close()
        self._dispatcher.is_training = True
        return CatchUpOutcome.CAUGHT_UP

    def _pass(self, iteration: int) -> None:
        self._passing(iteration)
        self._is_open = True
        self._dispatcher.handle([IterationReplayed(iteration)])

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._passed()

    def _release_due(self) -> None:
        """Release each peer's events up to its next step that is not due yet. No faster, because a
        barrier keeps no contributions from far ahead."""
        for pending in self._pending.values():
            while pending and not self._is_ahead(pending[0]):
                self._dispatcher.handle([pending.popleft()])

    def _is_ahead(self, event: Event) -> bool:
        if not isinstance(event, MessageArrived) or not event.message.is_own_step:
            return False
        return event.message.iteration > self._progress.iteration
