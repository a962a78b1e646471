"""A worker's connection to its coordinator: certificates, join streams and report sender.

Nothing here blocks training: calls queue, threads send and retry. While the coordinator is
unreachable the worker keeps its membership, which is also saved for the next process.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc

from dlion_api.errors import ContractError, DLionError, UnavailableError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.wire import coordination_pb2
from dlion_worker.coordination.channel import Caller, CallFailure, coordination_stub, open_channel
from dlion_worker.coordination.join_stream import Announcement, JoinStream
from dlion_worker.coordination.report_sender import ReportSender
from dlion_worker.coordination.saved_state import (
    SavedMembership,
    delete_membership,
    load_membership,
    merge_memberships,
    raise_incarnation,
    save_membership,
)
from dlion_worker.coordination.signing import request_certificate
from dlion_worker.security.credential_store import delete_credentials

_LOG = logging.getLogger(__name__)

FLUSH_S = 2.0
"""How long a worker that ends waits for the coordinator to accept its last records; one that has
finished waits longer for a coordinator that is there, and slow (`report_sender`)."""


class CoordinationClient:
    """This incarnation of this worker, as a client of its coordinator."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        job: JobKey,
        worker: WorkerIdentity,
        spec_hash: str,
        incarnation: int,
    ) -> None:
        """Load the saved membership; open no connection yet.

        Raises: OSError (the authority's file cannot be read).
        """
        self._config = config
        self._worker = worker
        self.sign = partial(request_certificate, config, job=job, worker=worker, role="trainer")
        self._caller = Caller(job, worker, Path(config.token_path))
        self._spec_hash = spec_hash
        self._incarnation = incarnation
        self._lock = threading.Lock()
        saved = load_membership(config.state_dir, job)
        self._membership = saved.membership if saved else None
        self._start_s = config.start_time_monotonic_s
        if self._start_s is None and saved and math.isfinite(saved.start_time_monotonic_s):
            self._start_s = saved.start_time_monotonic_s
        self._clock_lock = threading.Lock()
        self._pending_records: list[ProgressRecord] = []
        """Records given to `report` before the start of the run was known."""
        self._created_s = time.monotonic()
        self._clock_origin_s = self.start_time_monotonic_s()
        self._stop_reason: str | None = None
        self._error: DLionError | None = None
        self._closing = False
        self._streams: list[JoinStream] = []
        self._announcement: Announcement | None = None
        self._on_membership: Callable[[Membership], None] = lambda _: None
        self._on_bundles: Callable[[Mapping[SiteName, bytes]], None] | None = None
        self._channels = [open_channel(config)]
        """The newest one is in use; older ones are closed once it works."""
        self._stub = coordination_stub(self._channels[0])
        self._sender = ReportSender(
            self._stub,
            self._caller,
            incarnation,
            on_stop=self._set_stop_reason,
            on_failure=self._handle_failure,
        )

    def join(
        self,
        exchange_address: str,
        measuring_address: str,
        on_membership: Callable[[Membership], None],
        on_bundles: Callable[[Mapping[SiteName, bytes]], None] | None = None,
    ) -> None:
        """Join in the background and stay joined; call again to announce other addresses.

        Another thread calls `on_membership` for every change, one call at a time, first with the
        saved membership if there is one. `on_bundles` likewise receives the sites' authorities,
        before the membership that comes with them. Neither may block or raise.
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
        """Move to a new connection, which shows the coordinator's current certificate.

        The worker stays joined: streams on the old connection end after it has joined on the new
        one. Raises: OSError (the authority's file cannot be read).
        """
        channel = open_channel(self._config)
        with self._lock:
            self._channels.append(channel)
            self._stub = coordination_stub(channel)
            self._sender.stub = self._stub
            announcement = self._announcement
        if announcement is not None:
            self._announce(announcement)

    def _announce(self, announcement: Announcement) -> None:
        """Join with a new stream, on the newest connection."""
        with self._lock:
            earlier, channels = list(self._streams), self._channels[:-1]

            def take(update: coordination_pb2.MembershipUpdate) -> None:
                self._retire(earlier, channels)
                self._handle_update(update)

            stream = JoinStream(
                self._stub,
                announcement,
                known_version=self._known_version,
                on_update=take,
                on_failure=self._handle_failure,
            )
            self._streams.append(stream)
        for each in earlier:
            each.supersede()
        stream.start()

    def _retire(self, streams: list[JoinStream], channels: list[grpc.Channel]) -> None:
        """Close streams and channels after a later stream has joined, in that stream's thread."""
        with self._lock:
            self._streams = [each for each in self._streams if each not in streams]
            self._channels = [each for each in self._channels if each not in channels]
        while streams:
            streams.pop().close()
        while channels:
            channels.pop().close()

    def report(self, records: Iterable[ProgressRecord]) -> None:
        """Queue records and return; when the queue is full, steps and links are dropped first.

        Times in records count from `start_time_monotonic_s` as it was when this client was made.
        They are sent relative to the run's start, so a new worker waits for the first update of the
        coordinator. Raises: ContractError (a record cannot be sent (`dlion_api.protocol.records`):
        a defect of the caller).
        """
        with self._clock_lock:
            if self._start_s is None and self._membership is None:
                self._pending_records += records
            else:
                self._sender.put(map(self._on_run_clock, records))

    def membership(self) -> Membership | None:
        """The coordinator's last membership, or the saved one until there is an update."""
        return self._membership

    def stop_reason(self) -> str | None:
        """Why the coordinator asks the run to stop; None if it does not."""
        return self._stop_reason

    def failure(self) -> DLionError | None:
        """Why the coordinator rejects this incarnation permanently; None if it does not."""
        return self._error

    def connected(self) -> bool:
        return any(stream.connected for stream in self._streams)

    def start_time_monotonic_s(self) -> float:
        """`time.monotonic()` at the start of the run, according to the runner or the coordinator.

        Until either is known: when this client was made.
        """
        return self._created_s if self._start_s is None else self._start_s

    def close(
        self,
        *,
        finished: bool = False,
        flush_s: float = FLUSH_S,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Send the last records, and "finished". True if the coordinator accepted all.

        Not `finished`: a restart follows, and the coordinator reports this worker lost.
        `interrupted`: whether this worker was asked to end, so that it waits for `flush_s` only.
        """
        self._closing = True
        self._send_pending()
        taken = self._sender.close(flush_s=flush_s, finished=finished, interrupted=interrupted)
        with self._lock:
            streams, channels = list(self._streams), list(self._channels)
        for stream in streams:
            stream.close()
        for channel in channels:
            channel.close()
        return taken

    def _known_version(self) -> int:
        return 0 if self._membership is None else self._membership.version

    def _handle_update(self, update: coordination_pb2.MembershipUpdate) -> None:
        """Handle an update; runs in the join threads."""
        with self._lock:
            if math.isfinite(update.elapsed_s) and self._config.start_time_monotonic_s is None:
                # An update may wait before this process reads it: the time can be too long, never
                # too short.
                self._set_start(time.monotonic() - update.elapsed_s)
            if update.stop_reason:
                self._set_stop_reason(update.stop_reason)
            if update.site_bundles_pem and self._on_bundles is not None:
                bundles = update.site_bundles_pem.items()
                self._on_bundles({SiteName(site): bytes(pem) for site, pem in bundles})
            received = _membership(self._caller.job, update)
            if received.version < self._known_version():
                return  # from a superseded stream
            membership = merge_memberships(self._membership, received)
            if membership == self._membership:
                return
            self._membership = membership
            self._save(membership)
            self._on_membership(membership)

    def _set_start(self, start_s: float) -> None:
        with self._clock_lock:
            self._start_s = start_s if self._start_s is None else min(self._start_s, start_s)
        self._send_pending()

    def _send_pending(self) -> None:
        with self._clock_lock:
            records, self._pending_records = self._pending_records, []
            self._sender.put(map(self._on_run_clock, records))

    def _on_run_clock(self, record: ProgressRecord) -> ProgressRecord:
        """The record with its time relative to the run's start."""
        later_s = self._clock_origin_s - self.start_time_monotonic_s()
        return replace(record, time_s=record.time_s + later_s) if later_s else record

    def _save(self, membership: Membership) -> None:
        try:
            save_membership(
                self._config.state_dir, SavedMembership(membership, self.start_time_monotonic_s())
            )
        except OSError as error:
            _LOG.warning("membership %d not saved: %s", membership.version, error)

    def _set_stop_reason(self, reason: str) -> None:
        if self._stop_reason is None:
            self._stop_reason = reason

    def _handle_failure(self, failure: CallFailure) -> None:
        """Handle a permanent rejection: this incarnation cannot continue."""
        if self._closing:
            return  # it ends anyway; the coordinator answers late requests with "has finished"
        never_admitted = not self._admitted()
        if failure.reason is RefusalReason.OLD_INCARNATION and never_admitted:
            # This worker was not replaced, but lost its counter: the next start succeeds.
            self._save_incarnation(failure.known_incarnation or 0)
        text = f"{self._worker.name}, incarnation {self._incarnation}: {failure.message}"
        if failure.reason is RefusalReason.REVOKED:
            # Without a certificate the next start waits for one, which it gets once it is trusted
            # again. Until then its peers are as they were.
            delete_credentials(self._config.state_dir)
            delete_membership(self._config.state_dir)
            self._error = UnavailableError(text)
        else:
            self._error = ContractError(text)
        _LOG.error("%s", self._error)

    def _save_incarnation(self, known: int) -> None:
        try:
            raise_incarnation(self._config.state_dir, known)
        except OSError as error:
            _LOG.warning("incarnation %d not saved: %s", known, error)

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
        view.revoked,
    )
