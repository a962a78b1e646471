"""The port on which other sites' operators say what they see: the server's half of the gRPC skin.

Owns the streams and their refusals. Decides nothing itself: who a caller is says `credentials`,
what its message means `messages`, what follows from it `state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, SiteName
from dlion_api.refusals import REASON_KEY
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.coordinator.allowance import Allowance
from dlion_operator.federation.credentials import Credentials
from dlion_operator.federation.events import (
    Event,
    Greeted,
    News,
    RefusalReason,
    Refuse,
    Told,
)
from dlion_operator.federation.measuring import TAKES_AT_MOST_S, Arrivals, Turns
from dlion_operator.federation.messages import (
    MAX_STATEMENT_BYTES,
    claims_of,
    greeting_of,
    statement_of,
)
from dlion_operator.federation.state import SILENT_AFTER_S, Federation
from dlion_operator.reading import parser, readable

_LOG = logging.getLogger(__name__)

SERVICE = "dlion.v1alpha1.Federation"
MAX_STREAMS = 256
"""Calls under way at once. A caller that is no operator has one until it is refused, unheard."""
MAX_STREAMS_OF_SITE = 4
"""A site has one, and two for a moment; of a link that broke without a word, a few until that
shows. One more ends the oldest."""
BYTES_PER_UNIT = 1024
"""Of a caller's allowance a statement takes one unit, and one for every so many bytes."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A little more than the protocol allows, so that such a statement is refused by name.
    ("grpc.max_receive_message_length", MAX_STATEMENT_BYTES + 64 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    # An operator whose node or link is gone without a word is let go after 15 s at most.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

STATUS: Mapping[RefusalReason, grpc.StatusCode] = {
    RefusalReason.BAD_CERTIFICATE: grpc.StatusCode.UNAUTHENTICATED,
    RefusalReason.WRONG_SITE: grpc.StatusCode.NOT_FOUND,
    RefusalReason.REPLACED: grpc.StatusCode.ABORTED,
    RefusalReason.SILENT: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.TOO_MUCH: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Context = grpc.aio.ServicerContext[Any, Any]


class _RefusedError(Exception):
    """The stream is ended with this."""

    def __init__(self, refusal: Refuse) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class FederationService:
    """`federation.proto`'s calls on a port."""

    def __init__(
        self,
        own: SiteName,
        state: Federation,
        credentials: Credentials,
        on_news: Callable[[JobKey], None],
    ) -> None:
        """`on_news` runs in the loop: it must neither block nor raise."""
        self._own = own
        self._state = state
        self._credentials = credentials
        self._on_news = on_news
        self._numbers = itertools.count(1)
        self._under_way: dict[SiteName, list[asyncio.Task[Any]]] = {}
        """Streams of each site whose operator has shown its certificate, the oldest first."""
        self._displaced: set[asyncio.Task[Any]] = set()
        self._server: grpc.aio.Server | None = None
        self.refusals: Counter[RefusalReason] = Counter()
        self.streams = 0
        """Opened so far: connections that got past TLS."""
        self.turns = Turns()
        self.on_refused: Callable[[Refuse], None] = lambda _: None
        """Hears of each refusal. Runs in the loop: it must neither block nor raise."""

    async def start(self, listen_address: str) -> int:
        """Opens the port and yields its number.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
        method = grpc.stream_stream_rpc_method_handler(
            self._tell,
            request_deserializer=parser(wire.Statement),
            response_serializer=wire.Welcome.SerializeToString,
        )
        measure = grpc.stream_unary_rpc_method_handler(
            self._measure,
            request_deserializer=parser(wire.LinkChunk),
            response_serializer=wire.LinkTiming.SerializeToString,
        )
        methods = {"Tell": method, "Measure": measure}
        handler = grpc.method_handlers_generic_handler(SERVICE, methods)
        server.add_generic_rpc_handlers((handler,))
        try:
            port = server.add_secure_port(listen_address, self._credentials.server())
        except RuntimeError as error:
            raise UnavailableError(
                f"federation cannot listen on {listen_address}: {error}; choose another port"
                " (federation.port)"
            ) from error
        await server.start()
        self._server = server
        return port

    async def shut_down(self) -> None:
        """Closes the port and every stream at once."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def _tell(self, _: object, context: Context) -> None:
        """One stream, until it breaks or is refused."""
        stream = next(self._numbers)
        self.streams += 1
        try:
            with self._place(self._caller(context)):
                await self._listen(stream, context)
        except ContractError as error:
            await self._refuse(Refuse(RefusalReason.MALFORMED, str(error)), context)
        except _RefusedError as error:
            await self._refuse(error.refusal, context)
        finally:
            self._state.forget(stream)

    async def _listen(self, stream: int, context: Context) -> None:
        site = await self._greeted(stream, context)
        allowance = Allowance()
        while (message := await _next(context)) is not None:
            self._check(site, context)
            _spend(allowance, message)
            told = Told(stream, statement_of(message, site), time.monotonic())
            self._handle(told)

    def _caller(self, context: Context) -> SiteName:
        """The site whose operator calls, by its certificate alone, before anything is read: of what
        a site's authority signs, workers' certificates are many and in less trusted hands."""
        try:
            return self._credentials.operator_of(_certificate(context))
        except ContractError as error:
            raise _RefusedError(Refuse(RefusalReason.BAD_CERTIFICATE, str(error))) from error

    @contextlib.contextmanager
    def _place(self, site: SiteName) -> Iterator[None]:
        """This task's place among that site's streams.

        Raises:
            _RefusedError: newer ones have taken it.
        """
        task, under_way = asyncio.current_task(), self._under_way.setdefault(site, [])
        assert task is not None
        under_way.append(task)
        if len(under_way) > MAX_STREAMS_OF_SITE:
            self._displaced.add(under_way[0])
            under_way.pop(0).cancel()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._displaced:
                raise
            task.uncancel()
            words = f"more than {MAX_STREAMS_OF_SITE} streams of site {site}; the newest count"
            raise _RefusedError(Refuse(RefusalReason.REPLACED, words)) from None
        finally:
            self._displaced.discard(task)
            if task in under_way:
                under_way.remove(task)

    async def _greeted(self, stream: int, context: Context) -> SiteName:
        """The site that speaks, once it has shown that it is that one."""
        message = await _next(context)
        if message is None:
            raise ContractError("a stream without a greeting")
        site, to_site = greeting_of(message)
        self._check(site, context)
        self._handle(Greeted(stream, site, to_site, time.monotonic()))
        await context.write(wire.Welcome(site=self._own))
        return site

    async def _measure(self, _: object, context: Context) -> wire.LinkTiming:
        """One measurement."""
        try:
            async with asyncio.timeout(TAKES_AT_MOST_S):
                return await self._timed(context)
        except ContractError as error:
            await self._refuse(Refuse(RefusalReason.MALFORMED, str(error)), context)
        except TimeoutError:
            words = f"a measurement of more than {TAKES_AT_MOST_S:g} s"
            await self._refuse(Refuse(RefusalReason.SILENT, words), context)
        except UnavailableError as error:
            await self._refuse(Refuse(RefusalReason.TOO_MUCH, str(error)), context)
        except _RefusedError as error:
            await self._refuse(error.refusal, context)

    async def _timed(self, context: Context) -> wire.LinkTiming:
        self._caller(context)
        arrivals = Arrivals()
        with self.turns.turn():
            chunk = await _next_chunk(context)
            if chunk is None:
                raise ContractError("a measurement without a chunk")
            site, to_site = claims_of(chunk)
            self._check(site, context)
            if to_site != self._own:
                words = f"this is the operator of site {self._own}, not of {to_site}"
                raise _RefusedError(Refuse(RefusalReason.WRONG_SITE, words))
            while chunk is not None:
                arrivals.take(len(chunk.payload), time.monotonic())
                self.turns.received_bytes += len(chunk.payload)
                chunk = await _next_chunk(context)
        return arrivals.result()

    def _check(self, site: SiteName, context: Context) -> None:
        """At every statement: a certificate may run out, a bundle may be replaced."""
        try:
            self._credentials.check(_certificate(context), site)
        except ContractError as error:
            raise _RefusedError(Refuse(RefusalReason.BAD_CERTIFICATE, str(error))) from error

    def _handle(self, event: Event) -> None:
        for instruction in self._state.handle(event):
            match instruction:
                case Refuse():
                    raise _RefusedError(instruction)
                case News(run):
                    self._on_news(run)

    async def _refuse(self, refusal: Refuse, context: Context) -> NoReturn:
        self.refusals[refusal.reason] += 1
        self.on_refused(refusal)
        _LOG.warning(
            "stream of %s refused, %s: %s", context.peer(), refusal.reason, refusal.message
        )
        metadata = ((REASON_KEY, str(refusal.reason)),)
        await context.abort(STATUS[refusal.reason], refusal.message, metadata)
        raise AssertionError("abort raises")


def _certificate(context: Context) -> bytes | None:
    """What the caller has shown, PEM."""
    return next(iter(context.auth_context().get("x509_pem_cert") or ()), None)


async def _next(context: Context) -> wire.Statement | None:
    """The next statement; None: the stream has ended."""
    try:
        async with asyncio.timeout(SILENT_AFTER_S):
            message: Any = await context.read()
    except TimeoutError:
        words = f"nothing for {SILENT_AFTER_S:g} s, not even a heartbeat"
        raise _RefusedError(Refuse(RefusalReason.SILENT, words)) from None
    if message is grpc.aio.EOF:
        return None
    statement: wire.Statement = readable(message)
    if (size := statement.ByteSize()) > MAX_STATEMENT_BYTES:
        raise ContractError(f"statement of {size} bytes; allowed: {MAX_STATEMENT_BYTES}")
    return statement


async def _next_chunk(context: Context) -> wire.LinkChunk | None:
    """The next chunk of a measurement; None: there is no more."""
    message: Any = await context.read()
    if message is grpc.aio.EOF:
        return None
    chunk: wire.LinkChunk = readable(message)
    return chunk


def _spend(allowance: Allowance, message: wire.Statement) -> None:
    if not allowance.spend(1 + message.ByteSize() // BYTES_PER_UNIT, time.monotonic()):
        raise _RefusedError(Refuse(RefusalReason.TOO_MUCH, "too many statements at once"))
