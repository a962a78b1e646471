"""When a link is up: both of its streams are open, between the same two incarnations.

A state machine without I/O, one per peer: stream events in, actions for `links` out.

    outbound: the stream that we opened; open once the peer has acknowledged our hello
    inbound:  the stream that the peer opened; valid if its hello came *after the link was last
    down*

A link that breaks in one direction breaks in both: queued messages are lost. The direction that
survives repeats its hello, so that neither side takes old messages for new ones.

The hello carries the sender's iteration at that moment. The sender may finish more steps before its
policy learns that the link is up, and it sends these to no one. A policy therefore sends `PROGRESS`
first when a member joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.links.events import LinkDown, LinkUp


class HandshakeAction(Enum):
    """What to do besides emitting events."""

    CLEAR_QUEUE = "ClearQueue"  # messages queued for the peer are lost
    SEND_HELLO = "SendHello"  # repeat the hello on the outbound stream, if there is one
    RECONNECT = "Reconnect"  # the outbound stream leads to a replaced incarnation


HandshakeActions = list[LinkUp | LinkDown | HandshakeAction]


@dataclass
class Handshake:
    peer: Rank
    outbound: int | None = None
    """The peer's incarnation on the stream that we opened."""
    inbound: int | None = None
    """The incarnation that sent us its hello."""
    up: int | None = None
    """The incarnation that the link is up with."""
    newest: int = 0
    """The newest known incarnation of the peer; older ones have been replaced."""
    iteration: int = 0

    def learn_incarnation(self, incarnation: int) -> HandshakeActions:
        """The membership reports this incarnation: links to older ones are obsolete."""
        if incarnation <= self.newest:
            return []
        self.newest = incarnation
        outcome = self._down(f"replaced by incarnation {incarnation}")
        self.inbound = None
        if self.outbound is not None:
            self.outbound = None
            outcome.append(HandshakeAction.RECONNECT)
        return outcome

    def outbound_opened(self, incarnation: int) -> HandshakeActions:
        """The peer has acknowledged our hello."""
        if incarnation < self.newest:
            return [HandshakeAction.RECONNECT]
        outcome = self.learn_incarnation(incarnation)
        self.outbound = incarnation
        return outcome + self._settle()

    def outbound_closed(self, reason: str) -> HandshakeActions:
        """Our stream broke or could not be opened: the peer's hello is obsolete too."""
        self.outbound = None
        self.inbound = None
        return self._down(reason)

    def check(self, incarnation: int) -> None:
        """Check that this incarnation may send a hello.

        Raises:
            CallerError: It has been replaced.
        """
        if incarnation < self.newest:
            raise CallerError(
                PeerRefusal.OLD_INCARNATION,
                f"incarnation {incarnation} of rank {self.peer} was replaced by {self.newest}",
            )

    def hello_received(
        self, incarnation: int, iteration: int, *, new_stream: bool, has_messages: bool = False
    ) -> HandshakeActions:
        """The peer sent a hello, on a new stream or again on an existing one.

        `has_messages`: messages have arrived on that stream since its last hello.
        """
        self.check(incarnation)
        outcome = self.learn_incarnation(incarnation)
        if self.up is not None and not new_stream:
            # The peer answers our new stream late. It counts from our outbound stream, so nothing
            # of ours is lost.
            self.iteration = iteration
            if not has_messages:
                return outcome
            reopened = LinkDown(self.peer, self.up, "the peer opened the link again")
            return [*outcome, reopened, LinkUp(self.peer, self.up, iteration)]
        outcome += self._down("the peer opened the link again")
        self.inbound = incarnation
        self.iteration = iteration
        if new_stream:
            # The peer discarded our messages when it lost its own stream.
            outcome.append(HandshakeAction.SEND_HELLO)
        return outcome + self._settle()

    def inbound_closed(self, reason: str) -> HandshakeActions:
        self.inbound = None
        return self._down(reason)

    def _settle(self) -> HandshakeActions:
        if self.up is not None or self.inbound is None or self.inbound != self.outbound:
            return []
        self.up = self.inbound
        return [LinkUp(self.peer, self.up, self.iteration)]

    def _down(self, reason: str) -> HandshakeActions:
        if self.up is None:
            return []
        incarnation, self.up = self.up, None
        return [HandshakeAction.CLEAR_QUEUE, LinkDown(self.peer, incarnation, reason)]
