"""What the exchange tells its caller, and the snapshots it hands out.

Called by `exchange.Exchange`, and read by the trainer. Holds no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.refusals import PeerRefusal
from dlion_worker.policies.interface import MessageArrived


@dataclass(frozen=True)
class LinkUp:
    """The link to a peer carries messages in both directions, from now on.

    `iteration` is the last one that the peer had finished when it said so, in the hello that
    opened the link: nothing it sent before will come any more.
    """

    peer: Rank
    incarnation: int
    iteration: int


@dataclass(frozen=True)
class LinkDown:
    """The link to a peer is gone: what was queued or under way on it is lost, both ways."""

    peer: Rank
    incarnation: int
    reason: str


@dataclass(frozen=True)
class Refused:
    """Something was refused: a stream, a message, or (`outgoing`) one of ours by the peer.

    `peer` is None where the sender could not be told (it failed to prove who it is); `reason` is
    words for people.
    """

    peer: Rank | None
    reason: str
    outgoing: bool = False
    kind: PeerRefusal = PeerRefusal.MALFORMED


@dataclass(frozen=True)
class StatePulled:
    """A peer has taken this worker's state, whole."""

    peer: Rank
    weights_only: bool


ExchangeEvent = MessageArrived | LinkUp | LinkDown | Refused | StatePulled


@dataclass(frozen=True)
class StateWanted:
    """What a peer asks for."""

    weights_only: bool = False
    at_least: int = 0
    """The iteration whose update it is to hold: until then it is waited for."""


@dataclass(frozen=True)
class StateSnapshot:
    """A worker's whole state, for a peer that rejoins or averages at the end of the run.

    `payload` is opaque here (weights, and with them whatever the trainer adds); on arrival it is
    untrusted.
    """

    iteration: int
    samples: int
    payload: bytes | memoryview


@dataclass(frozen=True)
class LinkState:
    """One link's counters, since the exchange began (they survive reconnections).

    Bytes are payload bytes, but for the two `wire_` ones: whole frames as handed to gRPC, without
    TLS and TCP headers. `unacknowledged_bytes` never exceeds `window_bytes`: two budgets.
    """

    connected: bool
    incarnation: int
    queued_bytes: int
    """Not yet handed to the network, started or not."""
    unacknowledged_bytes: int
    window_bytes: int
    sent_total: int
    acknowledged_total: int
    received_total: int
    dropped_messages: int
    """Gave way to newer ones, or were sent while the link was down."""
    wire_sent_bytes: int
    wire_received_bytes: int
    remade_count: int = 0
    """How often our stream has gone over to a new connection, without a break."""
    problem: str = ""
    """What keeps the link from being up, for people; empty: nothing does."""
