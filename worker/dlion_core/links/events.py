"""Events and snapshots that the exchange passes to the trainer. No behaviour."""

from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.protocol.measurements import SentBytes
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.policies.interface import MessageArrived


@dataclass(frozen=True)
class LinkUp:
    """The link to a peer carries messages in both directions from now on.

    `epoch` grows with every connection of this link. `iteration` is the peer's last finished one
    when it sent the hello that opened the link. Nothing that the peer sent before will arrive any
    more.
    """

    peer: Rank
    epoch: int
    iteration: int


@dataclass(frozen=True)
class LinkDown:
    """The link to a peer is down: messages queued or in flight are lost, in both directions."""

    peer: Rank
    epoch: int
    reason: str


@dataclass(frozen=True)
class Refused:
    """A stream or message was rejected, or (`outgoing`) a peer rejected this worker's.

    `peer` is None if the sender could not prove its identity. `reason` is for people.
    """

    peer: Rank | None
    reason: str
    outgoing: bool = False
    kind: PeerRefusal = PeerRefusal.MALFORMED


@dataclass(frozen=True)
class StatePulled:
    """A peer has received this worker's whole state."""

    peer: Rank
    weights_only: bool


ExchangeEvent = MessageArrived | LinkUp | LinkDown | Refused | StatePulled


@dataclass(frozen=True)
class StateRequest:
    weights_only: bool = False
    at_least: int = 0
    """Wait until the state includes the update of this iteration."""
    unless_hash: str = ""
    """With `weights_only`: the hash of a replica that need not be sent."""


@dataclass(frozen=True)
class StateSnapshot:
    """A worker's whole state, for a peer that rejoins or averages at the end of the run.

    `payload` is opaque here: weights and what the trainer adds. A received one is untrusted.
    """

    iteration: int
    samples: int
    payload: bytes | memoryview
    is_equal: bool = False
    """The replica has the hash of the request, and there is no payload."""


@dataclass(frozen=True)
class ConnectionFacts:
    """What the kernel has counted on a peer's open TCP connections, since each of them began."""

    sent_segments: int
    """Segments with data, repeated ones included."""
    retransmitted_segments: int
    round_trip_s: float
    """The longest one of them, smoothed: it includes the time in queues."""
    min_round_trip_s: float | None
    """The shortest one of the last five minutes; None before the first acknowledgement."""


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one link since the exchange started; they survive reconnections.

    Bytes are as passed to gRPC, without TLS and TCP headers. `unacknowledged_bytes` never exceeds
    `window_bytes` as it was when they were sent. No total shrinks.
    """

    connected: bool
    queued_bytes: int
    """Not yet passed to the network, whether started or not."""
    unacknowledged_bytes: int
    window_bytes: int
    sent_total: int
    acknowledged_total: int
    dropped_messages: int
    """Superseded by newer ones, or sent while the link was down."""
    remade_count: int = 0
    """How often the outgoing stream has moved to a new connection without interruption."""
    gradient_total: int = 0
    """This and the next two are parts of `sent_total`."""
    weights_total: int = 0
    control_total: int = 0
    """Messages that are neither gradients nor weights."""
    header_total: int = 0
    """Beside `sent_total`: headers, acknowledgements, greetings and heartbeats."""
    state_total: int = 0
    """Beside `sent_total`: states that the peer pulled."""
    probe_total: int = 0
    """Beside `sent_total`: what the sidecar sent to the peer's sidecar."""
    problem: str = ""
    """Why the link is not up, for people; empty if it is."""
    neighbour: bool = True
    """Whether the link is kept; else only states and probes are sent to this peer."""
    address: str = ""
    """Where the peer is reached; empty: unknown."""
    connection: ConnectionFacts | None = None
    """None: not read, or unknown."""

    @property
    def wire_sent_bytes(self) -> int:
        """Payload and headers of this link's streams."""
        return self.sent_total + self.header_total

    @property
    def by_kind(self) -> SentBytes:
        """All that was sent to the peer."""
        return SentBytes(
            gradient_bytes=self.gradient_total,
            weights_bytes=self.weights_total,
            control_bytes=self.control_total,
            header_bytes=self.header_total,
            state_bytes=self.state_total,
            probe_bytes=self.probe_total,
        )
