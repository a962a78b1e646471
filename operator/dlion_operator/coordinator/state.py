"""The coordinator as a state machine without I/O: events in, instructions out.

Owns admission, incarnations, the versioned membership and the order of reports. It has no clock,
threads or gRPC. `messages` parses messages, and the gRPC service verifies tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dlion_api.names import KeeperIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import ProgressRecord, StepRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.protocol.trust import FOLLOWING, JOINING
from dlion_operator.coordinator.events import (
    Accept,
    CertificateRequested,
    Deliver,
    EndStream,
    Event,
    Instruction,
    JoinRequested,
    Publish,
    RecordsRequested,
    RefuseCall,
    RemoteMembersReported,
    ReportReceived,
    StopRequested,
    StreamEnded,
    WorkersChanged,
)
from dlion_operator.model.rate_limiter import RateLimiter
from dlion_operator.pki.token_bindings import TokenBindings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_api.names import JobKey, Rank, WorkerIdentity


_GONE = MemberState.FINISHED
"""State of a worker that the manifest no longer has: as a finished one, no peer waits for it."""


@dataclass
class _TrackedWorker:
    """State of one worker of the manifest."""

    member: Member
    stream: int | None
    last_sequence: int = 0
    has_ended: bool = False
    """It has sent its last report."""
    is_remote: bool = False
    """It joined its own site's coordinator, which reports its state."""
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)


class CoordinatorState:
    """The state of one run at this coordinator.

    Invariant: The version grows with every change of the membership and exceeds every version
    that a worker has reported.
    """

    def __init__(self, job: JobKey, workers: Sequence[WorkerIdentity], spec_hash: str) -> None:
        self.job = job
        self.stop_reason = ""
        self._expected = {worker.rank: worker for worker in workers}
        self._spec_hash = spec_hash
        self._version = 0
        self._workers: dict[Rank, _TrackedWorker] = {}
        self._bindings = TokenBindings()

    @property
    def workers(self) -> tuple[WorkerIdentity, ...]:
        """The manifest's current workers, by rank."""
        return tuple(self._expected[rank] for rank in sorted(self._expected))

    def membership(self) -> Membership:
        """Return the membership: every worker that ever joined, by rank."""
        members = tuple(self._workers[rank].member for rank in sorted(self._workers))
        return Membership(self._version, self.job, len(self._expected), members)

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """Return the instructions that the event leads to, in order."""
        match event:
            case CertificateRequested():
                replayed = self._unknown_caller(event) or self._replayed(event, event.role)
                return (replayed or Accept(),)
            case RecordsRequested():
                return (
                    self._unknown_caller(event) or self._replayed(event, FOLLOWING) or Accept(),
                )
            case JoinRequested():
                return self._join(event)
            case StreamEnded():
                return self._stream_ended(event)
            case ReportReceived():
                return self._report(event)
            case WorkersChanged():
                return self._workers_changed(event)
            case RemoteMembersReported():
                return self._remote_members_reported(event)
            case StopRequested():
                return self._stop(event)

    def _join(self, event: JoinRequested) -> tuple[Instruction, ...]:
        refusal = self._unknown_caller(event) or self._replayed(event, JOINING)
        refusal = refusal or self._wrong_spec(event) or self._outdated_caller(event)
        if refusal:
            return (refusal,)
        rank = event.worker.rank
        earlier = self._workers.get(rank)
        member = Member(
            event.worker,
            event.incarnation,
            MemberState.READY,
            event.exchange_address,
            event.measuring_address,
        )
        if earlier is not None and earlier.member.incarnation == event.incarnation:
            changed = earlier.member != member
            replaced = earlier.stream
            earlier.member, earlier.stream = member, event.stream
        else:
            changed = True
            replaced = earlier.stream if earlier else None
            self._workers[rank] = _TrackedWorker(member, event.stream)
        if earlier is not None:
            self._workers[
                rank
            ].rate_limiter = earlier.rate_limiter  # joining again does not reset it
        instructions: list[Instruction] = [Accept()]
        if replaced is not None:
            instructions.append(EndStream(replaced))
        if changed or event.known_version > self._version:
            self._version = max(self._version, event.known_version) + 1
            instructions.append(Publish())
        return tuple(instructions)

    def _stream_ended(self, event: StreamEnded) -> tuple[Instruction, ...]:
        for worker in self._workers.values():
            if worker.stream == event.stream:
                worker.stream = None
                if worker.member.state is MemberState.READY:
                    return (self._change_state(worker, self._state_when_gone(worker)),)
        return ()  # refused or replaced earlier

    def _report(self, event: ReportReceived) -> tuple[Instruction, ...]:
        refusal = (
            self._unknown_caller(event)
            or self._outdated_caller(event)
            or self._foreign_record(event)
        )
        if refusal:
            return (refusal,)
        worker = self._workers.get(event.worker.rank)
        if worker is None or worker.member.incarnation != event.incarnation:
            message = f"{event.worker.name}: join with this incarnation first"
            return (RefuseCall(RefusalReason.NOT_JOINED, message),)
        if event.sequence <= worker.last_sequence:
            return (Accept(),)  # a repeat, because the answer was lost
        if not worker.rate_limiter.try_acquire(len(event.records), event.now_s):
            message = f"{event.worker.name}: too many records at once; send them later"
            return (RefuseCall(RefusalReason.TOO_MUCH, message),)
        worker.last_sequence = event.sequence
        instructions: list[Instruction] = [Accept()]
        if event.records:
            instructions.append(Deliver(event.records))
        if event.finished:
            worker.has_ended = True
            instructions.append(self._change_state(worker, MemberState.FINISHED))
        return tuple(instructions)

    def _workers_changed(self, event: WorkersChanged) -> tuple[Instruction, ...]:
        expected = {worker.rank: worker for worker in event.workers}
        if expected == self._expected:
            return ()
        self._expected = expected
        for worker in self._workers.values():
            if worker.stream is None and not worker.has_ended and not worker.is_remote:
                state = self._state_when_gone(worker)
                worker.member = replace(worker.member, state=state)
        self._version += 1
        return (Publish(),)

    def _remote_members_reported(self, event: RemoteMembersReported) -> tuple[Instruction, ...]:
        changed = False
        for member in event.members:
            rank = member.identity.rank
            known = self._workers.get(rank)
            if known is not None and not (known.is_remote and _follows(member, known.member)):
                continue
            if self._expected.get(rank, member.identity) != member.identity:
                continue  # here the rank belongs to another worker
            self._workers[rank] = _TrackedWorker(member, None, is_remote=True)
            changed = True
        if not changed:
            return ()
        self._version += 1
        return (Publish(),)

    def _state_when_gone(self, worker: _TrackedWorker) -> MemberState:
        """Return LOST if the manifest still has the worker, else FINISHED."""
        return MemberState.LOST if self._is_expected(worker.member.identity) else _GONE

    def _is_expected(self, worker: WorkerIdentity) -> bool:
        return self._expected.get(worker.rank) == worker

    def _stop(self, event: StopRequested) -> tuple[Instruction, ...]:
        if self.stop_reason:
            return ()  # the first reason counts
        self.stop_reason = event.reason
        return (Publish(),)

    def _change_state(self, worker: _TrackedWorker, state: MemberState) -> Publish:
        worker.member = replace(worker.member, state=state)
        self._version += 1
        return Publish()

    def _unknown_caller(
        self, event: CertificateRequested | RecordsRequested | JoinRequested | ReportReceived
    ) -> RefuseCall | None:
        """Refuse a caller that is neither a worker of this run nor one of its keepers."""
        caller = event.worker
        if event.run != str(self.job):
            message = f"run {event.run!r:.200} is not served here; this is {self.job}"
            return RefuseCall(RefusalReason.WRONG_RUN, message)
        if isinstance(caller, KeeperIdentity):
            if all(worker.site != caller.site for worker in self._expected.values()):
                message = f"site {caller.site!r:.200}: not in the manifest here"
                return RefuseCall(RefusalReason.UNKNOWN_WORKER, message)
        elif not self._is_expected(caller) and not (
            isinstance(event, ReportReceived) and self._has_joined(caller)
        ):
            message = f"rank {caller.rank}, {caller.name:.200}: not in the manifest here"
            return RefuseCall(RefusalReason.UNKNOWN_WORKER, message)
        if not event.token_ok:
            message = f"{caller.name}: the token is not its own"
            return RefuseCall(RefusalReason.BAD_TOKEN, message)
        return None

    def _replayed(
        self, event: CertificateRequested | JoinRequested | RecordsRequested, use: str
    ) -> RefuseCall | None:
        """Refuse a token that another pod presents, or a repeated request."""
        caller, presented = event.worker, event.presented
        if presented.bearer is None or self._bindings.admit(
            caller, use, presented.bearer, presented.proof
        ):
            return None
        message = (
            f"{caller.name}: not signed by the key that its pod first used ({use}), or a repeated"
            " request. If the pod has lost that key, delete the pod: its successor uses a new key"
        )
        return RefuseCall(RefusalReason.REPLAYED_TOKEN, message)

    def _has_joined(self, worker: WorkerIdentity) -> bool:
        """Whether that worker has joined. It may finish even after its removal."""
        known = self._workers.get(worker.rank)
        return known is not None and known.member.identity == worker

    def _wrong_spec(self, event: JoinRequested) -> RefuseCall | None:
        if event.spec_hash == self._spec_hash:
            return None
        message = (
            f"{event.worker.name}: its manifest (hash {event.spec_hash!r:.80}) is not the one here"
            f" ({self._spec_hash}); apply the same manifest at every site"
        )
        return RefuseCall(RefusalReason.SPEC_DIFFERS, message)

    def _outdated_caller(self, event: JoinRequested | ReportReceived) -> RefuseCall | None:
        """Refuse an incarnation that has finished or that a newer one has replaced."""
        worker = self._workers.get(event.worker.rank)
        if worker is None:
            return None
        known = worker.member.incarnation
        if event.incarnation < known:
            message = f"{event.worker.name}: incarnation {event.incarnation}, {known} is known"
            return RefuseCall(RefusalReason.OLD_INCARNATION, message, known)
        ended = event.incarnation == known and worker.member.state is MemberState.FINISHED
        repeated = isinstance(event, ReportReceived) and event.sequence <= worker.last_sequence
        if ended and not repeated:
            message = f"{event.worker.name}: incarnation {known} has finished"
            return RefuseCall(RefusalReason.FINISHED, message)
        return None

    def _foreign_record(self, event: ReportReceived) -> RefuseCall | None:
        """Refuse records of another worker or of another incarnation."""
        for record in event.records:
            if record.rank != event.worker.rank or _incarnation(record, event) != event.incarnation:
                message = (
                    f"{event.worker.name}: a {type(record).__name__} of rank {record.rank},"
                    f" incarnation {_incarnation(record, event)}; allowed: its own"
                )
                return RefuseCall(RefusalReason.MALFORMED, message)
        return None


def _follows(member: Member, known: Member) -> bool:
    """Whether `member` updates `known`: same worker, changed, not an older incarnation."""
    is_same = member.identity == known.identity
    return is_same and member != known and member.incarnation >= known.incarnation


def _incarnation(record: ProgressRecord, event: ReportReceived) -> int:
    return record.incarnation if isinstance(record, StepRecord) else event.incarnation
