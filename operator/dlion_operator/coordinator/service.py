"""gRPC service of the coordinator: dispatch each call to its run and return each refusal."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from dlion_api.errors import ContractError
from dlion_api.protocol.port_limits import REQUEST_WITHIN_S
from dlion_api.protocol.refusals import KNOWN_INCARNATION_KEY, REASON_KEY, RefusalReason
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import CallRefusedError
from dlion_operator.coordinator.messages import Request, checked_size
from dlion_operator.coordinator.served_run import ServedRun
from dlion_operator.kubernetes.wire_parsing import parser, readable

_LOG = logging.getLogger(__name__)

SERVICE = "dlion.v1alpha1.Coordination"

STATUS: Mapping[RefusalReason, grpc.StatusCode] = {
    RefusalReason.BAD_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    RefusalReason.REPLAYED_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    RefusalReason.WRONG_RUN: grpc.StatusCode.NOT_FOUND,
    RefusalReason.UNKNOWN_WORKER: grpc.StatusCode.PERMISSION_DENIED,
    RefusalReason.SPEC_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.OLD_INCARNATION: grpc.StatusCode.ABORTED,
    RefusalReason.FINISHED: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.NOT_JOINED: grpc.StatusCode.UNAVAILABLE,
    RefusalReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.TOO_MUCH: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.REVOKED: grpc.StatusCode.PERMISSION_DENIED,
    RefusalReason.NO_AUTHORITY: grpc.StatusCode.UNAVAILABLE,
}

MAX_UNREAD_CALLS = 256
"""Calls of one address that wait for their request. Many workers may share an address, but a
request follows its call at once."""

Context = grpc.aio.ServicerContext[Any, Any]


_RequestOfCall = TypeVar("_RequestOfCall", bound=Request)
_Answer = TypeVar("_Answer")


class CoordinationService:
    """The calls of `coordination.proto` for all open runs."""

    def __init__(self) -> None:
        self.runs: dict[str, ServedRun] = {}
        """Open runs by their name on the wire; `server` adds and removes them."""
        self.refusals: Counter[RefusalReason] = Counter()
        """Refused calls by reason, over all runs."""
        self.calls: Counter[str] = Counter()
        """Calls by name, including refused ones. A reconnecting caller joins or follows again."""
        self.request_within_s = REQUEST_WITHIN_S
        self._unread: Counter[str] = Counter()
        """Calls that wait for their request, by the caller's address."""
        self.on_refused: Callable[[str, CallRefusedError], None] = lambda _run, _refusal: None
        """Called with each refusal and the run that the caller named (empty: unreadable).

        Runs in the event loop: it must neither block nor raise.
        """

    def handler(self) -> grpc.GenericRpcHandler:
        # As streams of one request: gRPC would wait for the request itself, without limit.
        answer: tuple[Any, Any] = (grpc.stream_unary_rpc_method_handler, self._answer)
        stream: tuple[Any, Any] = (grpc.stream_stream_rpc_method_handler, self._stream)
        wire = coordination_pb2
        calls: dict[str, tuple[Any, ...]] = {
            "Sign": (*answer, ServedRun.sign, wire.SignRequest, wire.SignResponse),
            "Join": (*stream, ServedRun.join, wire.JoinRequest, wire.MembershipUpdate),
            "Report": (*answer, ServedRun.report, wire.ProgressReport, wire.ReportReply),
            "ReportDownload": (
                *answer,
                ServedRun.report_download,
                wire.DownloadReport,
                wire.DownloadReply,
            ),
            "Follow": (*stream, ServedRun.follow, wire.FollowRequest, wire.FollowedRecords),
        }
        methods = {
            name: handler(
                partial(self._serve, serve, name, call),
                request_deserializer=parser(request),
                response_serializer=reply.SerializeToString,
            )
            for name, (handler, serve, call, request, reply) in calls.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _serve(
        self,
        serve: Callable[..., Awaitable[Any]],
        name: str,
        call: object,
        requests: AsyncIterator[Any],
        context: Context,
    ) -> Any:
        """Read the request and serve it. A caller has a few seconds to send it, and each address a
        limited number of calls that wait for theirs: no token has been shown yet."""
        host = str(context.peer()).rpartition(":")[0]
        if self._unread[host] >= MAX_UNREAD_CALLS:
            text = f"{MAX_UNREAD_CALLS} calls of this address wait for their request"
            return await self._refuse(context, "", CallRefusedError(RefusalReason.TOO_MUCH, text))
        self._unread[host] += 1
        try:
            async with asyncio.timeout(self.request_within_s):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            text = f"no request within {self.request_within_s:g} s"
            return await self._refuse(context, "", CallRefusedError(RefusalReason.MALFORMED, text))
        finally:
            self._unread[host] -= 1
            self._unread += Counter()  # drops those at zero
        return await serve(name, call, request, context)

    async def _stream(
        self,
        name: str,
        call: Callable[[ServedRun, _RequestOfCall], AsyncGenerator[Any, None]],
        request: _RequestOfCall | DecodeError,
        context: Context,
    ) -> None:
        """Answer with a stream of messages, as fast as the caller reads them."""

        async def stream(run: ServedRun, request: _RequestOfCall) -> None:
            async with aclosing(call(run, request)) as messages:
                async for message in messages:
                    await context.write(message)

        await self._answer(name, stream, request, context)

    async def _answer(
        self,
        name: str,
        call: Callable[[ServedRun, _RequestOfCall], Awaitable[_Answer]],
        request: _RequestOfCall | DecodeError,
        context: Context,
    ) -> _Answer:
        """Check the request, make the call and return its answer; abort if it is refused."""
        self.calls[name] += 1
        try:
            checked = readable(request)
            checked_size(checked)
            return await call(self._run(checked), checked)
        except ContractError as error:
            refusal = CallRefusedError(RefusalReason.MALFORMED, str(error))
        except CallRefusedError as error:
            refusal = error
        run = "" if isinstance(request, DecodeError) else request.run
        return await self._refuse(context, run, refusal)

    async def _refuse(self, context: Context, run: str, refusal: CallRefusedError) -> NoReturn:
        self.refusals[refusal.reason] += 1
        self.on_refused(run, refusal)
        _LOG.info("refused, %s: %s", refusal.reason, refusal.message)
        metadata = [(REASON_KEY, str(refusal.reason))]
        if refusal.known_incarnation is not None:
            metadata.append((KNOWN_INCARNATION_KEY, str(refusal.known_incarnation)))
        await context.abort(STATUS[refusal.reason], refusal.message, tuple(metadata))
        raise AssertionError("abort raises")

    def _run(self, request: Request) -> ServedRun:
        run = self.runs.get(request.run)
        if run is None:
            # Not more detail: the caller has not presented a valid token.
            message = f"run {request.run!r:.200} is not served here, or not yet"
            raise CallRefusedError(RefusalReason.WRONG_RUN, message)
        return run
