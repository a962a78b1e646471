"""A channel to the coordinator, and what a failed call on it means.

Owns the channel's options and the reading of refusals. No call has a deadline that somebody would
have to guess: keep-alive pings find a coordinator that is gone, in 15 s at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from dlion_api.names import JobKey, KeeperIdentity, WorkerIdentity
from dlion_api.refusals import KNOWN_INCARNATION_KEY, REASON_KEY, RefusalReason
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own back-off decides when to try again; gRPC's must not hold a call back for minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Bounds an attempt, too: so long may connection and handshake take, of a site that is far away.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Access(Protocol):
    """Where the coordinator is, and what proves it and the caller: of a worker's configuration
    (`WorkerConfig`), or of a keeper's."""

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


def open_channel(config: Access) -> grpc.Channel:
    """A channel that trusts only the authority in the configuration's file.

    Raises:
        OSError: that file cannot be read.
    """
    if not config.authority_pem_path:
        return grpc.insecure_channel(config.coordinator_address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=Path(config.authority_pem_path).read_bytes()
    )
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", config.coordinator_dns_name))
    return grpc.secure_channel(config.coordinator_address, credentials, options=options)


def coordination_stub(channel: grpc.Channel) -> coordination_pb2_grpc.CoordinationStub:
    """The coordinator's calls on that channel."""
    return coordination_pb2_grpc.CoordinationStub(channel)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Caller:
    """Who calls: stands in every request. The token is read anew each time (they are renewed)."""

    job: JobKey
    worker: WorkerIdentity | KeeperIdentity
    token_path: Path

    def token(self) -> str:
        """The token as it stands in the file now."""
        return self.token_path.read_text(encoding="utf-8").strip()

    def wire_worker(self) -> coordination_pb2.Worker:
        """This worker as the wire spells it; of a keeper only the site."""
        if isinstance(self.worker, KeeperIdentity):
            return coordination_pb2.Worker(site=self.worker.site)
        return coordination_pb2.Worker(
            rank=self.worker.rank,
            site=self.worker.site,
            group=self.worker.group,
            index=self.worker.index,
        )


@dataclass(frozen=True)
class Failure:
    """A call that did not succeed. `reason` is None where the coordinator was not reached."""

    reason: RefusalReason | None
    message: str
    known_incarnation: int | None = None

    @property
    def passing(self) -> bool:
        """Whether the same call may succeed later."""
        return self.reason is None or self.reason.passing


def failure_of(error: Exception) -> Failure:
    """What that error of a call (or of reading the token for it) means."""
    if isinstance(error, OSError):
        return Failure(None, f"token, authority or key not readable: {error}")
    if not isinstance(error, grpc.Call):
        return Failure(None, str(error))
    metadata = {key: value for key, value in error.trailing_metadata() or () if key}
    known = str(metadata.get(KNOWN_INCARNATION_KEY, ""))
    message = f"{error.code().name}: {error.details() or ''}"
    return Failure(
        _reason(str(metadata.get(REASON_KEY, ""))), message, int(known) if known.isdigit() else None
    )


def _reason(text: str) -> RefusalReason | None:
    try:
        return RefusalReason(text)
    except ValueError:  # none given, or one of a later version: try again
        return None
