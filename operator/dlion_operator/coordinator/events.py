"""Events that the coordinator's state machine handles, and the instructions it returns."""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.names import KeeperIdentity, WorkerIdentity
from dlion_api.protocol.membership import Member
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_operator.pki.token_bindings import Bearer, Proof


@dataclass(frozen=True)
class PresentedToken:
    """The token of a call and its pod's proof."""

    bearer: Bearer | None
    """None: the token is invalid."""
    proof: Proof = Proof()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class CertificateRequested:
    """A caller requests a certificate for a worker or a site's keeper."""

    run: str
    worker: WorkerIdentity | KeeperIdentity
    role: str
    presented: PresentedToken

    @property
    def token_ok(self) -> bool:
        """Whether the token is valid."""
        return self.presented.bearer is not None


@dataclass(frozen=True)
class RecordsRequested:
    """A keeper requests the stream of the run's records."""

    run: str
    worker: KeeperIdentity
    presented: PresentedToken

    @property
    def token_ok(self) -> bool:
        """Whether the token is valid."""
        return self.presented.bearer is not None


@dataclass(frozen=True)
class JoinRequested:
    """A worker opened a join stream, which `served_run` numbers as `stream`."""

    stream: int
    run: str
    worker: WorkerIdentity
    presented: PresentedToken
    incarnation: int
    exchange_address: str
    measuring_address: str
    spec_hash: str
    known_version: int

    @property
    def token_ok(self) -> bool:
        """Whether the token is valid."""
        return self.presented.bearer is not None


@dataclass(frozen=True)
class StreamEnded:
    """A join stream ended, from either side."""

    stream: int


@dataclass(frozen=True)
class ReportReceived:
    """A worker reported progress. `now_s` is a monotonic time, for the rate limit."""

    run: str
    worker: WorkerIdentity
    token_ok: bool
    incarnation: int
    sequence: int
    records: tuple[ProgressRecord, ...]
    finished: bool
    now_s: float


@dataclass(frozen=True)
class WorkersChanged:
    """The manifest's workers changed; the remaining ones keep their ranks."""

    workers: tuple[WorkerIdentity, ...]


@dataclass(frozen=True)
class RemoteMembersReported:
    """Some or all members that joined at other sites' coordinators."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class StopRequested:
    """The process that runs this coordinator ends the run."""

    reason: str


Event = (
    CertificateRequested
    | RecordsRequested
    | JoinRequested
    | StreamEnded
    | ReportReceived
    | WorkersChanged
    | RemoteMembersReported
    | StopRequested
)


@dataclass(frozen=True)
class RefuseCall:
    """Refuse the call with this reason."""

    reason: RefusalReason
    message: str
    known_incarnation: int | None = None


@dataclass(frozen=True)
class Accept:
    """Proceed with the call: sign, keep the stream or answer the report."""


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


Instruction = RefuseCall | Accept | EndStream | Publish | Deliver
