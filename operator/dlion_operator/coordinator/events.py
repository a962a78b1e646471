"""The words between the coordinator's state machine and its skin: events in, instructions out."""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.membership import Member
from dlion_api.names import KeeperIdentity, WorkerIdentity
from dlion_api.progress import ProgressRecord
from dlion_api.refusals import RefusalReason
from dlion_operator.bearers import Bearer, Proof


@dataclass(frozen=True)
class Shown:
    """The token that came with a call, and its pod's proof."""

    bearer: Bearer | None
    """None: the token does not hold."""
    proof: Proof = Proof()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class SignAsked:
    """Somebody wants a certificate for that worker, or for a site's keeper."""

    run: str
    worker: WorkerIdentity | KeeperIdentity
    role: str
    shown: Shown

    @property
    def token_ok(self) -> bool:
        """Whether the token holds."""
        return self.shown.bearer is not None


@dataclass(frozen=True)
class FollowAsked:
    """Somebody wants the run's records as they come in."""

    run: str
    worker: KeeperIdentity
    shown: Shown

    @property
    def token_ok(self) -> bool:
        """Whether the token holds."""
        return self.shown.bearer is not None


@dataclass(frozen=True)
class JoinAsked:
    """Somebody opened a join stream. `stream` is the skin's own number for it."""

    stream: int
    run: str
    worker: WorkerIdentity
    shown: Shown
    incarnation: int
    exchange_address: str
    measuring_address: str
    spec_hash: str
    known_version: int

    @property
    def token_ok(self) -> bool:
        """Whether the token holds."""
        return self.shown.bearer is not None


@dataclass(frozen=True)
class StreamEnded:
    """A join stream is no more, whoever ended it."""

    stream: int


@dataclass(frozen=True)
class ReportArrived:
    """Somebody sent progress. `now_s` is any monotonic clock's, for the rate limit."""

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
    """The manifest has other workers now; those who stay have kept their ranks."""

    workers: tuple[WorkerIdentity, ...]


@dataclass(frozen=True)
class OthersTold:
    """Members that have joined elsewhere, at their own sites' coordinators; some or all of them."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class StopAsked:
    """Whoever runs this coordinator wants the run to end."""

    reason: str


Event = (
    SignAsked
    | FollowAsked
    | JoinAsked
    | StreamEnded
    | ReportArrived
    | WorkersChanged
    | OthersTold
    | StopAsked
)


@dataclass(frozen=True)
class Refuse:
    """Answer the call with this, and nothing else."""

    reason: RefusalReason
    message: str
    known_incarnation: int | None = None


@dataclass(frozen=True)
class Accept:
    """The call is in order: sign, keep the stream, answer the report."""


@dataclass(frozen=True)
class EndStream:
    """A newer stream of the same worker has taken this one's place."""

    stream: int


@dataclass(frozen=True)
class Publish:
    """The membership, or the wish to stop, has changed: tell every stream."""


@dataclass(frozen=True)
class Deliver:
    """Hand these records to whoever listens, in order."""

    records: tuple[ProgressRecord, ...]


Instruction = Refuse | Accept | EndStream | Publish | Deliver
