"""One worker's calls to its site's keeper. Blocking; the caller retries.

The channel trusts only the worker's own site and verifies the keeper's name.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, KeeperIdentity, WorkerIdentity
from dlion_api.wire import keeping_pb2, keeping_pb2_grpc
from dlion_worker.artifact_client.chunks import MAX_MESSAGE_BYTES, ChunkVerifier, read_chunks
from dlion_worker.artifact_client.paths import max_file_bytes
from dlion_worker.coordination.channel import worker_to_wire
from dlion_worker.security.credentials import WorkerCredentials

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Detects within 15 s that the keeper's node has disappeared, and still waits for a slow disk.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_PERMANENT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
)


class ArtifactClient:
    """The calls of one worker incarnation; `close` cancels the current one."""

    def __init__(
        self,
        address: str,
        *,
        job: JobKey,
        worker: WorkerIdentity,
        incarnation: int,
        credentials: WorkerCredentials,
    ) -> None:
        self._job = job
        self._worker, self._wire_worker = worker, worker_to_wire(worker)
        self._incarnation = incarnation
        self._address = address
        self._credentials = credentials
        self._connect()
        self._lock = threading.Lock()
        self._closed = False
        self._call: Any = None

    def put(self, path: str, source: Path) -> int:
        """Upload the file as it is now; return its length in bytes.

        Raises:
            UnavailableError: The keeper is unreachable or full; a retry may help.
            ContractError: The keeper rejects the file permanently.
            OSError: `source` cannot be read.
        """
        with source.open("rb") as file:  # keeps reading this file even if a newer one replaces it
            total_bytes = file.seek(0, 2)
            file.seek(0)
            read_errors: list[OSError] = []
            try:
                chunks = self._put_chunks(path, file, total_bytes, read_errors)
                call = self._start(path, lambda stub: stub.Put.future(chunks))
                return int(call.result().kept_bytes)
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                if read_errors:
                    raise read_errors[0] from error
                raise _failure(f"{path} not uploaded to the keeper", error) from error

    def get(self, path: str, target: Path) -> bool:
        """Download the file and replace `target` atomically; False if the keeper has none.

        Raises: as `put`; OSError if `target` cannot be written.
        """
        request = keeping_pb2.GetRequest(run=str(self._job), worker=self._wire_worker, path=path)
        temporary = target.with_name(f".{target.name}.fetching")
        target.parent.mkdir(parents=True, exist_ok=True)
        call = None
        try:
            call = self._start(path, lambda stub: stub.Get(request))
            with temporary.open("wb") as file:
                verifier = None
                for chunk in call:
                    verifier = verifier or ChunkVerifier(self._checked(path, chunk.total_bytes))
                    if chunk.payload or verifier.total_bytes:
                        verifier.add(chunk.offset, chunk.payload, chunk.checksum)
                    file.write(chunk.payload)
            (verifier or ChunkVerifier(-1)).check_complete()
            temporary.replace(target)
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.NOT_FOUND:
                return False
            raise _failure(f"{path} not downloaded from the keeper", error) from error
        finally:
            if call is not None:
                call.cancel()
            temporary.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Cancel the current call; later calls fail."""
        with self._lock:
            self._closed = True
            call = self._call
        if call is not None:
            call.cancel()
        self._channel.close()

    def _connect(self) -> None:
        keeper, credentials = KeeperIdentity(self._worker.site), self._credentials
        self._renewals = credentials.renewals
        options = [*_OPTIONS, *credentials.target_options(keeper.dns_name(self._job))]
        secure = credentials.channel(keeper.site)
        if secure is None:
            self._channel = grpc.insecure_channel(self._address, options=options)
        else:
            self._channel = grpc.secure_channel(self._address, secure, options=options)
        self._stub = keeping_pb2_grpc.KeepingStub(self._channel)  # type: ignore[no-untyped-call]

    def _start(self, path: str, begin: Callable[[keeping_pb2_grpc.KeepingStub], Any]) -> Any:
        """Begin a call on a connection with the newest certificate. There is one call at a time.

        Raises: UnavailableError after `close`: gRPC would raise ValueError.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError(f"{path}: the connection to the keeper is closed")
            if self._renewals != self._credentials.renewals:
                self._channel.close()
                self._connect()
            self._call = begin(self._stub)
            return self._call

    def _checked(self, path: str, total_bytes: int) -> int:
        most = max_file_bytes(path, self._worker)
        if total_bytes > most:
            raise ContractError(f"{path}: {total_bytes} bytes from the keeper; allowed: {most}")
        return total_bytes

    def _put_chunks(
        self, path: str, file: Any, total_bytes: int, read_errors: list[OSError]
    ) -> Iterator[keeping_pb2.PutChunk]:
        """Runs in a gRPC thread, where exceptions are lost: hence `read_errors`."""
        yield keeping_pb2.PutChunk(
            start=keeping_pb2.PutStart(
                run=str(self._job),
                worker=self._wire_worker,
                incarnation=self._incarnation,
                path=path,
                total_bytes=total_bytes,
            )
        )
        try:
            for chunk in read_chunks(file, total_bytes):
                yield keeping_pb2.PutChunk(**chunk._asdict())
        # ValueError: the file was closed after the call ended
        except (OSError, ValueError) as error:
            read_errors.append(OSError(str(error)))
            raise


def _failure(what: str, error: Exception) -> ContractError | UnavailableError:
    code = _code(error)
    if code is None or not isinstance(error, grpc.Call):
        return UnavailableError(f"{what}: {error or 'cancelled'}")
    text = f"{what}: {code.name}: {error.details() or ''}"
    return ContractError(text) if code in _PERMANENT else UnavailableError(text)


def _code(error: Exception) -> grpc.StatusCode | None:
    """The status of an answered call; None if it was cancelled on this side."""
    return error.code() if isinstance(error, grpc.Call) else None
