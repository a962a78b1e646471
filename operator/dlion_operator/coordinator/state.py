"""The coordinator as a state machine without I/O: calls in, instructions out.

Owns admission, incarnations, the versioned membership and the order of reports. It has no clock,
threads or gRPC. `messages` parses messages, and the gRPC service verifies tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dlion_api.names import JobKey, KeeperIdentity, Rank, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import ProcessRecord, ProgressRecord, StepRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.protocol.revocation import MAX_REVOCATIONS, Revocation, revocation_of
from dlion_api.protocol.trust import JOINING
from dlion_operator.coordinator.events import (
    AccessRequested,
    CallRefusedError,
    Deliver,
    DownloadReported,
    EndStream,
    Instruction,
    JoinRequested,
    Publish,
    ReportReceived,
)
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.model.rate_limiter import RateLimiter
from dlion_operator.pki.token_bindings import TokenBindings

MAX_CLOCK_INCARNATION = 2**40
"""An incarnation is a clock in seconds or the last one plus one. A larger one would leave none for
the worker's later starts."""

MAX_NEW_STARTS = 1000
"""Starts of a worker that are unknown to this coordinator, where its numbers are larger."""


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
        self.downloads: dict[str, DownloadProgress] = {}
        """The last report of each worker's download, by the worker's name."""
        self._expected = {worker.rank: worker for worker in workers}
        self._spec_hash = spec_hash
        self._version = 0
        self._workers: dict[Rank, _TrackedWorker] = {}
        self._bindings = TokenBindings()
        self._revocations: tuple[Revocation, ...] = ()

    @property
    def workers(self) -> tuple[WorkerIdentity, ...]:
        """The manifest's current workers, by rank."""
        return tuple(self._expected[rank] for rank in sorted(self._expected))

    def membership(self) -> Membership:
        """Return the membership: every worker that ever joined, by rank."""
        members = tuple(self._workers[rank].member for rank in sorted(self._workers))
        return Membership(self._version, self.job, len(self._expected), members)

    def admit(self, event: AccessRequested) -> None:
        """Check a caller. Raises: CallRefusedError, as do all methods that take an event."""
        self._check_caller(event)
        self._check_replay(event, event.use)

    def join(self, event: JoinRequested) -> tuple[Instruction, ...]:
        """Admit a worker. Return what follows, in order."""
        self._check_caller(event)
        self._check_replay(event, JOINING)
        self._check_spec(event)
        self._check_incarnation(event)
        rank = event.worker.rank
        earlier = self._workers.get(rank)
        member = Member(
            event.worker,
            event.incarnation,
            MemberState.READY,
            event.exchange_address,
            event.measuring_address,
        )
        changed = earlier is None or earlier.member != member
        instructions: list[Instruction] = []
        if earlier is not None and earlier.stream is not None:
            instructions.append(EndStream(earlier.stream))
        if earlier is not None and earlier.member.incarnation == event.incarnation:
            earlier.member, earlier.stream = member, event.stream
        else:
            # A new incarnation does not reset the limit.
            limiter = earlier.rate_limiter if earlier else RateLimiter()
            self._workers[rank] = _TrackedWorker(member, event.stream, rate_limiter=limiter)
        if changed or event.known_version > self._version:
            self._version = max(self._version, event.known_version) + 1
            instructions.append(Publish())
        return tuple(instructions)

    def end_stream(self, stream: int) -> tuple[Instruction, ...]:
        """Take the end of a join stream, from either side."""
        for worker in self._workers.values():
            if worker.stream == stream:
                worker.stream = None
                if worker.member.state is MemberState.READY:
                    return (self._change_state(worker, self._state_when_gone(worker)),)
        return ()  # refused or replaced earlier

    def report(self, event: ReportReceived) -> tuple[Instruction, ...]:
        self._check_caller(event)
        self._check_incarnation(event)
        self._check_records(event)
        worker = self._workers.get(event.worker.rank)
        if worker is None or worker.member.incarnation != event.incarnation:
            message = f"{event.worker.name}: join with this incarnation first"
            raise CallRefusedError(RefusalReason.NOT_JOINED, message)
        if event.sequence <= worker.last_sequence:
            return ()  # a repeat, because the answer was lost
        if not worker.rate_limiter.try_acquire(len(event.records), event.now_s):
            message = f"{event.worker.name}: too many records at once; send them later"
            raise CallRefusedError(RefusalReason.TOO_MUCH, message)
        worker.last_sequence = event.sequence
        instructions: list[Instruction] = [Deliver(event.records)] if event.records else []
        if event.finished:
            worker.has_ended = True
            instructions.append(self._change_state(worker, MemberState.FINISHED))
        return tuple(instructions)

    def download(self, event: DownloadReported) -> None:
        self._check_caller(event)
        self.downloads[event.worker.name] = event.progress

    def expect(self, workers: Sequence[WorkerIdentity]) -> tuple[Instruction, ...]:
        """Set the manifest's workers; the remaining ones keep their ranks."""
        expected = {worker.rank: worker for worker in workers}
        if expected == self._expected:
            return ()
        self._expected = expected
        for worker in self._workers.values():
            if worker.stream is None and not worker.has_ended and not worker.is_remote:
                state = self._state_when_gone(worker)
                worker.member = replace(worker.member, state=state)
        self._version += 1
        return (Publish(),)

    def revoke(
        self, revocations: Sequence[Revocation], workers: Sequence[WorkerIdentity]
    ) -> tuple[Instruction, ...]:
        """Refuse the workers that these revocations cover, and no others, from now on.

        `workers`: All workers of the run. A revoked one is a member even where it never joined:
        peers may know it from an earlier coordinator. A start that was revoked never returns.
        """
        self._revocations = tuple(revocations)
        for worker in workers:
            if worker.rank not in self._workers and self._revocation_of(worker):
                unknown = Member(worker, 0, MemberState.FINISHED, "")
                self._workers[worker.rank] = _TrackedWorker(unknown, None, is_remote=True)
        ended: list[Instruction] = []
        is_changed = False
        for tracked in self._workers.values():
            member = tracked.member
            is_revoked = self._revocation_of(member.identity) is not None
            if is_revoked == member.revoked:
                continue
            is_changed = True
            tracked.member = replace(member, revoked=is_revoked)
            if is_revoked:
                tracked.member = replace(tracked.member, state=MemberState.FINISHED)
                ended += [] if tracked.stream is None else [EndStream(tracked.stream)]
                tracked.stream, tracked.has_ended = None, True
        if not is_changed:
            return ()
        self._version += 1
        return (*ended, Publish())

    def revoked_names(self) -> tuple[str, ...]:
        """The revoked workers that are or were of this run, by rank."""
        members = self.membership().members
        return tuple(member.identity.name for member in members if member.revoked)

    def revocation_reasons(self) -> Mapping[str, str]:
        """The reason of each revocation, by the name that it revokes; the first few hundred."""
        in_effect = [each for each in self._revocations if not each.is_lifted]
        return {each.name: each.reason for each in in_effect[:MAX_REVOCATIONS]}

    def _revocation_of(self, worker: WorkerIdentity) -> Revocation | None:
        return revocation_of(self._revocations, worker)

    def update_remote_members(self, members: Sequence[Member]) -> tuple[Instruction, ...]:
        """Update some or all members that joined at other sites' coordinators."""
        changed = False
        for reported in members:
            member, rank = reported, reported.identity.rank
            if self._revocation_of(member.identity):
                member = replace(member, state=MemberState.FINISHED, revoked=True)
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
        """Return LOST if the manifest still has the worker, else FINISHED: no peer waits for it."""
        is_expected = self._is_expected(worker.member.identity)
        return MemberState.LOST if is_expected else MemberState.FINISHED

    def _is_expected(self, worker: WorkerIdentity) -> bool:
        return self._expected.get(worker.rank) == worker

    def stop(self, reason: str) -> tuple[Instruction, ...]:
        """End the run; the first reason counts."""
        if self.stop_reason:
            return ()
        self.stop_reason = reason
        return (Publish(),)

    def _change_state(self, worker: _TrackedWorker, state: MemberState) -> Publish:
        worker.member = replace(worker.member, state=state)
        self._version += 1
        return Publish()

    def _check_caller(
        self, event: AccessRequested | JoinRequested | ReportReceived | DownloadReported
    ) -> None:
        """Refuse a caller that is neither a worker of this run nor one of its keepers."""
        caller = event.worker
        if isinstance(caller, KeeperIdentity):
            if all(worker.site != caller.site for worker in self._expected.values()):
                message = f"site {caller.site!r:.200}: not in the manifest here"
                raise CallRefusedError(RefusalReason.UNKNOWN_WORKER, message)
        elif event.bearer is not None and (revoked := self._revocation_of(caller)):
            why = f": {revoked.reason}" if revoked.reason else ""
            message = f"{caller.name} is revoked{why}; `dlion trust restore` lifts it"
            raise CallRefusedError(RefusalReason.REVOKED, message)
        elif not self._is_expected(caller) and not (
            isinstance(event, ReportReceived) and self._has_joined(caller)
        ):
            message = f"rank {caller.rank}, {caller.name:.200}: not in the manifest here"
            raise CallRefusedError(RefusalReason.UNKNOWN_WORKER, message)
        if event.bearer is None:
            message = f"{caller.name}: the token is not its own"
            raise CallRefusedError(RefusalReason.BAD_TOKEN, message)

    def _check_replay(self, event: AccessRequested | JoinRequested, use: str) -> None:
        """Refuse a token that another pod presents, or a repeated request."""
        caller, bearer = event.worker, event.bearer
        if bearer is None or self._bindings.admit(caller, use, bearer, event.proof):
            return
        message = (
            f"{caller.name}: not signed by the key that its pod first used ({use}), or a repeated"
            " request. If the pod has lost that key, delete the pod: its successor uses a new key"
        )
        raise CallRefusedError(RefusalReason.REPLAYED_TOKEN, message)

    def _has_joined(self, worker: WorkerIdentity) -> bool:
        """Whether that worker has joined. It may finish even after its removal."""
        known = self._workers.get(worker.rank)
        return known is not None and known.member.identity == worker

    def _check_spec(self, event: JoinRequested) -> None:
        if event.spec_hash == self._spec_hash:
            return
        message = (
            f"{event.worker.name}: its manifest (hash {event.spec_hash!r:.80}) is not the one here"
            f" ({self._spec_hash}); apply the same manifest at every site"
        )
        raise CallRefusedError(RefusalReason.SPEC_DIFFERS, message)

    def _check_incarnation(self, event: JoinRequested | ReportReceived) -> None:
        """Refuse an incarnation that has finished or that a newer one has replaced."""
        worker = self._workers.get(event.worker.rank)
        known = 0 if worker is None else worker.member.incarnation
        if event.incarnation > (most := max(known + MAX_NEW_STARTS, MAX_CLOCK_INCARNATION)):
            message = f"{event.worker.name}: incarnation {event.incarnation}; allowed: up to {most}"
            raise CallRefusedError(RefusalReason.MALFORMED, message)
        if worker is None:
            return
        if event.incarnation < known:
            message = f"{event.worker.name}: incarnation {event.incarnation}, {known} is known"
            raise CallRefusedError(RefusalReason.OLD_INCARNATION, message, known)
        ended = event.incarnation == known and worker.member.state is MemberState.FINISHED
        repeated = isinstance(event, ReportReceived) and event.sequence <= worker.last_sequence
        if ended and not repeated:
            message = f"{event.worker.name}: incarnation {known} has finished"
            raise CallRefusedError(RefusalReason.FINISHED, message)

    def _check_records(self, event: ReportReceived) -> None:
        """Refuse records of another worker or of another incarnation."""
        for record in event.records:
            if record.rank != event.worker.rank or _incarnation(record, event) != event.incarnation:
                message = (
                    f"{event.worker.name}: a {type(record).__name__} of rank {record.rank},"
                    f" incarnation {_incarnation(record, event)}; allowed: its own"
                )
                raise CallRefusedError(RefusalReason.MALFORMED, message)


def _follows(member: Member, known: Member) -> bool:
    """Whether `member` updates `known`: same worker, changed, not an older incarnation."""
    is_same = member.identity == known.identity
    return is_same and member != known and member.incarnation >= known.incarnation


_WITH_INCARNATION = StepRecord, ProcessRecord


def _incarnation(record: ProgressRecord, event: ReportReceived) -> int:
    return record.incarnation if isinstance(record, _WITH_INCARNATION) else event.incarnation
