"""Incoming streams: a worker's gRPC service and its access checks.

Checks the caller (certificate, run, rank, incarnation) before it reads anything else, and the
certificate again while the stream is open. Messages stay bytes, so that an invalid frame is
rejected here and not inside gRPC.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.protocol.port_limits import REQUEST_WITHIN_S, OpenCalls
from dlion_api.protocol.refusals import CallerError, PeerRefusal, refusal_kind
from dlion_api.wire import exchange_pb2
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello
from dlion_core.links.deadline import ArrivalDeadline
from dlion_core.links.events import Refused
from dlion_core.links.framing import PROTOCOL, StreamReceiver, split_payload
from dlion_worker.security.credentials import PeerCertificate
from dlion_worker.transport.peer_links import PeerLink, PeerLinks
from dlion_worker.transport.state_server import (
    CallContext,
    StateProvider,
    StateServer,
    certificate_of,
    refusal_metadata,
)

logger = logging.getLogger(__name__)

SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Exchange"].full_name
HELLO_TIMEOUT_S = 10.0
"""Time limit for the hello of an accepted caller; it only frees what a silent one occupies."""

MAX_STREAMS_PER_CERTIFICATE = 16
"""Open streams per certificate: one, a second one while connections are renewed, and a few that
have broken. Pulls without a request yet count, too."""

ACKNOWLEDGEMENT_DELAY_S = 0.002
"""An acknowledgement per frame costs the receiver a third of its CPU time. This delay is far below
an iteration, the unit of the window, and the same for every acknowledgement."""


class ExchangeService:
    def __init__(self, links: PeerLinks, state_provider: StateProvider) -> None:
        self._links = links
        self._pulls = StateServer(links, state_provider)
        self._open = OpenCalls(MAX_STREAMS_PER_CERTIFICATE)
        """By certificate, which identifies a caller before its hello."""

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers for a server; requests and responses stay bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Link": grpc.stream_stream_rpc_method_handler(self._link),
                # As a stream of one request: gRPC would wait for the request without limit.
                "PullState": grpc.stream_stream_rpc_method_handler(self._pull),
            },
        )

    async def _link(self, _requests: object, context: CallContext) -> None:
        caller = certificate_of(context)
        with self._open.counted(caller) as is_allowed:
            if not is_allowed:
                await self._refuse_excess(context)
            stream = IncomingStream(self._links, context)
            code, reason = await stream.run()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, reason, refusal_metadata(stream.refusal))

    async def _pull(self, _requests: object, context: CallContext) -> AsyncIterator[bytes]:
        with self._open.counted(certificate_of(context)) as is_allowed:
            if not is_allowed:
                await self._refuse_excess(context)
            try:
                async with asyncio.timeout(REQUEST_WITHIN_S):
                    request = await context.read()
            except TimeoutError:
                text = f"no request within {REQUEST_WITHIN_S:g} s"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        data = b"" if request is grpc.aio.EOF else request
        async with aclosing(self._pulls.serve(data, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _refuse_excess(self, context: CallContext) -> NoReturn:
        text = f"{MAX_STREAMS_PER_CERTIFICATE} streams by this certificate are open already"
        self._links.emit(Refused(None, text, kind=PeerRefusal.MALFORMED))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        raise AssertionError("abort raises")


class IncomingStream:
    """One peer's stream to this worker, from its hello to its end."""

    def __init__(self, links: PeerLinks, context: CallContext) -> None:
        self._links = links
        self._local = links.local
        self._context = context
        self._receiver = StreamReceiver(self._local.max_message_bytes, self._local.incarnation)
        self._has_messages = False
        self._acknowledge = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._resumed: asyncio.Future[None] = loop.create_future()
        self.successor: IncomingStream | None = None
        """The stream that waits to continue this one."""
        self.refusal: PeerRefusal | None = None
        """Why the peer was rejected, if it was."""
        self.proof: PeerCertificate | None = None
        """The certificate check that admitted the peer."""
        self.deadline = ArrivalDeadline(time.monotonic())

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def check_proof(self) -> None:
        """Check that the peer, and its waiting successor, would be admitted again now.

        Raises: CallerError (its site is no longer trusted, or its certificate has expired).
        """
        if self.proof is not None and not self._ended.done():
            self.proof.check(open_connection=True)
            if self.successor is not None:
                self.successor.check_proof()

    async def run(self) -> tuple[grpc.StatusCode, str]:
        """Serve the stream until it ends; return its status."""
        try:
            link = await self._open()
        except UnavailableError as error:
            return grpc.StatusCode.UNAVAILABLE, str(error)
        except TimeoutError:
            return grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_TIMEOUT_S} s"
        except ContractError as error:
            logger.warning("rejected a stream: %s", error)
            self.refusal = refusal_kind(error)
            self._links.emit(Refused(None, str(error), kind=self.refusal))
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        tasks = {asyncio.create_task(self._read(link)), asyncio.create_task(self._write(link))}
        reason = "the connection to the peer broke"  # gRPC then cancels this very task
        try:
            done, _ = await asyncio.wait({*tasks, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended in done:
                reason = self._ended.result()
                return grpc.StatusCode.ABORTED, reason
            reason = next(task.result() for task in done if task is not self._ended)
        except ContractError as error:
            reason, self.refusal = str(error), PeerRefusal.MALFORMED
            link.record_violation(reason)
            return grpc.StatusCode.INVALID_ARGUMENT, reason
        except UnavailableError as error:
            reason = str(error)
            return grpc.StatusCode.UNAVAILABLE, reason
        except grpc.aio.UsageError as error:  # a write during the close
            reason = str(error)
        finally:
            for task in tasks:
                task.cancel()
            self._detach(link, reason)
        return grpc.StatusCode.OK, reason

    async def _open(self) -> PeerLink:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            data = await self._context.read()
        if data is grpc.aio.EOF:
            raise ContractError("the stream ended before its hello")
        frame = self._receiver.parse(data)
        if not frame.HasField("hello"):
            raise ContractError("the first frame of a stream is not a hello")
        link = self._links.find_caller(frame.hello.run, frame.hello.rank)
        certificate = certificate_of(self._context)
        local = self._local
        self.proof = PeerCertificate(local.credentials, certificate, link.peer, local.job)
        if frame.hello.protocol != PROTOCOL:
            text = f"protocol {frame.hello.protocol}; allowed: {PROTOCOL}"
            raise CallerError(PeerRefusal.WRONG_RELEASE, f"{text}. Run the same release everywhere")
        if not link.wanted:
            raise UnavailableError(
                f"rank {link.rank} is not a neighbour at the moment; retry later"
            )
        if frame.hello.continues:
            await self._wait_for_handover(link, frame.hello)
            return link
        self._receiver.hello_received(frame.hello)
        link.accept_stream(frame.hello, self)
        self._hello = frame.hello
        self._acknowledge.set()
        return link

    async def _wait_for_handover(self, link: PeerLink, hello: Hello) -> None:
        """Wait beside the peer's existing stream, until that one moves to this one.

        Raises: UnavailableError (there is no such stream, or it ended otherwise).
        """
        before = link.incoming
        if not isinstance(before, IncomingStream) or not before.matches(hello):
            raise UnavailableError("there is no stream that this one could continue; retry later")
        if before.successor is not None:
            before.successor.end("another connection has taken its place")
        before.successor = self
        try:
            ready = Acknowledgement(epoch=hello.epoch, incarnation=self._local.incarnation)
            await self._send(link, ready)
            waiting: set[asyncio.Future[Any]] = {self._resumed, self._ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # gRPC cancels this very task if the connection breaks
            if self._resumed.done():
                self._detach(link, "the connection to the peer broke")
            raise
        finally:
            if before.successor is self:
                before.successor = None
        if not self._resumed.done():
            raise UnavailableError(self._ended.result())

    def matches(self, hello: Hello) -> bool:
        """Whether this incarnation of this worker opened the stream."""
        return self._hello.incarnation == hello.incarnation

    def _hand_over(self, link: PeerLink) -> str:
        """The peer has moved: pass all state on to the waiting successor."""
        successor, self.successor = self.successor, None
        if successor is None:
            return "the peer moved the stream, but no connection waits to continue it"
        link.incoming_migrated(successor)
        successor.take_over(
            self._hello, self._receiver, self.deadline, has_messages=self._has_messages
        )
        return "the stream has moved to another connection"

    def take_over(
        self,
        hello: Hello,
        receiver: StreamReceiver,
        deadline: ArrivalDeadline,
        *,
        has_messages: bool,
    ) -> None:
        """Continue the stream that this one was waiting for."""
        self._hello, self._receiver = hello, receiver
        self.deadline, self._has_messages = deadline, has_messages
        self._acknowledge.set()
        self._resumed.set_result(None)

    def _detach(self, link: PeerLink, reason: str) -> None:
        if self.successor is not None:
            self.successor.end(reason)
        link.incoming_ended(self, reason)

    async def _read(self, link: PeerLink) -> str:
        while (data := await self._context.read()) is not grpc.aio.EOF:
            now_s = time.monotonic()
            self.deadline.arrived(now_s)
            link.wire_received_bytes += len(data)
            data, payload = split_payload(data)
            frame = self._receiver.parse(data)
            if frame.last:
                return self._hand_over(link)
            if frame.HasField("hello"):
                self._hello_repeated(link, frame)
            else:
                await self._handle_frame(link, frame, payload, now_s)
            self._acknowledge.set()
        return "the peer ended its stream"

    def _hello_repeated(self, link: PeerLink, frame: Frame) -> None:
        given, before = frame.hello, self._hello
        if (given.run, given.rank, given.incarnation) != (
            before.run, before.rank, before.incarnation,
        ):  # fmt: skip
            raise ContractError("a second hello on a stream names another worker")
        self._receiver.hello_received(given)
        link.hello_repeated(given, has_messages=self._has_messages)
        self._has_messages = False

    async def _handle_frame(
        self, link: PeerLink, frame: Frame, payload: memoryview | None, now_s: float
    ) -> None:
        message = self._receiver.feed(frame, now_s, payload)
        link.receive_s += time.monotonic() - now_s
        if message is None:
            return
        self._has_messages = True
        if await link.wait_until_up(self):
            link.deliver(message)

    async def _write(self, link: PeerLink) -> str:
        # Acknowledgements are running totals: one covers all frames that arrive close together.
        while True:
            await self._acknowledge.wait()
            await asyncio.sleep(ACKNOWLEDGEMENT_DELAY_S)
            self._acknowledge.clear()
            await self._send(link, self._receiver.acknowledgement())

    async def _send(self, link: PeerLink, acknowledgement: Acknowledgement) -> None:
        data = acknowledgement.SerializeToString()
        link.send_queue.header_total += len(data)
        await self._context.write(data)
