"""The gRPC skin of the coordinator: calls become events, instructions become answers.

Runs in one asyncio loop, whose single thread is what keeps the state consistent. Owns the join
streams. Called by `server`; decides nothing itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dlion_api.errors import ContractError
from dlion_api.membership import Membership, MemberState
from dlion_api.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_api.refusals import KNOWN_INCARNATION_KEY, REASON_KEY, RefusalReason
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import (
    Deliver,
    EndStream,
    Instruction,
    Publish,
    Refuse,
    StopAsked,
    StreamEnded,
)
from dlion_operator.coordinator.messages import (
    Request,
    checked_size,
    join_event,
    membership_update,
    report_event,
    sign_event,
    worker_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlion_api.names import JobKey, SiteName, WorkerIdentity
    from dlion_api.progress import ProgressRecord
    from dlion_operator.authority import Authority
    from dlion_operator.coordinator.state import Coordinator

_LOG = logging.getLogger(__name__)

SERVICE = "dlion.v1alpha1.Coordination"

STATUS: Mapping[RefusalReason, grpc.StatusCode] = {
    RefusalReason.BAD_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    RefusalReason.WRONG_RUN: grpc.StatusCode.NOT_FOUND,
    RefusalReason.UNKNOWN_WORKER: grpc.StatusCode.PERMISSION_DENIED,
    RefusalReason.SPEC_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.OLD_INCARNATION: grpc.StatusCode.ABORTED,
    RefusalReason.FINISHED: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.NOT_JOINED: grpc.StatusCode.UNAVAILABLE,
    RefusalReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.TOO_MUCH: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_R = TypeVar("_R", bound=Request)

Context = grpc.aio.ServicerContext[Any, Any]


class TokenVerifier(Protocol):
    """Says whose a token is (`dlion_operator.authority.Tokens`)."""

    def verify(self, token: str, worker: WorkerIdentity, job: JobKey) -> bool:
        """Whether that token is that worker's."""
        ...


class CoordinationService:
    """The three calls of `coordination.proto` for one run."""

    def __init__(
        self,
        state: Coordinator,
        *,
        authorities: Mapping[SiteName, Authority],
        tokens: TokenVerifier,
        on_record: Callable[[ProgressRecord], None],
        start_time_monotonic_s: float,
    ) -> None:
        self._state = state
        self._authorities = authorities
        self._tokens = tokens
        self._on_record = on_record
        self._start_s = start_time_monotonic_s
        self._numbers = itertools.count(1)
        self._news: dict[int, asyncio.Event] = {}
        self._replaced: set[int] = set()
        self._closing = False

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls, in the form that a gRPC server takes."""
        wire = coordination_pb2
        methods = {
            "Sign": grpc.unary_unary_rpc_method_handler(
                self.sign,
                request_deserializer=_parser(wire.SignRequest),
                response_serializer=wire.SignResponse.SerializeToString,
            ),
            "Join": grpc.unary_stream_rpc_method_handler(
                self.join,
                request_deserializer=_parser(wire.JoinRequest),
                response_serializer=wire.MembershipUpdate.SerializeToString,
            ),
            "Report": grpc.unary_unary_rpc_method_handler(
                self.report,
                request_deserializer=_parser(wire.ProgressReport),
                response_serializer=wire.ReportReply.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def stop(self, reason: str) -> None:
        """Tells every worker to end the run, those that join later too."""
        self._carry_out(self._state.handle(StopAsked(reason)))

    def close(self) -> None:
        """Streams that end from here on are no news: this coordinator ends them itself."""
        self._closing = True

    async def sign(
        self, request: coordination_pb2.SignRequest | DecodeError, context: Context
    ) -> coordination_pb2.SignResponse:
        """A certificate for a worker whose token holds."""
        try:
            request = _readable(request)
            event = sign_event(request, token_ok=self._token_ok(request))
            await self._answer(self._state.handle(event), context)
            chain = self._authority(event.worker).sign(
                request.csr_pem, event.worker, self._state.job
            )
        except ContractError as error:
            await self._malformed(error, context)
        bundles = {str(site): authority.bundle_pem for site, authority in self._authorities.items()}
        return coordination_pb2.SignResponse(certificate_chain_pem=chain, site_bundles_pem=bundles)

    async def join(
        self, request: coordination_pb2.JoinRequest | DecodeError, context: Context
    ) -> None:
        """Streams memberships, the newest only, until either side ends it."""
        stream = next(self._numbers)
        try:
            request = _readable(request)
            event = join_event(request, stream=stream, token_ok=self._token_ok(request))
        except ContractError as error:
            await self._malformed(error, context)
        news = self._news[stream] = asyncio.Event()
        try:
            await self._answer(self._state.handle(event), context)
            while stream not in self._replaced:
                news.clear()
                await context.write(self._update())
                await news.wait()
        finally:
            del self._news[stream]
            self._replaced.discard(stream)
            before = self._state.membership()
            self._carry_out(self._state.handle(StreamEnded(stream)))
            if not self._closing:
                self._tell_lost(before, self._state.membership())

    def _tell_lost(self, before: Membership, after: Membership) -> None:
        """Whoever listens hears of a worker whose stream broke."""
        for member in after.members:
            earlier = before.member(member.identity.rank)
            if member.state is MemberState.LOST and member != earlier:
                self._on_record(
                    EventRecord(
                        time_s=time.monotonic() - self._start_s,
                        rank=member.identity.rank,
                        iteration=0,
                        reason=EventReason.WORKER_LOST,
                        message=f"{member.identity.name}: incarnation {member.incarnation} is gone",
                        warning=True,
                    )
                )

    async def report(
        self, request: coordination_pb2.ProgressReport | DecodeError, context: Context
    ) -> coordination_pb2.ReportReply:
        """Takes progress; the answer carries whether to stop."""
        try:
            request = _readable(request)
            token_ok = self._token_ok(request)
            event = report_event(request, token_ok=token_ok, now_s=time.monotonic())
        except ContractError as error:
            await self._malformed(error, context)
        await self._answer(self._state.handle(event), context)
        return coordination_pb2.ReportReply(stop_reason=self._state.stop_reason)

    async def _answer(self, instructions: tuple[Instruction, ...], context: Context) -> None:
        """Carries the instructions out; does not return where the call is refused."""
        for instruction in instructions:
            if isinstance(instruction, Refuse):
                await _abort(instruction, context)
        self._carry_out(instructions)

    def _carry_out(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case EndStream(stream):
                    if stream in self._news:
                        self._replaced.add(stream)
                        self._news[stream].set()
                case Publish():
                    for news in self._news.values():
                        news.set()
                case Deliver(records):
                    for record in records:
                        self._on_record(record)

    def _update(self) -> coordination_pb2.MembershipUpdate:
        return membership_update(
            self._state.membership(),
            elapsed_s=time.monotonic() - self._start_s,
            stop_reason=self._state.stop_reason,
        )

    def _token_ok(self, request: Request) -> bool:
        """Raises ContractError for fields that are too long to look at."""
        checked_size(request)
        return self._tokens.verify(request.token, worker_of(request), self._state.job)

    def _authority(self, worker: WorkerIdentity) -> Authority:
        authority = self._authorities.get(worker.site)
        if authority is None:
            raise ContractError(
                f"no authority for site {worker.site} here (there are: "
                f"{', '.join(self._authorities) or 'none, tls.mode is Disabled'})"
            )
        return authority

    async def _malformed(self, error: ContractError, context: Context) -> NoReturn:
        await _abort(self._state.refuse(RefusalReason.MALFORMED, str(error)), context)


def _parser(message: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    """Bytes to message; what cannot be read is passed on, to be refused and counted by the call.

    gRPC would answer INTERNAL by itself, and nobody would know why.
    """

    def parse(content: bytes) -> Message | DecodeError:
        try:
            return message.FromString(content)
        except DecodeError as error:  # wrong UTF-8 in a text field, too
            return error

    return parse


def _readable(request: _R | DecodeError) -> _R:
    if isinstance(request, DecodeError):
        raise ContractError(f"the message cannot be read: {request}")
    return request


async def _abort(refusal: Refuse, context: Context) -> NoReturn:
    _LOG.info("refused, %s: %s", refusal.reason, refusal.message)
    metadata = [(REASON_KEY, str(refusal.reason))]
    if refusal.known_incarnation is not None:
        metadata.append((KNOWN_INCARNATION_KEY, str(refusal.known_incarnation)))
    await context.abort(STATUS[refusal.reason], refusal.message, tuple(metadata))
    raise AssertionError("abort raises")
