"""The stream on which this operator tells one other site what it sees: the client's half of the
gRPC skin. It comes back when it breaks. Where this operator's certificate is new, another one is
opened beside it and takes its place once it stands; where that site's bundle is another, it ends at
once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, OperatorIdentity, SiteName
from dlion_api.wire import federation_pb2 as wire
from dlion_api.wire import federation_pb2_grpc
from dlion_operator.federation.credentials import Credentials
from dlion_operator.federation.messages import greeting, to_wire
from dlion_operator.federation.reports import RunReport
from dlion_operator.federation.telling import Telling
from dlion_operator.loops import backoff_s

_LOG = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""So soon is said what is new; looking costs little."""
ANSWER_WITHIN_S = 15.0
CONNECTED_WITHIN_S = 15.0
"""Of a link that is opened beside the one in use."""
GREETED_WITHIN_S = 5.0
"""On a connection that stands: less than the other end bears silence on the stream before."""
LONGEST_WAIT_S = 5.0
"""Between two attempts, so that a link that is back is used at once."""

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_http_proxy", 0),
    # A new channel makes a new handshake, with the certificate and the bundle as they are then.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own back-off decides when to try again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Bounds an attempt, too: so long may connection and handshake take, of a site that is far away.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 4096),
)

Stream = grpc.aio.StreamStreamCall[wire.Statement, wire.Welcome]


@dataclass
class _Link:
    """One connection to that site's operator, and what was said on its stream."""

    channel: grpc.aio.Channel
    version: int
    """Of the credentials that it goes by."""
    bundle: bytes | None
    stream: Stream = field(init=False)
    """Begins with the greeting."""
    telling: Telling = field(default_factory=Telling)

    async def close(self) -> None:
        await self.channel.close()


class Dialler:
    """What one other site is told."""

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
        """Whether that site listens just now."""
        self.problem = ""
        """Why not, where it does not."""
        self.failures = 0
        """Attempts without success, and streams that broke, since the start."""
        self.round_trip_s: float | None = None
        """What the answer to the greeting of the newest stream took; None before the first."""
        self.sent_bytes = 0
        """Of statements, before TLS and HTTP/2."""
        self._successor: tuple[_Link, asyncio.Task[None]] | None = None
        """The link that is being connected beside the one in use."""
        self._renew_at_s = 0.0

    async def run(self) -> None:
        """For ever: says what is new."""
        attempts = 0
        while True:
            try:
                await self._hold()
                attempts = 0
                continue  # remade
            except grpc.aio.AioRpcError as error:
                problem = _in_words(error.code(), error.details())
            except (ContractError, TimeoutError, OSError) as error:
                problem = str(error) or f"no answer within {ANSWER_WITHIN_S:g} s"
            except Exception:  # noqa: BLE001 - one site's words must not end the stream for good
                _LOG.exception("site %s is told nothing; tried again", self.site)
                problem = "a defect here; this operator's log has it"
            attempts = 0 if self.connected else attempts + 1
            self._failed(problem)
            await self._pause(min(LONGEST_WAIT_S, backoff_s(attempts)))

    async def _pause(self, seconds: float) -> None:
        """Waits; not on, once there is another certificate or bundle to try with."""
        version, left_s = self._credentials.version, seconds
        while self._credentials.version == version and left_s > 0.0:
            await asyncio.sleep(min(LOOK_EVERY_S, left_s))
            left_s -= LOOK_EVERY_S

    def _failed(self, problem: str) -> None:
        self.connected = False
        self.failures += 1
        if problem != self.problem:
            _LOG.warning("site %s at %s is not reached: %s", self.site, self._address, problem)
        self.problem = problem

    async def _hold(self) -> None:
        """Tells until the stream breaks, which raises, or that site's bundle is another: whom it
        vouched for may be trusted no more."""
        link = self._dialled()
        try:
            await self._greet(link)
            while self._credentials.bundle(self.site) == link.bundle:
                await self._say_news(link)
                await asyncio.sleep(LOOK_EVERY_S)
                if self._credentials.version != link.version:
                    link = await self._succeeded(link)
        finally:
            await link.close()
            await self._give_up_successor()

    def _dialled(self) -> _Link:
        """A link by the credentials as they are now, not connected yet. Raises: ContractError."""
        options = (
            *_OPTIONS,
            ("grpc.ssl_target_name_override", OperatorIdentity(self.site).dns_name),
        )
        version, bundle = self._credentials.version, self._credentials.bundle(self.site)
        channel_credentials = self._credentials.channel(self.site)
        channel = grpc.aio.secure_channel(self._address, channel_credentials, options=options)
        return _Link(channel, version, bundle)

    async def _succeeded(self, link: _Link) -> _Link:
        """The link that takes that one's place, once it stands; until then that one."""
        if self._successor is None:
            if time.monotonic() >= self._renew_at_s:
                newer = self._dialled()
                self._successor = newer, asyncio.create_task(_connected(newer.channel))
            return link
        newer, connecting = self._successor
        if not connecting.done():
            return link
        try:
            connecting.result()
            # The other end hears the newest stream alone: nothing is told on this one meanwhile.
            await self._greet(newer, within_s=GREETED_WITHIN_S)
        except (grpc.aio.AioRpcError, ContractError, TimeoutError, OSError) as error:
            await self._give_up_successor()
            self.failures += 1
            self._renew_at_s = time.monotonic() + LONGEST_WAIT_S
            words = str(error) or "no answer"
            _LOG.warning("site %s: no new connection, the old one stays: %s", self.site, words)
            return link
        self._successor = None
        await link.close()
        return newer

    async def _give_up_successor(self) -> None:
        successor, self._successor = self._successor, None
        if successor is not None:
            link, connecting = successor
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await link.close()

    async def _greet(self, link: _Link, *, within_s: float = ANSWER_WITHIN_S) -> None:
        stub = federation_pb2_grpc.FederationStub(link.channel)  # type: ignore[no-untyped-call]
        stream = link.stream = stub.Tell()
        async with asyncio.timeout(within_s):
            await self._write(stream, greeting(self._own, self.site))
            sent_s = time.monotonic()  # the connection stands by now
            answer: Any = await stream.read()
        if answer is grpc.aio.EOF:
            await _raise_end(stream)
        self.round_trip_s = time.monotonic() - sent_s
        if not self.connected:
            _LOG.info("site %s at %s is told what is new here", self.site, self._address)
        self.connected, self.problem = True, ""

    async def _say_news(self, link: _Link) -> None:
        if link.stream.done():
            await _raise_end(link.stream)
        for statement in link.telling.news(self._reports(), time.monotonic()):
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._write(link.stream, to_wire(statement))

    async def _write(self, stream: Stream, message: wire.Statement) -> None:
        try:
            await stream.write(message)
        except asyncio.InvalidStateError:  # it has ended meanwhile
            await _raise_end(stream)
        self.sent_bytes += message.ByteSize()


async def _connected(channel: grpc.aio.Channel) -> None:
    """Waits until it is. Raises: TimeoutError."""
    async with asyncio.timeout(CONNECTED_WITHIN_S):
        await channel.channel_ready()


async def _raise_end(stream: Stream) -> None:
    """Raises with what the other end said last."""
    raise ContractError(_in_words(await stream.code(), await stream.details()))


def _in_words(code: grpc.StatusCode, details: str | None) -> str:
    """Refusals inside TLS reach nobody but the gRPC core: what may be wrong is said here."""
    words = f"{code.name}: {details or 'the stream has ended'}"
    if code is grpc.StatusCode.UNAVAILABLE:
        words += "; see that it listens at that address and knows this site's bundle"
    return words
