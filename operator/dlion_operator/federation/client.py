"""gRPC client: the stream on which this operator sends its reports to one other site.

The stream reconnects when it breaks. When this operator's certificate is renewed, a second
connection is opened and replaces the first once it is up. When the site's bundle changes, the
stream ends at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from dlion_api.cancellation import raise_if_cancelled
from dlion_api.errors import ContractError
from dlion_api.names import JobKey, SiteName
from dlion_api.wire import federation_pb2 as wire
from dlion_api.wire import federation_pb2_grpc
from dlion_operator.federation.credentials import Credentials
from dlion_operator.federation.messages import site_hello, to_wire
from dlion_operator.federation.outbound_reports import OutboundReports
from dlion_operator.federation.reports import RunReport
from dlion_operator.model.backoff import backoff_s

_LOG = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
"""How often changes are looked for, which is cheap."""
ANSWER_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 15.0
"""Timeout of a connection opened beside the one in use."""
HELLO_TIMEOUT_S = 5.0
"""Timeout of a hello on an open connection. Less than the server's timeout for silence on the
earlier stream."""
MAX_WAIT_S = 5.0
"""Between two attempts: bounds the delay after a link recovers."""

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own back-off decides when to retry.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also limits one attempt: connection and handshake of a distant site take time.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 4096),
)

Stream = grpc.aio.StreamStreamCall[wire.Statement, wire.Welcome]


@dataclass
class _SiteConnection:
    """One connection to that site's operator, and what its stream has sent."""

    channel: grpc.aio.Channel
    version: int
    """Version of the credentials that it uses."""
    bundle: bytes | None
    stream: Stream = field(init=False)
    """Starts with the hello."""
    outbound: OutboundReports = field(default_factory=OutboundReports)


class FederationClient:
    """Sends reports to one other site."""

    def __init__(
        self,
        own: SiteName,
        site: SiteName,
        address: str,
        credentials: Credentials,
        reports: Callable[[], Mapping[JobKey, RunReport]],
    ) -> None:
        self._own = own
        self.site = site
        self._address = address
        self._credentials = credentials
        self._reports = reports
        self.connected = False
        """Whether the stream is established now."""
        self.problem = ""
        """Why it is not; empty if it is."""
        self.failures = 0
        """Failed attempts and broken streams since the start."""
        self.round_trip_s: float | None = None
        """Time to the answer to the newest stream's hello; None before the first."""
        self.sent_bytes = 0
        """Bytes of statements, before TLS and HTTP/2."""
        self._successor: tuple[_SiteConnection, asyncio.Task[None]] | None = None
        """The connection being opened beside the one in use."""
        self._renew_at_s = 0.0

    async def run(self) -> None:
        """Send changes until cancelled, and reconnect when the stream breaks."""
        attempts = 0
        while True:
            try:
                await self._serve_stream()
                attempts = 0
                continue  # with the new bundle
            except grpc.aio.AioRpcError as error:
                problem = _error_text(error.code(), error.details())
            except (ContractError, TimeoutError, OSError) as error:
                problem = str(error) or f"no answer within {ANSWER_TIMEOUT_S:g} s"
            except Exception:  # noqa: BLE001 - a bug must not end reports to the site permanently
                _LOG.exception("site %s receives no reports; retrying", self.site)
                problem = "an internal error here; see this operator's log"
            raise_if_cancelled()
            attempts = 0 if self.connected else attempts + 1
            self._failed(problem)
            await self._pause(min(MAX_WAIT_S, backoff_s(attempts)))

    async def _pause(self, seconds: float) -> None:
        """Wait, but return early when certificate or bundles change."""
        version, left_s = self._credentials.version, seconds
        while self._credentials.version == version and left_s > 0.0:
            await asyncio.sleep(min(POLL_INTERVAL_S, left_s))
            left_s -= POLL_INTERVAL_S

    def _failed(self, problem: str) -> None:
        self.connected = False
        self.failures += 1
        if problem != self.problem:
            _LOG.warning("site %s at %s is not reached: %s", self.site, self._address, problem)
        self.problem = problem

    async def _serve_stream(self) -> None:
        """Send changes until the stream breaks, which raises, or the site's bundle changes.

        A changed bundle ends the stream, because the connected peer may no longer be trusted.
        """
        connection = self._open_connection()
        try:
            await self._greet(connection)
            while self._credentials.bundle(self.site) == connection.bundle:
                await self._send_pending(connection)
                await asyncio.sleep(POLL_INTERVAL_S)
                if self._credentials.version != connection.version:
                    connection = await self._replace_connection(connection)
        finally:
            await connection.channel.close()
            await self._close_successor()

    def _open_connection(self) -> _SiteConnection:
        """Return a connection with the current credentials, not up yet. Raises: ContractError."""
        version, bundle = self._credentials.version, self._credentials.bundle(self.site)
        channel = self._credentials.channel(self.site, self._address, _OPTIONS)
        return _SiteConnection(channel, version, bundle)

    async def _replace_connection(self, connection: _SiteConnection) -> _SiteConnection:
        """Return the connection's replacement once that is up, else the connection itself."""
        if self._successor is None:
            if time.monotonic() >= self._renew_at_s:
                newer = self._open_connection()
                self._successor = newer, asyncio.create_task(_connected(newer.channel))
            return connection
        newer, connecting = self._successor
        if not connecting.done():
            return connection
        try:
            connecting.result()
            # The server accepts the newest stream only, so nothing is sent on this one meanwhile.
            await self._greet(newer, within_s=HELLO_TIMEOUT_S)
        except (grpc.aio.AioRpcError, ContractError, TimeoutError, OSError) as error:
            await self._close_successor()
            self.failures += 1
            self._renew_at_s = time.monotonic() + MAX_WAIT_S
            text = str(error) or "no answer"
            _LOG.warning("site %s: no new connection, the old one stays: %s", self.site, text)
            return connection
        self._successor = None
        await connection.channel.close()
        return newer

    async def _close_successor(self) -> None:
        successor, self._successor = self._successor, None
        if successor is not None:
            connection, connecting = successor
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await connection.channel.close()

    async def _greet(
        self, connection: _SiteConnection, *, within_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        stub = federation_pb2_grpc.FederationStub(connection.channel)  # type: ignore[no-untyped-call]
        stream = connection.stream = stub.Report()
        async with asyncio.timeout(within_s):
            await self._write(stream, site_hello(self._own, self.site))
            sent_s = time.monotonic()  # the connection is up by now
            answer: Any = await stream.read()
        if answer is grpc.aio.EOF:
            await _raise_end(stream)
        self.round_trip_s = time.monotonic() - sent_s
        if not self.connected:
            _LOG.info("site %s at %s receives this site's reports", self.site, self._address)
        self.connected, self.problem = True, ""

    async def _send_pending(self, connection: _SiteConnection) -> None:
        if connection.stream.done():
            await _raise_end(connection.stream)
        for statement in connection.outbound.pending(self._reports(), time.monotonic()):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._write(connection.stream, to_wire(statement))

    async def _write(self, stream: Stream, message: wire.Statement) -> None:
        try:
            await stream.write(message)
        except asyncio.InvalidStateError:  # it has ended meanwhile
            await _raise_end(stream)
        self.sent_bytes += message.ByteSize()


async def _connected(channel: grpc.aio.Channel) -> None:
    """Wait until the channel is connected. Raises: TimeoutError."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        await channel.channel_ready()


async def _raise_end(stream: Stream) -> None:
    """Raise ContractError with the status of the ended stream."""
    raise ContractError(_error_text(await stream.code(), await stream.details()))


def _error_text(code: grpc.StatusCode, details: str | None) -> str:
    """Return the error's text, with advice where gRPC hides a refusal inside TLS."""
    text = f"{code.name}: {details or 'the stream has ended'}"
    if code is grpc.StatusCode.UNAVAILABLE:
        text += "; check that it listens at that address and has this site's bundle"
    return text
