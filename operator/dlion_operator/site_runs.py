"""The runs that this site's coordinator serves, as reconciling sees them.

Joins the coordinator, the progress that comes in through it, and the stop condition that only the
whole job can judge. Its methods are called in the operator's event loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.progress import EvaluationRecord, EventRecord, ProgressRecord
from dlion_api.spec import Job
from dlion_operator.authority import Authority
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.served_run import Signer, TokenVerifier
from dlion_operator.decisions import Notice
from dlion_operator.exposure import Addresses, told_elsewhere
from dlion_operator.federation.reports import Figures, LinksTo, RunReport, SiteWorkers, SpecPrint
from dlion_operator.job_authority import JobAuthority, NamedAuthority
from dlion_operator.observed import KNOWN_AFTER_S, NOTHING_KNOWN, RunView
from dlion_operator.other_sites import (
    Neighbours,
    believed,
    drift,
    failed_elsewhere,
    judged_replicas,
    members_elsewhere,
    remote_views,
    seen_from_outside,
    too_few_go_on,
    with_pairs,
    without_the_run,
    workers_of_all,
)
from dlion_operator.progress import RunProgress
from dlion_operator.refused_callers import RefusedCallers
from dlion_operator.run_trust import Bundles, known, same_keys
from dlion_operator.served import Served
from dlion_operator.statuses import as_kubernetes
from dlion_operator.store import ObjectName
from dlion_operator.target import TargetWatch
from dlion_operator.worker_news import WorkerNews

_LOG = logging.getLogger(__name__)

LINKS_EVERY_S = 5.0
"""So often links are counted: there may be very many."""


class SiteRuns:
    """A `dlion_operator.reconcile.Runs`."""

    def __init__(
        self,
        server: CoordinatorServer,
        *,
        authority: Authority,
        tokens: TokenVerifier,
        trigger: Callable[[ObjectName], None],
    ) -> None:
        """`trigger` is called where a job's situation may have changed."""
        self._server = server
        self._authority = authority
        self._tokens = tokens
        self._trigger = trigger
        self._neighbours: Neighbours | None = None
        self._served: dict[JobKey, Served] = {}
        self.refused_callers = RefusedCallers(self._served, trigger)
        server.on_refused(self.refused_callers.at_coordinator)
        server.on_keeper_refused(self.refused_callers.at_keeper)

    def federate(self, neighbours: Neighbours) -> None:
        """Runs are held against what other sites say from now on."""
        self._neighbours = neighbours

    def open(
        self,
        job: Job,
        workers: tuple[WorkerIdentity, ...],
        *,
        spec_hash: str,
        age_s: float,
        failed: frozenset[Rank] = frozenset(),
        addresses: Addresses | None = None,
        authority: NamedAuthority | None = None,
        kept_bundles: Bundles = MappingProxyType({}),
    ) -> None:
        key = job.key
        if key in self._served:
            self._served[key].addresses = addresses
            self._take_over(key, job, workers, failed)
            self._renew_trust(key, authority)
            return
        self._close_but(key, key.namespace, key.name)
        own, spec_print = self._authority.site, SpecPrint.of(job)
        everybody = workers_of_all(workers, own, spec_print, self._reports_of(job))
        served = self._served[key] = Served(
            job,
            spec_print,
            workers,
            everybody,
            RunProgress(job),
            TargetWatch(job.spec.trainer.stop.target_accuracy, [w.rank for w in everybody]),
            WorkerNews(everybody),
            time.monotonic(),
            failed,
            addresses,
            JobAuthority(own, bundle_pem=kept_bundles.get(own, b"")) if authority else None,
            kept_bundles,
        )
        served.progress.expect(everybody)
        self._server.open(
            job,
            workers=self._awaited(served),
            spec_hash=spec_hash,
            authorities=self._signers(served),
            bundles={} if authority else None,
            tokens=self._tokens,
            on_record=lambda record: self._take(key, record),
            start_time_monotonic_s=time.monotonic() - age_s,
        )
        self._renew_trust(key, authority)
        _LOG.info("run %s is served", key)
        self.hear(key)

    def _signers(self, served: Served) -> dict[SiteName, Signer]:
        """Who signs for this site's workers of that run; empty: its links are open."""
        if served.job.spec.tls.mode == "Disabled":
            return {}
        return {self._authority.site: served.authority or self._authority}

    def _renew_trust(self, run: JobKey, named: NamedAuthority | None = None) -> None:
        """Where that job names authorities: its workers know each other by what these are now.

        `named` is what there is of this site's; None: as it was.
        """
        served = self._served[run]
        if served.authority is None:
            return
        own, now = self._authority.site, datetime.now(UTC)
        authority = served.authority.followed_by(named, now) if named else served.authority
        told = {site: each.bundle_pem for site, each in self._reports_of(served.job).items()}
        kept = {**served.kept_bundles, **served.bundles}
        sites = [own, *filter(self._is_trusted, (SiteName(s.name) for s in served.job.spec.sites))]
        found = known(sites, {**told, own: authority.bundle_pem}, kept, now)
        served.same_keys = same_keys(found, own, kept, served.kept_bundles)
        bundles = {site: each for site, each in found.items() if site not in served.same_keys}
        if (authority, bundles) != (served.authority, served.bundles):
            served.authority, served.bundles = authority, bundles
            self._server.trust_in(run, authority, bundles)
            for site, other in same_keys(bundles, own, {}).items():
                _LOG.warning(
                    "run %s: %s is believed in this run only: its authority has the key of %s's",
                    run,
                    site,
                    other,
                )

    def _is_trusted(self, site: SiteName) -> bool:
        """Whether another site is believed here at all: its runs' authorities stand on its own."""
        return self._neighbours is not None and self._neighbours.has_bundle(site)

    def replace_authority(self, authority: Authority) -> None:
        """Signs with that one from now on.

        It has the key of the one before, by whose certificate pods of older runs know it still.
        """
        self._authority = authority
        self._server.replace_authority(authority)

    def _take_over(
        self,
        run: JobKey,
        job: Job,
        workers: tuple[WorkerIdentity, ...],
        failed: frozenset[Rank],
    ) -> None:
        """The manifest may have changed in mid-run: other counts, another quorum."""
        served = self._served[run]
        is_other = served.job != job
        if is_other:
            served.job, served.spec_print = job, SpecPrint.of(job)
        served.wanted, served.failed = workers, failed
        self._rescale(run)
        if is_other:
            self.hear(run)  # what was kept out may come in now
        else:
            self._judge(run)

    def _rescale(self, run: JobKey) -> None:
        """Takes over another count of workers in mid-run."""
        served = self._served[run]
        reports = self._reports_of(served.job)
        everybody = workers_of_all(served.wanted, self._authority.site, served.spec_print, reports)
        if served.workers != everybody:
            served.workers = everybody
            served.progress.expect(everybody)
            served.news.expect(everybody)
        self._server.expect(run, self._awaited(served))

    def _awaited(self, served: Served) -> tuple[WorkerIdentity, ...]:
        """The workers that others wait for: without those that failed for good anywhere."""
        failed = served.failed | failed_elsewhere(self._reports_of(served.job))
        return tuple(worker for worker in served.workers if worker.rank not in failed)

    def hear(self, run: JobKey) -> None:
        """Other sites say something new of that run."""
        served = self._served.get(run)
        if served is None:
            return
        self._rescale(run)
        self._renew_trust(run)
        reports, membership = self._reports_of(served.job), self._server.membership(run)
        self._server.tell_others(
            run, members_elsewhere(self._authority.site, served.spec_print, reports, membership)
        )
        is_over = served.is_over or served.progress.stop_reason
        if not is_over and (reason := too_few_go_on(served.job, reports)):
            self.stop(run, reason)
        self._judge(run)
        self._trigger(ObjectName(run.namespace, run.name))

    def _judge(self, run: JobKey) -> None:
        """Whether the replicas that count are accurate enough: who counts may have changed."""
        served = self._served[run]
        if served.job.spec.trainer.stop.target_accuracy is None or served.is_over:
            return
        reports, membership = self._reports_of(served.job), self._server.membership(run)
        counted = judged_replicas(
            served.workers,
            served.spec_print,
            reports,
            membership,
            self._without_run(served.job, reports),
        )
        served.target.expect(set(counted) - self._left(served))
        let_in = {member.identity.rank for member in membership.members}
        others = {
            rank: accuracy
            for report in reports.values()
            for rank, accuracy in report.workers.accuracies.items()
            if rank in let_in
        }
        reason = served.target.take_others(others)
        if reason and not served.progress.stop_reason:
            self.stop(run, reason)

    def _without_run(self, job: Job, reports: Mapping[SiteName, RunReport]) -> frozenset[SiteName]:
        """Other sites that are known not to have this run."""
        if self._neighbours is None:
            return frozenset()
        return without_the_run(job, self._authority.site, reports, self._neighbours.hearing)

    def _left(self, served: Served) -> frozenset[Rank]:
        """Workers of this site that will not come again."""
        if not served.is_over:
            return served.failed
        return frozenset(w.rank for w in served.workers if w.site == self._authority.site)

    def reports(self) -> dict[JobKey, RunReport]:
        """What other sites are to know of the runs that are served here."""
        return {run: self._report(run, served) for run, served in self._served.items()}

    def _report(self, run: JobKey, served: Served) -> RunReport:
        own, progress = self._authority.site, served.progress
        members = [m for m in self._server.membership(run).members if m.identity.site == own]
        ranks = {member.identity.rank for member in members}
        accuracies = {rank: a for rank, a in served.target.accuracies.items() if rank in ranks}
        reached = told_elsewhere(members, served.addresses)
        has_heard_all = time.monotonic() - served.opened_s >= KNOWN_AFTER_S
        workers = SiteWorkers(
            tuple(worker for worker in served.workers if worker.site == own),
            reached,
            settled=has_heard_all and len(reached) == len(members),
            accuracies=accuracies,
            left=self._left(served),
        )
        rate = progress.samples_per_s()
        figures = Figures(
            progress.training,
            progress.iteration(),
            rate if math.isfinite(rate) else 0.0,
            self._links_to(run, served),
        )
        bundle_pem = served.authority.bundle_pem if served.authority else b""
        return RunReport(served.spec_print, workers, figures, bundle_pem)

    def _links_to(self, run: JobKey, served: Served) -> tuple[LinksTo, ...]:
        """Of this site's workers to other sites', as they were a few seconds ago at most."""
        now_s = time.monotonic()
        if now_s - served.linked_s >= LINKS_EVERY_S:
            membership = self._server.membership(run)
            served.links = served.progress.links_to(self._authority.site, membership)
            served.linked_s = now_s
        return served.links

    def _reports_of(self, job: Job) -> Mapping[SiteName, RunReport]:
        """What other sites say of that run, as far as it is theirs to say."""
        if self._neighbours is None:
            return {}
        return believed(job, self._authority.site, self._neighbours.reports(job.key))

    def stop(self, run: JobKey, reason: str) -> None:
        if (served := self._served.get(run)) is not None and not served.stop_reason:
            served.stop_reason = reason
            self._server.stop(run, reason)

    def finish(self, run: JobKey, reason: str, *, succeeded: bool) -> None:
        if run in self._served:
            self._served[run].is_over = True
            self._server.finish(run, reason, succeeded=succeeded)

    def close(self, namespace: str, name: str) -> None:
        self._close_but(None, namespace, name)

    def view(self, run: JobKey) -> RunView | None:
        served = self._served.get(run)
        if served is None:
            return None
        membership = self._server.membership(run)
        ready = Counter(member.identity.site for member in membership.ready())
        now_s = time.monotonic()
        served.seen_s |= {member.identity.name: now_s for member in membership.ready()}
        view = RunView(
            open_s=now_s - served.opened_s,
            ready=ready,
            away_s={name: now_s - seen_s for name, seen_s in served.seen_s.items()},
            training=served.progress.training,
            gathered_s=served.gathered_for_s(now_s, ready.total()),
            stop_reason=served.progress.stop_reason or served.stop_reason,
            trainer_status=served.progress.trainer_status(as_kubernetes(datetime.now(UTC))),
            steps_per_second=served.progress.steps_per_second(),
            links=served.progress.links(membership),
            iteration=served.progress.iteration(),
            samples_per_s=served.progress.samples_per_s(),
            linked=served.progress.linked(membership),
            bundles=served.bundles,
        )
        own, neighbours = self._authority.site, self._neighbours
        if neighbours is None:
            return view
        reports = neighbours.reports(run)
        return replace(
            view,
            links=with_pairs(served.job, own, view.links, self._links_to(run, served), reports),
            remote=remote_views(served.job, own, served.spec_print, neighbours, served.same_keys),
            drift=drift(served.job, own, served.spec_print, reports),
        )

    def elsewhere(self, run: JobKey, sites: Collection[SiteName]) -> RunView:
        if self._neighbours is None:
            return NOTHING_KNOWN
        others = [site for site in sites if site != self._authority.site]
        return seen_from_outside(run, others, self._neighbours)

    def news(self, run: JobKey) -> tuple[Notice, ...]:
        served = self._served.get(run)
        return () if served is None else served.news.due(time.monotonic())

    def authority_pem(self) -> str:
        return self._server.authority_pem.decode()

    def refusals(self) -> Mapping[str, int]:
        """Refused calls by reason since the start."""
        return {str(reason): count for reason, count in self._server.refusals().items()}

    def keeper_refusals(self) -> Mapping[JobKey, Mapping[str, int]]:
        """By run and reason, since each keeper began."""
        return self._server.keeper_refusals()

    def calls(self) -> Mapping[str, int]:
        """Calls by name since the start."""
        return self._server.calls()

    def _close_but(self, kept: JobKey | None, namespace: str, name: str) -> None:
        for key in [k for k in self._served if (k.namespace, k.name) == (namespace, name)]:
            if key != kept:
                del self._served[key]
                self._server.close(key)
                _LOG.info("run %s is served no more", key)

    def _take(self, key: JobKey, record: ProgressRecord) -> None:
        served = self._served.get(key)
        if served is None:
            return
        served.progress.take(record)
        served.news.take(record)
        if isinstance(record, EvaluationRecord):
            served.target.take(record)
            self._judge(key)
        if isinstance(record, EventRecord):
            self._trigger(ObjectName(key.namespace, key.name))
