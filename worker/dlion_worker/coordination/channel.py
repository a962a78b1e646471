"""gRPC channels to the coordinator, and the meaning of failed calls.

No call has a fixed deadline: keep-alive pings detect an unreachable coordinator within 15 s.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import grpc

from dlion_api.names import JobKey, KeeperIdentity, WorkerIdentity
from dlion_api.protocol.refusals import KNOWN_INCARNATION_KEY, REASON_KEY, RefusalReason
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own backoff decides when to retry; gRPC's must not delay a call for minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also limits one attempt: connecting to a distant site and its handshake may take this long.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class CoordinatorAccess(Protocol):
    """Address and credentials for the coordinator, from a `WorkerConfig` or a `KeeperConfig`."""

    @property
    def coordinator_address(self) -> str: ...
    @property
    def coordinator_dns_name(self) -> str: ...
    @property
    def authority_pem_path(self) -> str: ...
    @property
    def token_path(self) -> str: ...
    @property
    def proof_dir(self) -> Path: ...


def open_channel(config: CoordinatorAccess) -> grpc.Channel:
    """A channel that trusts only the authority in the configuration's file.

    Raises: OSError (that file cannot be read).
    """
    if not config.authority_pem_path:
        return grpc.insecure_channel(config.coordinator_address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=Path(config.authority_pem_path).read_bytes()
    )
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", config.coordinator_dns_name))
    return grpc.secure_channel(config.coordinator_address, credentials, options=options)


def coordination_stub(channel: grpc.Channel) -> coordination_pb2_grpc.CoordinationStub:
    return coordination_pb2_grpc.CoordinationStub(channel)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Caller:
    """The caller's identity, part of every request. The token is read each time: it is renewed."""

    job: JobKey
    worker: WorkerIdentity | KeeperIdentity
    token_path: Path

    def token(self) -> str:
        return self.token_path.read_text(encoding="utf-8").strip()

    def wire_worker(self) -> coordination_pb2.Worker:
        return worker_to_wire(self.worker)


def worker_to_wire(worker: WorkerIdentity | KeeperIdentity) -> coordination_pb2.Worker:
    """A worker as a wire message; for a keeper only the site."""
    return coordination_pb2.Worker(**asdict(worker))


@dataclass(frozen=True)
class CallFailure:
    """A failed call. `reason` is None if the coordinator was not reached."""

    reason: RefusalReason | None
    message: str
    known_incarnation: int | None = None

    @property
    def passing(self) -> bool:
        """Whether a retry may succeed."""
        return self.reason is None or self.reason.passing

    @property
    def ends_start(self) -> bool:
        """Whether a worker that has joined, or tries to, must end."""
        return self.reason is not None and self.reason.ends_start


def failure_of(error: Exception) -> CallFailure:
    """Classify an error of a call, or of reading the token for it."""
    if isinstance(error, OSError):
        return CallFailure(None, f"token, authority or key not readable: {error}")
    if not isinstance(error, grpc.Call):
        return CallFailure(None, str(error))
    metadata = {key: value for key, value in error.trailing_metadata() or () if key}
    known = str(metadata.get(KNOWN_INCARNATION_KEY, ""))
    message = f"{error.code().name}: {error.details() or ''}"
    return CallFailure(
        _reason(str(metadata.get(REASON_KEY, ""))), message, int(known) if known.isdigit() else None
    )


def _reason(text: str) -> RefusalReason | None:
    try:
        return RefusalReason(text)
    except ValueError:  # none, or one of a later version: retry
        return None
