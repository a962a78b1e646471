"""When a link is up: both of its streams open, between the same two incarnations.

Called by `links`. A state machine without I/O, one per peer: what happened to either stream in,
what is to be done about it out.

    outbound: the stream that we dialled, open once the peer has acknowledged our hello
    inbound:  the stream that the peer dialled, fresh once its hello has come *since the link was
              last down*

A link that breaks in one direction breaks in both: what was queued is lost, and the direction that
still stands says hello again, so that neither side takes a remnant for news.

The hello's iteration is the sender's when it said hello. Until its policy hears that the link is
up it may finish more steps and send them to nobody; so a policy whose member joins says `PROGRESS`
first of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dlion_api.names import Rank
from dlion_api.refusals import CallerError, PeerRefusal
from dlion_worker.exchange.events import LinkDown, LinkUp


class Action(Enum):
    """What the skin has to do besides telling the trainer."""

    FORGET = "Forget"  # what is queued for the peer is lost
    GREET = "Greet"  # say hello again on the outbound stream, if there is one
    REDIAL = "Redial"  # the outbound stream leads to an incarnation that is no more


Outcome = list[LinkUp | LinkDown | Action]


@dataclass
class Handshake:
    """One peer's link."""

    peer: Rank
    outbound: int | None = None
    """The incarnation at the other end of the stream that we dialled."""
    inbound: int | None = None
    """The incarnation that has said hello to us."""
    up: int | None = None
    """The incarnation that the link is up with."""
    newest: int = 0
    """The newest incarnation of the peer that we know of; an older one is a ghost."""
    iteration: int = 0

    def knows(self, incarnation: int) -> Outcome:
        """The membership names this incarnation: links to an older one are no use."""
        if incarnation <= self.newest:
            return []
        self.newest = incarnation
        outcome = self._down(f"replaced by incarnation {incarnation}")
        self.inbound = None
        if self.outbound is not None:
            self.outbound = None
            outcome.append(Action.REDIAL)
        return outcome

    def outbound_opened(self, incarnation: int) -> Outcome:
        """The peer has acknowledged our hello."""
        if incarnation < self.newest:
            return [Action.REDIAL]
        outcome = self.knows(incarnation)
        self.outbound = incarnation
        return outcome + self._settle()

    def outbound_closed(self, reason: str) -> Outcome:
        """Our stream broke, or could not be opened: what the peer said so far is a remnant."""
        self.outbound = None
        self.inbound = None
        return self._down(reason)

    def check(self, incarnation: int) -> None:
        """Passes if that incarnation may say hello.

        Raises:
            CallerError: It is a ghost, which has been replaced.
        """
        if incarnation < self.newest:
            raise CallerError(
                PeerRefusal.OLD_INCARNATION,
                f"incarnation {incarnation} of rank {self.peer} was replaced by {self.newest}",
            )

    def greeted(
        self, incarnation: int, iteration: int, *, new_stream: bool, heard: bool = False
    ) -> Outcome:
        """The peer said hello, on a new stream or again on the one it has.

        `heard`: messages have come on that stream since its last hello.
        """
        self.check(incarnation)
        outcome = self.knows(incarnation)
        if self.up is not None and not new_stream:
            # The peer answers our own new stream, late. It counts that as the beginning, and our
            # outbound stream is what it counts from: nothing of ours is lost.
            self.iteration = iteration
            if not heard:
                return outcome
            reopened = LinkDown(self.peer, self.up, "the peer opened the link again")
            return [*outcome, reopened, LinkUp(self.peer, self.up, iteration)]
        outcome += self._down("the peer opened the link again")
        self.inbound = incarnation
        self.iteration = iteration
        if new_stream:
            # Whatever the peer had of ours, it forgot when it lost its own stream.
            outcome.append(Action.GREET)
        return outcome + self._settle()

    def inbound_closed(self, reason: str) -> Outcome:
        """The peer's stream broke."""
        self.inbound = None
        return self._down(reason)

    def _settle(self) -> Outcome:
        if self.up is not None or self.inbound is None or self.inbound != self.outbound:
            return []
        self.up = self.inbound
        return [LinkUp(self.peer, self.up, self.iteration)]

    def _down(self, reason: str) -> Outcome:
        if self.up is None:
            return []
        incarnation, self.up = self.up, None
        return [Action.FORGET, LinkDown(self.peer, incarnation, reason)]
