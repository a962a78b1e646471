"""One run of a job at this site, as its manifest and its Jobs define it. Pure.

Pods get the sizes of all groups when their Jobs are created, and keep them when a group is scaled.
Ranks by group do not depend on them (`dlion_api.spec.ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.revocation import (
    Revocation,
    RevocationInEffect,
    revocation_of,
)
from dlion_api.spec import Job
from dlion_api.spec.sites import Group, workers_of
from dlion_operator.children.pods import owner_of
from dlion_operator.children.workload import group_pod_set
from dlion_operator.model.initial_group_sizes import from_json, with_group_sizes
from dlion_operator.model.job_view import WorkerJobView, parse_time
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import SiteRuntime, kept_runtime
from dlion_operator.model.workload_view import QueueState
from dlion_operator.pki.named_authority import NamedAuthority, names_authority
from dlion_operator.plan.observed import (
    EMPTY_RUN_VIEW,
    Observed,
    PodView,
    RemoteView,
    RunView,
    given_revocations,
    last_known_revocations,
    revocations_in,
)

NOT_READ = NamedAuthority(None, "the authority that tls names has not been read yet")


@dataclass(frozen=True)
class Run:
    """The run that a manifest requests, its current objects, and what else is observed."""

    job: Job
    """The job with the group sizes from the start of the run."""
    wanted: Mapping[str, int]
    """Desired size of each group of this site."""
    site: SiteName
    jobs: Mapping[str, WorkerJobView]
    """Jobs by group."""
    pods: Sequence[PodView]
    keepers: Sequence[PodView]
    """Its keeper's pods: one, and possibly others that terminate."""
    other_runs: Sequence[WorkerJobView]
    observed: Observed
    settings: Settings
    """The settings, with the DLionRuntime of the run's pods."""

    @classmethod
    def of(cls, job: Job, observed: Observed, settings: Settings) -> Run:
        """Build the run that `job` requests at this site from the observed objects."""
        site = SiteName(settings.site)
        views = [WorkerJobView(document) for document in observed.jobs]
        run_id = job.key.run_id
        jobs = {view.group: view for view in views if view.run_id == run_id}
        pods = [pod for pod in map(PodView, observed.pods) if pod.run_id == run_id]
        current = observed.runtime.runtime if observed.runtime else None
        runtime = kept_runtime(jobs.values()) if jobs else current
        return cls(
            job=_with_initial_sizes(job, jobs, site),
            wanted={group.name: group.workers for group in groups_of(job, site)},
            site=site,
            jobs=jobs,
            pods=[pod for pod in pods if pod.component == names.WORKER],
            keepers=[pod for pod in pods if pod.component == names.KEEPER],
            other_runs=[view for view in views if view.run_id != run_id],
            observed=observed,
            settings=replace(settings, runtime=runtime),
        )

    @property
    def status(self) -> Mapping[str, Any]:
        """The current status, if it belongs to this run; else empty."""
        return status_of_run(self.observed, self.job.key.run_id)

    @property
    def view(self) -> RunView:
        """What the coordinator knows of it. Empty while it is not served."""
        return self.observed.run or EMPTY_RUN_VIEW

    @property
    def owner(self) -> Mapping[str, Any]:
        """The owner reference of its objects."""
        return owner_of(self.observed.document)

    @property
    def authority(self) -> NamedAuthority | None:
        """The state of the authority that the job names. None: it names none."""
        if not names_authority(self.job):
            return None
        return self.observed.authority or NOT_READ

    @property
    def groups(self) -> Sequence[Group]:
        """The groups with their initial sizes."""
        return groups_of(self.job, self.site)

    @property
    def is_complete(self) -> bool:
        return all(group.name in self.jobs for group in self.groups)

    @property
    def has_ended(self) -> bool:
        """Whether every group has its Job, and all have ended, apart from revoked workers."""
        jobs = self.jobs.values()
        if not self.is_complete or all(view.ended_at for view in jobs):
            return self.is_complete
        revoked = {(each.group, each.index) for each in self.revoked_workers if self._is_here(each)}
        is_over = any(view.completed_indexes for view in jobs) or bool(self.view.stop_reason)
        return is_over and all(
            view.ended_at or (view.group, index) in revoked or index in view.finished_indexes
            for view in jobs
            for index in range(view.workers)
        )

    def _is_here(self, worker: WorkerIdentity) -> bool:
        return worker.site == self.site

    @property
    def spec_hash(self) -> str:
        """The hash that its workers started with. A newer operator may fill in other defaults."""
        kept = next((v.spec_hash for v in self.jobs.values() if v.spec_hash), "")
        return kept or self.job.hash()

    @property
    def kept_bundles(self) -> Mapping[SiteName, bytes]:
        """The latest trust bundles of each site's workers, where the job names an authority."""
        text = _kept(self.jobs, names.AUTHORITIES_ANNOTATION)
        if not text:
            return {}
        # With `cryptography`, which `dlion render` does without.
        from dlion_operator.pki.run_trust import bundles_from_text

        return bundles_from_text(text)

    @property
    def own_revocations(self) -> tuple[Revocation, ...]:
        """What is revoked at this site, and which quarantines are lifted."""
        return self._parsed_revocations[0]

    @property
    def revocations_problem(self) -> str:
        """What is wrong with them. Empty: nothing."""
        return self._parsed_revocations[1]

    @property
    def _parsed_revocations(self) -> tuple[tuple[Revocation, ...], str]:
        metadata, kept = self.observed.document["metadata"], self.kept_revocations
        return given_revocations(metadata.get("annotations") or {}, kept, self.site)

    @property
    def kept_revocations(self) -> tuple[RevocationInEffect, ...]:
        """All in the status."""
        return revocations_in(self.status)

    @property
    def revocations(self) -> tuple[RevocationInEffect, ...]:
        """All that are known, by name. While the run is not served: as last known."""
        if self.observed.run is not None:
            return self.view.revocations
        return last_known_revocations(self.own_revocations, self.kept_revocations, self.site)

    @property
    def revoked_workers(self) -> tuple[WorkerIdentity, ...]:
        """Current workers of all sites that are not accepted here."""
        effective = [each for each in self.revocations if each.is_effective]
        return tuple(each for each in self.workers if revocation_of(effective, each))

    @property
    def created_at(self) -> datetime | None:
        """When the first Job of this attempt was created. Suspending does not change it."""
        return min((v.created_at for v in self.jobs.values() if v.created_at), default=None)

    @property
    def age(self) -> timedelta:
        """Time since this attempt was created. 0: it has no Job yet."""
        return self.observed.now - self.created_at if self.created_at else timedelta()

    @property
    def age_s(self) -> float:
        """Seconds since the first attempt was created, on which its records count."""
        first = parse_time((self.status.get("attempt") or {}).get("runStartTime"))
        began = first or self.created_at or self.observed.now
        return max(0.0, (self.observed.now - began).total_seconds())

    @property
    def started_at(self) -> datetime | None:
        """When its first Job started or resumed."""
        return min((v.started_at for v in self.jobs.values() if v.started_at), default=None)

    @property
    def manifest_digest(self) -> str:
        """Digest of the manifest of its Jobs (`manifest_changes`). Empty: not known."""
        return _kept(self.jobs, names.MANIFEST_ANNOTATION)

    @property
    def attempt(self) -> int:
        """The current attempt at this run, from 1: by its status, else by its Jobs."""
        counted = (self.status.get("attempt") or {}).get("number", 1)
        return max(int(counted), *(view.attempt for view in self.jobs.values()), 1)

    @property
    def attempt_start(self) -> datetime | None:
        """When the current attempt begins or began. None: it is the first."""
        return parse_time((self.status.get("attempt") or {}).get("startTime"))

    @property
    def earlier_jobs(self) -> tuple[WorkerJobView, ...]:
        """Its Jobs of earlier attempts, which have failed."""
        return tuple(view for view in self.jobs.values() if view.attempt < self.attempt)

    @property
    def ended_at(self) -> datetime | None:
        """When its last Job ended."""
        return max((v.ended_at for v in self.jobs.values() if v.ended_at), default=None)

    @property
    def failed(self) -> tuple[str, ...]:
        """Wanted workers that failed permanently, as `group-index`."""
        return tuple(
            f"{group.name}-{index}"
            for group in self.groups
            if (view := self.jobs.get(group.name)) is not None
            for index in view.failed_indexes
            if index < self.size_of(group)  # a Job keeps the indexes of removed workers
        )

    @property
    def failed_ranks(self) -> frozenset[Rank]:
        """Ranks of current workers of this site that failed permanently."""
        failed = {(v.group, index) for v in self.jobs.values() for index in v.failed_indexes}
        here = (worker for worker in self.workers if worker.site == self.site)
        return frozenset(each.rank for each in here if (each.group, each.index) in failed)

    @property
    def succeeded(self) -> int:
        """Number of wanted workers that ended successfully."""
        return sum(
            index < self.size_of(group)
            for group in self.groups
            if (view := self.jobs.get(group.name)) is not None
            for index in view.completed_indexes
        )

    def wanted_size_of(self, group: Group) -> int:
        """Desired size of that group, limited to what the run and its runtime allow.

        No group grows while the manifest wants more workers than the runtime allows.
        """
        wanted = self.wanted.get(group.name, group.workers)
        if not self.job.may_grow:
            wanted = min(wanted, group.workers)
        job = self.jobs.get(group.name)
        return wanted if job is None or not self.too_many_workers else min(wanted, job.workers)

    @property
    def runtime(self) -> SiteRuntime | None:
        """The DLionRuntime that its pods are made with. None: none."""
        return self.settings.runtime

    @property
    def too_many_workers(self) -> str:
        """What is wrong if the manifest wants more workers here than the runtime allows. Empty:
        nothing."""
        return self.runtime.excess(sum(self.wanted.values())) if self.runtime is not None else ""

    def size_of(self, group: Group) -> int:
        """The same, limited to what its queue has admitted."""
        wanted, view = self.wanted_size_of(group), self.queue.view if self.queue else None
        admitted = view.admitted_count(group_pod_set(group.name)) if view else None
        job = self.jobs.get(group.name)
        if admitted is None and job is not None and self.queue and self.queue.problem:
            admitted = job.workers  # what is admitted cannot be read: no group grows
        return wanted if admitted is None else min(wanted, max(0, admitted))

    @property
    def queue(self) -> QueueState | None:
        """What Kueue reports of the run as a whole. None: it has no queue, or Kueue admits each of
        its Jobs by itself: those of an older operator, and those that Kueue's webhook has put into
        a default queue."""
        return None if any(view.queued for view in self.jobs.values()) else self.observed.queue

    @property
    def may_start(self) -> bool:
        """Whether suspended Jobs may start now, as far as a queue decides."""
        return self.queue is None or self.queue.may_run

    def is_queued(self, group: str) -> bool:
        """Whether that group waits in a queue and runs no pods."""
        view = self.jobs.get(group)
        if view is None:
            return names.QUEUE_LABEL in self.job.metadata.labels
        here = (pod for pod in self.pods if pod.group == group)
        waits = view.queued or not self.may_start
        return waits and view.suspended and all(pod.is_finished for pod in here)

    @property
    def workers(self) -> tuple[WorkerIdentity, ...]:
        """Current workers of all sites. Remaining workers keep their ranks."""
        here = {group.name: self.size_of(group) for group in self.groups}
        if self.job.may_grow:
            return with_group_sizes(self.job, {self.site: here}).workers()
        return tuple(
            worker
            for worker in self.job.workers()
            if worker.site != self.site or worker.index < here[worker.group]
        )

    @property
    def size(self) -> int:
        return sum(self.size_of(group) for group in self.groups)

    def total_size(self, view: RunView) -> int:
        """Number of workers at all sites. Each site reports its own; the manifest is the
        default."""
        others = [site for site in self.job.spec.sites if site.name != self.site]
        return self.size + sum(self.remote_size(SiteName(site.name), view) for site in others)

    @property
    def trusted_size(self) -> int:
        """As `size`, without revoked workers."""
        return self.size - sum(map(self._is_here, self.revoked_workers))

    def trusted_total(self, view: RunView) -> int:
        """As `total_size`, without revoked workers."""
        return max(0, self.total_size(view) - len(self.revoked_workers))

    @property
    def trusted_pods(self) -> list[PodView]:
        """Pods without those of revoked workers, which do not join."""
        revoked = {f"{w.group}-{w.index}" for w in self.revoked_workers if self._is_here(w)}
        return [pod for pod in self.pods if pod.worker not in revoked]

    def remote_size(self, site: SiteName, view: RunView) -> int:
        reported = view.remote.get(site, RemoteView()).workers
        listed = tuple(each for each in self.job.spec.sites if each.name == site)
        return workers_of(listed) if reported is None else reported

    @property
    def oversized_groups(self) -> tuple[str, ...]:
        """Messages on groups that should be larger than this run allows."""
        if self.too_many_workers:
            return ()  # `diagnose` reports that, also before the workers train
        exchange = self.job.spec.exchange
        beyond_run = (
            f"group {group.name}: {self.wanted[group.name]} workers wanted, but this run began with"
            f" {group.workers}; with exchange policy {exchange.policy} and topology"
            f" {exchange.topology} more apply from the next run on"
            for group in self.groups
            if self.wanted.get(group.name, 0) > self.wanted_size_of(group)
        )
        beyond_queue = (
            f"group {group.name}: {self.wanted_size_of(group)} workers wanted, and the queue has"
            f" admitted {self.size_of(group)}; suspend and resume the job to queue it again"
            for group in self.groups
            if self.wanted_size_of(group) > self.size_of(group)
        )
        return (*beyond_run, *beyond_queue)


def status_of_run(observed: Observed, run_id: str) -> Mapping[str, Any]:
    """The current status, if it belongs to that run; else empty."""
    status = observed.document.get("status") or {}
    return status if status.get("runId") == run_id else {}


def groups_of(job: Job, site: str) -> tuple[Group, ...]:
    """The groups of that site. Empty where the job does not name it."""
    return next((each.groups for each in job.spec.sites if each.name == site), ())


def _kept(jobs: Mapping[str, WorkerJobView], annotation: str) -> str:
    """The annotation of the first Job that has it. Empty: none has."""
    return next(filter(None, (view.annotations.get(annotation) for view in jobs.values())), "")


def _with_initial_sizes(job: Job, jobs: Mapping[str, WorkerJobView], site: str) -> Job:
    """The manifest with the initial sizes and the rank numbering of this site's Jobs."""
    is_as_now = all(view.ranks_by_group for view in jobs.values())
    job = job.with_group_ranks() if is_as_now else job.with_counted_ranks()
    kept = _kept(jobs, names.ALL_WORKERS_ANNOTATION)
    counts = {} if job.may_grow else from_json(kept)
    here = {name: view.initial_workers for name, view in jobs.items()}
    return with_group_sizes(job, {**counts, site: {**counts.get(site, {}), **here}})
