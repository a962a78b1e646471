"""The runs that this site's coordinator serves, as the reconciler uses them.

Also checks the job's target accuracy. All methods run in the operator's event loop.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.accusations import quarantine_reason
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, ProgressRecord
from dlion_api.spec import Job
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.served_run import Signer, TokenVerifier
from dlion_operator.federation.node import FederationNode
from dlion_operator.federation.reports import (
    LinksTo,
    ReportedWorkers,
    RunReport,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.model.job_view import format_time
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.job_authority import JobAuthority
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.pki.run_trust import shared_keys, trusted_bundles
from dlion_operator.plan.decisions import JobEvent, OpenRun
from dlion_operator.plan.objects.exposure import advertised_members
from dlion_operator.plan.observed import ALL_HEARD_AFTER_S, EMPTY_RUN_VIEW, RunView
from dlion_operator.served_runs.progress import RunProgress
from dlion_operator.served_runs.refused_callers import RefusedCallers
from dlion_operator.served_runs.remote_sites import RemoteReports, remote_views, unserved_run_view
from dlion_operator.served_runs.revocations import RunRevocations
from dlion_operator.served_runs.site_run_state import SiteRunState
from dlion_operator.served_runs.target_accuracy import TargetAccuracyMonitor
from dlion_operator.served_runs.worker_events import OBSERVED_REASONS, WorkerEvents

_LOG = logging.getLogger(__name__)

LINK_COUNT_INTERVAL_S = 5.0
"""Interval of counting links: there may be very many."""


class SiteRuns:
    """The coordinator, as the reconciler uses it."""

    def __init__(
        self,
        server: CoordinatorServer,
        *,
        authority: CertificateAuthority,
        tokens: TokenVerifier,
        trigger: Callable[[ObjectName], None],
    ) -> None:
        """`trigger` is called when a job's phase may have changed."""
        self._server = server
        self._authority = authority
        self._tokens = tokens
        self._trigger = trigger
        self._federation: FederationNode | None = None
        self._served: dict[JobKey, SiteRunState] = {}
        self.refused_callers = RefusedCallers(self._served, trigger)
        server.service.on_refused = self.refused_callers.at_coordinator
        server.on_keeper_refused = self.refused_callers.at_keeper

    def federate(self, federation: FederationNode) -> None:
        """Take the reports of other sites into account from now on."""
        self._federation = federation

    def open(self, action: OpenRun) -> None:
        """Serve that run with these workers, and close other runs of the same job."""
        job, authority, key = action.job, action.authority, action.job.key
        if key in self._served:
            self._update_run(key, action)
            self._update_trust(key, authority)
            return
        self.close(key.namespace, key.name)
        own, spec_fingerprint = self._authority.site, SpecFingerprint.of(job)
        job_workers = self._remote(job, spec_fingerprint).all_workers(action.workers)
        served = self._served[key] = SiteRunState(
            job,
            spec_fingerprint,
            action.workers,
            job_workers,
            RunProgress(job),
            TargetAccuracyMonitor.of(job, job_workers),
            WorkerEvents(job_workers),
            time.monotonic(),
            action.failed,
            action.addresses,
            JobAuthority(own, bundle_pem=action.kept_bundles.get(own, b"")) if authority else None,
            RunRevocations(own, action.kept_revocations),
            action.kept_bundles,
        )
        served.revocations.set_own(action.revocations)
        self._server.open(
            job,
            workers=self._expected_workers(served),
            spec_hash=action.spec_hash,
            authorities=self._signers(served),
            bundles={} if authority else None,
            tokens=self._tokens,
            on_record=lambda record: self._take(key, record),
            start_time_monotonic_s=time.monotonic() - action.age_s,
            job_uid=action.job_uid,
        )
        self._update_trust(key, authority)
        _LOG.info("run %s is served", key)
        self.update_remote(key)

    def _signers(self, served: SiteRunState) -> dict[SiteName, Signer]:
        """Return the signers for this site's workers. Empty: TLS is disabled."""
        if served.job.spec.tls.mode == "Disabled":
            return {}
        return {self._authority.site: served.authority or self._authority}

    def _update_trust(self, run: JobKey, named: NamedAuthority | None = None) -> None:
        """Update the bundles by which workers trust each other, where the job names an authority.

        `named` is the current state of this site's authority; None: unchanged.
        """
        served = self._served[run]
        if served.authority is None:
            return
        own, now = self._authority.site, datetime.now(UTC)
        authority = served.authority.updated_with(named, now) if named else served.authority
        reported = {site: each.bundle_pem for site, each in self._remote_of(served).by_site.items()}
        kept = {**served.kept_bundles, **served.bundles}
        sites = [own, *filter(self._is_trusted, (SiteName(s.name) for s in served.job.spec.sites))]
        trusted = trusted_bundles(sites, {**reported, own: authority.bundle_pem}, kept, now)
        served.shared_keys = shared_keys(trusted, own, kept, served.kept_bundles)
        bundles = {site: each for site, each in trusted.items() if site not in served.shared_keys}
        if (authority, bundles) != (served.authority, served.bundles):
            served.authority, served.bundles = authority, bundles
            self._server.runs[run].replace_authority(authority)
            self._server.runs[run].trust(bundles)
            for site, other in shared_keys(bundles, own, {}).items():
                message = "run %s: %s is trusted in this run only: its authority has %s's key"
                _LOG.warning(message, run, site, other)

    def _is_trusted(self, site: SiteName) -> bool:
        """Whether another site is trusted. Authorities of its runs depend on its own one."""
        return self._federation is not None and self._federation.has_bundle(site)

    def replace_authority(self, authority: CertificateAuthority) -> None:
        """Sign with this authority. Pods of older runs still trust the previous one, which has the
        same key."""
        self._authority = authority
        self._server.replace_authority(authority)

    def _update_run(self, run: JobKey, action: OpenRun) -> None:
        """Apply a manifest that may have changed during the run."""
        served = self._served[run]
        is_other, before = served.job != action.job, served.revocations.effective()
        if is_other:
            served.job, served.spec_fingerprint = action.job, SpecFingerprint.of(action.job)
        served.addresses = action.addresses
        served.wanted, served.failed = action.workers, action.failed
        served.revocations.set_own(action.revocations)
        self._rescale(run)
        if is_other or served.revocations.effective() != before:
            self.update_remote(run)  # members that were rejected may now match, or be trusted again
        else:
            self._check_target_accuracy(run)

    def _rescale(self, run: JobKey) -> None:
        served = self._served[run]
        remote = self._remote_of(served)
        served.revocations.set_remote(remote.by_site)
        job_workers = remote.all_workers(served.wanted)
        if served.workers != job_workers:
            served.workers = job_workers
            served.events.expect(job_workers)
        if (trusted := served.trusted_workers) != served.counted_workers:
            served.counted_workers = trusted
            served.progress.expect(trusted)
        if events := served.revocations.changes():
            for event in events:
                served.events.add(event, kind=event.message)
            self._trigger(ObjectName(run.namespace, run.name))
        self._server.runs[run].revoke(served.revocations.effective(), job_workers)
        self._server.runs[run].expect(self._expected_workers(served))

    def _expected_workers(self, served: SiteRunState) -> tuple[WorkerIdentity, ...]:
        """The workers that others wait for: all but those that failed permanently at any site."""
        failed = served.failed | self._remote_of(served).failed_ranks()
        return tuple(worker for worker in served.trusted_workers if worker.rank not in failed)

    def update_remote(self, run: JobKey) -> None:
        """Apply new reports of other sites on that run."""
        served = self._served.get(run)
        if served is None:
            return
        self._rescale(run)
        self._update_trust(run)
        remote, membership = self._remote_of(served), self._server.membership(run)
        self._server.runs[run].update_remote_members(remote.members(membership))
        is_over = served.is_over or served.progress.stop_reason
        if not is_over and (reason := remote.over_reason()):
            self.stop(run, reason)
        self._check_target_accuracy(run)
        self._trigger(ObjectName(run.namespace, run.name))

    def _check_target_accuracy(self, run: JobKey) -> None:
        """Stop the run once the counted replicas, which may have changed, are accurate enough."""
        served = self._served[run]
        if served.job.spec.trainer.stop.target_accuracy is None or served.is_over:
            return
        remote, membership = self._remote_of(served), self._server.membership(run)
        absent = frozenset[SiteName]()  # other sites that are known not to have this run
        if self._federation is not None:
            absent = remote.sites_without_run(self._federation.reachability)
        counted = remote.counted_replicas(served.trusted_workers, membership, absent)
        served.target.expect(set(counted) - self._ended_ranks(served))
        admitted = {member.identity.rank for member in membership.members}
        others = {
            rank: accuracy
            for report in remote.by_site.values()
            for rank, accuracy in report.workers.accuracies.items()
            if rank in admitted
        }
        reason = served.target.take_others(others)
        if reason and not served.progress.stop_reason:
            self.stop(run, reason)

    def _ended_ranks(self, served: SiteRunState) -> frozenset[Rank]:
        if not served.is_over:
            return served.failed
        return frozenset(w.rank for w in served.workers if w.site == self._authority.site)

    def reports(self) -> dict[JobKey, RunReport]:
        """What this site reports to the others."""
        return {run: self._report(run, served) for run, served in self._served.items()}

    def _report(self, run: JobKey, served: SiteRunState) -> RunReport:
        own, progress = self._authority.site, served.progress
        members = [m for m in self._server.membership(run).members if m.identity.site == own]
        ranks = {member.identity.rank for member in members}
        accuracies = {rank: a for rank, a in served.target.accuracies.items() if rank in ranks}
        reachable = advertised_members(members, served.addresses)
        has_heard_all = time.monotonic() - served.opened_s >= ALL_HEARD_AFTER_S
        workers = ReportedWorkers(
            tuple(worker for worker in served.workers if worker.site == own),
            reachable,
            settled=has_heard_all and len(reachable) == len(members),
            accuracies=accuracies,
            left=self._ended_ranks(served),
        )
        rate = progress.samples_per_s()
        rate = rate if math.isfinite(rate) else 0.0
        links = self._links_to(run, served)
        figures = TrainingFigures(progress.training, progress.iteration(), rate, links)
        bundle_pem = served.authority.bundle_pem if served.authority else b""
        return RunReport(
            served.spec_fingerprint, workers, figures, bundle_pem, served.revocations.own
        )

    def _links_to(self, run: JobKey, served: SiteRunState) -> tuple[LinksTo, ...]:
        """Links from this site's workers to other sites, at most a few seconds old."""
        now_s = time.monotonic()
        if now_s - served.linked_s >= LINK_COUNT_INTERVAL_S:
            membership = self._server.membership(run)
            served.links = served.progress.links_to(self._authority.site, membership)
            served.linked_s = now_s
        return served.links

    def _remote_of(self, served: SiteRunState) -> RemoteReports:
        return self._remote(served.job, served.spec_fingerprint)

    def _remote(self, job: Job, spec_fingerprint: SpecFingerprint) -> RemoteReports:
        """The reports of other sites on that run, limited to what each may report."""
        reports = {} if self._federation is None else self._federation.reports(job.key)
        return RemoteReports(self._authority.site, job, spec_fingerprint, reports).trusted()

    def stop(self, run: JobKey, reason: str) -> None:
        if (served := self._served.get(run)) is not None and not served.stop_reason:
            served.stop_reason = reason
            self._server.runs[run].stop(reason)

    def finish(self, run: JobKey, reason: str, *, succeeded: bool) -> None:
        if run in self._served:
            self._served[run].is_over = True
            self._server.runs[run].finish(reason, succeeded=succeeded)

    def close(self, namespace: str, name: str) -> None:
        for key in [k for k in self._served if (k.namespace, k.name) == (namespace, name)]:
            del self._served[key]
            self._server.close(key)
            _LOG.info("run %s is no longer served", key)

    def view(self, run: JobKey) -> RunView | None:
        """Return what is known of the run, or None if it is not served."""
        served = self._served.get(run)
        if served is None:
            return None
        membership = self._server.membership(run)
        ready = Counter(member.identity.site for member in membership.ready())
        now_s = time.monotonic()
        served.last_present_s |= {member.identity.name: now_s for member in membership.ready()}
        view = RunView(
            open_s=now_s - served.opened_s,
            ready=ready,
            report_age_s={
                name: now_s - last_present_s
                for name, last_present_s in served.last_present_s.items()
            },
            training=served.progress.training,
            all_joined_s=served.gathered_for_s(now_s, ready.total()),
            stop_reason=served.progress.stop_reason or served.stop_reason,
            trainer_status=served.progress.trainer_status(format_time(datetime.now(UTC))),
            steps_per_second=served.progress.steps_per_second(),
            links=served.progress.links(membership),
            iteration=served.progress.iteration(),
            samples_per_s=served.progress.samples_per_s(),
            linked=served.progress.linked(membership),
            bundles=served.bundles,
            revocations=served.revocations.all(),
            downloads=self._server.downloads(run),
        )
        own, federation = self._authority.site, self._federation
        if federation is None:
            return view
        remote = RemoteReports(own, served.job, served.spec_fingerprint, federation.reports(run))
        return replace(
            view,
            links=remote.with_site_pairs(view.links, self._links_to(run, served)),
            remote=remote_views(
                served.job, own, served.spec_fingerprint, federation, served.shared_keys
            ),
            drift=remote.spec_drift(),
        )

    def remote_view(self, run: JobKey, sites: Collection[SiteName]) -> RunView:
        """Return what other ones of these sites report of a run that is not served here."""
        if self._federation is None:
            return EMPTY_RUN_VIEW
        others = [site for site in sites if site != self._authority.site]
        return unserved_run_view(run, others, self._federation)

    def events(self, run: JobKey) -> tuple[JobEvent, ...]:
        """Return and remove the events of its workers that are due."""
        served = self._served.get(run)
        events = () if served is None else served.events.pop_due(time.monotonic())
        # The others are made of records, which the keeper has already.
        self.note(run, [each for each in events if each.reason in OBSERVED_REASONS])
        return events

    def note(self, run: JobKey, events: Iterable[JobEvent]) -> None:
        """Add events of the operator to the run's records, once where they are repeated.

        The API server drops its own after an hour. Nothing happens if the run is not served.
        """
        if (served := self._served.get(run)) is None or served.is_over:
            return
        # The same ones are decided at each attempt to write the status.
        if not (notes := tuple(events)) or notes == served.last_notes:
            return
        before, served.last_notes = served.last_notes[-1:], notes
        for event in notes:
            if (event,) != before:
                is_warning = event.type == "Warning"
                self._server.runs[run].note(event.reason, event.message, warning=is_warning)
            before = (event,)

    def authority_pem(self) -> str:
        """Return the certificate by which workers trust the coordinator."""
        return self._server.authority_pem.decode()

    def _take(self, key: JobKey, record: ProgressRecord) -> None:
        if (served := self._served.get(key)) is None:
            return
        served.progress.take(record)
        served.events.take(record)
        if isinstance(record, EvaluationRecord):
            served.target.take(record)
            self._check_target_accuracy(key)
        if isinstance(record, EventRecord):
            if served.job.spec.exchange.quarantine != "off":
                self._take_accusation(key, record)
            self._trigger(ObjectName(key.namespace, key.name))

    def _take_accusation(self, run: JobKey, record: EventRecord) -> None:
        """Quarantine a worker once most of the others at this site have named it."""
        served = self._served[run]
        ready = self._server.membership(run).ready()
        here = [m.identity.rank for m in ready if m.identity.site == self._authority.site]
        trusted = {worker.rank: worker for worker in served.trusted_workers}
        accused = served.accusations.take(record, here=here, known=trusted.keys())
        if accused is None:
            return
        reason = quarantine_reason(record)
        if served.revocations.quarantine(trusted[accused].name, reason):
            self._rescale(run)
