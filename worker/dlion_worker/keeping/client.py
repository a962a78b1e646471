"""One worker's calls to the keeper of its site. Blocking; retries are the caller's business.

Called by `courier` in its thread, and by the trainer when it starts, before there is anything to
train with. Owns the channel, which trusts the worker's own site alone and asks for the keeper's
name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, KeeperIdentity, WorkerIdentity
from dlion_api.wire import coordination_pb2, keeping_pb2, keeping_pb2_grpc
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.keeping.pieces import MAX_MESSAGE_BYTES, Arrival, cut
from dlion_worker.keeping.places import most_bytes

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A keeper whose node is gone without a word is noticed after 15 s; a slow disk is waited for.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_FOR_GOOD = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


class KeeperClient:
    """The calls of one incarnation of a worker; `close` breaks off the one under way."""

    def __init__(
        self,
        address: str,
        *,
        job: JobKey,
        worker: WorkerIdentity,
        incarnation: int,
        credentials: WorkerCredentials,
    ) -> None:
        """Opens no connection yet."""
        self._job = job
        self._worker = worker
        self._incarnation = incarnation
        self._address = address
        self._credentials = credentials
        self._connect()
        self._lock = threading.Lock()
        self._closed = False
        self._call: Any = None

    def put(self, path: str, source: Path) -> int:
        """Brings that file, as it is when this is called; its length.

        Raises:
            UnavailableError: the keeper is away, or has no room: later it may do.
            ContractError: the keeper refuses it for good.
            OSError: `source` cannot be read.
        """
        with source.open("rb") as file:  # stays this file, also when a newer one takes its name
            file.seek(0, 2)
            total_bytes = file.tell()
            file.seek(0)
            broken: list[OSError] = []
            try:
                call = self._begin(
                    self._newest().Put.future(self._put_chunks(path, file, total_bytes, broken))
                )
                return int(call.result().kept_bytes)
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                if broken:
                    raise broken[0] from error
                raise _failure(f"{path} not brought to the keeper", error) from error

    def get(self, path: str, target: Path) -> bool:
        """Fetches that file to `target`, which is replaced whole; False: the keeper has none.

        Raises: as `put`; OSError where `target` cannot be written.
        """
        request = keeping_pb2.GetRequest(run=str(self._job), worker=self._wire(), path=path)
        fresh = target.with_name(f".{target.name}.fetching")
        target.parent.mkdir(parents=True, exist_ok=True)
        call = None
        try:
            call = self._begin(self._newest().Get(request))
            with fresh.open("wb") as file:
                arrival = None
                for chunk in call:
                    arrival = arrival or Arrival(self._checked(path, chunk.total_bytes))
                    if chunk.payload or arrival.total_bytes:
                        arrival.take(chunk.offset, chunk.payload, chunk.checksum)
                    file.write(chunk.payload)
            (arrival or Arrival(-1)).check_whole()
            fresh.replace(target)
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.NOT_FOUND:
                return False
            raise _failure(f"{path} not fetched from the keeper", error) from error
        finally:
            if call is not None:
                call.cancel()
            fresh.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Ends what is under way; later calls are refused."""
        with self._lock:
            self._closed = True
            call = self._call
        if call is not None:
            call.cancel()
        self._channel.close()

    def _connect(self) -> None:
        keeper = KeeperIdentity(self._worker.site)
        self._renewals = self._credentials.renewals
        self._channel = _channel(self._address, keeper, self._job, self._credentials)
        self._stub = keeping_pb2_grpc.KeepingStub(self._channel)  # type: ignore[no-untyped-call]

    def _newest(self) -> keeping_pb2_grpc.KeepingStub:
        """On a connection that goes by the newest certificate. There is one call at a time."""
        with self._lock:
            if self._renewals != self._credentials.renewals and not self._closed:
                self._channel.close()
                self._connect()
        return self._stub

    def _begin(self, call: Any) -> Any:
        with self._lock:
            self._call = call
            if self._closed:
                call.cancel()
        return call

    def _checked(self, path: str, total_bytes: int) -> int:
        most = most_bytes(path, self._worker)
        if total_bytes > most:
            raise ContractError(f"{path}: {total_bytes} bytes from the keeper; allowed: {most}")
        return total_bytes

    def _wire(self) -> coordination_pb2.Worker:
        it = self._worker
        return coordination_pb2.Worker(rank=it.rank, site=it.site, group=it.group, index=it.index)

    def _put_chunks(
        self, path: str, file: Any, total_bytes: int, broken: list[OSError]
    ) -> Iterator[keeping_pb2.PutChunk]:
        """In a thread of gRPC's, which tells nobody what is raised here: hence `broken`."""
        yield keeping_pb2.PutChunk(
            start=keeping_pb2.PutStart(
                run=str(self._job),
                worker=self._wire(),
                incarnation=self._incarnation,
                path=path,
                total_bytes=total_bytes,
            )
        )
        try:
            for piece in cut(file, total_bytes):
                yield keeping_pb2.PutChunk(
                    offset=piece.offset, payload=piece.payload, checksum=piece.checksum
                )
        except (OSError, ValueError) as error:  # ValueError: closed, the call is over
            broken.append(OSError(str(error)))
            raise


def _channel(
    address: str, keeper: KeeperIdentity, job: JobKey, credentials: WorkerCredentials
) -> grpc.Channel:
    options = [*_OPTIONS, *credentials.target_options(keeper.dns_name(job))]
    secure = credentials.channel(keeper.site)
    if secure is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, secure, options=options)


def _failure(what: str, error: Exception) -> ContractError | UnavailableError:
    code = _code(error)
    if code is None or not isinstance(error, grpc.Call):
        return UnavailableError(f"{what}: {error or 'broken off'}")
    words = f"{what}: {code.name}: {error.details() or ''}"
    return ContractError(words) if code in _FOR_GOOD else UnavailableError(words)


def _code(error: Exception) -> grpc.StatusCode | None:
    """The status of a call that was answered; None: it was broken off on this side."""
    return error.code() if isinstance(error, grpc.Call) else None
