"""One run of a job at this site, as its manifest and its Jobs say together. Pure.

Pods were told the counts that their Jobs were made with, those of all sites, and go on with these
whatever is scaled meanwhile; ranks by group do not depend on them (`dlion_api.spec.ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from dlion_api import cluster_names as names
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job
from dlion_api.spec.sites import Group, workers_of
from dlion_operator import run_trust
from dlion_operator.first_counts import read, with_counts
from dlion_operator.job_view import JobView
from dlion_operator.observed import Observed, PodView, RemoteView, RunView


@dataclass(frozen=True)
class Run:
    """The run that a manifest asks for, and what there is of it."""

    job: Job
    """With the counts that the run began with."""
    wanted: Mapping[str, int]
    """Workers of each group of this site that are wanted now."""
    site: SiteName
    jobs: Mapping[str, JobView]
    """By group."""
    pods: Sequence[PodView]
    """Its workers' pods."""
    keepers: Sequence[PodView]
    """Its keeper's pods: one, and others on their way out."""
    strays: Sequence[JobView]
    """Jobs of other runs of this job."""

    @classmethod
    def of(cls, job: Job, seen: Observed, site: SiteName) -> Run:
        """What there is of the run that `job` asks for, at this site."""
        views = [JobView(document) for document in seen.jobs]
        run_id = job.key.run_id
        jobs = {view.group: view for view in views if view.run_id == run_id}
        pods = [pod for pod in map(PodView, seen.pods) if pod.labels.get(names.RUN_LABEL) == run_id]
        return cls(
            job=_as_it_began(job, jobs, site),
            wanted={group.name: group.workers for group in groups_of(job, site)},
            site=site,
            jobs=jobs,
            pods=[p for p in pods if p.labels.get(names.COMPONENT_LABEL) == names.WORKER],
            keepers=[p for p in pods if p.labels.get(names.COMPONENT_LABEL) == names.KEEPER],
            strays=[view for view in views if view.run_id != run_id],
        )

    @property
    def groups(self) -> Sequence[Group]:
        """This site's groups, as the run began with them."""
        return groups_of(self.job, self.site)

    @property
    def is_complete(self) -> bool:
        """Whether every group has its Job."""
        return all(group.name in self.jobs for group in self.groups)

    @property
    def has_ended(self) -> bool:
        """Whether every Job has come to its end."""
        return self.is_complete and all(view.ended_at for view in self.jobs.values())

    @property
    def spec_hash(self) -> str:
        """What its workers were started with; a newer operator may fill in other defaults."""
        return next((v.spec_hash for v in self.jobs.values() if v.spec_hash), self.job.hash())

    @property
    def kept_bundles(self) -> Mapping[SiteName, bytes]:
        """By which the workers of each site were known last, where the job names an authority."""
        kept = (v.annotations.get(names.AUTHORITIES_ANNOTATION, "") for v in self.jobs.values())
        return run_trust.read(next(filter(None, kept), ""))

    @property
    def made_at(self) -> datetime | None:
        """When the first of its Jobs was made; breaks change nothing of it."""
        return min((v.made_at for v in self.jobs.values() if v.made_at), default=None)

    @property
    def started_at(self) -> datetime | None:
        """When the first of its Jobs began, or went on after a break."""
        return min((v.started_at for v in self.jobs.values() if v.started_at), default=None)

    @property
    def manifest_digest(self) -> str:
        """Of the manifest that its Jobs were made from (`corrections`); empty: not known."""
        kept = (v.annotations.get(names.MANIFEST_ANNOTATION, "") for v in self.jobs.values())
        return next(filter(None, kept), "")

    @property
    def ended_at(self) -> datetime | None:
        """When the last of its Jobs ended."""
        return max((v.ended_at for v in self.jobs.values() if v.ended_at), default=None)

    @property
    def failed(self) -> tuple[str, ...]:
        """Workers that are wanted now and failed for good, as `group-index`."""
        return tuple(
            f"{group.name}-{index}"
            for group in self.groups
            if (view := self.jobs.get(group.name)) is not None
            for index in view.failed_indexes
            if index < self.size_of(group)  # a Job keeps the index of a worker scaled away
        )

    @property
    def failed_ranks(self) -> frozenset[Rank]:
        """The same, of those that there should be now."""
        failed = {(v.group, index) for v in self.jobs.values() for index in v.failed_indexes}
        here = (worker for worker in self.workers if worker.site == self.site)
        return frozenset(each.rank for each in here if (each.group, each.index) in failed)

    @property
    def succeeded(self) -> int:
        """Workers that are wanted now and ended well."""
        return sum(
            index < self.size_of(group)
            for group in self.groups
            if (view := self.jobs.get(group.name)) is not None
            for index in view.completed_indexes
        )

    def size_of(self, group: Group) -> int:
        """How many workers of it there should be now."""
        wanted = self.wanted.get(group.name, group.workers)
        return wanted if self.job.may_grow else min(wanted, group.workers)

    def waits_in_queue(self, group: str) -> bool:
        """Whether somebody else says when that group starts, and nothing of it runs yet."""
        view = self.jobs.get(group)
        if view is None:
            return names.QUEUE_LABEL in self.job.metadata.labels
        here = (pod for pod in self.pods if pod.labels.get(names.GROUP_LABEL) == group)
        is_over = all(pod.phase in ("Succeeded", "Failed") for pod in here)
        return view.queued and view.suspended and is_over

    @property
    def workers(self) -> tuple[WorkerIdentity, ...]:
        """The workers of all sites that there should be now; who stays keeps its rank."""
        here = {group.name: self.size_of(group) for group in self.groups}
        if self.job.may_grow:
            return with_counts(self.job, {self.site: here}).workers()
        return tuple(
            worker
            for worker in self.job.workers()
            if worker.site != self.site or worker.index < here[worker.group]
        )

    @property
    def size(self) -> int:
        """How many workers there should be at this site now."""
        return sum(self.size_of(group) for group in self.groups)

    def size_of_all(self, view: RunView) -> int:
        """How many workers there should be at all sites now: other sites' as they say, or as the
        manifest here has it."""
        others = [site for site in self.job.spec.sites if site.name != self.site]
        return self.size + sum(self.size_there(SiteName(site.name), view) for site in others)

    def size_there(self, site: SiteName, view: RunView) -> int:
        """How many workers there should be at another site now."""
        told = view.remote.get(site, RemoteView()).workers
        listed = tuple(each for each in self.job.spec.sites if each.name == site)
        return workers_of(listed) if told is None else told

    @property
    def too_many(self) -> tuple[str, ...]:
        """Groups that are to be larger than this run can make them, in words."""
        exchange = self.job.spec.exchange
        return tuple(
            f"group {group.name}: {self.wanted[group.name]} workers wanted, {group.workers} is what"
            f" this run began with; with exchange policy {exchange.policy} and topology"
            f" {exchange.topology} more act on the next run"
            for group in self.groups
            if self.wanted.get(group.name, 0) > self.size_of(group)
        )


def groups_of(job: Job, site: str) -> tuple[Group, ...]:
    """The groups of that site; empty where the job does not name it."""
    return next((each.groups for each in job.spec.sites if each.name == site), ())


def _as_it_began(job: Job, jobs: Mapping[str, JobView], site: str) -> Job:
    """The manifest with the counts that this site's Jobs were made with, ranks as theirs."""
    is_as_now = all(view.ranks_by_group for view in jobs.values())
    job = job.with_room_to_grow() if is_as_now else job.with_counted_ranks()
    kept = (view.annotations.get(names.ALL_WORKERS_ANNOTATION, "") for view in jobs.values())
    counts = {} if job.may_grow else read(next(filter(None, kept), ""))
    here = {name: view.first_workers for name, view in jobs.items()}
    return with_counts(job, {**counts, site: {**counts.get(site, {}), **here}})
