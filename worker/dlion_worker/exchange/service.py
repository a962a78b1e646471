"""Incoming streams: the gRPC service of a worker, and who may call it.

Called by `exchange`, on its loop. Checks who calls (certificate, run, rank, incarnation) before it
reads anything else, and the certificate again while the stream stands; what is in the frames is
`framing`'s business, what it does to the link `links`', whose state is given to whom `pulls`'.
Bytes are handed over as they came, so that a frame that does not parse is refused here and not
inside gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.refusals import CallerError, PeerRefusal, kind_of
from dlion_api.wire import exchange_pb2
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.exchange.callers import Context, certificate_of, told
from dlion_worker.exchange.deadline import ArrivalDeadline
from dlion_worker.exchange.events import Refused, StateSnapshot, StateWanted
from dlion_worker.exchange.framing import PROTOCOL, Inbox, cut_payload
from dlion_worker.exchange.links import Link, Links
from dlion_worker.exchange.pulls import Pulls
from dlion_worker.peer_proof import PeerProof

logger = logging.getLogger(__name__)

SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Exchange"].full_name
HELLO_WITHIN_S = 10.0
"""A caller that is let in says who it is at once; this only frees what a mute one holds."""

MAX_LINKS_OF_CALLER = 16
"""Streams under way by one certificate. A peer has one, another beside it while it is renewed, and
what its breaks have left."""

ACKNOWLEDGE_AFTER_S = 0.002
"""Writing an acknowledgement costs the receiver a third of its CPU per frame; this is far below the
time of an iteration, which is what the window holds, and every acknowledgement is as late."""


class ExchangeService:
    """What peers call."""

    def __init__(
        self,
        links: Links,
        credentials: WorkerCredentials,
        state_provider: Callable[[StateWanted], StateSnapshot],
    ) -> None:
        self._links = links
        self._credentials = credentials
        self._pulls = Pulls(links, credentials, state_provider)
        self._open: Counter[bytes] = Counter()
        """Streams under way, by their callers' certificates: who says nothing is known by it."""

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers, for a server; requests and answers stay bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Link": grpc.stream_stream_rpc_method_handler(self._link),
                "PullState": grpc.unary_stream_rpc_method_handler(self._pulls.serve),
            },
        )

    async def _link(self, _requests: object, context: Context) -> None:
        caller = certificate_of(context)
        if caller is not None and self._open[caller] >= MAX_LINKS_OF_CALLER:
            words = f"{MAX_LINKS_OF_CALLER} streams by this certificate are open already"
            self._links.shared.emit(Refused(None, words, kind=PeerRefusal.MALFORMED))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        if caller is not None:
            self._open[caller] += 1
        try:
            stream = IncomingStream(self._links, self._credentials, context)
            code, reason = await stream.run()
        finally:
            self._leave(caller)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, reason, told(stream.refusal))

    def _leave(self, caller: bytes | None) -> None:
        if caller is not None:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]


class IncomingStream:
    """One peer's stream to us, from its hello to its end."""

    def __init__(self, links: Links, credentials: WorkerCredentials, context: Context) -> None:
        self._links = links
        self._me = links.shared.me
        self._credentials = credentials
        self._context = context
        self._inbox = Inbox(self._me.max_message_bytes, self._me.incarnation)
        self._heard = False
        self._acknowledge = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._goes_on: asyncio.Future[None] = loop.create_future()
        self.successor: IncomingStream | None = None
        """What waits to go on where this one ends."""
        self.refusal: PeerRefusal | None = None
        """Why the peer was refused, if it was."""
        self.proof: PeerProof | None = None
        """What the peer was let in by."""
        self.deadline = ArrivalDeadline(time.monotonic())

    def end(self, reason: str) -> None:
        """Closes the stream, soon."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def check_proof(self) -> None:
        """Passes while the peer would be let in again, here and where it is to go on.

        Raises:
            CallerError: It would not: its site is no longer believed, or its certificate is over.
        """
        if self.proof is not None and not self._ended.done():
            self.proof.check(standing=True)
            if self.successor is not None:
                self.successor.check_proof()

    async def run(self) -> tuple[grpc.StatusCode, str]:
        """Serves the stream until it ends; the status to end it with."""
        try:
            link = await self._open()
        except UnavailableError as error:
            return grpc.StatusCode.UNAVAILABLE, str(error)
        except TimeoutError:
            return grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_WITHIN_S} s"
        except ContractError as error:
            logger.warning("refused a stream: %s", error)
            self.refusal = kind_of(error)
            self._links.shared.emit(Refused(None, str(error), kind=self.refusal))
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        tasks = {asyncio.create_task(self._read(link)), asyncio.create_task(self._write())}
        reason = "the connection to the peer broke"  # gRPC then cancels this very task
        try:
            done, _ = await asyncio.wait({*tasks, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended in done:
                reason = self._ended.result()
                return grpc.StatusCode.ABORTED, reason
            reason = next(task.result() for task in done if task is not self._ended)
        except ContractError as error:
            reason, self.refusal = str(error), PeerRefusal.MALFORMED
            link.offended(reason)
            return grpc.StatusCode.INVALID_ARGUMENT, reason
        except grpc.aio.UsageError as error:  # written to while it was being closed
            reason = str(error)
        finally:
            for task in tasks:
                task.cancel()
            self._gone(link, reason)
        return grpc.StatusCode.OK, reason

    async def _open(self) -> Link:
        async with asyncio.timeout(HELLO_WITHIN_S):
            data = await self._context.read()
        if data is grpc.aio.EOF:
            raise ContractError("the stream ended before its hello")
        frame = self._inbox.parse(data)
        if not frame.HasField("hello"):
            raise ContractError("the first frame of a stream is not a hello")
        link = self._links.claimed(frame.hello.run, frame.hello.rank)
        shown = certificate_of(self._context)
        self.proof = PeerProof(self._credentials, shown, link.peer, self._me.job)
        self._check(frame.hello)
        if not link.wanted:
            raise UnavailableError(f"rank {link.rank} is no neighbour of ours just now; try again")
        if frame.hello.continues:
            await self._wait_for_turn(link, frame.hello)
            return link
        self._inbox.greeted(frame.hello)
        link.admit(frame.hello, self)
        self._hello = frame.hello
        self._acknowledge.set()
        return link

    def _check(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            words = f"protocol {hello.protocol}; allowed: {PROTOCOL}"
            raise CallerError(
                PeerRefusal.WRONG_RELEASE, f"{words}. Run the same release everywhere"
            )

    async def _wait_for_turn(self, link: Link, hello: Hello) -> None:
        """Stands beside the stream that the peer has, and returns when that has gone over to this.

        Raises:
            UnavailableError: There is no such stream, or it has ended in another way.
        """
        before = link.incoming
        if not isinstance(before, IncomingStream) or not before.is_of(hello):
            raise UnavailableError("there is no stream that this one could continue; try again")
        if before.successor is not None:
            before.successor.end("another connection has taken its place")
        before.successor = self
        try:
            stands = Acknowledgement(epoch=hello.epoch, incarnation=self._me.incarnation)
            await self._context.write(stands.SerializeToString())
            waiting: set[asyncio.Future[Any]] = {self._goes_on, self._ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # gRPC cancels this very task where the connection breaks
            if self._goes_on.done():
                self._gone(link, "the connection to the peer broke")
            raise
        finally:
            if before.successor is self:
                before.successor = None
        if not self._goes_on.done():
            raise UnavailableError(self._ended.result())

    def is_of(self, hello: Hello) -> bool:
        """Whether the same incarnation of the same worker has opened this stream."""
        return self._hello.incarnation == hello.incarnation

    def _hand_over(self, link: Link) -> str:
        """The peer sends no more here: what waits goes on with all that this one knows."""
        successor, self.successor = self.successor, None
        if successor is None:
            return "the stream was to go on elsewhere, and nothing waits there"
        link.incoming_goes_on(successor)
        successor.go_on(self._hello, self._inbox, self.deadline, heard=self._heard)
        return "the stream goes on elsewhere"

    def go_on(self, hello: Hello, inbox: Inbox, deadline: ArrivalDeadline, *, heard: bool) -> None:
        """It is this one's turn: so far the stream has come that it continues."""
        self._hello, self._inbox, self.deadline, self._heard = hello, inbox, deadline, heard
        self._acknowledge.set()
        self._goes_on.set_result(None)

    def _gone(self, link: Link, reason: str) -> None:
        if self.successor is not None:
            self.successor.end(reason)
        link.incoming_ended(self, reason)

    async def _read(self, link: Link) -> str:
        while (data := await self._context.read()) is not grpc.aio.EOF:
            now_s = time.monotonic()
            self.deadline.arrived(now_s)
            link.wire_received_bytes += len(data)
            data, payload = cut_payload(data)
            frame = self._inbox.parse(data)
            if frame.last:
                return self._hand_over(link)
            if frame.HasField("hello"):
                self._greeted_again(link, frame)
            else:
                await self._take(link, frame, payload, now_s)
            self._acknowledge.set()
        return "the peer ended its stream"

    def _greeted_again(self, link: Link, frame: Frame) -> None:
        given, before = frame.hello, self._hello
        if (given.run, given.rank, given.incarnation) != (
            before.run, before.rank, before.incarnation,
        ):  # fmt: skip
            raise ContractError("a second hello on a stream names another worker")
        self._inbox.greeted(given)
        link.greeted_again(given, heard=self._heard)
        self._heard = False

    async def _take(
        self, link: Link, frame: Frame, payload: memoryview | None, now_s: float
    ) -> None:
        before = self._inbox.received_total
        message = self._inbox.feed(frame, now_s, payload)
        link.received_total += self._inbox.received_total - before
        if message is None:
            return
        self._heard = True
        if await link.until_up(self):
            link.deliver(message)

    async def _write(self) -> str:
        # Acknowledgements are running totals: frames that come close together share one.
        while True:
            await self._acknowledge.wait()
            await asyncio.sleep(ACKNOWLEDGE_AFTER_S)
            self._acknowledge.clear()
            await self._context.write(self._inbox.acknowledgement().SerializeToString())
