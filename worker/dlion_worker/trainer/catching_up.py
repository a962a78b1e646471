"""How a worker that took a state over while all others went on gets level with them.

Owns the way from that state to the iteration at which it comes in: one way for trainer and
simulator, driven by `loop` and `simulation.worker`. The state is of an iteration since which every
step of those who train has come, or will. So this worker makes their updates as they make them
(`IterationPassed`); once it has made all that it knows of it names an iteration F just ahead
(`rendezvous`), passes all before F, and comes in with a step of its own at F. Nobody waits for
more than the word that it will be there.

What comes is handed on no faster than the iterations that it belongs to: a barrier keeps no
contributions of iterations far ahead. Where one that trains is lost meanwhile, what it had sent to
others may not have come here; and two who come late cannot each wait for the other's word. Then the
worker comes in anew, by a state that all hold at.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from dlion_worker.policies.horizon import LEAP
from dlion_worker.policies.interface import (
    Event,
    IterationPassed,
    MemberJoined,
    MemberLeft,
    MessageArrived,
    MessageKind,
)
from dlion_worker.trainer import rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_worker.policies.interface import Machine, Message
    from dlion_worker.trainer.hearing import Hearing
    from dlion_worker.trainer.inbox import Inbox
    from dlion_worker.trainer.stopping import JobProgress

MOST_BYTES = 256 * 2**20
"""Of what may come while a state is on its way: as much from each of the others. Beyond that all
wait for the state instead."""

_STEPS = frozenset({MessageKind.GRADIENT, MessageKind.PROGRESS})


class Outcome(StrEnum):
    """What has become of it so far."""

    UNDER_WAY = "UnderWay"
    LEVEL = "Level"  # the next step is its own
    LOST = "Lost"  # it has to come in anew


class CatchUp:
    """One worker's, from `begin` until `look` says how it ended."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        hearing: Hearing,
        progress: JobProgress,
        machine: Machine,
        send: Callable[[Rank, Message], None],
        passing: Callable[[int], None],
        passed: Callable[[], None],
    ) -> None:
        """With those whom the inbox names (`Inbox.ahead`). `passing(iteration)`: that one is about
        to be passed, to be noted in `progress`; `passed()`: its update has been made."""
        self._lives, inbox.ahead = inbox.ahead, {}
        self._inbox, self._hearing, self._progress = inbox, hearing, progress
        self._machine, self._send = machine, send
        self._passing, self._passed = passing, passed
        self._meeting = rendezvous.Meeting()
        self._kept: dict[Rank, deque[Event]] = {}
        """What has come and was not heard yet, by peer and in order."""
        self._furthest = progress.iteration
        """The last step that has come of anybody."""
        self._is_open = self._is_lost = False

    def begin(self) -> None:
        """Takes all that has come until now."""
        self._hearing.is_in = False
        self.take(self._inbox.start(self._progress.iteration))
        now = self._inbox.lives
        self._is_lost |= any(now.get(peer) != life for peer, life in self._lives.items())

    def take(self, events: Iterable[Event]) -> None:
        """Takes what has happened since."""
        for event in events:
            match event:
                case MemberJoined(rank=rank) | MemberLeft(rank=rank):
                    self._is_lost |= isinstance(event, MemberLeft) or rank not in self._lives
                    self._keep(rank, event)
                case MessageArrived(sender=sender, message=message):
                    self._is_lost |= sender not in self._lives
                    if not _is_own_step(message):
                        self._keep(sender, event)
                    elif message.iteration <= self._furthest + LEAP:
                        self._furthest = max(self._furthest, message.iteration)
                        self._keep(sender, event)
                    else:  # refused at once, as by all: nobody goes on to there
                        self._hearing.handle([event])
                case _:
                    self._hearing.handle([event])

    def _keep(self, peer: Rank, event: Event) -> None:
        self._kept.setdefault(peer, deque()).append(event)

    def look(self) -> Outcome:
        """Goes as far as what has come leads."""
        while True:
            self._hand_on()
            if self._is_lost or self._hearing.standstill.holds:
                return Outcome.LOST
            if self._machine.waiting_for():
                return Outcome.UNDER_WAY
            self._close()
            self._name()
            if self._is_level():
                return self._come_in()
            if (iteration := self._next()) is None:
                return Outcome.UNDER_WAY
            self._pass(iteration)

    def _next(self) -> int | None:
        """The iteration to be passed now: one of which a step has come. There may be gaps: one that
        trains alone leaps to where it is to meet somebody."""
        following, named = self._following(), self._meeting.iteration
        iteration = min(following, default=None)
        is_before = iteration is not None and (not named or iteration < named)
        return iteration if is_before else None

    def _is_level(self) -> bool:
        """Whether nobody does anything more before F."""
        following, named = self._following(), self._meeting.iteration
        if self._progress.iteration + 1 == named:
            return True
        return len(following) == len(self._lives) and 0 < named <= min(following)

    def _following(self) -> list[int]:
        """The next steps that have come, of each peer one."""
        heads = [kept[0] for kept in self._kept.values() if kept]
        return [head.message.iteration for head in heads if isinstance(head, MessageArrived)]

    def _name(self) -> None:
        """Where to come in: named once nothing more is to be made up for, to all who are there."""
        if self._meeting.iteration or self._furthest <= self._progress.iteration + 1:
            answers, lives = self._inbox.answers, self._inbox.lives
            for peer in self._meeting.to_ask(lives, answers, heard=self._furthest):
                self._send(peer, rendezvous.ask(self._meeting.iteration))

    def _come_in(self) -> Outcome:
        if not self._meeting.agreed(self._lives, self._inbox.answers):
            return Outcome.UNDER_WAY
        if self._progress.iteration + 1 < self._meeting.iteration:
            self._pass(self._meeting.iteration - 1)
        for kept in self._kept.values():
            self._hearing.handle(kept)
        self._close()
        self._hearing.is_in = True
        return Outcome.LEVEL

    def _pass(self, iteration: int) -> None:
        self._passing(iteration)
        self._is_open = True
        self._hearing.handle([IterationPassed(iteration)])

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._passed()

    def _hand_on(self) -> None:
        """Of each peer what comes before its next step, and that once it is this worker's turn."""
        for kept in self._kept.values():
            while kept and not self._is_ahead(kept[0]):
                self._hearing.handle([kept.popleft()])

    def _is_ahead(self, event: Event) -> bool:
        if not isinstance(event, MessageArrived) or not _is_own_step(event.message):
            return False
        return event.message.iteration > self._progress.iteration


def _is_own_step(message: Message) -> bool:
    return message.kind in _STEPS and message.local_batch_size > 0
