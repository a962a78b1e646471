"""One run at its coordinator: calls become events, instructions become answers.

Runs in one asyncio loop, whose single thread is what keeps the state consistent. Owns the join
and follow streams of the run. `service` brings it the calls, `server` opens and closes it; it
decides nothing itself.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Protocol

from dlion_api.errors import ContractError
from dlion_api.membership import Member, Membership, MemberState
from dlion_api.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_api.records import record_to_json
from dlion_api.refusals import RefusalReason
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import (
    Deliver,
    EndStream,
    Instruction,
    OthersTold,
    Publish,
    Refuse,
    StopAsked,
    StreamEnded,
    WorkersChanged,
)
from dlion_operator.coordinator.feed import Batch, End, RecordFeed
from dlion_operator.coordinator.messages import (
    Request,
    caller_of,
    follow_event,
    followed_records,
    join_event,
    membership_update,
    report_event,
    sign_event,
)
from dlion_operator.job_authority import CannotSignError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from dlion_api.names import JobKey, KeeperIdentity, SiteName, WorkerIdentity
    from dlion_api.progress import ProgressRecord
    from dlion_operator.bearers import Bearer
    from dlion_operator.coordinator.state import Coordinator


class Signer(Protocol):
    """A site's authority, for one run (`dlion_operator.authority`, `job_authority`)."""

    @property
    def site(self) -> SiteName:
        """Whose workers it signs for."""
        ...

    @property
    def bundle_pem(self) -> bytes:
        """By which these are known; empty: that is not known now."""
        ...

    def sign(self, csr_pem: bytes, worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> bytes:
        """Certificate chain (PEM). Raises: CannotSignError, ContractError."""
        ...


class TokenVerifier(Protocol):
    """Says whose a token is (`dlion_operator.authority.Tokens`, `dlion_operator.pod_tokens`)."""

    async def verify(
        self, token: str, worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> Bearer | None:
        """Whose that token is, where it is that worker's, or that keeper's, of that run."""
        ...


class RefusedError(Exception):
    """A call is not answered but with this. Caught by `service`, which tells the caller."""

    def __init__(self, refusal: Refuse) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ServedRun:
    """What the calls of `coordination.proto` do to one run; requests are of a checked size."""

    def __init__(
        self,
        state: Coordinator,
        feed: RecordFeed,
        *,
        authorities: Mapping[SiteName, Signer],
        bundles: Mapping[SiteName, bytes],
        tokens: TokenVerifier,
        on_record: Callable[[ProgressRecord], None],
        start_time_monotonic_s: float,
        on_keeper_refused: Callable[[JobKey, str, str], None],
        has_own_trust: bool = False,
    ) -> None:
        """`bundles` are of sites whose workers are signed for elsewhere. `has_own_trust`: all of
        that is this run's alone, and no other's changes concern it. `on_keeper_refused` hears of
        each reason for which this site's keeper has refused more callers, and the last's words."""
        self._on_keeper_refused = on_keeper_refused
        self.keeper_refusals: Mapping[str, int] = {}
        """Of this site's keeper, since it began, by reason."""
        self.has_own_trust = has_own_trust
        self.state = state
        self._feed = feed
        self._authorities = dict(authorities)
        self._bundles = dict(bundles)
        self._tokens = tokens
        self._on_record = on_record
        self._start_s = start_time_monotonic_s
        self._numbers = itertools.count(1)
        self._news: dict[int, asyncio.Event] = {}
        """Of join streams, by their numbers."""
        self._fed: dict[int, asyncio.Event] = {}
        """Of follow streams."""
        self._followers: dict[SiteName, int] = {}
        self._replaced: set[int] = set()
        self._closing = False

    def stop(self, reason: str) -> None:
        """Tells every worker to end the run, those that join later too."""
        self._carry_out(self.state.handle(StopAsked(reason)))

    def expect(self, workers: Sequence[WorkerIdentity]) -> None:
        """The manifest has these workers now."""
        self._carry_out(self.state.handle(WorkersChanged(tuple(workers))))

    def tell_others(self, members: Sequence[Member]) -> None:
        """So stand workers that have joined elsewhere."""
        self._carry_out(self.state.handle(OthersTold(tuple(members))))

    def trust(self, bundles: Mapping[SiteName, bytes]) -> None:
        """Workers are to know other sites by these; those that have joined are told."""
        self._bundles = dict(bundles)
        self._wake(self._news)

    def replace_authority(self, authority: Signer) -> None:
        """Certificates of that authority's site are signed by it from now on."""
        if authority.site in self._authorities:
            self._authorities[authority.site] = authority
            self._wake(self._news)

    def take(self, record: ProgressRecord) -> None:
        """A record of this side's own, as if a worker had reported it."""
        self._deliver((record,), (record_to_json(record),))

    def finish(self, reason: str, *, succeeded: bool) -> None:
        """Tells followers, those that come later too, that the run is over."""
        self._feed.finish(End(reason or "Ended", succeeded))
        self._wake(self._fed)

    def close(self) -> None:
        """Ends all streams. That they end is no news from here on."""
        self._closing = True
        self._wake(self._news)
        self._wake(self._fed)

    async def sign(self, request: coordination_pb2.SignRequest) -> coordination_pb2.SignResponse:
        """A certificate for a worker or a keeper whose token holds."""
        event = sign_event(request, bearer=await self._bearer(request))
        self._answer(self.state.handle(event))
        authority = self._authority(event.worker.site)
        try:
            chain = authority.sign(request.csr_pem, event.worker, self.state.job)
        except CannotSignError as error:
            raise RefusedError(self.state.refuse(RefusalReason.NO_AUTHORITY, str(error))) from error
        return coordination_pb2.SignResponse(
            certificate_chain_pem=chain, site_bundles_pem=self._all_bundles()
        )

    async def join(
        self, request: coordination_pb2.JoinRequest
    ) -> AsyncGenerator[coordination_pb2.MembershipUpdate, None]:
        """Memberships, the newest only, until either side ends it."""
        stream = next(self._numbers)
        event = join_event(request, stream=stream, bearer=await self._bearer(request))
        news = self._news[stream] = asyncio.Event()
        try:
            self._answer(self.state.handle(event))
            known: Mapping[str, bytes] = {}
            while stream not in self._replaced and not self._closing:
                news.clear()
                bundles = self._all_bundles()
                yield self._update({} if bundles == known else bundles)
                known = bundles
                await news.wait()
        finally:
            del self._news[stream]
            self._replaced.discard(stream)
            before = self.state.membership()
            self._carry_out(self.state.handle(StreamEnded(stream)))
            if not self._closing:
                self._tell_lost(before, self.state.membership())

    async def report(
        self, request: coordination_pb2.ProgressReport
    ) -> coordination_pb2.ReportReply:
        """Takes progress; the answer carries whether to stop."""
        token_ok = await self._bearer(request) is not None
        event = report_event(request, token_ok=token_ok, now_s=time.monotonic())
        self._answer(self.state.handle(event), [_one_line(text) for text in request.records_json])
        return coordination_pb2.ReportReply(stop_reason=self.state.stop_reason)

    async def follow(
        self, request: coordination_pb2.FollowRequest
    ) -> AsyncGenerator[coordination_pb2.FollowedRecords, None]:
        """Records from where the follower was, as they come, and at last how the run ended."""
        event = follow_event(request, bearer=await self._bearer(request))
        self._answer(self.state.handle(event))
        self._hear_refusals(request)
        stream = next(self._numbers)
        self._replace_follower(event.worker.site, stream)
        self._fed[stream] = asyncio.Event()
        sequence = self._feed.position(request.epoch, request.taken_sequence)
        try:
            # The first message may be empty: it tells the epoch.
            batch: Batch | None = self._feed.batch(sequence) or Batch(sequence, (), None)
            while batch is not None:
                yield followed_records(self._feed.epoch, batch)
                batch = None if batch.end else await self._next_batch(stream, batch.next_sequence)
        finally:
            del self._fed[stream]
            self._replaced.discard(stream)
            if self._followers.get(event.worker.site) == stream:
                del self._followers[event.worker.site]

    def _hear_refusals(self, request: coordination_pb2.FollowRequest) -> None:
        """Whom the keeper has refused since it began; the newest of them is told."""
        refusals = dict(request.refusals)
        grown = [kind for kind, n in refusals.items() if n > self.keeper_refusals.get(kind, 0)]
        self.keeper_refusals = refusals
        for kind in grown:
            self._on_keeper_refused(self.state.job, kind, request.refused_words)

    async def _next_batch(self, stream: int, sequence: int) -> Batch | None:
        """The records from there on, once there are any; None: the stream is to end."""
        while stream not in self._replaced and not self._closing:
            self._fed[stream].clear()
            batch = self._feed.batch(sequence)
            if batch is not None:
                return batch
            await self._fed[stream].wait()
        return None

    def _replace_follower(self, site: SiteName, stream: int) -> None:
        """A keeper has one stream: that of one whose node is gone must not linger."""
        earlier = self._followers.get(site)
        self._followers[site] = stream
        if earlier is not None:
            self._replaced.add(earlier)
            self._fed[earlier].set()

    def _answer(self, instructions: tuple[Instruction, ...], texts: Sequence[str] = ()) -> None:
        """Carries the instructions out; `texts` are the records of the report as they came.

        Raises:
            RefusedError: the call is refused.
        """
        for instruction in instructions:
            if isinstance(instruction, Refuse):
                raise RefusedError(instruction)
        self._carry_out(instructions, texts)

    def _carry_out(self, instructions: tuple[Instruction, ...], texts: Sequence[str] = ()) -> None:
        for instruction in instructions:
            match instruction:
                case EndStream(stream):
                    if stream in self._news:
                        self._replaced.add(stream)
                        self._news[stream].set()
                case Publish():
                    self._wake(self._news)
                case Deliver(records):
                    self._deliver(records, texts)

    def _deliver(self, records: Sequence[ProgressRecord], texts: Sequence[str]) -> None:
        self._feed.put(texts)
        self._wake(self._fed)
        for record in records:
            self._on_record(record)

    def _tell_lost(self, before: Membership, after: Membership) -> None:
        """Whoever listens hears of a worker whose stream broke."""
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
        """Of every site of the run, as far as they are known; empty: links are open, or this site's
        own is not known now, and workers are to go on with what they know."""
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
        for news in streams.values():
            news.set()


def _one_line(text: str) -> str:
    """A record that was read, for a file of lines: in JSON a line end is a space between words."""
    return text.replace("\n", " ").replace("\r", " ")
