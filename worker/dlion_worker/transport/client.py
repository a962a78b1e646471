"""Outgoing streams: connect and reconnect to peers, and pull their states.

Each connection has its own channel, which trusts only the authority of the peer's site. Retries
back off with jitter, so that workers that lost contact together do not reconnect together.
"""

import asyncio
import contextlib
import logging
import random
import time
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from dlion_api.cancellation import raise_if_cancelled
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import WorkerIdentity
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, PullStateRequest
from dlion_core.links.deadline import MAX_RECONNECT_WAIT_S, RECONNECT_WAIT_S, ArrivalDeadline
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_core.links.framing import MAX_FRAME_BYTES
from dlion_core.links.state_transfer import MAX_CHUNK_GAP_S, MAX_GATHERING_S, StateAssembler
from dlion_worker.call_errors import ClosedHandshakes, refusal_of
from dlion_worker.security.credentials import PeerCertificate, UnknownAuthorityError
from dlion_worker.transport.peer_links import PeerExchangeConfig, PeerLink
from dlion_worker.transport.reauthentication import ConnectionTrust, Reauthentication, TrustVerdict
from dlion_worker.transport.service import SERVICE

logger = logging.getLogger(__name__)

WAIT_GROWTH = 1.6
CONNECT_TIMEOUT_S = 10.0
"""Time limit for a replacement connection to a linked peer; then another one is tried."""

MAX_STATE_BYTES = 2**30

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
    # A channel connects once: `PeerConnector` makes a new one per attempt. Otherwise a closed
    # channel keeps reconnecting until the last exception that references it is freed.
    ("grpc.initial_reconnect_backoff_ms", 3_600_000),
    ("grpc.max_reconnect_backoff_ms", 3_600_000),
]


def open_channel(address: str, peer: WorkerIdentity, local: PeerExchangeConfig) -> grpc.aio.Channel:
    """A channel that accepts only that worker as its server."""
    name = peer.dns_name(local.job)
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, *local.credentials.target_options(name)]
    channel = local.credentials.channel(peer.site)
    if channel is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, channel, options)


class StreamConnection:
    def __init__(self, channel: grpc.aio.Channel, trust: ConnectionTrust) -> None:
        self._channel = channel
        self.trust = trust
        method: LinkMethod = channel.stream_stream(f"/{SERVICE}/Link")
        self.call = method()

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


class OutgoingStream:
    """One stream to a peer, which can move from connection to connection.

    It moves between two frames: the last one on the old connection is marked, and the peer reads on
    from the new one. No message is lost, duplicated or reordered.
    """

    def __init__(self, link: PeerLink, connection: StreamConnection) -> None:
        self._link = link
        self._reading = self._writing = connection
        self._next_connection: StreamConnection | None = None
        """The connection to move to."""
        self._migrated = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.opened = False
        self.last_sent_s = time.monotonic()
        self.deadline = ArrivalDeadline(self.last_sent_s)

    @property
    def trust(self) -> ConnectionTrust:
        """The trust that the connection written to now is based on."""
        return self._writing.trust

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self) -> None:
        """Run the stream until it ends; call `close` afterwards.

        Raises: grpc.aio.AioRpcError (the peer or the network ended it), UnavailableError (we ended
        it), ContractError (the peer sent invalid acknowledgements).
        """
        self._link.outgoing_started(self)
        read = asyncio.create_task(self._read())
        write = asyncio.create_task(self._write())
        try:
            await asyncio.wait((read, write, self._ended), return_when=asyncio.FIRST_COMPLETED)
            # A write to an ended call only fails; the read knows the reason.
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
            # otherwise the exception and these references keep each other alive
            del read, write, task

    async def migrate(self, connection: StreamConnection) -> None:
        """Move to that open connection and close the old one."""
        self._next_connection = connection
        self._migrated.clear()
        self._link.wake.set()
        await self._migrated.wait()

    async def close(self) -> None:
        for connection in {self._reading, self._writing, self._next_connection or self._writing}:
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
            # Everything sent on the old connection has arrived: read acknowledgements where we
            # write.
            await self._reading.close()
            self._reading = self._writing
            self._link.remade_count += 1
            self._migrated.set()

    async def _write(self) -> None:
        while True:
            if self._next_connection is not None:
                before, self._writing = self._writing, self._next_connection
                self._next_connection = None
                await before.call.write(Frame(last=True).SerializeToString())
                await before.call.done_writing()
            now_s = time.monotonic()
            data = self._link.next_frame(now_s)
            self._link.send_s += time.monotonic() - now_s
            if data is None:
                self._link.wake.clear()
                await self._link.wake.wait()
            else:
                self.last_sent_s = now_s
                await self._writing.call.write(data)


class PeerConnector:
    """Keeps a stream to one peer while the peer is a member."""

    def __init__(self, link: PeerLink, local: PeerExchangeConfig, rng: random.Random) -> None:
        self._link = link
        self._local = local
        self._rng = rng
        self._last_report = ""
        self._handshakes = ClosedHandshakes()
        self._renewed = asyncio.Event()
        self._reauthentication = Reauthentication(local.credentials, link.peer)
        self.stream: OutgoingStream | None = None

    def renew(self) -> None:
        """Move the stream to a connection with the newest certificate."""
        self._renewed.set()

    def check_trust(self, inbound_proof: PeerCertificate | None, now_s: float) -> None:
        """Start a reauthentication if one is due, and end the stream if the peer failed it.

        `inbound_proof` is what the peer proved on its own stream, if it has one.
        """
        if (stream := self.stream) is None:
            return
        verdict = self._reauthentication.evaluate(stream.trust, inbound_proof, now_s)
        if verdict is TrustVerdict.RENEW:
            self.renew()
        elif verdict is not TrustVerdict.VALID:
            stream.end(f"{self._link.peer.name} {verdict.value}")

    async def run(self, *, after: asyncio.Task[None] | None = None) -> None:
        """Connect again and again until cancelled. `after`: an earlier task that must end first."""
        if after is not None:
            await asyncio.wait({after})
        wait_s = RECONNECT_WAIT_S
        while True:
            self._link.redial.clear()
            dialling = self._link.target and not self._link.quarantined
            if dialling and await self._dial(self._link.target):
                wait_s = RECONNECT_WAIT_S
            try:
                # Not `wait_for`, which may lose a cancellation (python/cpython#86296).
                async with asyncio.timeout(self._jittered(wait_s)):
                    await self._link.redial.wait()
            except TimeoutError:
                wait_s = min(wait_s * WAIT_GROWTH, MAX_RECONNECT_WAIT_S)

    def _jittered(self, wait_s: float) -> float:
        return wait_s * self._rng.uniform(0.5, 1.5)

    async def _dial(self, address: str) -> bool:
        """Run one stream until it ends; return whether it was ever open."""
        stream = None
        reason = "closed"
        try:
            self._renewed.clear()
            stream = self.stream = OutgoingStream(self._link, self._connection(address))
            renewing = asyncio.create_task(self._migrate_on_renewal(stream, address))
            try:
                await stream.run()
            finally:
                renewing.cancel()
                await asyncio.wait({renewing})
                await stream.close()
        except grpc.aio.AioRpcError as error:
            reason = self._describe_error(error, address)
        except UnknownAuthorityError as error:
            reason = str(error)
            self._report_refusal(PeerRefusal.UNKNOWN_AUTHORITY, reason, address)
        except UnavailableError as error:
            reason = str(error)
        except ContractError as error:
            reason = str(error)
            self._link.record_violation(reason)
        finally:
            self.stream = None
            self._link.outgoing_ended(reason)
        opened = stream is not None and stream.opened
        if opened:
            self._last_report, self._handshakes = "", ClosedHandshakes()
        return opened

    def _connection(self, address: str) -> StreamConnection:
        trust = (
            self._reauthentication.current_trust()
        )  # read first: the channel may then trust newer bundles, never older ones
        channel = open_channel(address, self._link.peer, self._local)
        return StreamConnection(channel, trust)

    async def _migrate_on_renewal(self, stream: OutgoingStream, address: str) -> None:
        """Move the stream to a new connection on request, until cancelled.

        The old connection stays in use until the new one is open, because its peer has been
        authenticated (`check_trust` limits for how long).
        """
        wait_s = RECONNECT_WAIT_S
        while True:
            await self._renewed.wait()
            self._renewed.clear()
            connection = await self._next_connection(address)
            raise_if_cancelled()
            if connection is not None:
                await stream.migrate(connection)
                wait_s = RECONNECT_WAIT_S
                continue
            self._renewed.set()
            await asyncio.sleep(self._jittered(wait_s))
            wait_s = min(wait_s * WAIT_GROWTH, MAX_RECONNECT_WAIT_S)

    async def _next_connection(self, address: str) -> StreamConnection | None:
        """A connection on which the peer is ready to continue the stream, or None."""
        connection: StreamConnection | None = None
        is_open = False
        try:
            connection = self._connection(address)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                with contextlib.suppress(grpc.aio.UsageError, asyncio.InvalidStateError):
                    await connection.call.write(self._link.hello_frame(continues=True))
                # If the call has ended, the read raises the reason.
                is_open = await connection.call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            self._describe_error(error, address)
        except (ContractError, UnavailableError, TimeoutError) as error:
            logger.info("new connection to %s at %s: %r", self._link.peer.name, address, error)
        finally:
            if connection is not None and not is_open:
                await connection.close()
        return connection if is_open else None

    def _describe_error(self, error: grpc.aio.AioRpcError, address: str) -> str:
        """Why the stream ended. Report once what a retry alone does not solve."""
        details = error.details() or error.code().name
        kind = refusal_of(error)
        peer_id = self._link.peer.spiffe_id(self._local.job)
        if kind is PeerRefusal.UNPROVEN:
            details = f"what answers at {address} cannot prove that it is {peer_id}: {details}"
        if not self._handshakes.should_report(kind, time.monotonic()):
            kind = None
        elif kind is PeerRefusal.NOT_BELIEVED:
            details = (
                f"what answers at {address} for {peer_id} closes every handshake (it does not trust"
                f" this worker, or is a proxy with nothing behind it): {details}"
            )
        self._report_refusal(kind, details, address)
        return details

    def _report_refusal(self, kind: PeerRefusal | None, text: str, address: str) -> None:
        """Log and report a problem unless it was the last one reported. `kind` None: retry."""
        if text == self._last_report:
            return
        self._last_report = text
        level = logging.INFO if kind is None else logging.WARNING
        logger.log(level, "link to %s at %s: %s", self._link.peer.name, address, text)
        if kind is not None:
            self._link.peer_refused(kind, text)

    async def pull(self, wanted: StateRequest) -> StateSnapshot:
        """Pull the peer's state, for as long as it keeps arriving (state_transfer has the limits).

        Raises: UnavailableError (the peer is unreachable or went silent; another peer may work),
        ContractError (the data received is not a state).
        """
        request = PullStateRequest(
            run=str(self._local.job),
            rank=self._local.identity.rank,
            incarnation=self._local.incarnation,
            weights_only=wanted.weights_only,
            at_least=wanted.at_least,
            unless_hash=wanted.unless_hash,
        )
        if not self._link.target or self._link.is_revoked:
            why = "is revoked" if self._link.is_revoked else "has no address yet"
            raise UnavailableError(f"{self._link.peer.name} {why}")
        channel = open_channel(self._link.target, self._link.peer, self._local)
        try:
            method: PullMethod = channel.unary_stream(f"/{SERVICE}/PullState")
            call = method(request.SerializeToString())
            assembly = StateAssembler(MAX_STATE_BYTES, may_be_equal=bool(wanted.unless_hash))
            return await _take_state(call, assembly)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"state of {self._link.peer.name}: {error.details()}") from error
        finally:
            await channel.close()


async def _take_state(
    call: grpc.aio.UnaryStreamCall[bytes, bytes], assembly: StateAssembler
) -> StateSnapshot:
    start_s = time.monotonic()
    deadline = ArrivalDeadline(start_s, max_s=MAX_CHUNK_GAP_S)
    while True:
        try:
            async with asyncio.timeout(deadline.allowed_s):
                data = await call.read()
        except TimeoutError as error:
            raise UnavailableError(
                f"the peer's state stopped arriving: {deadline.describe(time.monotonic())}"
            ) from error
        if data is grpc.aio.EOF:
            raise ContractError("the peer's state ended before it was complete")
        assert isinstance(data, bytes)
        deadline.arrived(time.monotonic())
        snapshot = assembly.feed(data)
        if snapshot is not None:
            return snapshot
        if not assembly.has_begun and time.monotonic() - start_s > MAX_GATHERING_S:
            raise UnavailableError(f"the peer's state has not begun after {MAX_GATHERING_S:.0f} s")


def _acknowledgement(data: bytes) -> Acknowledgement:
    if len(data) > MAX_FRAME_BYTES:
        raise ContractError(f"acknowledgement of {len(data)} bytes")
    try:
        return Acknowledgement.FromString(data)
    except DecodeError as error:
        raise ContractError(f"{len(data)} bytes that are not an acknowledgement") from error
