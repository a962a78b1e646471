"""One run at its coordinator: turn calls into events and instructions into answers.

Owns the run's join and follow streams. `service` dispatches calls to it, `server` opens and closes
it, and `state` decides. It runs in a single asyncio loop, so the state needs no lock.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.protocol.revocation import Revocation
from dlion_api.reasons import EventReason
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import (
    CallRefusedError,
    Deliver,
    EndStream,
    Instruction,
    Publish,
)
from dlion_operator.coordinator.feed import RecordBatch, RecordFeed, RunEnd
from dlion_operator.coordinator.messages import (
    TRAINER_ROLE,
    Request,
    access_event,
    caller_of,
    download_event,
    followed_records,
    join_event,
    membership_update,
    report_event,
)
from dlion_operator.coordinator.state import CoordinatorState
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.job_authority import CannotSignError, JobAuthority
from dlion_operator.pki.token_bindings import Bearer

Signer = CertificateAuthority | JobAuthority
"""A site's certificate authority for one run."""


class TokenVerifier(Protocol):
    """Verifies tokens (`dlion_operator.pki.authority.Tokens`, `dlion_operator.pki.pod_tokens`)."""

    async def verify(
        self, token: str, worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> Bearer | None:
        """Return the token's bearer if it belongs to that worker or keeper of that run."""
        ...


class ServedRun:
    """Handles the calls of `coordination.proto` for one run; requests are size-checked."""

    def __init__(
        self,
        state: CoordinatorState,
        feed: RecordFeed,
        *,
        authorities: Mapping[SiteName, Signer],
        bundles: Mapping[SiteName, bytes],
        tokens: TokenVerifier,
        on_record: Callable[[ProgressRecord], None],
        start_time_monotonic_s: float,
        on_keeper_refused: Callable[[JobKey, str, str], None],
        checkpoint_key: Callable[[Rank], bytes] = lambda _: b"",
        has_own_trust: bool = False,
    ) -> None:
        """`bundles` are those of sites whose workers are signed for elsewhere.

        `has_own_trust`: Authorities and bundles are this run's own; changes for all runs skip it.
        `checkpoint_key` returns what authenticates a worker's checkpoints; empty: nothing does.
        `on_keeper_refused` receives each reason for new refusals by this site's keeper, with the
        last message.
        """
        self._on_keeper_refused = on_keeper_refused
        self._checkpoint_key = checkpoint_key
        self.keeper_refusals: Mapping[str, int] = {}
        """Refusals by this site's keeper since it started, by reason."""
        self.has_own_trust = has_own_trust
        self.state = state
        self._feed = feed
        self._authorities = dict(authorities)
        self._bundles = dict(bundles)
        self._tokens = tokens
        self._on_record = on_record
        self._start_s = start_time_monotonic_s
        self._numbers = itertools.count(1)
        self._join_signals: dict[int, asyncio.Event] = {}
        """An entry for each join stream, by its number."""
        self._follow_signals: dict[int, asyncio.Event] = {}
        """An entry for each follow stream, by its number."""
        self._followers: dict[SiteName, int] = {}
        self._replaced: set[int] = set()
        self._closing = False

    def stop(self, reason: str) -> None:
        """Ask every worker to end the run, including those that join later."""
        self._carry_out(self.state.stop(reason))

    def expect(self, workers: Sequence[WorkerIdentity]) -> None:
        self._carry_out(self.state.expect(workers))

    def update_remote_members(self, members: Sequence[Member]) -> None:
        """Update the members that joined at other sites."""
        self._carry_out(self.state.update_remote_members(members))

    def revoke(self, revocations: Sequence[Revocation], workers: Sequence[WorkerIdentity]) -> None:
        """Refuse these workers, and have their peers close the links to them."""
        self._carry_out(self.state.revoke(revocations, workers))
        self._wake(self._follow_signals)

    def trust(self, bundles: Mapping[SiteName, bytes]) -> None:
        """Set other sites' bundles and send them to joined workers."""
        self._bundles = dict(bundles)
        self._wake(self._join_signals)

    def replace_authority(self, authority: Signer) -> None:
        """Sign with `authority` for its site from now on."""
        if authority.site in self._authorities:
            self._authorities[authority.site] = authority
            self._wake(self._join_signals)

    def take(self, record: ProgressRecord) -> None:
        """Add a record of the operator, as if a worker had reported it."""
        self._deliver((record,), (record_to_json(record),))

    def note(self, reason: str, message: str, *, warning: bool) -> None:
        """Add an event of the operator to the records. It has no worker: its rank is 0."""
        time_s = max(0.0, time.monotonic() - self._start_s)
        record = EventRecord(time_s, Rank(0), 0, reason, message, warning)
        self._feed.put([record_to_json(record)])
        self._wake(self._follow_signals)

    def finish(self, reason: str, *, succeeded: bool) -> None:
        """Report the end of the run to followers, including later ones."""
        self._feed.finish(RunEnd(reason or "Ended", succeeded))
        self._wake(self._follow_signals)

    def close(self) -> None:
        """End all streams without reporting their workers as lost."""
        self._closing = True
        self._wake(self._join_signals)
        self._wake(self._follow_signals)

    async def sign(self, request: coordination_pb2.SignRequest) -> coordination_pb2.SignResponse:
        """Issue a certificate for a worker or keeper with a valid token."""
        event = access_event(request, await self._bearer(request))
        self.state.admit(event)
        authority = self._authority(event.worker.site)
        try:
            chain = authority.sign(request.csr_pem, event.worker, self.state.job)
        except CannotSignError as error:
            raise CallRefusedError(RefusalReason.NO_AUTHORITY, str(error)) from error
        response = coordination_pb2.SignResponse(
            certificate_chain_pem=chain, site_bundles_pem=self._all_bundles()
        )
        if request.role == TRAINER_ROLE and isinstance(event.worker, WorkerIdentity):
            response.checkpoint_key = self._checkpoint_key(event.worker.rank)
        return response

    async def join(
        self, request: coordination_pb2.JoinRequest
    ) -> AsyncGenerator[coordination_pb2.MembershipUpdate, None]:
        """Stream the newest membership until either side ends the stream."""
        stream = next(self._numbers)
        event = join_event(request, stream=stream, bearer=await self._bearer(request))
        signal = self._join_signals[stream] = asyncio.Event()
        try:
            self._carry_out(self.state.join(event))
            known: Mapping[str, bytes] = {}
            while stream not in self._replaced and not self._closing:
                signal.clear()
                bundles = self._all_bundles()
                yield self._update({} if bundles == known else bundles)
                known = bundles
                await signal.wait()
        finally:
            del self._join_signals[stream]
            self._replaced.discard(stream)
            before = self.state.membership()
            self._carry_out(self.state.end_stream(stream))
            if not self._closing:
                self._report_lost(before, self.state.membership())

    async def report(
        self, request: coordination_pb2.ProgressReport
    ) -> coordination_pb2.ReportReply:
        """Process a progress report; the answer carries the stop reason, if any."""
        bearer = await self._bearer(request)
        event = report_event(request, bearer=bearer, now_s=time.monotonic())
        self._carry_out(self.state.report(event), map(_one_line, request.records_json))
        return coordination_pb2.ReportReply(stop_reason=self.state.stop_reason)

    async def report_download(
        self, request: coordination_pb2.DownloadReport
    ) -> coordination_pb2.DownloadReply:
        self.state.download(download_event(request, await self._bearer(request)))
        return coordination_pb2.DownloadReply()

    async def follow(
        self, request: coordination_pb2.FollowRequest
    ) -> AsyncGenerator[coordination_pb2.FollowedRecords, None]:
        """Stream records from the follower's position on, and finally how the run ended."""
        event = access_event(request, await self._bearer(request))
        self.state.admit(event)
        self._report_keeper_refusals(request)
        stream = next(self._numbers)
        self._replace_follower(event.worker.site, stream)
        self._follow_signals[stream] = asyncio.Event()
        sequence = self._feed.position(request.epoch, request.taken_sequence)
        try:
            # The first message may be empty: it carries the epoch.
            batch: RecordBatch | None = self._feed.batch(sequence) or RecordBatch(
                sequence, (), None
            )
            while batch is not None:
                revoked = self.state.revoked_names()
                reasons = self.state.revocation_reasons()
                yield followed_records(self._feed.epoch, batch, revoked, reasons)
                following = batch.next_sequence
                batch = None if batch.end else await self._next_batch(stream, following, revoked)
        finally:
            del self._follow_signals[stream]
            self._replaced.discard(stream)
            if self._followers.get(event.worker.site) == stream:
                del self._followers[event.worker.site]

    def _report_keeper_refusals(self, request: coordination_pb2.FollowRequest) -> None:
        """Store the keeper's refusal counts and report the reasons that have increased."""
        refusals = dict(request.refusals)
        grown = [kind for kind, n in refusals.items() if n > self.keeper_refusals.get(kind, 0)]
        self.keeper_refusals = refusals
        for kind in grown:
            self._on_keeper_refused(self.state.job, kind, request.refused_words)

    async def _next_batch(
        self, stream: int, sequence: int, revoked: Sequence[str]
    ) -> RecordBatch | None:
        """Wait for records from `sequence` on, or other revoked workers; None: the stream ends."""
        while stream not in self._replaced and not self._closing:
            self._follow_signals[stream].clear()
            batch = self._feed.batch(sequence)
            if batch is None and self.state.revoked_names() != revoked:
                batch = RecordBatch(sequence, (), None)
            if batch is not None:
                return batch
            await self._follow_signals[stream].wait()
        return None

    def _replace_follower(self, site: SiteName, stream: int) -> None:
        """Keep one stream per keeper: end the earlier one, whose node may have failed."""
        earlier = self._followers.get(site)
        self._followers[site] = stream
        if earlier is not None:
            self._replaced.add(earlier)
            self._follow_signals[earlier].set()

    def _carry_out(self, instructions: tuple[Instruction, ...], texts: Iterable[str] = ()) -> None:
        """Carry out the instructions. `texts` are the report's records as JSON."""
        for instruction in instructions:
            match instruction:
                case EndStream(stream):
                    if stream in self._join_signals:
                        self._replaced.add(stream)
                        self._join_signals[stream].set()
                case Publish():
                    self._wake(self._join_signals)
                case Deliver(records):
                    self._deliver(records, texts)

    def _deliver(self, records: Sequence[ProgressRecord], texts: Iterable[str]) -> None:
        self._feed.put(texts)
        self._wake(self._follow_signals)
        for record in records:
            self._on_record(record)

    def _report_lost(self, before: Membership, after: Membership) -> None:
        """Record the loss of each worker whose stream broke."""
        for member in after.members:
            earlier = before.member(member.identity.rank)
            if member.state is MemberState.LOST and member != earlier:
                self.take(
                    EventRecord(
                        time_s=time.monotonic() - self._start_s,
                        rank=member.identity.rank,
                        iteration=0,
                        reason=EventReason.WORKER_LOST,
                        message=f"{member.identity.name}: incarnation {member.incarnation} is gone",
                        warning=True,
                    )
                )

    def _all_bundles(self) -> dict[str, bytes]:
        """Return the known bundles of the run's sites.

        Empty without TLS, and while this site's own bundle is unknown: workers then keep the
        bundles that they have.
        """
        own = {str(site): each.bundle_pem for site, each in self._authorities.items()}
        if not own or not all(own.values()):
            return {}
        sites = {worker.site for worker in self.state.workers}
        bundles = {str(site): pem for site, pem in self._bundles.items() if site in sites}
        return bundles | own

    def _update(self, bundles: Mapping[str, bytes]) -> coordination_pb2.MembershipUpdate:
        return membership_update(
            self.state.membership(),
            elapsed_s=time.monotonic() - self._start_s,
            stop_reason=self.state.stop_reason,
            site_bundles_pem=bundles,
        )

    async def _bearer(self, request: Request) -> Bearer | None:
        return await self._tokens.verify(request.token, caller_of(request), self.state.job)

    def _authority(self, site: SiteName) -> Signer:
        authority = self._authorities.get(site)
        if authority is None:
            raise ContractError(
                f"no authority for site {site} here (there are: "
                f"{', '.join(self._authorities) or 'none, tls.mode is Disabled'})"
            )
        return authority

    @staticmethod
    def _wake(streams: Mapping[int, asyncio.Event]) -> None:
        for signal in streams.values():
            signal.set()


def _one_line(text: str) -> str:
    """Return a valid JSON record on one line; its line breaks are insignificant whitespace."""
    return text.replace("\n", " ").replace("\r", " ")
