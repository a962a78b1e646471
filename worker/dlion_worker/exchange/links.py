"""All links of one worker, as the exchange's loop holds them.

Called by `service` and `client` (what happened to a stream) and by `exchange` (what the trainer
wants). Joins each peer's `Outbox` and `Handshake`; knows streams only by what it can do to them.
Everything here runs on the exchange's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, Rank, WorkerIdentity
from dlion_api.refusals import CallerError, PeerRefusal
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello
from dlion_worker.exchange.events import ExchangeEvent, LinkDown, LinkState, LinkUp, Refused
from dlion_worker.exchange.framing import PROTOCOL
from dlion_worker.exchange.handshake import Action, Handshake, Outcome
from dlion_worker.exchange.window import Outbox, QueueRule
from dlion_worker.policies.interface import Message, MessageArrived

logger = logging.getLogger(__name__)

OFFENCES = 3
"""After so many broken promises an incarnation is refused for good."""

MAX_ADDRESS_LENGTH = 300


class Stream(Protocol):
    """What a link can do to one of its streams."""

    def end(self, reason: str) -> None:
        """Closes it, soon."""
        ...


@dataclass(frozen=True)
class Self:
    """Who we are, for hellos and certificates; `address` is filled in when the port is known."""

    job: JobKey
    identity: WorkerIdentity
    incarnation: int
    queue_rule: QueueRule
    max_queued_messages: int
    max_message_bytes: int


@dataclass
class Surroundings:
    """What all links share."""

    me: Self
    emit: Callable[[ExchangeEvent], None]
    is_exposed: bool = False
    """Whether other sites' peers dial another address than this site's."""
    address: str = ""
    iteration: int = 0


class Link:
    """One peer, both directions."""

    def __init__(self, peer: WorkerIdentity, shared: Surroundings) -> None:
        self.peer = peer
        self._shared = shared
        self.outbox = Outbox(shared.me.queue_rule, shared.me.max_queued_messages)
        self.handshake = Handshake(peer.rank)
        self.address = ""
        self.override: str | None = None
        self.wanted = False
        """Whether streams to and from this peer are kept; else only states are pulled."""
        self.was_wanted = False
        """Whether they are, or were before: what they carried counts."""
        self.incoming: Stream | None = None
        self.outgoing: Stream | None = None
        self.received_total = 0
        self.wire_received_bytes = 0
        self.remade_count = 0
        self._ended = "no answer yet"
        self.wake = asyncio.Event()  # something may be sent
        self.redial = asyncio.Event()  # the address may have changed: dial at once
        self._changed = asyncio.Event()
        self._hello_due = False
        self._offences: Counter[int] = Counter()  # by incarnation
        self._quarantined: int | None = None

    @property
    def rank(self) -> Rank:
        """The peer's."""
        return self.peer.rank

    @property
    def target(self) -> str:
        """Where to dial; empty: nowhere, as far as is known."""
        return self.override or self.address

    @property
    def wire_bytes(self) -> int:
        """Sent and received so far."""
        return self.outbox.wire_sent_bytes + self.wire_received_bytes

    # ---- what the trainer wants ----

    def push(self, message: Message) -> None:
        """Queues a message; on a link that is down it is lost, and counted."""
        if self.handshake.up is None:
            self.outbox.dropped_messages += 1
            return
        try:
            self.outbox.push(message)
        except UnavailableError as error:
            logger.warning("rank %d: %s", self.rank, error)
            self.break_off(str(error))
        self.wake.set()

    def known_as(self, incarnation: int, address: str) -> None:
        """The membership says where the peer is now."""
        if incarnation < self.handshake.newest:
            return
        self.moved_to(address)
        self.apply(self.handshake.knows(incarnation))

    def moved_to(self, address: str) -> None:
        """The peer takes streams there from now on."""
        if address and address != self.address:
            self.address = address
            self.redial.set()

    def _quarantine(self, reason: str) -> None:
        """Refuses the peer's present incarnation from now on."""
        if self.quarantined:  # of it more had arrived by then
            return
        self._quarantined = self.handshake.newest
        words = f"incarnation {self._quarantined} is quarantined: {reason}"
        self._shared.emit(Refused(self.rank, words, kind=PeerRefusal.QUARANTINED))
        self.break_off(words)

    @property
    def quarantined(self) -> bool:
        """Whether the newest incarnation of the peer is refused."""
        return self._quarantined is not None and self.handshake.newest <= self._quarantined

    def break_off(self, reason: str) -> None:
        """Ends both streams; they are opened again unless the peer is quarantined."""
        for stream in (self.outgoing, self.incoming):
            if stream is not None:
                stream.end(reason)

    # ---- what happened to a stream ----

    def check_caller(self, incarnation: int) -> None:
        """Passes if that incarnation of the peer may call.

        Raises:
            CallerError: It has been replaced, or is in quarantine.
        """
        self.handshake.check(incarnation)
        if self._quarantined is not None and incarnation <= self._quarantined:
            words = f"incarnation {incarnation} is in quarantine"
            raise CallerError(PeerRefusal.QUARANTINED, words)

    def admit(self, hello: Hello, stream: Stream) -> None:
        """Takes the peer's new stream in place of an older one.

        Raises:
            CallerError: That incarnation has been replaced, or is in quarantine.
        """
        self.check_caller(hello.incarnation)
        older, self.incoming = self.incoming, stream
        if older is not None:
            older.end("replaced by a newer stream")
        if self._is_dialled_as_told:
            self.moved_to(hello.address[:MAX_ADDRESS_LENGTH])
        self.apply(self.handshake.greeted(hello.incarnation, hello.iteration, new_stream=True))

    def greeted_again(self, hello: Hello, *, heard: bool) -> None:
        """The peer begins anew on the stream it has."""
        outcome = self.handshake.greeted(
            hello.incarnation, hello.iteration, new_stream=False, heard=heard
        )
        self.apply(outcome)

    def incoming_ended(self, stream: Stream, reason: str) -> None:
        """That stream is gone; no news if a newer one has replaced it."""
        if self.incoming is stream:
            self.incoming = None
            self.apply(self.handshake.inbound_closed(reason))

    def incoming_goes_on(self, stream: Stream) -> None:
        """The peer's stream has gone over to that one, without a break."""
        self.incoming = stream
        self._changed.set()

    def outgoing_began(self, stream: Stream) -> None:
        """We have dialled; the hello is the first frame that will leave."""
        self.outgoing = stream
        self._greet()

    def outgoing_ended(self, reason: str) -> None:
        """Our stream broke, or never came to be."""
        self.outgoing, self._ended = None, reason
        self.apply(self.handshake.outbound_closed(reason))

    def acknowledged(self, a: Acknowledgement, now_s: float) -> None:
        """The peer says what it has."""
        if self.handshake.outbound is None:
            self.apply(self.handshake.outbound_opened(a.incarnation))
        self.outbox.acknowledge(a, now_s)
        self.wake.set()

    async def until_up(self, stream: Stream) -> bool:
        """Waits for our own half of the link; false if the stream has become a remnant."""
        while self.incoming is stream and self.handshake.inbound is not None:
            if self.handshake.up is not None:
                return True
            self._changed.clear()
            await self._changed.wait()
        return False

    def deliver(self, message: Message) -> None:
        """Hands a whole message to the trainer."""
        self._shared.emit(MessageArrived(self.rank, message))

    def offended(self, reason: str) -> None:
        """The peer broke the protocol, or sent nonsense: counted, and too often is too often."""
        self._shared.emit(Refused(self.rank, reason))
        self._offences[self.handshake.newest] += 1
        count = self._offences[self.handshake.newest]
        if count >= OFFENCES:
            self._quarantine(f"refused {count} times, the last time for: {reason}")

    def unproven(self, error: CallerError) -> None:
        """What the peer proved itself by holds no more: both streams end, and are opened again
        where either side can prove itself anew."""
        self._shared.emit(Refused(self.rank, str(error), kind=error.kind))
        self.break_off(str(error))

    def refused(self, kind: PeerRefusal, reason: str) -> None:
        """The peer will not have our stream, or does not prove itself: a retry alone changes
        nothing."""
        self._shared.emit(Refused(self.rank, reason, outgoing=True, kind=kind))

    # ---- what leaves ----

    def next_frame(self, now_s: float) -> bytes | None:
        """The next frame of our stream; None: wait for `wake`."""
        if self._hello_due:
            self._hello_due = False
            self.outbox.heartbeat()  # its acknowledgement tells the idle link's delay
            data = Frame(hello=self._hello()).SerializeToString()
            self.outbox.wire_sent_bytes += len(data)
            return data
        return self.outbox.next_frame(now_s)

    def continuing_hello(self) -> bytes:
        """The first frame on a new connection that our stream is to go over to."""
        hello = self._hello()
        hello.continues = True
        data = Frame(hello=hello).SerializeToString()
        self.outbox.wire_sent_bytes += len(data)
        return data

    def state(self) -> LinkState:
        """The link's counters."""
        box = self.outbox
        return LinkState(
            connected=self.handshake.up is not None,
            incarnation=self.handshake.newest,
            queued_bytes=box.queued_bytes,
            unacknowledged_bytes=box.unacknowledged_bytes,
            window_bytes=box.window_bytes,
            sent_total=box.sent_total,
            acknowledged_total=box.acknowledged_total,
            received_total=self.received_total,
            dropped_messages=box.dropped_messages,
            wire_sent_bytes=box.wire_sent_bytes,
            wire_received_bytes=self.wire_received_bytes,
            remade_count=self.remade_count,
            problem=self._problem(),
        )

    def _problem(self) -> str:
        if self.handshake.up is not None:
            return ""
        if not self.target:
            return "its address is not known"
        if self.handshake.outbound is not None:
            return f"reached at {self.target}, and does not reach this worker"
        return f"not reached at {self.target}: {self._ended}"

    def apply(self, outcome: Outcome) -> None:
        """Does what the handshake asks for, in order."""
        for item in outcome:
            if isinstance(item, LinkUp | LinkDown):
                self._shared.emit(item)
            elif item is Action.FORGET:
                self.outbox.reset()
            elif item is Action.GREET and self.outgoing is not None:
                self._greet()
            elif item is Action.REDIAL and self.outgoing is not None:
                self.outgoing.end("the peer has a newer incarnation")
        self._changed.set()
        self.wake.set()

    def _greet(self) -> None:
        self.outbox.reset()
        self._hello_due = True
        self.wake.set()

    def _hello(self) -> Hello:
        me = self._shared.me
        return Hello(
            run=str(me.job),
            rank=me.identity.rank,
            incarnation=me.incarnation,
            protocol=PROTOCOL,
            epoch=self.outbox.epoch,
            iteration=self._shared.iteration,
            address=self._shared.address if self._is_dialled_as_told else "",
        )

    @property
    def _is_dialled_as_told(self) -> bool:
        """Whether peer and we dial what the other tells; else the membership has addresses."""
        return not self._shared.is_exposed or self.peer.site == self._shared.me.identity.site


@dataclass
class Links:
    """Every peer's link, by rank."""

    shared: Surroundings
    by_rank: dict[Rank, Link] = field(default_factory=dict)

    def break_off(self, reason: str) -> None:
        """Ends all of them; who is wanted is dialled anew."""
        for link in self.by_rank.values():
            link.break_off(reason)

    def claimed(self, run: str, rank: int) -> Link:
        """The link of a caller that says it is that rank of that run.

        Raises:
            CallerError: Another run.
            UnavailableError: Nobody by that rank has joined, as far as is known here; it may be
                that our membership is late.
        """
        if run != str(self.shared.me.job):
            words = f"run {run[:300]!r}; this worker takes part in {self.shared.me.job}"
            raise CallerError(PeerRefusal.WRONG_RUN, words)
        link = self.by_rank.get(Rank(rank))
        if link is None:
            raise UnavailableError(f"rank {rank} is not known here yet; try again")
        return link
