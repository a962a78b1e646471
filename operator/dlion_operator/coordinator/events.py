"""What the coordinator's state machine handles, and the instructions it returns.

`bearer` is the owner of the caller's token. None: the token is invalid.
"""

from dataclasses import dataclass

from dlion_api.names import KeeperIdentity, WorkerIdentity
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.pki.token_bindings import Bearer, Proof


@dataclass(frozen=True)
class AccessRequested:
    """A caller requests a certificate, or a keeper the stream of the run's records."""

    worker: WorkerIdentity | KeeperIdentity
    use: str
    """The role of the certificate, or `FOLLOWING`."""
    bearer: Bearer | None
    proof: Proof = Proof()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class JoinRequested:
    """A worker opened a join stream, which `served_run` numbers as `stream`."""

    stream: int
    worker: WorkerIdentity
    bearer: Bearer | None
    incarnation: int
    exchange_address: str
    measuring_address: str
    spec_hash: str
    known_version: int
    proof: Proof = Proof()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class ReportReceived:
    """A worker reported progress. `now_s` is a monotonic time, for the rate limit."""

    worker: WorkerIdentity
    bearer: Bearer | None
    incarnation: int
    sequence: int
    records: tuple[ProgressRecord, ...]
    finished: bool
    now_s: float


@dataclass(frozen=True)
class DownloadReported:
    """A worker that has not joined reported its download."""

    worker: WorkerIdentity
    bearer: Bearer | None
    progress: DownloadProgress


class CallRefusedError(Exception):
    """A call is refused. `service` catches this and returns the reason to the caller."""

    def __init__(
        self, reason: RefusalReason, message: str, known_incarnation: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.known_incarnation = known_incarnation


@dataclass(frozen=True)
class EndStream:
    """End this stream: a newer one of the same worker replaces it."""

    stream: int


@dataclass(frozen=True)
class Publish:
    """Send the changed membership or stop reason on every join stream."""


@dataclass(frozen=True)
class Deliver:
    """Pass these records on to `on_record` and followers, in order."""

    records: tuple[ProgressRecord, ...]


Instruction = EndStream | Publish | Deliver
