"""Serves `keeping.proto`: checks callers and paths, receives and sends files.

Runs in the keeper's loop; disk access runs in threads. Messages stay bytes, so that an invalid one
is rejected here.
"""

import asyncio
import errno
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.port_limits import OpenCalls
from dlion_api.protocol.refusals import (
    MAX_TEXT_BYTES,
    REASON_KEY,
    CallerError,
    PeerRefusal,
    refusal_kind,
)
from dlion_api.wire import coordination_pb2, keeping_pb2
from dlion_worker.artifact_client.chunks import MAX_MESSAGE_BYTES, ChunkVerifier, read_chunks
from dlion_worker.artifact_client.paths import (
    AccessDeniedError,
    log_path,
    max_file_bytes,
    metadata_path,
    model_path,
    provenance_path,
)
from dlion_worker.artifact_server.provenance_signer import ProvenanceSigner
from dlion_worker.artifact_server.store import ArtifactStore, PartialFile
from dlion_worker.artifact_server.workers import RevokedWorkers, SiteWorkerRegistry
from dlion_worker.security.credentials import WorkerCredentials

_LOG = logging.getLogger(__name__)

SERVICE = keeping_pb2.DESCRIPTOR.services_by_name["Keeping"].full_name
SILENCE_TIMEOUT_S = 30.0
"""A caller that is silent for this long in the middle of a file is disconnected."""

MAX_CALLS_OF_CALLER = 8
"""A trainer and a sidecar make one call at a time each; the rest is for those that have broken."""

MAX_NAME_CHARACTERS = 63

ArtifactCallContext = grpc.aio.ServicerContext[Any, Any]
_M = TypeVar("_M", bound=Message)


class TooManyCallsError(CallerError):
    """The caller has too many calls open; a retry may help."""


class UploadRejections:
    """The rejections of one keeper since its start, by reason, for the coordinator.

    The service's loop writes, the record stream's thread reads.
    """

    def __init__(self) -> None:
        self._counts: Counter[PeerRefusal] = Counter()
        self.last_message = ""

    def record(self, kind: PeerRefusal, last_message: str) -> None:
        self.last_message = last_message.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
        self._counts[kind] += 1

    def counts(self) -> Mapping[str, int]:
        return {str(kind): count for kind, count in self._counts.copy().items()}


class ArtifactService:
    def __init__(
        self,
        job: JobKey,
        workers: SiteWorkerRegistry,
        store: ArtifactStore,
        credentials: WorkerCredentials,
        refusals: UploadRejections,
        revoked: RevokedWorkers,
        signer: ProvenanceSigner,
    ) -> None:
        self._signer = signer
        self._rejections = refusals
        self._revoked = revoked
        self._job = job
        self._workers = workers
        self._store = store
        self._credentials = credentials
        self._open = OpenCalls(MAX_CALLS_OF_CALLER)
        """By certificate, which identifies a caller before its first message."""
        self._incarnations: dict[Rank, int] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by folder: its files replace others one at a time, and a statement is signed while
        the files that it is about stay."""

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers for a server; requests and responses stay bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Put": grpc.stream_unary_rpc_method_handler(self._put),
                # As a stream of one request: gRPC would wait for the request without limit.
                "Get": grpc.stream_stream_rpc_method_handler(self._get),
            },
        )

    # ---- uploads --------------------------------------------------------------------------------

    async def _put(self, _requests: object, context: ArtifactCallContext) -> bytes:
        with self._open.counted(_certificate_of(context)) as is_allowed:
            try:
                _check_allowed(is_allowed)
                total_bytes = await self._receive_file(context)
            except (ContractError, UnavailableError, OSError) as error:
                await self._refuse(error, context)
        return keeping_pb2.PutReply(kept_bytes=total_bytes).SerializeToString()

    async def _receive_file(self, context: ArtifactCallContext) -> int:
        first = _parsed(keeping_pb2.PutChunk, await _next(context))
        if not first.HasField("start"):
            raise ContractError("the first message does not name the file")
        start = first.start
        worker = self._caller(start.run, start.worker, context)
        if start.total_bytes > (most := max_file_bytes(start.path, worker)):
            raise ContractError(f"{start.path}: {start.total_bytes} bytes; allowed: {most}")
        is_log = start.path == log_path(worker.rank)
        # A sidecar uploads it, also of a trainer that fails before it has an incarnation.
        incarnation = None if is_log else start.incarnation
        self._check_incarnation(worker, incarnation)
        file = await _created(asyncio.to_thread(self._store.create, start.path, start.total_bytes))
        try:
            await self._receive_chunks(context, file, ChunkVerifier(start.total_bytes))
            async with self._locks[start.path.rpartition("/")[0]]:
                await _completed(
                    asyncio.to_thread(self._store_file, start.path, file, worker, incarnation)
                )
        finally:
            await asyncio.shield(asyncio.to_thread(file.discard))
        _LOG.info("%s: %d bytes of %s", start.path, start.total_bytes, worker.name)
        return int(start.total_bytes)

    def _store_file(
        self, path: str, file: PartialFile, worker: WorkerIdentity, incarnation: int | None
    ) -> None:
        self._check_incarnation(worker, incarnation)
        self._revoked.check(worker)
        if path == provenance_path(worker.site):
            file.rewrite(lambda content: self._signer.signed(content, worker))
        file.commit()
        if path in (model_path(worker.site), metadata_path(worker.site)):
            # After the commit: where that fails, the statement is about the model that stays.
            self._store.remove(provenance_path(worker.site))

    async def _receive_chunks(
        self, context: ArtifactCallContext, file: PartialFile, verifier: ChunkVerifier
    ) -> None:
        while (data := await _next(context)) is not None:
            chunk = _parsed(keeping_pb2.PutChunk, data)
            if chunk.HasField("start"):
                raise ContractError("a second file in one call")
            verifier.add(chunk.offset, chunk.payload, chunk.checksum)
            await asyncio.to_thread(file.write, chunk.payload)
        verifier.check_complete()

    def _check_incarnation(self, worker: WorkerIdentity, incarnation: int | None) -> None:
        """An incarnation that has been replaced must not overwrite newer files. None: any may."""
        if incarnation is None:
            return
        newest = self._incarnations.get(worker.rank, 0)
        if incarnation < newest:
            text = f"incarnation {incarnation} of {worker.name} was replaced by {newest}"
            raise CallerError(PeerRefusal.OLD_INCARNATION, text)
        if incarnation > newest:  # only before a file: while it is stored, another may be newer
            self._incarnations[worker.rank] = incarnation

    # ---- downloads ------------------------------------------------------------------------------

    async def _get(self, _requests: object, context: ArtifactCallContext) -> AsyncIterator[bytes]:
        with self._open.counted(_certificate_of(context)) as is_allowed:
            try:
                _check_allowed(is_allowed)
                async with aclosing(self._send_file(context)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except (ContractError, UnavailableError, OSError) as error:
                await self._refuse(error, context)

    async def _send_file(self, context: ArtifactCallContext) -> AsyncGenerator[bytes]:
        request = _parsed(keeping_pb2.GetRequest, await _next(context))
        worker = self._caller(request.run, request.worker, context)
        max_file_bytes(request.path, worker)
        with await asyncio.to_thread(self._store.open, request.path) as file:
            total_bytes = file.seek(0, 2)
            file.seek(0)
            if not total_bytes:
                yield keeping_pb2.FileChunk().SerializeToString()
            chunks = read_chunks(file, total_bytes)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                self._revoked.check(worker)  # also of one that is revoked meanwhile
                yield keeping_pb2.FileChunk(
                    total_bytes=total_bytes, **chunk._asdict()
                ).SerializeToString()

    # ---- access -------------------------------------------------------------------------------

    def _caller(
        self, run: str, wire: coordination_pb2.Worker, context: ArtifactCallContext
    ) -> WorkerIdentity:
        if run != str(self._job):
            text = f"run {run!r:.200}; served here: {self._job}"
            raise AccessDeniedError(text, PeerRefusal.WRONG_RUN)
        if max(len(wire.site), len(wire.group)) > MAX_NAME_CHARACTERS:
            text = "the name of a caller's site or group is too long"
            raise AccessDeniedError(text, PeerRefusal.MALFORMED)
        worker = WorkerIdentity(Rank(wire.rank), SiteName(wire.site), wire.group, wire.index)
        self._workers.check(worker)
        try:
            self._credentials.check_peer(_certificate_of(context), worker, self._job)
        except ContractError as error:
            raise AccessDeniedError(str(error), refusal_kind(error)) from error
        self._revoked.check(worker)
        self._workers.register(worker)
        return worker

    async def _refuse(self, error: Exception, context: ArtifactCallContext) -> NoReturn:
        if isinstance(error, FileNotFoundError):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no file at this path")
        _LOG.warning("rejected: %s", error)
        metadata: tuple[tuple[str, str], ...] = ()
        if isinstance(error, ContractError):
            kind = refusal_kind(error)
            self._rejections.record(kind, str(error))
            metadata = ((REASON_KEY, str(kind)),)
        await context.abort(
            _status(error), str(error) or f"silent for {SILENCE_TIMEOUT_S:g} s", metadata
        )
        raise error  # abort does not return, but its type does not declare it


def _certificate_of(context: ArtifactCallContext) -> bytes | None:
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def _check_allowed(is_allowed: bool) -> None:
    if not is_allowed:
        text = f"{MAX_CALLS_OF_CALLER} calls by this certificate are open already"
        raise TooManyCallsError(PeerRefusal.MALFORMED, text)


async def _created(work: Coroutine[Any, Any, PartialFile]) -> PartialFile:
    """Return the file. If the caller is cancelled meanwhile, discard it: it reserves space."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if task.exception() is None:
            task.result().discard()
        raise


async def _completed(work: Coroutine[Any, Any, None]) -> None:
    """Run the work to its end, also if the caller is cancelled: it uses a lock and a file."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _next(context: ArtifactCallContext) -> bytes | None:
    """The caller's next message; None at the end. Raises: TimeoutError."""
    async with asyncio.timeout(SILENCE_TIMEOUT_S):
        data = await context.read()
    return None if data is grpc.aio.EOF else bytes(data)


def _parsed(kind: type[_M], data: bytes | None) -> _M:
    if data is None:
        raise ContractError("the call ended before it named the file")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ContractError(f"message of {len(data)} bytes; allowed: {MAX_MESSAGE_BYTES}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ContractError(f"{len(data)} bytes that are not a {kind.__name__}") from error


def _status(error: Exception) -> grpc.StatusCode:
    match error:
        case AccessDeniedError():
            return grpc.StatusCode.PERMISSION_DENIED
        case TooManyCallsError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case ContractError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case TimeoutError():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.UNAVAILABLE
