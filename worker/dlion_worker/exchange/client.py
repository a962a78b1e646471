"""Outgoing streams: dialling peers, again and again, and pulling their state.

Called by `exchange`, on its loop. Each connection has a channel of its own, so that it trusts only
the authority of the site that it dials, and goes by the certificate of the moment. Waits between
attempts grow, with chance in them, so that workers that lost each other at once do not come back
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import WorkerIdentity
from dlion_api.refusals import PeerRefusal
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, PullStateRequest
from dlion_worker.credentials import UnknownAuthorityError, WorkerCredentials
from dlion_worker.exchange.deadline import HEARTBEAT_S, ArrivalDeadline
from dlion_worker.exchange.events import StateSnapshot, StateWanted
from dlion_worker.exchange.framing import MAX_FRAME_BYTES
from dlion_worker.exchange.links import Link, Self
from dlion_worker.exchange.proving import Proven, Proving, Verdict
from dlion_worker.exchange.service import SERVICE
from dlion_worker.exchange.transfer import Assembly
from dlion_worker.peer_proof import PeerProof
from dlion_worker.refused_calls import Handshakes, refusal_of

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 3.0
WAIT_GROWTH = 1.6
STANDS_WITHIN_S = 10.0
"""A new connection to a peer that is linked; after that another one is tried."""

LinkMethod = grpc.aio.StreamStreamMultiCallable[bytes, bytes]
PullMethod = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]

_CALL_ENDED = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.http2.max_frame_size", 2**20),  # a chunk in one piece
    ("grpc.enable_retries", 0),
    # A channel dials once: `Dialler` makes a new one for each attempt, and a closed channel would
    # otherwise go on dialling until the last exception that knows it is forgotten.
    ("grpc.initial_reconnect_backoff_ms", 3_600_000),
    ("grpc.max_reconnect_backoff_ms", 3_600_000),
]


def open_channel(
    address: str, peer: WorkerIdentity, me: Self, credentials: WorkerCredentials
) -> grpc.aio.Channel:
    """A channel that will speak to that worker alone."""
    name = peer.dns_name(me.job)
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, *credentials.target_options(name)]
    channel = credentials.channel(peer.site)
    if channel is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, channel, options)


class Connection:
    """One call on a channel of its own."""

    def __init__(self, channel: grpc.aio.Channel, proven: Proven) -> None:
        self._channel = channel
        self.proven = proven
        method: LinkMethod = channel.stream_stream(f"/{SERVICE}/Link")
        self.call = method()

    async def close(self) -> None:
        """Ends both."""
        self.call.cancel()
        await self._channel.close()


class OutgoingStream:
    """One stream to a peer, from dialling to its end, over one connection after another.

    It goes over between two frames: the last one on the old connection says so, and the peer reads
    on from the new one. Nothing is lost, doubled or out of order, and the link stays up.
    """

    def __init__(self, link: Link, connection: Connection) -> None:
        self._link = link
        self._reading = self._writing = connection
        self._standing: Connection | None = None
        """What the stream is to go over to."""
        self._gone_over = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.opened = False
        self.last_sent_s = time.monotonic()
        self.deadline = ArrivalDeadline(self.last_sent_s)

    @property
    def proven(self) -> Proven:
        """By what the peer is believed where frames are written now."""
        return self._writing.proven

    def end(self, reason: str) -> None:
        """Closes the stream, soon."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self) -> None:
        """Keeps the stream until it ends; `close` is to follow.

        Raises:
            grpc.aio.AioRpcError: The peer or the network ended it.
            UnavailableError: We did.
            ContractError: The peer's acknowledgements are nonsense.
        """
        self._link.outgoing_began(self)
        read = asyncio.create_task(self._read())
        write = asyncio.create_task(self._write())
        try:
            await asyncio.wait((read, write, self._ended), return_when=asyncio.FIRST_COMPLETED)
            # Writing to a call that has ended only says that it has; reading says why.
            if write.done() and not isinstance(write.exception(), _CALL_ENDED):
                write.result()
            await asyncio.wait((read, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise UnavailableError(self._ended.result())
            read.result()
            raise UnavailableError("the peer ended the stream")
        finally:
            for task in (read, write):
                task.cancel()
            await asyncio.gather(read, write, return_exceptions=True)
            del read, write, task  # or the exception keeps them, and they keep it

    async def go_over(self, connection: Connection) -> None:
        """Goes on over that connection, which stands, and closes the one before."""
        self._standing = connection
        self._gone_over.clear()
        self._link.wake.set()
        await self._gone_over.wait()

    async def close(self) -> None:
        """Ends its connections; it goes over to none any more."""
        for connection in {self._reading, self._writing, self._standing or self._writing}:
            await connection.close()

    async def _read(self) -> None:
        while True:
            call = self._reading.call
            while (data := await call.read()) is not grpc.aio.EOF:
                assert isinstance(data, bytes)
                now_s = time.monotonic()
                self.opened = True
                self.deadline.arrived(now_s)
                self._link.acknowledged(_acknowledgement(data), now_s)
            if self._reading is self._writing:
                return
            # All that we sent there has arrived: acknowledgements go on where our frames do.
            await self._reading.close()
            self._reading = self._writing
            self._link.remade_count += 1
            self._gone_over.set()

    async def _write(self) -> None:
        while True:
            if self._standing is not None:
                before, self._writing = self._writing, self._standing
                self._standing = None
                await before.call.write(Frame(last=True).SerializeToString())
                await before.call.done_writing()
            now_s = time.monotonic()
            data = self._link.next_frame(now_s)
            if data is None:
                self._link.wake.clear()
                await self._link.wake.wait()
            else:
                self.last_sent_s = now_s
                await self._writing.call.write(data)


class Dialler:
    """Keeps a stream to one peer for as long as the peer is a member."""

    def __init__(
        self, link: Link, me: Self, credentials: WorkerCredentials, chance: random.Random
    ) -> None:
        self._link = link
        self._me = me
        self._credentials = credentials
        self._chance = chance
        self._last_report = ""
        self._handshakes = Handshakes()
        self._renewed = asyncio.Event()
        self._proving = Proving(credentials, link.peer)
        self.stream: OutgoingStream | None = None

    def renew(self) -> None:
        """The stream that stands is to go over to a connection with the newest certificate."""
        self._renewed.set()

    def have_proven(self, shown: PeerProof | None, now_s: float) -> None:
        """Has the peer prove itself anew where it is to, and ends a stream on which it has not.
        `shown`: by what it has proved itself on its own stream."""
        if (stream := self.stream) is None:
            return
        verdict = self._proving.judge(stream.proven, shown, now_s)
        if verdict is Verdict.RENEW:
            self.renew()
        elif verdict is not Verdict.HOLDS:
            stream.end(f"{self._link.peer.name} {verdict.value}")

    async def run(self, *, after: asyncio.Task[None] | None = None) -> None:
        """Dials for ever; cancel it to stop. `after`: an earlier call, which is to end before."""
        if after is not None:
            await asyncio.wait({after})
        wait_s = FIRST_WAIT_S
        while True:
            self._link.redial.clear()
            dialling = self._link.target and not self._link.quarantined
            if dialling and await self._dial(self._link.target):
                wait_s = FIRST_WAIT_S
            try:
                await asyncio.wait_for(self._link.redial.wait(), self._jittered(wait_s))
            except TimeoutError:
                wait_s = min(wait_s * WAIT_GROWTH, LONGEST_WAIT_S)

    def _jittered(self, wait_s: float) -> float:
        return wait_s * self._chance.uniform(0.5, 1.5)

    async def _dial(self, address: str) -> bool:
        """Holds one stream until it ends; whether it ever was open."""
        stream = None
        reason = "closed"
        try:
            self._renewed.clear()
            stream = self.stream = OutgoingStream(self._link, self._connection(address))
            renewing = asyncio.create_task(self._keep_renewed(stream, address))
            try:
                await stream.run()
            finally:
                renewing.cancel()
                await asyncio.wait({renewing})
                await stream.close()
        except grpc.aio.AioRpcError as error:
            reason = self._judge(error, address)
        except UnknownAuthorityError as error:
            reason = str(error)
            self._tell(PeerRefusal.UNKNOWN_AUTHORITY, reason, address)
        except UnavailableError as error:
            reason = str(error)
        except ContractError as error:
            reason = str(error)
            self._link.offended(reason)
        finally:
            self.stream = None
            self._link.outgoing_ended(reason)
        opened = stream is not None and stream.opened
        if opened:
            self._last_report, self._handshakes = "", Handshakes()
        return opened

    def _connection(self, address: str) -> Connection:
        proven = self._proving.now()  # before: the channel may then trust newer ones, never older
        channel = open_channel(address, self._link.peer, self._me, self._credentials)
        return Connection(channel, proven)

    async def _keep_renewed(self, stream: OutgoingStream, address: str) -> None:
        """Takes that stream over to a new connection whenever it is told to; cancel it to stop.

        The new one stands before the old one is closed. As long as it does not, the old one goes
        on: its peer let it in (and `have_proven` ends it where that was too long ago).
        """
        wait_s = FIRST_WAIT_S
        while True:
            await self._renewed.wait()
            self._renewed.clear()
            connection = await self._standing(address)
            if connection is not None:
                await stream.go_over(connection)
                wait_s = FIRST_WAIT_S
                continue
            self._renewed.set()
            await asyncio.sleep(self._jittered(wait_s))
            wait_s = min(wait_s * WAIT_GROWTH, LONGEST_WAIT_S)

    async def _standing(self, address: str) -> Connection | None:
        """A connection on which the peer waits for the stream to go over; None: not to be had."""
        connection: Connection | None = None
        stands = False
        try:
            connection = self._connection(address)
            async with asyncio.timeout(STANDS_WITHIN_S):
                with contextlib.suppress(grpc.aio.UsageError, asyncio.InvalidStateError):
                    await connection.call.write(self._link.continuing_hello())
                # Of a call that has ended, reading says why.
                stands = await connection.call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            self._judge(error, address)
        except (ContractError, UnavailableError, TimeoutError) as error:
            logger.info("new connection to %s at %s: %r", self._link.peer.name, address, error)
        finally:
            if connection is not None and not stands:
                await connection.close()
        return connection if stands else None

    def _judge(self, error: grpc.aio.AioRpcError, address: str) -> str:
        """Why the stream ended, in words; what no retry will mend is reported, once."""
        details = error.details() or error.code().name
        kind = refusal_of(error)
        who = self._link.peer.spiffe_id(self._me.job)
        if kind is PeerRefusal.UNPROVEN:
            details = f"what answers at {address} cannot prove that it is {who}: {details}"
        if not self._handshakes.is_told(kind, time.monotonic()):
            kind = None
        elif kind is PeerRefusal.NOT_BELIEVED:
            details = (
                f"what answers at {address} for {who} closes every handshake (it does not believe"
                f" this worker, or is a proxy with nothing behind it): {details}"
            )
        self._tell(kind, details, address)
        return details

    def _tell(self, kind: PeerRefusal | None, words: str, address: str) -> None:
        """Reports it, unless it is what was reported last; None: a retry may do."""
        if words == self._last_report:
            return
        self._last_report = words
        level = logging.INFO if kind is None else logging.WARNING
        logger.log(level, "link to %s at %s: %s", self._link.peer.name, address, words)
        if kind is not None:
            self._link.refused(kind, words)

    async def pull(self, wanted: StateWanted, *, max_state_bytes: int) -> StateSnapshot:
        """The peer's state, for as long as it keeps coming.

        Raises:
            UnavailableError: The peer cannot be reached, or fell silent; another may do.
            ContractError: What came is not a state.
        """
        request = PullStateRequest(
            run=str(self._me.job),
            rank=self._me.identity.rank,
            incarnation=self._me.incarnation,
            weights_only=wanted.weights_only,
            at_least=wanted.at_least,
        )
        if not self._link.target:
            raise UnavailableError(f"{self._link.peer.name} has no address yet")
        channel = open_channel(self._link.target, self._link.peer, self._me, self._credentials)
        try:
            method: PullMethod = channel.unary_stream(f"/{SERVICE}/PullState")
            call = method(request.SerializeToString())
            return await _take_state(call, Assembly(max_state_bytes))
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"state of {self._link.peer.name}: {error.details()}") from error
        finally:
            await channel.close()


async def _take_state(
    call: grpc.aio.UnaryStreamCall[bytes, bytes], assembly: Assembly
) -> StateSnapshot:
    deadline = ArrivalDeadline(time.monotonic(), HEARTBEAT_S)
    while True:
        try:
            async with asyncio.timeout(deadline.allowed_s):
                data = await call.read()
        except TimeoutError as error:
            raise UnavailableError(
                f"the peer's state stopped coming: {deadline.describe(time.monotonic())}"
            ) from error
        if data is grpc.aio.EOF:
            raise ContractError("the peer's state ended before it was whole")
        assert isinstance(data, bytes)
        deadline.arrived(time.monotonic())
        snapshot = assembly.feed(data)
        if snapshot is not None:
            return snapshot


def _acknowledgement(data: bytes) -> Acknowledgement:
    if len(data) > MAX_FRAME_BYTES:
        raise ContractError(f"acknowledgement of {len(data)} bytes")
    try:
        return Acknowledgement.FromString(data)
    except DecodeError as error:
        raise ContractError(f"{len(data)} bytes that are not an acknowledgement") from error
