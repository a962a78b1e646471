"""`keeping.proto` as the keeper serves it: who calls, whether the file is theirs, and its bytes.

Runs in the keeper's loop; the disk is touched in threads. Called by `process`. Messages come as
bytes, so that one that does not parse is refused here.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.refusals import REASON_KEY, CallerError, PeerRefusal, kind_of
from dlion_api.wire import coordination_pb2, keeping_pb2
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.keeper.refusals import Refusals
from dlion_worker.keeper.store import ArrivingFile, Store
from dlion_worker.keeper.workers import SiteWorkers
from dlion_worker.keeping.pieces import MAX_MESSAGE_BYTES, Arrival, cut
from dlion_worker.keeping.places import NotYoursError, most_bytes

_LOG = logging.getLogger(__name__)

SERVICE = keeping_pb2.DESCRIPTOR.services_by_name["Keeping"].full_name
SILENT_S = 30.0
"""A caller that says nothing for so long in the middle of a file is let go."""

MAX_NAME_CHARACTERS = 63

Context = grpc.aio.ServicerContext[Any, Any]
_M = TypeVar("_M", bound=Message)


class KeepingService:
    """What the site's workers call."""

    def __init__(
        self,
        job: JobKey,
        workers: SiteWorkers,
        store: Store,
        credentials: Callable[[], WorkerCredentials],
        refusals: Refusals,
    ) -> None:
        """`credentials` yields the newest ones."""
        self._refusals = refusals
        self._job = job
        self._workers = workers
        self._store = store
        self._credentials = credentials
        self._incarnations: dict[Rank, int] = {}
        self.counts: Counter[str] = Counter()
        """Files kept, fetched, refused."""

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers, for a server; requests and answers stay bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Put": grpc.stream_unary_rpc_method_handler(self._put),
                "Get": grpc.unary_stream_rpc_method_handler(self._get),
            },
        )

    # ---- bringing --------------------------------------------------------------------------------

    async def _put(self, _requests: object, context: Context) -> bytes:
        try:
            total_bytes = await self._take_file(context)
        except (ContractError, OSError, TimeoutError) as error:
            await self._refuse(error, context)
        self.counts["kept"] += 1
        return keeping_pb2.PutReply(kept_bytes=total_bytes).SerializeToString()

    async def _take_file(self, context: Context) -> int:
        first = _parsed(keeping_pb2.PutChunk, await _next(context))
        if not first.HasField("start"):
            raise ContractError("the first message does not say which file comes")
        start = first.start
        worker = self._caller(start.run, start.worker, context)
        if start.total_bytes > (most := most_bytes(start.path, worker)):
            raise ContractError(f"{start.path}: {start.total_bytes} bytes; allowed: {most}")
        self._check_incarnation(worker, start.incarnation)
        file = await asyncio.to_thread(self._store.arriving, start.path, start.total_bytes)
        try:
            await self._take_chunks(context, file, Arrival(start.total_bytes))
            self._check_incarnation(worker, start.incarnation)
            await asyncio.to_thread(file.keep)
        finally:
            await asyncio.shield(asyncio.to_thread(file.drop))
        _LOG.info("%s: %d bytes of %s", start.path, start.total_bytes, worker.name)
        return int(start.total_bytes)

    async def _take_chunks(self, context: Context, file: ArrivingFile, arrival: Arrival) -> None:
        while (data := await _next(context)) is not None:
            chunk = _parsed(keeping_pb2.PutChunk, data)
            if chunk.HasField("start"):
                raise ContractError("a second file in one call")
            arrival.take(chunk.offset, chunk.payload, chunk.checksum)
            await asyncio.to_thread(file.write, chunk.payload)
        arrival.check_whole()

    def _check_incarnation(self, worker: WorkerIdentity, incarnation: int) -> None:
        """A start that has been replaced, and does not know it yet, must not have the last word."""
        newest = self._incarnations.get(worker.rank, 0)
        if incarnation < newest:
            words = f"incarnation {incarnation} of {worker.name} was replaced by {newest}"
            raise CallerError(PeerRefusal.OLD_INCARNATION, words)
        self._incarnations[worker.rank] = incarnation

    # ---- fetching --------------------------------------------------------------------------------

    async def _get(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            request = _parsed(keeping_pb2.GetRequest, data)
            most_bytes(request.path, self._caller(request.run, request.worker, context))
            with await asyncio.to_thread(self._store.open, request.path) as file:
                total_bytes = file.seek(0, 2)
                file.seek(0)
                if not total_bytes:
                    yield keeping_pb2.FileChunk().SerializeToString()
                pieces = cut(file, total_bytes)
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    yield keeping_pb2.FileChunk(
                        total_bytes=total_bytes,
                        offset=piece.offset,
                        payload=piece.payload,
                        checksum=piece.checksum,
                    ).SerializeToString()
        except (ContractError, OSError) as error:
            await self._refuse(error, context)
        self.counts["fetched"] += 1

    # ---- who calls -------------------------------------------------------------------------------

    def _caller(self, run: str, wire: coordination_pb2.Worker, context: Context) -> WorkerIdentity:
        if run != str(self._job):
            words = f"run {run!r:.200}; kept here: {self._job}"
            raise NotYoursError(words, PeerRefusal.WRONG_RUN)
        if max(len(wire.site), len(wire.group)) > MAX_NAME_CHARACTERS:
            words = "a caller's site or group has a name that is too long"
            raise NotYoursError(words, PeerRefusal.MALFORMED)
        worker = WorkerIdentity(Rank(wire.rank), SiteName(wire.site), wire.group, wire.index)
        self._workers.check(worker)
        shown = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        try:
            self._credentials().check_peer(shown, worker, self._job)
        except ContractError as error:
            raise NotYoursError(str(error), kind_of(error)) from error
        self._workers.admit(worker)
        return worker

    async def _refuse(self, error: Exception, context: Context) -> NoReturn:
        if isinstance(error, FileNotFoundError):
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing is kept at this path")
        self.counts["refused"] += 1
        _LOG.warning("refused: %s", error)
        metadata: tuple[tuple[str, str], ...] = ()
        if isinstance(error, ContractError):
            kind = kind_of(error)
            self._refusals.refused(kind, str(error))
            metadata = ((REASON_KEY, str(kind)),)
        await context.abort(_status(error), str(error) or f"silent for {SILENT_S:g} s", metadata)
        raise error  # abort does not return; its types do not say so


async def _next(context: Context) -> bytes | None:
    """The caller's next message; None: there is none. Raises: TimeoutError."""
    async with asyncio.timeout(SILENT_S):
        data = await context.read()
    return None if data is grpc.aio.EOF else bytes(data)


def _parsed(kind: type[_M], data: bytes | None) -> _M:
    if data is None:
        raise ContractError("the call ended before it said which file comes")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ContractError(f"message of {len(data)} bytes; allowed: {MAX_MESSAGE_BYTES}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ContractError(f"{len(data)} bytes that are not a {kind.__name__}") from error


def _status(error: Exception) -> grpc.StatusCode:
    match error:
        case NotYoursError():
            return grpc.StatusCode.PERMISSION_DENIED
        case ContractError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case TimeoutError():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.UNAVAILABLE
