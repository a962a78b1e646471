"""The worker's one object for its coordinator. Parts: signing, join streams, report sender.

Nothing here blocks training: calls queue, threads send and retry. With the coordinator away the
worker goes on with the membership it has, kept on disk for the next process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import ContractError, DLionError
from dlion_api.membership import Member, Membership, MemberState
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.refusals import RefusalReason
from dlion_worker.coordination.channel import Caller, Failure, coordination_stub, open_channel
from dlion_worker.coordination.joining import Announcement, JoinStream
from dlion_worker.coordination.kept import (
    Kept,
    keep_membership,
    kept_membership,
    merged,
    note_known_incarnation,
)
from dlion_worker.coordination.reporting import ReportSender
from dlion_worker.coordination.signing import Role, SignedCertificate, request_certificate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import grpc

    from dlion_api.progress import ProgressRecord
    from dlion_api.wire import coordination_pb2
    from dlion_api.worker_config import WorkerConfig

_LOG = logging.getLogger(__name__)

FLUSH_S = 2.0
"""How long the end of a worker waits for a coordinator to take its last records."""


class CoordinationClient:
    """This incarnation of this worker, as its coordinator knows it."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        job: JobKey,
        worker: WorkerIdentity,
        spec_hash: str,
        incarnation: int,
    ) -> None:
        """Reads the kept membership; opens no connection yet.

        Raises:
            OSError: the authority's file cannot be read.
        """
        self._config = config
        self._worker = worker
        self._caller = Caller(job, worker, Path(config.token_path))
        self._spec_hash = spec_hash
        self._incarnation = incarnation
        self._lock = threading.Lock()
        kept = kept_membership(config.state_dir, job)
        self._membership = kept.membership if kept else None
        self._start_s = _first_finite(
            config.start_time_monotonic_s, kept.start_time_monotonic_s if kept else None
        )
        self._placing = threading.Lock()
        self._unplaced: list[ProgressRecord] = []
        """Given to `report` before anybody said when the run began."""
        self._created_s = time.monotonic()
        self._times_count_from_s = self.start_time_monotonic_s()
        self._stop_reason: str | None = None
        self._error: DLionError | None = None
        self._closing = False
        self._streams: list[JoinStream] = []
        self._announcement: Announcement | None = None
        self._on_membership: Callable[[Membership], None] = _ignore
        self._on_bundles: Callable[[Mapping[SiteName, bytes]], None] | None = None
        self._channels = [open_channel(config)]
        """The newest one is used; those before it are closed once that stands."""
        self._stub = coordination_stub(self._channels[0])
        self._sender = ReportSender(
            self._stub,
            self._caller,
            incarnation,
            on_stop=self._note_stop,
            on_failure=self._note_failure,
        )

    def sign(
        self,
        csr_pem: bytes,
        role: Role = "trainer",
        addresses: Sequence[str] = (),
        *,
        stopped: Callable[[], bool] = lambda: False,
        wait_s: float | None = None,
    ) -> SignedCertificate:
        """A certificate for that request; see `request_certificate` for waiting and errors."""
        return request_certificate(
            self._config,
            job=self._caller.job,
            worker=self._worker,
            csr_pem=csr_pem,
            role=role,
            addresses=addresses,
            stopped=stopped,
            wait_s=wait_s,
        )

    def join(
        self,
        exchange_address: str,
        measuring_address: str,
        on_membership: Callable[[Membership], None],
        on_bundles: Callable[[Mapping[SiteName, bytes]], None] | None = None,
    ) -> None:
        """Joins in the background and stays joined; call again to announce other addresses.

        `on_membership` is called for every change, from another thread, one call at a time, first
        with the kept membership if there is one; `on_bundles` likewise with the authorities by
        which sites are known, before a membership that comes with them. Neither must block nor
        raise.
        """
        announcement = Announcement(
            self._caller,
            self._incarnation,
            self._spec_hash,
            exchange_address,
            measuring_address,
            self._config.proof_dir,
        )
        with self._lock:
            first = self._announcement is None
            self._on_membership, self._on_bundles = on_membership, on_bundles
            self._announcement = announcement
            if first and self._membership is not None:
                on_membership(self._membership)
        if first:
            self._sender.start()
        self._announce(announcement)

    def renew_connection(self) -> None:
        """Goes over to a new connection, on which the coordinator shows its certificate of now. The
        worker stays joined: what is on the old one ends when it has joined on the new one.

        Raises:
            OSError: the authority's file cannot be read.
        """
        channel = open_channel(self._config)
        with self._lock:
            self._channels.append(channel)
            self._stub = coordination_stub(channel)
            self._sender.go_on_with(self._stub)
            announcement = self._announcement
        if announcement is not None:
            self._announce(announcement)

    def _announce(self, announcement: Announcement) -> None:
        """Joins by a stream of its own, on the newest connection."""
        with self._lock:
            earlier, channels = list(self._streams), self._channels[:-1]

            def take(update: coordination_pb2.MembershipUpdate) -> None:
                self._retire(earlier, channels)
                self._take(update)

            stream = JoinStream(
                self._stub,
                announcement,
                known_version=self._known_version,
                on_update=take,
                on_failure=self._note_failure,
            )
            self._streams.append(stream)
        for each in earlier:
            each.supersede()
        stream.start()

    def _retire(self, streams: list[JoinStream], channels: list[grpc.Channel]) -> None:
        """A later stream has joined: these are ended. Runs in that one's thread."""
        with self._lock:
            self._streams = [each for each in self._streams if each not in streams]
            self._channels = [each for each in self._channels if each not in channels]
        while streams:
            streams.pop().close()
        while channels:
            channels.pop().close()

    def report(self, records: Iterable[ProgressRecord]) -> None:
        """Queues records and returns; what waits too long gives way, steps and links first.

        Their times count from what `start_time_monotonic_s` was when this client was made. They
        are sent by the run's clock, as it is known when they come: a new worker waits for the
        coordinator's first word.

        Raises:
            ContractError: a record cannot be sent (`dlion_api.records`): a defect of the caller.
        """
        with self._placing:
            if self._start_s is None and self._membership is None:
                self._unplaced += records
            else:
                self._sender.put(map(self._placed, records))

    def membership(self) -> Membership | None:
        """The last membership known: the coordinator's, or the kept one until it speaks."""
        return self._membership

    def stop_reason(self) -> str | None:
        """Why the coordinator wants the run ended; None while it does not."""
        return self._stop_reason

    def failure(self) -> DLionError | None:
        """Why the coordinator refuses this incarnation for good; None while it does not."""
        return self._error

    def connected(self) -> bool:
        """Whether the join stream stands just now."""
        return any(stream.connected for stream in self._streams)

    def start_time_monotonic_s(self) -> float:
        """`time.monotonic()` at which the run began, as the runner says; else the coordinator.

        Until either has spoken: when this client was made.
        """
        return self._created_s if self._start_s is None else self._start_s

    def finish(self, flush_s: float = FLUSH_S) -> bool:
        """Leaves in order: last records, "finished", end. True if the coordinator took them all."""
        return self._close(flush_s, finished=True)

    def close(self, flush_s: float = FLUSH_S) -> bool:
        """Ends without leaving the run (a restart follows): the coordinator sees it lost."""
        return self._close(flush_s, finished=False)

    def _close(self, flush_s: float, *, finished: bool) -> bool:
        self._closing = True
        self._place_unplaced()
        taken = self._sender.close(flush_s=flush_s, finished=finished)
        with self._lock:
            streams, channels = list(self._streams), list(self._channels)
        for stream in streams:
            stream.close()
        for channel in channels:
            channel.close()
        return taken

    def _known_version(self) -> int:
        return 0 if self._membership is None else self._membership.version

    def _take(self, update: coordination_pb2.MembershipUpdate) -> None:
        """Runs in the join threads."""
        with self._lock:
            if math.isfinite(update.elapsed_s) and self._config.start_time_monotonic_s is None:
                # An update may lie here for long before this process comes to it; never too short.
                self._note_start(time.monotonic() - update.elapsed_s)
            if update.stop_reason:
                self._note_stop(update.stop_reason)
            if update.site_bundles_pem and self._on_bundles is not None:
                told = update.site_bundles_pem.items()
                self._on_bundles({SiteName(site): bytes(pem) for site, pem in told})
            received = _membership(self._caller.job, update)
            if received.version < self._known_version():
                return  # of a stream that has been superseded
            membership = merged(self._membership, received)
            if membership == self._membership:
                return
            self._membership = membership
            self._keep(membership)
            self._on_membership(membership)

    def _note_start(self, began_s: float) -> None:
        with self._placing:
            self._start_s = began_s if self._start_s is None else min(self._start_s, began_s)
        self._place_unplaced()

    def _place_unplaced(self) -> None:
        with self._placing:
            unplaced, self._unplaced = self._unplaced, []
            self._sender.put(map(self._placed, unplaced))

    def _placed(self, record: ProgressRecord) -> ProgressRecord:
        """That record by the run's clock."""
        later_s = self._times_count_from_s - self.start_time_monotonic_s()
        return replace(record, time_s=record.time_s + later_s) if later_s else record

    def _keep(self, membership: Membership) -> None:
        try:
            keep_membership(self._config.state_dir, Kept(membership, self.start_time_monotonic_s()))
        except OSError as error:
            _LOG.warning("membership %d not kept on disk: %s", membership.version, error)

    def _note_stop(self, reason: str) -> None:
        if self._stop_reason is None:
            self._stop_reason = reason

    def _note_failure(self, failure: Failure) -> None:
        """The refusal is for good: this process cannot go on under this incarnation."""
        if self._closing:
            return  # it goes anyway; "has finished" is what it hears last, if it asks once more
        never_admitted = not self._admitted()
        if failure.reason is RefusalReason.OLD_INCARNATION and never_admitted:
            # Not a ghost but a worker whose counter was lost: the next start passes.
            self._note_incarnation(failure.known_incarnation or 0)
        self._error = ContractError(
            f"{self._worker.name}, incarnation {self._incarnation}: {failure.message}"
        )
        _LOG.error("%s", self._error)

    def _note_incarnation(self, known: int) -> None:
        try:
            note_known_incarnation(self._config.state_dir, known)
        except OSError as error:
            _LOG.warning("incarnation %d not kept on disk: %s", known, error)

    def _admitted(self) -> bool:
        member = self._membership.member(self._worker.rank) if self._membership else None
        return member is not None and member.incarnation == self._incarnation


def _membership(job: JobKey, update: coordination_pb2.MembershipUpdate) -> Membership:
    members = tuple(_member(view) for view in update.members)
    return Membership(update.version, job, update.expected_count, members)


def _member(view: coordination_pb2.MemberView) -> Member:
    worker = view.worker
    if view.state not in set(MemberState):
        allowed = ", ".join(MemberState)
        raise ContractError(f"worker {worker.rank}: state {view.state[:40]!r}; allowed: {allowed}")
    return Member(
        WorkerIdentity(Rank(worker.rank), SiteName(worker.site), worker.group, worker.index),
        view.incarnation,
        MemberState(view.state),
        view.exchange_address,
        view.measuring_address,
    )


def _first_finite(*moments: float | None) -> float | None:
    return next((m for m in moments if m is not None and math.isfinite(m)), None)


def _ignore(membership: Membership) -> None:
    """Nobody has joined yet."""
