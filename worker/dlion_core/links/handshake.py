"""When a link is up: both of its streams are open, between the same two incarnations.

A state machine without I/O, one per peer: stream events in, actions for `peer_links` out. Its state
is which of the two streams are open; the actions follow from whether the link is up before and
after.

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
    """The handshake with one peer."""

    peer: Rank
    is_outbound_open: bool = False
    """Whether the peer has acknowledged our hello."""
    is_inbound_open: bool = False
    """Whether the peer's hello is valid: it came after the link was last down."""
    newest: int = 0
    """The newest known incarnation of the peer; older ones have been replaced."""
    iteration: int = 0
    """The peer's iteration in its last hello."""

    @property
    def is_up(self) -> bool:
        """Whether messages pass in both directions."""
        return self.is_outbound_open and self.is_inbound_open

    def learn_incarnation(self, incarnation: int) -> HandshakeActions:
        """The membership reports this incarnation: links to older ones are obsolete."""
        if incarnation <= self.newest:
            return []
        was_outbound_open = self.is_outbound_open
        actions = self._set_open(False, False, f"replaced by incarnation {incarnation}")
        self.newest = incarnation
        return [*actions, HandshakeAction.RECONNECT] if was_outbound_open else actions

    def outbound_opened(self, incarnation: int) -> HandshakeActions:
        """The peer has acknowledged our hello."""
        if incarnation < self.newest:
            return [HandshakeAction.RECONNECT]
        return self.learn_incarnation(incarnation) + self._set_open(True, self.is_inbound_open)

    def outbound_closed(self, reason: str) -> HandshakeActions:
        """Our stream broke or could not be opened. The peer's hello is obsolete, too."""
        return self._set_open(False, False, reason)

    def inbound_closed(self, reason: str) -> HandshakeActions:
        """The peer's stream broke."""
        return self._set_open(self.is_outbound_open, False, reason)

    def check(self, incarnation: int) -> None:
        """Raise CallerError if this incarnation has been replaced: it may send no hello."""
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
        actions = self.learn_incarnation(incarnation)
        self.iteration = iteration
        reason = "the peer opened the link again"
        if new_stream:
            # The peer discarded our messages when it lost its own stream.
            return actions + self._set_open(self.is_outbound_open, True, reason, is_new_stream=True)
        if self.is_up and has_messages:
            # The peer answers our new stream late. It counts from our outbound stream, so nothing
            # of ours is lost.
            return [*actions, self._link_down(reason), self._link_up()]
        return actions + self._set_open(self.is_outbound_open, True)

    def _set_open(
        self, outbound: bool, inbound: bool, reason: str = "", *, is_new_stream: bool = False
    ) -> HandshakeActions:
        was_up = self.is_up
        self.is_outbound_open, self.is_inbound_open = outbound, inbound
        actions: HandshakeActions = []
        if was_up and (is_new_stream or not self.is_up):
            actions += [HandshakeAction.CLEAR_QUEUE, self._link_down(reason)]
        if is_new_stream:
            actions.append(HandshakeAction.SEND_HELLO)
        if self.is_up and (is_new_stream or not was_up):
            actions.append(self._link_up())
        return actions

    def _link_up(self) -> LinkUp:
        return LinkUp(self.peer, self.newest, self.iteration)

    def _link_down(self, reason: str) -> LinkDown:
        return LinkDown(self.peer, self.newest, reason)
