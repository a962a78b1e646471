"""What the exchange's thread hands to the training thread, as events for the policies.

Owns what comes before the start: links that are up then are members of the first iteration, what
they have sent already is kept for it, and questions of other latecomers are answered. From the
start on, links come and go as events.
"""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Iterator
from enum import IntEnum

from dlion_api.errors import ContractError
from dlion_api.membership import Membership, MemberState
from dlion_api.names import Rank
from dlion_worker.exchange import ExchangeEvent, LinkDown, LinkUp, Refused, StatePulled
from dlion_worker.policies.interface import (
    Event,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    Regrouped,
)
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.rendezvous import Answer, Role

_STEP_KINDS = (MessageKind.GRADIENT, MessageKind.PROGRESS)
_LONGEST_REASON_BYTES = 200
_HANDED_ON = re.compile(r"worker \d+: ")


DEPARTURE_S = 1.0
"""For so long a barrier still holds for a peer that has said that it was told to end, and may be
one of many: where the manifest has it no longer, nobody holds for it."""


class Farewell(IntEnum):
    """What a `STOP` means; travels as its weights version."""

    STOPPED = 0  # the run is over: all are to finish
    SAVED = 1  # and this worker has saved its site's model
    LEAVING = 2  # this worker alone was told to end


def farewell(reason: str, iteration: int, meaning: Farewell = Farewell.STOPPED) -> Message:
    """What a worker says last."""
    return Message(
        MessageKind.STOP,
        iteration,
        weights_version=meaning,
        payload=reason.encode()[:_LONGEST_REASON_BYTES],
    )


class Inbox:
    """A queue between two threads. `put` is called by the exchange, all else by the trainer."""

    def __init__(
        self,
        send: Callable[[Rank, Message], None],
        membership: Callable[[], Membership | None] = lambda: None,
    ) -> None:
        """`send(peer, message)` queues a message on a link; `membership`: as last heard."""
        self._send = send
        self._membership = membership
        self._queue: queue.SimpleQueue[ExchangeEvent | Regrouped] = queue.SimpleQueue()
        self._started = False
        self.iteration = 0
        """Before the start: the last iteration that this worker's own weights hold."""
        self.early: list[MessageArrived] = []
        """Messages that came before the start, in order."""
        self._regrouped: list[Event] = []
        """Before the start: the last that was heard of who exchanges with whom."""
        self.lives: dict[Rank, int] = {}
        """Peers that are linked, each with a number that changes when its link was down."""
        self._last_life = 0
        self.ahead: dict[Rank, int] = {}
        """Those who train and went on while this worker took a state over, by the lives of their
        links then: it is to catch up with them once it starts."""
        self.answers: dict[Rank, Answer] = {}
        """What linked peers have last answered this latecomer."""
        self.stopped: set[Rank] = set()
        """Peers that have finished their last iteration."""
        self.served: set[Rank] = set()
        """Peers that have taken this worker's last state."""
        self.saved: set[Rank] = set()
        """Peers that have saved their site's model."""
        self.stop_reason: str | None = None
        self.stop_iteration: int | None = None
        """The iteration at which the first peer to stop has stopped."""
        self.farewell: Message | None = None
        """Once this worker has stopped: what a peer that comes now is told at once."""
        self.refusals: list[Refused] = []
        self._leaving: set[Rank] = set()
        self._departed: dict[Rank, float] = {}
        """Peers that are gone as they had said, by the moment from which nobody holds for them."""

    @property
    def linked(self) -> set[Rank]:
        """Peers whose links are up."""
        return set(self.lives)

    def put(self, arrival: ExchangeEvent | Regrouped) -> None:
        """Takes one arrival; never blocks."""
        self._queue.put(arrival)

    def start(self, iteration: int) -> list[Event]:
        """Members that are linked, as of `iteration`, and what they have sent already; before them
        who exchanges with whom, where that changes.

        Steps up to `iteration` are left out: the weights to start from hold them.
        """
        self.drain()
        self._started = True
        self.forget_steps(iteration)
        early, self.early = self.early, []
        joined = [MemberJoined(rank, iteration) for rank in sorted(self.lives)]
        return [*self._regrouped, *joined, *early]

    def begin_anew(self, iteration: int) -> None:
        """As before the start: this worker comes in once more, with its own weights of that
        iteration, and all its links are about to be opened anew."""
        self.drain()
        self._started = False
        self.iteration = iteration
        self.early, self._departed, self.ahead = [], {}, {}
        self.answers.clear()

    def forget_steps(self, iteration: int) -> None:
        """Drops what came early of iterations up to that one."""
        self.early = [
            arrival
            for arrival in self.early
            if arrival.message.kind not in _STEP_KINDS or arrival.message.iteration > iteration
        ]

    def forget_promises(self) -> None:
        """Drops what came early of iterations that nobody has made: once those who trained are
        gone, what latecomers have named to each other binds nobody."""
        self.early = [
            arrival
            for arrival in self.early
            if arrival.message.kind is not MessageKind.PROGRESS or arrival.message.local_batch_size
        ]

    def heard_at(self, iteration: int) -> set[Rank]:
        """Before the start: peers whose own step of that iteration has come."""
        return {
            arrival.sender
            for arrival in self.early
            if arrival.message.iteration == iteration and arrival.message.local_batch_size
        }

    def first_steps(self) -> dict[Rank, int]:
        """Before the start: the first own step that has come of each peer. Whatever it does later
        comes as well."""
        firsts: dict[Rank, int] = {}
        for arrival in self.early:
            if arrival.message.kind in _STEP_KINDS and arrival.message.local_batch_size:
                firsts.setdefault(arrival.sender, arrival.message.iteration)
        return firsts

    def wait(self, timeout_s: float) -> list[Event]:
        """Events of the next arrival, waiting for one, and of all that stand behind it."""
        try:
            first = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return self.drain()
        return [*self._translate(first), *self.drain()]

    def drain(self) -> list[Event]:
        """Events of all that has arrived, without waiting."""
        events = [event for arrival in self._arrivals() for event in self._translate(arrival)]
        now_s = time.monotonic()
        gone = [r for r, due_s in self._departed.items() if due_s <= now_s or self._is_over(r)]
        return events + self._gone(gone)

    def take_refusals(self) -> list[Refused]:
        """Nonsense that has come since the last call."""
        taken, self.refusals = self.refusals, []
        return taken

    def _arrivals(self) -> Iterator[ExchangeEvent | Regrouped]:
        while True:
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return

    def _translate(self, arrival: ExchangeEvent | Regrouped) -> list[Event]:
        match arrival:
            case Regrouped():
                self._regrouped = [arrival]
                return [arrival] if self._started else []
            case LinkUp(peer=peer, iteration=iteration):
                self._link_up(peer)
                joined = MemberJoined(peer, iteration)
                return [*self._gone([peer]), joined] if self._started else []
            case LinkDown(peer=peer):
                return self._link_down(peer)
            case StatePulled(peer=peer, weights_only=True):
                self.served.add(peer)
            case MessageArrived():
                return self._message(arrival)
        return []

    def _link_up(self, peer: Rank) -> None:
        self._last_life += 1
        self.lives[peer] = self._last_life
        self.answers.pop(peer, None)
        if self.farewell is not None:
            self._send(peer, self.farewell)
        elif not self._started:
            # Before any answer of ours leaves on this link: whoever has that knows our question.
            self._send(peer, rendezvous.ask())

    def _link_down(self, peer: Rank) -> list[Event]:
        self.lives.pop(peer, None)
        self.answers.pop(peer, None)
        for known in (self.stopped, self.served):
            known.discard(peer)
        self.early = [message for message in self.early if message.sender != peer]
        if not self._started:
            return []
        if peer in self._leaving:
            # Often all are told to end at once: then nobody is to go on without the others.
            self._leaving.discard(peer)
            self._departed[peer] = time.monotonic() + DEPARTURE_S
            return []
        return [MemberLeft(peer)]

    def _is_over(self, departed: Rank) -> bool:
        """Whether it does not come back: its part has ended in order, or the manifest has fewer
        workers by now than are there."""
        membership = self._membership()
        if membership is None:
            return False
        member = membership.member(departed)
        has_ended = member is not None and member.state is MemberState.FINISHED
        return has_ended or len(membership.ready()) > membership.expected_count

    def _gone(self, peers: list[Rank]) -> list[Event]:
        """Those among them that have departed: now they count as gone."""
        return [MemberLeft(r) for r in peers if self._departed.pop(r, None) is not None]

    def _message(self, arrival: MessageArrived) -> list[Event]:
        match arrival.message.kind:
            case MessageKind.STOP:
                self._stop(arrival)
                return []
            case MessageKind.MEET:
                return self._meet(arrival)
        if not self._started:
            self.early.append(arrival)
            return []
        return [arrival]

    def _stop(self, arrival: MessageArrived) -> None:
        meaning = arrival.message.weights_version
        if meaning == Farewell.LEAVING:
            self._leaving.add(arrival.sender)
            return
        self.stopped.add(arrival.sender)
        if meaning == Farewell.SAVED:
            self.saved.add(arrival.sender)
        reason = bytes(arrival.message.payload[:_LONGEST_REASON_BYTES]).decode("utf-8", "replace")
        if self.stop_iteration is None:
            # Handed on from worker to worker it names the first alone.
            is_handed_on = _HANDED_ON.match(reason) is not None
            self.stop_reason = reason if is_handed_on else f"worker {arrival.sender}: {reason}"
            self.stop_iteration = arrival.message.iteration

    def _meet(self, arrival: MessageArrived) -> list[Event]:
        try:
            said = rendezvous.read(arrival.message)
        except ContractError as error:
            self.refusals.append(Refused(arrival.sender, str(error)))
            return []
        if isinstance(said, Answer):
            self.answers[arrival.sender] = said
            return []
        if self._started:
            return [arrival]
        if (progress := rendezvous.as_progress(said)) is not None:
            self.early.append(MessageArrived(arrival.sender, progress))
        self._send(arrival.sender, rendezvous.answer(said, done=self.iteration, role=Role.OUT))
        return []
