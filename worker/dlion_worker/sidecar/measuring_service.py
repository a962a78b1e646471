"""The gRPC service for other sidecars: exchanges capacities and measures probes.

Checks the caller and its message, which is untrusted input.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from dlion_api.addresses import join_host_port
from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.port_limits import REQUEST_WITHIN_S, OpenCalls, connection_options
from dlion_api.protocol.refusals import REASON_KEY, CallerError, PeerRefusal, refusal_kind
from dlion_api.spec import Job
from dlion_api.wire import measuring_pb2
from dlion_worker.security.credentials import PeerCertificate, WorkerCredentials
from dlion_worker.sidecar.capacity_messages import MAX_PROBE_BYTES, from_wire, to_wire

if TYPE_CHECKING:
    from dlion_worker.sidecar.process import SidecarProcess

_LOG = logging.getLogger(__name__)

SERVICE = measuring_pb2.DESCRIPTOR.services_by_name["Measuring"].full_name

MAX_MESSAGE_BYTES = 64 * 1024

MAX_CALLS = 256
"""Concurrent calls of all peers."""

MAX_CONNECTIONS = 4096
"""Each peer holds one, and briefly a second one when its certificate is renewed."""

MAX_PROBES_PER_CALLER = 4
"""Maximum concurrent probes. A sidecar measures one link at a time; a broken connection may leave
one behind."""

MAX_SHARES_PER_CALLER = 16
"""Maximum concurrent shares. A sidecar makes one at a time; without TLS, all sidecars of an address
are one caller."""

_OPTIONS = [
    # Somewhat above the protocol's limit, so that our own check reports such a message.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    *connection_options(
        MAX_CONNECTIONS,
        max_calls_per_connection=MAX_PROBES_PER_CALLER + MAX_SHARES_PER_CALLER,
    ),
]

PROBE_WITHIN_S = 120.0
"""The longest probe: the largest one over a link of a few kbit/s."""

MeasuringCallContext = grpc.aio.ServicerContext[Any, Any]


def _caller(context: MeasuringCallContext) -> str:
    """The caller's certificate, which it has proved; without TLS its address."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
    return certificate.decode("latin-1") or str(context.peer()).rpartition(":")[0]


class MeasuringService:
    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        worker: SidecarProcess,
        credentials: WorkerCredentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = job.key
        self._job, self._rank = job, rank
        self._worker, self._credentials, self._clock = worker, credentials, clock
        self.probe_within_s, self.request_within_s = PROBE_WITHIN_S, REQUEST_WITHIN_S
        self._shares = OpenCalls(MAX_SHARES_PER_CALLER)
        self._probes = OpenCalls(MAX_PROBES_PER_CALLER)
        self._proofs: dict[Rank, PeerCertificate] = {}
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._handler(),))

    async def start(self, host: str, *, preferred_port: int) -> int:
        """Listen on the preferred port, or on any if it is 0 or taken; return the port.

        Raises: OSError if the address is unavailable.
        """
        try:
            port = self._credentials.add_port(self._server, join_host_port(host, preferred_port))
        except RuntimeError as error:
            if not preferred_port:
                where = f"{host}: {error}"
                raise OSError(f"cannot listen for other sidecars at {where}") from error
            return await self.start(host, preferred_port=0)
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Stop the service; current calls have 0.2 s to finish."""
        await self._server.stop(grace=0.2)

    def _handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            # As a stream of one request: gRPC would wait for the request without limit.
            "Share": grpc.stream_unary_rpc_method_handler(
                self._serve_share,
                request_deserializer=measuring_pb2.CapacityShare.FromString,
                response_serializer=measuring_pb2.CapacityShare.SerializeToString,
            ),
            "Probe": grpc.stream_unary_rpc_method_handler(
                self._serve_probe,
                request_deserializer=measuring_pb2.ProbeChunk.FromString,
                response_serializer=measuring_pb2.ProbeResult.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _serve_share(
        self,
        request_iterator: AsyncIterator[measuring_pb2.CapacityShare],
        context: MeasuringCallContext,
    ) -> measuring_pb2.CapacityShare:
        with self._shares.counted(_caller(context)) as is_allowed:
            if not is_allowed:
                await self._refuse_excess(context, f"{MAX_SHARES_PER_CALLER} shares")
            try:
                async with asyncio.timeout(self.request_within_s):
                    request = await anext(request_iterator)
            except (TimeoutError, StopAsyncIteration):
                text = f"no request within {self.request_within_s:g} s"
                await self._refuse(context, ContractError(text))
            return await self._share(request, context)

    async def _share(
        self, request: measuring_pb2.CapacityShare, context: MeasuringCallContext
    ) -> measuring_pb2.CapacityShare:
        """Receive a peer's capacity and return this worker's."""
        try:
            self._check_caller(request.run, request.rank, context)
            if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
                raise ContractError(f"share of {size} bytes; allowed: {MAX_MESSAGE_BYTES}")
            capacity = from_wire(request, self._key, Rank(request.rank))
            self._worker.handle_capacity(capacity, request.incarnation)
        except ContractError as error:
            await self._refuse(context, error)
        answer = to_wire(self._worker.own(), self._key, self._worker.incarnation())
        self._worker.count_sent(capacity.rank, answer.ByteSize())
        return answer

    async def _serve_probe(
        self,
        request_iterator: AsyncIterator[measuring_pb2.ProbeChunk],
        context: MeasuringCallContext,
    ) -> measuring_pb2.ProbeResult:
        """The bytes after the first chunk, and the time in which they arrived."""
        with self._probes.counted(_caller(context)) as is_allowed:
            if not is_allowed:
                await self._refuse_excess(context, f"{MAX_PROBES_PER_CALLER} probes")
            try:
                async with asyncio.timeout(self.probe_within_s):
                    return await self._receive(request_iterator, context)
            except TimeoutError:
                too_slow = ContractError(f"a probe of more than {self.probe_within_s:g} s")
                await self._refuse(context, too_slow)

    async def _receive(
        self,
        request_iterator: AsyncIterator[measuring_pb2.ProbeChunk],
        context: MeasuringCallContext,
    ) -> measuring_pb2.ProbeResult:
        first_s, last_s, total, rest = 0.0, 0.0, 0, 0
        async for chunk in request_iterator:
            last_s = self._clock()
            if total == 0:
                first_s = last_s
                try:
                    self._check_caller(chunk.run, chunk.rank, context)
                except ContractError as error:
                    await self._refuse(context, error)
            else:
                rest += len(chunk.payload)
            total += max(1, len(chunk.payload))
            if total > MAX_PROBE_BYTES:
                too_long = ContractError(f"a probe of more than {MAX_PROBE_BYTES} bytes")
                await self._refuse(context, too_long)
        return measuring_pb2.ProbeResult(
            busy_bytes=rest, receiver_busy_micros=round(1e6 * (last_s - first_s))
        )

    def _check_caller(self, run: str, rank: int, context: MeasuringCallContext) -> None:
        try:
            identity = None if rank == self._rank else self._job.worker(Rank(rank))
        except LookupError:
            identity = None
        text = f"caller: run {run[:80]!r} worker {rank} is not a peer of {self._key}"
        if run != str(self._key):
            raise CallerError(PeerRefusal.WRONG_RUN, text)
        if identity is None:
            raise CallerError(PeerRefusal.UNKNOWN_WORKER, text)
        if self._worker.is_revoked(identity.rank):
            raise CallerError(PeerRefusal.REVOKED, f"caller: {identity.name} is revoked")
        if not self._credentials.enabled:
            return
        certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        proof = self._proofs.get(identity.rank)
        # Once per certificate, not per call.
        if proof is None or proof.certificate_pem != certificate:
            self._proofs[identity.rank] = PeerCertificate(
                self._credentials, certificate, identity, self._key
            )
        else:
            proof.check()

    async def _refuse_excess(self, context: MeasuringCallContext, most: str) -> NoReturn:
        text = f"more than {most} at once"
        await self._refuse(context, ContractError(text), grpc.StatusCode.RESOURCE_EXHAUSTED)

    async def _refuse(
        self,
        context: MeasuringCallContext,
        error: ContractError,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    ) -> NoReturn:
        kind = refusal_kind(error)
        self._worker.refused(kind, f"a caller: {error}", dialled=False)
        _LOG.warning("rejected: %s", error)
        metadata = ((REASON_KEY, str(kind)),)
        await context.abort(code, str(error), metadata)
        raise error  # abort does not return, but its type does not declare it
