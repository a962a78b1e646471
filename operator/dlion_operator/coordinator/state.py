"""The coordinator as a state machine without I/O: events in, instructions out.

Owns admission, incarnations, the membership and its versions, and the order of reports. Called by
the gRPC skin and by the tests. Knows no clock, no thread, no gRPC; does not parse messages
(`messages`) nor verify tokens (the skin says whether they held).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dlion_api.membership import Member, Membership, MemberState
from dlion_api.names import KeeperIdentity
from dlion_api.progress import ProgressRecord, StepRecord
from dlion_api.refusals import RefusalReason
from dlion_api.trust import FOLLOWING, JOINING
from dlion_operator.bearers import Holders
from dlion_operator.coordinator.allowance import Allowance
from dlion_operator.coordinator.events import (
    Accept,
    Deliver,
    EndStream,
    Event,
    FollowAsked,
    Instruction,
    JoinAsked,
    OthersTold,
    Publish,
    Refuse,
    ReportArrived,
    SignAsked,
    StopAsked,
    StreamEnded,
    WorkersChanged,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_api.names import JobKey, Rank, WorkerIdentity


_GONE = MemberState.FINISHED
"""A worker that was taken out of the manifest: nobody waits for it, as for one that has ended."""


@dataclass
class _Worker:
    """What is known of one worker of the manifest."""

    member: Member
    stream: int | None
    last_sequence: int = 0
    has_ended: bool = False
    """It has said its farewell."""
    is_elsewhere: bool = False
    """It has joined its own site's coordinator, which says how it is."""
    allowance: Allowance = field(default_factory=Allowance)


class Coordinator:
    """The state of one run at this coordinator.

    Invariant: `version` grows with every change of the membership, and is above every version that
    a worker has told it knows.
    """

    def __init__(self, job: JobKey, workers: Sequence[WorkerIdentity], spec_hash: str) -> None:
        self.job = job
        self.stop_reason = ""
        self.refusals: Counter[RefusalReason] = Counter()
        """Refused calls by reason, for metrics."""
        self._expected = {worker.rank: worker for worker in workers}
        self._spec_hash = spec_hash
        self._version = 0
        self._workers: dict[Rank, _Worker] = {}
        self._holders = Holders()

    @property
    def workers(self) -> tuple[WorkerIdentity, ...]:
        """The workers that the manifest has now, by rank."""
        return tuple(self._expected[rank] for rank in sorted(self._expected))

    def membership(self) -> Membership:
        """The membership as it stands, members by rank: everyone who ever joined here."""
        members = tuple(self._workers[rank].member for rank in sorted(self._workers))
        return Membership(self._version, self.job, len(self._expected), members)

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """What is to be done about that event, in order."""
        match event:
            case SignAsked():
                replayed = self._stranger(event) or self._replayed(event, event.role)
                return (replayed or Accept(),)
            case FollowAsked():
                return (self._stranger(event) or self._replayed(event, FOLLOWING) or Accept(),)
            case JoinAsked():
                return self._join(event)
            case StreamEnded():
                return self._stream_ended(event)
            case ReportArrived():
                return self._report(event)
            case WorkersChanged():
                return self._workers_changed(event)
            case OthersTold():
                return self._others_told(event)
            case StopAsked():
                return self._stop(event)

    def refuse(
        self, reason: RefusalReason, message: str, known_incarnation: int | None = None
    ) -> Refuse:
        """A refusal, counted. Called from outside for messages that never became an event."""
        self.refusals[reason] += 1
        return Refuse(reason, message, known_incarnation)

    def _join(self, event: JoinAsked) -> tuple[Instruction, ...]:
        refusal = self._stranger(event) or self._replayed(event, JOINING)
        refusal = refusal or self._wrong_spec(event) or self._ghost(event)
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
            self._workers[rank] = _Worker(member, event.stream)
        if earlier is not None:
            self._workers[rank].allowance = earlier.allowance  # not renewed by joining again
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
        return ()  # refused, or replaced before

    def _report(self, event: ReportArrived) -> tuple[Instruction, ...]:
        refusal = self._stranger(event) or self._ghost(event) or self._false_record(event)
        if refusal:
            return (refusal,)
        worker = self._workers.get(event.worker.rank)
        if worker is None or worker.member.incarnation != event.incarnation:
            message = f"{event.worker.name}: join with this incarnation first"
            return (self.refuse(RefusalReason.NOT_JOINED, message),)
        if event.sequence <= worker.last_sequence:
            return (Accept(),)  # its answer was lost: taken before
        if not worker.allowance.spend(len(event.records), event.now_s):
            message = f"{event.worker.name}: too many records at once; send them later"
            return (self.refuse(RefusalReason.TOO_MUCH, message),)
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
            if worker.stream is None and not worker.has_ended and not worker.is_elsewhere:
                state = self._state_when_gone(worker)
                worker.member = replace(worker.member, state=state)
        self._version += 1
        return (Publish(),)

    def _others_told(self, event: OthersTold) -> tuple[Instruction, ...]:
        changed = False
        for member in event.members:
            rank = member.identity.rank
            known = self._workers.get(rank)
            if known is not None and not (known.is_elsewhere and _follows(member, known.member)):
                continue
            if self._expected.get(rank, member.identity) != member.identity:
                continue  # that rank is another's here
            self._workers[rank] = _Worker(member, None, is_elsewhere=True)
            changed = True
        if not changed:
            return ()
        self._version += 1
        return (Publish(),)

    def _state_when_gone(self, worker: _Worker) -> MemberState:
        """Lost, where it may come back; whoever the manifest has no longer need not."""
        return MemberState.LOST if self._is_expected(worker.member.identity) else _GONE

    def _is_expected(self, worker: WorkerIdentity) -> bool:
        return self._expected.get(worker.rank) == worker

    def _stop(self, event: StopAsked) -> tuple[Instruction, ...]:
        if self.stop_reason:
            return ()  # the first reason counts
        self.stop_reason = event.reason
        return (Publish(),)

    def _change_state(self, worker: _Worker, state: MemberState) -> Publish:
        worker.member = replace(worker.member, state=state)
        self._version += 1
        return Publish()

    def _stranger(
        self, event: SignAsked | FollowAsked | JoinAsked | ReportArrived
    ) -> Refuse | None:
        """Whether the caller is not one of this run's workers, nor a keeper of it."""
        who = event.worker
        if event.run != str(self.job):
            message = f"run {event.run!r:.200} is not served here; this is {self.job}"
            return self.refuse(RefusalReason.WRONG_RUN, message)
        if isinstance(who, KeeperIdentity):
            if all(worker.site != who.site for worker in self._expected.values()):
                message = f"site {who.site!r:.200}: not in the manifest here"
                return self.refuse(RefusalReason.UNKNOWN_WORKER, message)
        elif not self._is_expected(who) and not (
            isinstance(event, ReportArrived) and self._has_joined(who)
        ):
            message = f"rank {who.rank}, {who.name:.200}: not in the manifest here"
            return self.refuse(RefusalReason.UNKNOWN_WORKER, message)
        if not event.token_ok:
            message = f"{who.name}: the token is not its own"
            return self.refuse(RefusalReason.BAD_TOKEN, message)
        return None

    def _replayed(self, event: SignAsked | JoinAsked | FollowAsked, use: str) -> Refuse | None:
        """Whether somebody else than its pod shows that token, or the same request again."""
        who, shown = event.worker, event.shown
        if shown.bearer is None or self._holders.admit(who, use, shown.bearer, shown.proof):
            return None
        message = (
            f"{who.name}: not by the key that its pod began with ({use}), or this request was made"
            " before. If the pod has lost that key, delete the pod: the next one begins anew"
        )
        return self.refuse(RefusalReason.REPLAYED_TOKEN, message)

    def _has_joined(self, worker: WorkerIdentity) -> bool:
        """Whether that worker takes part, though the manifest may have it no longer: it may end
        in order."""
        known = self._workers.get(worker.rank)
        return known is not None and known.member.identity == worker

    def _wrong_spec(self, event: JoinAsked) -> Refuse | None:
        if event.spec_hash == self._spec_hash:
            return None
        message = (
            f"{event.worker.name}: its manifest (hash {event.spec_hash!r:.80}) is not the one here"
            f" ({self._spec_hash}); apply the same manifest at every site"
        )
        return self.refuse(RefusalReason.SPEC_DIFFERS, message)

    def _ghost(self, event: JoinAsked | ReportArrived) -> Refuse | None:
        """Whether the caller's time is over: a newer start is known, or it has said farewell."""
        worker = self._workers.get(event.worker.rank)
        if worker is None:
            return None
        known = worker.member.incarnation
        if event.incarnation < known:
            message = f"{event.worker.name}: incarnation {event.incarnation}, {known} is known"
            return self.refuse(RefusalReason.OLD_INCARNATION, message, known)
        ended = event.incarnation == known and worker.member.state is MemberState.FINISHED
        repeated = isinstance(event, ReportArrived) and event.sequence <= worker.last_sequence
        if ended and not repeated:
            message = f"{event.worker.name}: incarnation {known} has finished"
            return self.refuse(RefusalReason.FINISHED, message)
        return None

    def _false_record(self, event: ReportArrived) -> Refuse | None:
        """Whether a record speaks for another worker, or for another start of this one."""
        for record in event.records:
            if record.rank != event.worker.rank or _incarnation(record, event) != event.incarnation:
                message = (
                    f"{event.worker.name}: a {type(record).__name__} of rank {record.rank},"
                    f" incarnation {_incarnation(record, event)}; allowed: its own"
                )
                return self.refuse(RefusalReason.MALFORMED, message)
        return None


def _follows(member: Member, known: Member) -> bool:
    """Whether that is news of the same worker, and of no earlier start of it."""
    is_same = member.identity == known.identity
    return is_same and member != known and member.incarnation >= known.incarnation


def _incarnation(record: ProgressRecord, event: ReportArrived) -> int:
    return record.incarnation if isinstance(record, StepRecord) else event.incarnation
