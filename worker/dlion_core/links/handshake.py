"""When a link is up: both of its streams are open, between the same two incarnations.

A state machine without I/O, one per peer: stream events in, actions for `peer_links` out. The table
`TRANSITIONS` is the whole machine; what happens besides follows from the states before and after.

A link that breaks in one direction breaks in both: queued messages are lost. The direction that
survives repeats its hello, so that neither side takes old messages for new ones.

The hello carries the sender's iteration at that moment. The sender may finish more steps before its
policy learns that the link is up, and it sends these to no one. A policy therefore sends `PROGRESS`
first when a member joins.
"""

from dataclasses import dataclass
from enum import Enum, auto

from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.links.events import LinkDown, LinkUp


class LinkState(Enum):
    """Which streams are open, between this worker and the peer's newest incarnation."""

    DOWN = auto()
    OUTBOUND = auto()  # the stream that we opened; the peer has acknowledged our hello
    INBOUND = auto()  # the stream that the peer opened; its hello came after the link was last down
    UP = auto()  # both


class LinkInput(Enum):
    """What happened to a stream or to the peer."""

    NEW_INCARNATION = auto()  # a newer process of the peer: all streams are obsolete
    OUTBOUND_OPENED = auto()
    OUTBOUND_CLOSED = auto()  # the peer's hello is obsolete, too
    HELLO_ON_NEW_STREAM = auto()
    HELLO_REPEATED = auto()
    INBOUND_CLOSED = auto()


_DOWN, _OUT, _IN, _UP = LinkState

TRANSITIONS = {
    state: dict(zip(LinkInput, following, strict=True))
    for state, following in {
        # by input, in their order; a hello on a new stream takes a link down and up again
        _DOWN: (_DOWN, _OUT, _DOWN, _IN, _IN, _DOWN),
        _OUT: (_DOWN, _OUT, _DOWN, _UP, _UP, _OUT),
        _IN: (_DOWN, _UP, _DOWN, _IN, _IN, _DOWN),
        _UP: (_DOWN, _UP, _DOWN, _UP, _UP, _OUT),
    }.items()
}
"""State -> input -> the state that follows."""


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
    state: LinkState = LinkState.DOWN
    newest: int = 0
    """The newest known incarnation of the peer; older ones have been replaced."""
    iteration: int = 0
    """The peer's iteration in its last hello."""
    epoch: int = 0
    """How often the link has come up."""

    @property
    def is_up(self) -> bool:
        """Whether messages pass in both directions."""
        return self.state is LinkState.UP

    @property
    def is_outbound_open(self) -> bool:
        """Whether the peer has acknowledged our hello."""
        return self.state in {LinkState.OUTBOUND, LinkState.UP}

    @property
    def is_inbound_open(self) -> bool:
        """Whether the peer's hello is valid."""
        return self.state in {LinkState.INBOUND, LinkState.UP}

    def learn_incarnation(self, incarnation: int) -> HandshakeActions:
        """The membership reports this incarnation: links to older ones are obsolete."""
        if incarnation <= self.newest:
            return []
        was_outbound_open = self.is_outbound_open
        actions = self._move(LinkInput.NEW_INCARNATION, f"replaced by incarnation {incarnation}")
        self.newest = incarnation
        return [*actions, HandshakeAction.RECONNECT] if was_outbound_open else actions

    def outbound_opened(self, incarnation: int) -> HandshakeActions:
        """The peer has acknowledged our hello."""
        if incarnation < self.newest:
            return [HandshakeAction.RECONNECT]
        return self.learn_incarnation(incarnation) + self._move(LinkInput.OUTBOUND_OPENED)

    def outbound_closed(self, reason: str) -> HandshakeActions:
        """Our stream broke or could not be opened."""
        return self._move(LinkInput.OUTBOUND_CLOSED, reason)

    def inbound_closed(self, reason: str) -> HandshakeActions:
        """The peer's stream broke."""
        return self._move(LinkInput.INBOUND_CLOSED, reason)

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
        """The peer sent a hello, on a new stream or again on an existing one. `has_messages`:
        messages have arrived on that stream since its last hello."""
        self.check(incarnation)
        actions = self.learn_incarnation(incarnation)
        self.iteration = iteration
        reason = "the peer opened the link again"
        if new_stream:
            # The peer discarded our messages when it lost its own stream.
            moved = self._move(LinkInput.HELLO_ON_NEW_STREAM, reason)
            return [*actions, *_with_hello(moved)]
        if self.is_up and has_messages:
            # The peer answers our new stream late. It counts from our outbound stream, so none of
            # our messages is lost.
            return [*actions, self._link_down(reason), self._link_up()]
        return actions + self._move(LinkInput.HELLO_REPEATED)

    def _move(self, what: LinkInput, reason: str = "") -> HandshakeActions:
        before, self.state = self.state, TRANSITIONS[self.state][what]
        is_new_stream = what is LinkInput.HELLO_ON_NEW_STREAM
        actions: HandshakeActions = []
        if before is LinkState.UP and (is_new_stream or not self.is_up):
            actions += [HandshakeAction.CLEAR_QUEUE, self._link_down(reason)]
        if self.is_up and (is_new_stream or before is not LinkState.UP):
            actions.append(self._link_up())
        return actions

    def _link_up(self) -> LinkUp:
        self.epoch += 1
        return LinkUp(self.peer, self.epoch, self.iteration)

    def _link_down(self, reason: str) -> LinkDown:
        return LinkDown(self.peer, self.epoch, reason)


def _with_hello(actions: HandshakeActions) -> HandshakeActions:
    """Repeat our hello once the link is down, and before it is up."""
    is_up = bool(actions) and isinstance(actions[-1], LinkUp)
    at = len(actions) - is_up
    return [*actions[:at], HandshakeAction.SEND_HELLO, *actions[at:]]
