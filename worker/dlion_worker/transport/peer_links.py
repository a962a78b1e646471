"""All links of one worker; everything here runs on the exchange's loop.

A link combines a peer's `SendQueue` and `Handshake`. `service` and `client` report what happened to
a stream, `exchange` what the trainer wants.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, Rank, WorkerIdentity
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello
from dlion_core.links.events import ExchangeEvent, LinkCounters, LinkDown, LinkUp, Refused
from dlion_core.links.framing import PROTOCOL
from dlion_core.links.handshake import Handshake, HandshakeAction, HandshakeActions
from dlion_core.links.incarnations import MAX_VIOLATIONS, PeerIncarnations
from dlion_core.links.link_budget import QueueRule
from dlion_core.links.message_rate import MESSAGES_PER_S, MessageRate
from dlion_core.links.send_queue import MAX_QUEUED_MESSAGES, SendQueue
from dlion_core.policies.catalogue import messages_must_arrive
from dlion_core.policies.interface import Message, MessageArrived
from dlion_worker.security.credentials import WorkerCredentials

logger = logging.getLogger(__name__)

MAX_ADDRESS_LENGTH = 300


class LinkStream(Protocol):
    """A stream, as far as a link needs it."""

    def end(self, reason: str) -> None: ...


@dataclass(frozen=True)
class PeerExchangeConfig:
    """This worker, and the settings of its links."""

    job: JobKey
    identity: WorkerIdentity
    incarnation: int
    credentials: WorkerCredentials
    listen_host: str = "127.0.0.1"
    listen_port: int = 0  # 0: any free port
    advertise_host: str = ""  # empty: the same as `listen_host`
    is_exposed: bool = False  # peers of other sites connect to the address in the membership
    max_message_bytes: int = 256 * 2**20
    queue_rule: QueueRule = QueueRule.KEEP

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        job: Job,
        *,
        incarnation: int,
        credentials: WorkerCredentials,
        max_message_bytes: int,
    ) -> PeerExchangeConfig:
        """The settings of a worker of that job."""
        return cls(
            job=job.key,
            identity=job.worker(config.rank),
            incarnation=incarnation,
            credentials=credentials,
            listen_host=config.listen_host,
            listen_port=config.exchange_port,
            advertise_host=config.advertise_host,
            is_exposed=job.spec.network.exposure != "PodNetwork",
            max_message_bytes=max_message_bytes,
            queue_rule=QueueRule.KEEP if messages_must_arrive(job.spec) else QueueRule.NEWEST,
        )


class PeerLink:
    def __init__(self, peer: WorkerIdentity, shared: PeerLinks) -> None:
        self.peer = peer
        self._shared = shared
        self.send_queue = SendQueue(shared.local.queue_rule, MAX_QUEUED_MESSAGES)
        self.handshake = Handshake(peer.rank)
        self.address = ""
        self.dial_override: str | None = None
        self.wanted = False
        """Whether to keep streams with this peer; if not, only states are pulled."""
        self.is_revoked = False
        """Whether the membership lets no start of this peer take part."""
        self.was_wanted = False
        """Whether streams are or were kept."""
        self.incoming: LinkStream | None = None
        self.outgoing: LinkStream | None = None
        self.wire_received_bytes = self.state_bytes = self.probe_bytes = 0
        self.send_s = self.receive_s = 0.0
        """Seconds of cutting messages into frames, and of joining them."""
        self.remade_count = 0
        self._last_error = "no answer yet"
        self.wake = asyncio.Event()  # there may be something to send
        self.redial = asyncio.Event()  # the address may have changed: reconnect at once
        self._changed = asyncio.Event()
        self._hello_due = False
        self._incarnations = PeerIncarnations()
        self._message_rate = MessageRate(time.monotonic())

    @property
    def rank(self) -> Rank:
        return self.peer.rank

    @property
    def target(self) -> str:
        """Address to connect to; empty if unknown."""
        return self.dial_override or self.address

    @property
    def wire_bytes(self) -> int:
        return self.send_queue.wire_sent_bytes + self.wire_received_bytes

    # ---- called for the trainer ----

    def push(self, message: Message, epoch: int | None = None) -> None:
        """Queue a message; if the link is down or not in that epoch, drop and count it."""
        if not self.handshake.is_up or epoch not in {None, self.handshake.epoch}:
            self.send_queue.dropped_messages += 1
            return
        try:
            self.send_queue.push(message)
        except UnavailableError as error:
            logger.warning("rank %d: %s", self.rank, error)
            self.close_streams(str(error))
        self.wake.set()

    def set_member(self, incarnation: int, address: str) -> None:
        """Take the peer's incarnation and address from the membership."""
        self._incarnations.confirm(incarnation)
        if incarnation < self.handshake.newest:
            return
        self.set_address(address)
        self.apply(self.handshake.learn_incarnation(incarnation))

    def set_revoked(self, is_revoked: bool) -> None:
        """Refuse the peer from now on, or no longer. Its messages do not reach the trainer."""
        if is_revoked == self.is_revoked:
            return
        self.is_revoked = is_revoked
        if is_revoked:
            text = f"{self.peer.name} is revoked"
            self._shared.emit(Refused(self.rank, text, kind=PeerRefusal.REVOKED))
            self.close_streams(text)
        self.redial.set()

    def set_address(self, address: str) -> None:
        """Connect to this address from now on."""
        if address and address != self.address:
            self.address = address
            self.redial.set()

    def _quarantine(self, reason: str) -> None:
        """Reject the peer's current incarnation from now on."""
        if self.quarantined:  # already reported; more messages had been received by then
            return
        self._incarnations.quarantine(self.handshake.newest)
        text = f"incarnation {self.handshake.newest} is quarantined: {reason}"
        self._shared.emit(Refused(self.rank, text, kind=PeerRefusal.QUARANTINED))
        self.close_streams(text)

    @property
    def quarantined(self) -> bool:
        """Whether the peer's newest incarnation is rejected."""
        return self.is_revoked or self._incarnations.is_quarantined(self.handshake.newest)

    def close_streams(self, reason: str) -> None:
        """End both streams; they are opened again unless the peer is quarantined."""
        for stream in (self.outgoing, self.incoming):
            if stream is not None:
                stream.end(reason)

    # ---- stream events ----

    def check_caller(self, incarnation: int) -> None:
        """Check that this incarnation of the peer may call.

        Raises: CallerError (it is revoked, replaced or quarantined, or cannot be).
        """
        if self.is_revoked:
            raise CallerError(PeerRefusal.REVOKED, f"{self.peer.name} is revoked")
        self.handshake.check(incarnation)
        self._incarnations.check(incarnation, wall_clock_s=time.time())

    def accept_stream(self, hello: Hello, stream: LinkStream) -> None:
        """Use the peer's new stream instead of an older one.

        Raises: CallerError (as `check_caller`).
        """
        self.check_caller(hello.incarnation)
        older, self.incoming = self.incoming, stream
        if older is not None:
            older.end("replaced by a newer stream")
        if self._uses_announced_address:
            self.set_address(hello.address[:MAX_ADDRESS_LENGTH])
        self.apply(
            self.handshake.hello_received(hello.incarnation, hello.iteration, new_stream=True)
        )

    def hello_repeated(self, hello: Hello, *, has_messages: bool) -> None:
        """The peer restarts its epoch on the existing stream."""
        outcome = self.handshake.hello_received(
            hello.incarnation, hello.iteration, new_stream=False, has_messages=has_messages
        )
        self.apply(outcome)

    def incoming_ended(self, stream: LinkStream, reason: str) -> None:
        """A stream has ended; ignore it if a newer one has replaced it."""
        if self.incoming is stream:
            self.incoming = None
            self.apply(self.handshake.inbound_closed(reason))

    def incoming_migrated(self, stream: LinkStream) -> None:
        """The peer's stream has moved to this one without interruption."""
        self.incoming = stream
        self._changed.set()

    def outgoing_started(self, stream: LinkStream) -> None:
        """A stream to the peer is opening; the hello is its first frame."""
        self.outgoing = stream
        self._start_epoch()

    def outgoing_ended(self, reason: str) -> None:
        """The stream to the peer broke or could not be opened."""
        self.outgoing, self._last_error = None, reason
        self.apply(self.handshake.outbound_closed(reason))

    def acknowledged(self, a: Acknowledgement, now_s: float) -> None:
        """Raises: CallerError (that incarnation is quarantined or cannot be)."""
        if not self.handshake.is_outbound_open:
            self._incarnations.check(a.incarnation, wall_clock_s=time.time())
            self.apply(self.handshake.outbound_opened(a.incarnation))
        self.send_queue.acknowledge(a, now_s)
        self.wake.set()

    async def wait_until_up(self, stream: LinkStream) -> bool:
        """Wait until the link is up; return False if the stream is obsolete."""
        while self.incoming is stream and self.handshake.is_inbound_open:
            if self.handshake.is_up:
                return True
            self._changed.clear()
            await self._changed.wait()
        return False

    def deliver(self, message: Message) -> None:
        """Pass a complete message to the trainer.

        Raises: ContractError (there are too many); UnavailableError (too early for so much).
        """
        if self.is_revoked:
            return  # what its stream had received before it was closed
        if not self._message_rate.allows(time.monotonic()):
            raise CallerError(
                PeerRefusal.MALFORMED, f"more than {MESSAGES_PER_S:,.0f} messages a second"
            )
        self._shared.emit(MessageArrived(self.rank, message))

    def record_violation(self, reason: str, kind: PeerRefusal = PeerRefusal.MALFORMED) -> None:
        """Report and count a protocol violation; quarantine the peer at `MAX_VIOLATIONS`."""
        self._shared.emit(Refused(self.rank, reason, kind=kind))
        count = self._incarnations.add_violation(self.handshake.newest)
        if count >= MAX_VIOLATIONS:
            self._quarantine(f"{count} violations, the last one: {reason}")

    def trust_expired(self, error: CallerError) -> None:
        """The peer's authentication is no longer valid: end both streams.

        They are opened again once each side can prove its identity.
        """
        self._shared.emit(Refused(self.rank, str(error), kind=error.kind))
        self.close_streams(str(error))

    def peer_refused(self, kind: PeerRefusal, reason: str) -> None:
        """Report that the peer rejects our stream or fails to authenticate; no retry helps."""
        self._shared.emit(Refused(self.rank, reason, outgoing=True, kind=kind))

    # ---- outgoing frames and state ----

    def next_frame(self, now_s: float) -> bytes | None:
        """The next frame of the outgoing stream, or None: wait for `wake`."""
        if not self._hello_due:
            return self.send_queue.next_frame(now_s)
        self._hello_due = False
        self.send_queue.heartbeat()  # its acknowledgement measures the idle link's delay
        return self.hello_frame()

    def hello_frame(self, *, continues: bool = False) -> bytes:
        """The first frame on a connection. `continues`: the stream is to move to it."""
        local = self._shared.local
        hello = Hello(
            run=str(local.job),
            rank=local.identity.rank,
            incarnation=local.incarnation,
            protocol=PROTOCOL,
            epoch=self.send_queue.epoch,
            iteration=self._shared.iteration,
            address=self._shared.address if self._uses_announced_address else "",
            continues=continues,
        )
        data = Frame(hello=hello).SerializeToString()
        self.send_queue.header_total += len(data)
        return data

    def state(self) -> LinkCounters:
        box = self.send_queue
        return LinkCounters(
            connected=self.handshake.is_up,
            queued_bytes=box.queued_bytes,
            unacknowledged_bytes=box.unacknowledged_bytes,
            window_bytes=box.window_bytes,
            sent_total=box.sent_total,
            acknowledged_total=box.acknowledged_total,
            dropped_messages=box.dropped_messages,
            remade_count=self.remade_count,
            gradient_total=box.gradient_total,
            weights_total=box.weights_total,
            control_total=box.control_total,
            header_total=box.header_total,
            state_total=self.state_bytes,
            probe_total=self.probe_bytes,
            problem=self._problem(),
            neighbour=self.wanted,
            address=self.target,
        )

    def _problem(self) -> str:
        if self.handshake.is_up:
            return ""
        if not self.target:
            return "its address is unknown"
        if self.handshake.is_outbound_open:
            return f"reached at {self.target}, but it does not reach this worker"
        return f"not reached at {self.target}: {self._last_error}"

    def apply(self, outcome: HandshakeActions) -> None:
        for item in outcome:
            if isinstance(item, LinkUp | LinkDown):
                self._shared.emit(item)
            elif item is HandshakeAction.CLEAR_QUEUE:
                self.send_queue.reset()
            elif item is HandshakeAction.SEND_HELLO and self.outgoing is not None:
                self._start_epoch()
            elif item is HandshakeAction.RECONNECT and self.outgoing is not None:
                self.outgoing.end("the peer has a newer incarnation")
        self._changed.set()
        self.wake.set()

    def _start_epoch(self) -> None:
        self.send_queue.reset()
        self._hello_due = True
        self.wake.set()

    @property
    def _uses_announced_address(self) -> bool:
        """Whether both sides use the addresses in hellos, or those in the membership."""
        local = self._shared.local
        return not local.is_exposed or self.peer.site == local.identity.site


@dataclass
class PeerLinks:
    """All links by rank, and what they share."""

    local: PeerExchangeConfig
    emit: Callable[[ExchangeEvent], None]
    address: str = ""
    iteration: int = 0
    by_rank: dict[Rank, PeerLink] = field(default_factory=dict)

    def close_streams(self, reason: str) -> None:
        """End the streams of all links; wanted ones are opened again."""
        for link in self.by_rank.values():
            link.close_streams(reason)

    def find_caller(self, run: str, rank: int) -> PeerLink:
        """Find the link for the rank and run that a caller claims.

        Raises: CallerError (the caller belongs to another run), UnavailableError (the rank is
        unknown; our membership may be outdated).
        """
        if run != str(self.local.job):
            text = f"run {run[:300]!r}; this worker takes part in {self.local.job}"
            raise CallerError(PeerRefusal.WRONG_RUN, text)
        link = self.by_rank.get(Rank(rank))
        if link is None:
            raise UnavailableError(f"rank {rank} is not known here yet; retry later")
        return link
