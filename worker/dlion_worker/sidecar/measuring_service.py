"""What a sidecar answers its peers' sidecars: capacities, and how fast a probe arrived.

Owns the checks on who calls and what is said: a peer's message is untrusted input. Called by
gRPC; hands capacities on. Decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from dlion_api.addresses import joined
from dlion_api.errors import ContractError
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.refusals import REASON_KEY, CallerError, PeerRefusal, kind_of
from dlion_api.spec import Job
from dlion_api.wire import measuring_pb2, measuring_pb2_grpc
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.peer_proof import PeerProof
from dlion_worker.sidecar.peer_words import MOST_PROBE_BYTES, OwnWorker, from_wire, to_wire

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024

Context = grpc.aio.ServicerContext[Any, Any]


class MeasuringService(measuring_pb2_grpc.MeasuringServicer):
    """The service of one sidecar."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        worker: OwnWorker,
        credentials: WorkerCredentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = job.key
        self._job, self._rank = job, rank
        self._worker, self._credentials, self._clock = worker, credentials, clock
        self._proofs: dict[Rank, PeerProof] = {}

    async def Share(  # noqa: N802 - gRPC's name
        self, request: measuring_pb2.CapacityShare, context: Context
    ) -> measuring_pb2.CapacityShare:
        """Takes a peer's capacity, gives this worker's."""
        try:
            self._check_caller(request.run, request.rank, context)
            if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
                raise ContractError(f"share of {size} bytes; allowed: {MAX_MESSAGE_BYTES}")
            capacity = from_wire(request, self._key, Rank(request.rank))
            self._worker.heard(capacity, request.incarnation)
        except ContractError as error:
            await self._refuse(context, error)
        return to_wire(self._worker.own(), self._key, self._worker.incarnation())

    async def Probe(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[measuring_pb2.ProbeChunk],
        context: Context,
    ) -> measuring_pb2.ProbeResult:
        """Bytes after the first chunk, and the time in which they arrived here."""
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
            if total > MOST_PROBE_BYTES:
                too_long = ContractError(f"a probe of more than {MOST_PROBE_BYTES} bytes")
                await self._refuse(context, too_long)
        return measuring_pb2.ProbeResult(
            busy_bytes=rest, receiver_busy_micros=round(1e6 * (last_s - first_s))
        )

    def _check_caller(self, run: str, rank: int, context: Context) -> None:
        identity = self._peer(rank)
        words = f"caller: run {run[:80]!r} worker {rank} is no peer of {self._key}"
        if run != str(self._key):
            raise CallerError(PeerRefusal.WRONG_RUN, words)
        if identity is None:
            raise CallerError(PeerRefusal.UNKNOWN_WORKER, words)
        if not self._credentials.enabled:
            return
        shown = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        proof = self._proofs.get(identity.rank)
        if proof is None or proof.certificate_pem != shown:  # once per certificate, not per call
            self._proofs[identity.rank] = PeerProof(self._credentials, shown, identity, self._key)
        else:
            proof.check()

    def _peer(self, rank: int) -> WorkerIdentity | None:
        try:
            return None if rank == self._rank else self._job.worker(Rank(rank))
        except LookupError:
            return None

    async def _refuse(self, context: Context, error: ContractError) -> NoReturn:
        kind = kind_of(error)
        self._worker.refused(kind, f"a caller: {error}", dialled=False)
        _LOG.warning("refused: %s", error)
        metadata = ((REASON_KEY, str(kind)),)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), metadata)
        raise error  # abort does not return; its types do not say so


class MeasuringServer:
    """The service on a port."""

    def __init__(self, service: MeasuringService, credentials: WorkerCredentials) -> None:
        options = [
            # A little more than the protocol allows, so that such a message is refused by name.
            ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=256)
        measuring_pb2_grpc.add_MeasuringServicer_to_server(  # type: ignore[no-untyped-call]
            service, self._server
        )
        self._credentials = credentials

    async def start(self, host: str, *, preferred_port: int) -> int:
        """Listens; its port: the preferred one, or any where that is taken (or 0).

        Raises: OSError where the address cannot be had.
        """
        try:
            port = self._bind(host, preferred_port)
        except RuntimeError as error:
            if not preferred_port:
                where = f"{host}: {error}"
                raise OSError(f"cannot listen for other sidecars at {where}") from error
            return await self.start(host, preferred_port=0)
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Ends the service; calls under way have a moment to finish."""
        await self._server.stop(grace=0.2)

    def _bind(self, host: str, port: int) -> int:
        address = joined(host, port)
        secure = self._credentials.server()
        if secure is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, secure)
