"""gRPC server: receives the reports of other sites' operators, and refuses what is not theirs."""

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
from dlion_api.protocol.port_limits import connection_options
from dlion_api.protocol.refusals import REASON_KEY
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.federation.credentials import Credentials
from dlion_operator.federation.link_bandwidth import ACCEPTED_KEY, MEASUREMENT_TIMEOUT_S, ChunkTimer
from dlion_operator.federation.messages import MAX_STATEMENT_BYTES, sites_of, statement_of
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.federation.state import SILENT_AFTER_S, FederationState
from dlion_operator.kubernetes.wire_parsing import SERVER_OPTIONS, parser, readable
from dlion_operator.model.rate_limiter import RateLimiter

_LOG = logging.getLogger(__name__)

SERVICE = "dlion.v1alpha1.Federation"
MAX_STREAMS = 256
"""Concurrent calls. A caller that is not an operator holds one only until it is refused."""
MAX_CONNECTIONS = 256
"""An operator holds one, and another one for a measurement."""
MAX_CALLS_PER_CONNECTION = 32
"""Further ones wait."""
MAX_STREAMS_OF_SITE = 4
"""A site has one, briefly two, and a few after a link failed silently. A further stream ends the
oldest."""
BYTES_PER_UNIT = 1024
"""A statement costs one unit of the rate limit, plus one for each of this many bytes."""
HELLO_WAIT_S = 1.0
"""How long a refusal of a certificate waits for the caller's first message."""
MAX_WAITING_REFUSALS = 16
"""Maximum concurrent refusals that wait: silent callers must not use up `MAX_STREAMS`."""

_OPTIONS = (
    *SERVER_OPTIONS,
    # Above the protocol's limit, so that a statement just over it is refused with a reason.
    ("grpc.max_receive_message_length", MAX_STATEMENT_BYTES + 64 * 1024),
    *connection_options(MAX_CONNECTIONS, max_calls_per_connection=MAX_CALLS_PER_CONNECTION),
)

STATUS: Mapping[FederationRefusalReason, grpc.StatusCode] = {
    FederationRefusalReason.BAD_CERTIFICATE: grpc.StatusCode.UNAUTHENTICATED,
    FederationRefusalReason.WRONG_SITE: grpc.StatusCode.NOT_FOUND,
    FederationRefusalReason.REPLACED: grpc.StatusCode.ABORTED,
    FederationRefusalReason.SILENT: grpc.StatusCode.DEADLINE_EXCEEDED,
    FederationRefusalReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    FederationRefusalReason.TOO_MUCH: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Context = grpc.aio.ServicerContext[Any, Any]


class FederationService:
    """Serves the calls of `federation.proto` on a port."""

    def __init__(
        self,
        own: SiteName,
        state: FederationState,
        credentials: Credentials,
        on_run_changed: Callable[[JobKey], None],
    ) -> None:
        """`on_run_changed` runs in the event loop: it must neither block nor raise."""
        self._own = own
        self._state = state
        self._credentials = credentials
        self._on_run_changed = on_run_changed
        self._numbers = itertools.count(1)
        self._under_way: dict[SiteName, list[asyncio.Task[Any]]] = {}
        """Streams of each authenticated site, the oldest first."""
        self._displaced: set[asyncio.Task[Any]] = set()
        self._server: grpc.aio.Server | None = None
        self.refusals: Counter[FederationRefusalReason] = Counter()
        self.streams = 0
        """Streams opened so far; each passed TLS."""
        self._waiting_refusals = asyncio.Semaphore(MAX_WAITING_REFUSALS)
        self.measuring = asyncio.Lock()
        """Limits this receiver to one measurement at a time."""
        self.measured_bytes = 0
        """Received in all measurements so far."""
        self.on_refused: Callable[[StreamRefusedError], None] = lambda _: None
        """Called with each refusal in the event loop: it must neither block nor raise."""

    async def start(self, listen_address: str) -> int:
        """Open the port and return its number.

        Raises: UnavailableError if the server cannot listen on the address.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
        methods = {
            "Report": grpc.stream_stream_rpc_method_handler(
                self._serve_stream,
                request_deserializer=parser(wire.Statement),
                response_serializer=wire.Welcome.SerializeToString,
            ),
            "Measure": grpc.stream_unary_rpc_method_handler(
                self._measure,
                request_deserializer=parser(wire.LinkChunk),
                response_serializer=wire.LinkTiming.SerializeToString,
            ),
        }
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
        """Close the port and every stream immediately."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def _serve_stream(self, _: object, context: Context) -> None:
        """Serve one stream until it breaks or is refused."""
        stream = next(self._numbers)
        self.streams += 1
        try:
            with self._stream_slot(await self._caller(context)):
                await self._listen(stream, context)
        except (ContractError, StreamRefusedError) as error:
            await self._refuse(error, context)
        finally:
            self._state.forget(stream)

    async def _listen(self, stream: int, context: Context) -> None:
        site = await self._greeted(stream, context)
        rate_limiter = RateLimiter()
        while (message := await _next(context)) is not None:
            self._check(site, context)
            cost = 1 + message.ByteSize() // BYTES_PER_UNIT
            if not rate_limiter.try_acquire(cost, time.monotonic()):
                text = "too many statements at once"
                raise StreamRefusedError(FederationRefusalReason.TOO_MUCH, text)
            statement = statement_of(message, site)
            for run in self._state.receive(stream, statement, time.monotonic()):
                self._on_run_changed(run)

    async def _caller(self, context: Context) -> SiteName:
        """Return the calling operator's site, by its certificate, whatever its messages say.

        The same authority signs workers' certificates, which are less trusted.
        """
        try:
            with _bad_certificates_refused():
                return self._credentials.operator_of(_certificate(context))
        except StreamRefusedError:
            # Where the caller's write fails, grpc.aio replaces the status with INTERNAL
            # (grpc/grpc#36066), and the caller would not learn why.
            if not self._waiting_refusals.locked():
                async with self._waiting_refusals:
                    await _skip_message(context)
            raise

    @contextlib.contextmanager
    def _stream_slot(self, site: SiteName) -> Iterator[None]:
        """Register this task's stream with that site.

        Raises: StreamRefusedError if newer streams of the site have displaced it.
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
            text = f"more than {MAX_STREAMS_OF_SITE} streams of site {site}; the newest count"
            raise StreamRefusedError(FederationRefusalReason.REPLACED, text) from None
        finally:
            self._displaced.discard(task)
            if task in under_way:
                under_way.remove(task)

    async def _greeted(self, stream: int, context: Context) -> SiteName:
        """Read the hello and return the caller's verified site."""
        message = await _next(context)
        if message is None:
            raise ContractError("a stream without a hello")
        if message.WhichOneof("what") != "hello":
            text = f"a stream begins with a hello, not {message.WhichOneof('what')}"
            raise ContractError(text)
        site, to_site = sites_of(message.hello)
        self._check(site, context)
        self._state.open_stream(stream, site, to_site, time.monotonic())
        await context.write(wire.Welcome(site=self._own))
        return site

    async def _measure(self, _: object, context: Context) -> wire.LinkTiming:
        """Serve one measurement."""
        try:
            async with asyncio.timeout(MEASUREMENT_TIMEOUT_S):
                return await self._timed(context)
        except TimeoutError:
            text = f"a measurement of more than {MEASUREMENT_TIMEOUT_S:g} s"
            await self._refuse(StreamRefusedError(FederationRefusalReason.SILENT, text), context)
        except (ContractError, StreamRefusedError) as error:
            await self._refuse(error, context)

    async def _timed(self, context: Context) -> wire.LinkTiming:
        await self._caller(context)
        # Before anything is refused: see `BandwidthMeter`.
        chunk: wire.LinkChunk | None = await _read(context)
        if self.measuring.locked():
            text = "another site is measuring now; retry later"
            raise StreamRefusedError(FederationRefusalReason.TOO_MUCH, text)
        if chunk is None:
            raise ContractError("a measurement without a chunk")
        arrivals = ChunkTimer()
        async with self.measuring:
            site, to_site = sites_of(chunk)
            self._check(site, context)
            if to_site != self._own:
                text = f"this is the operator of site {self._own}, not of {to_site}"
                raise StreamRefusedError(FederationRefusalReason.WRONG_SITE, text)
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
            # The hello is not timed: a round trip follows it.
            while (chunk := await _read(context)) is not None:
                arrivals.take(len(chunk.payload), time.monotonic())
                self.measured_bytes += len(chunk.payload)
        return arrivals.result()

    def _check(self, site: SiteName, context: Context) -> None:
        """Verify the caller at every statement: its certificate may expire, its bundle change."""
        with _bad_certificates_refused():
            self._credentials.check(_certificate(context), site)

    async def _refuse(
        self, refusal: ContractError | StreamRefusedError, context: Context
    ) -> NoReturn:
        if isinstance(refusal, ContractError):
            refusal = StreamRefusedError(FederationRefusalReason.MALFORMED, str(refusal))
        self.refusals[refusal.reason] += 1
        self.on_refused(refusal)
        _LOG.warning(
            "stream of %s refused, %s: %s", context.peer(), refusal.reason, refusal.message
        )
        metadata = ((REASON_KEY, str(refusal.reason)),)
        await context.abort(STATUS[refusal.reason], refusal.message, metadata)
        raise AssertionError("abort raises")


@contextlib.contextmanager
def _bad_certificates_refused() -> Iterator[None]:
    try:
        yield
    except ContractError as error:
        raise StreamRefusedError(FederationRefusalReason.BAD_CERTIFICATE, str(error)) from error


def _certificate(context: Context) -> bytes | None:
    return next(iter(context.auth_context().get("x509_pem_cert") or ()), None)


async def _next(context: Context) -> wire.Statement | None:
    """Return the next statement; None: the stream has ended."""
    try:
        async with asyncio.timeout(SILENT_AFTER_S):
            statement: wire.Statement | None = await _read(context)
    except TimeoutError:
        text = f"nothing for {SILENT_AFTER_S:g} s, not even a heartbeat"
        raise StreamRefusedError(FederationRefusalReason.SILENT, text) from None
    if statement is not None and (size := statement.ByteSize()) > MAX_STATEMENT_BYTES:
        raise ContractError(f"statement of {size} bytes; allowed: {MAX_STATEMENT_BYTES}")
    return statement


async def _skip_message(context: Context) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HELLO_WAIT_S):
            await context.read()


async def _read(context: Context) -> Any:
    """Return the stream's next message; None: it has ended. Raises: ContractError."""
    message = await context.read()
    return None if message is grpc.aio.EOF else readable(message)
