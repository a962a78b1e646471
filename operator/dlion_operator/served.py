"""What is known of one run that this site's coordinator serves. Plain data, kept by `site_runs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job
from dlion_operator.exposure import Addresses
from dlion_operator.federation.reports import LinksTo, SpecPrint
from dlion_operator.job_authority import JobAuthority
from dlion_operator.progress import RunProgress
from dlion_operator.run_trust import Bundles
from dlion_operator.target import TargetWatch
from dlion_operator.worker_news import WorkerNews


@dataclass
class Served:
    """One run."""

    job: Job
    spec_print: SpecPrint
    """Of the manifest as it stands."""
    wanted: tuple[WorkerIdentity, ...]
    """Of all sites, by the manifest here."""
    workers: tuple[WorkerIdentity, ...]
    """Of all sites, other sites' as they say."""
    progress: RunProgress
    target: TargetWatch
    news: WorkerNews
    opened_s: float
    failed: frozenset[Rank]
    """Workers of this site that have failed for good."""
    addresses: Addresses | None
    """Where other sites reach this one's workers; None: where these say."""
    authority: JobAuthority | None
    """This site's, where the job names one; None: the site's own signs."""
    kept_bundles: Bundles
    """By which its workers were known before this operator started."""
    bundles: Bundles = field(default_factory=dict)
    """By which they know each other now, where the job names authorities."""
    same_keys: Mapping[SiteName, SiteName] = field(default_factory=dict)
    """Sites whose authority has the key of another site's, and that site: they are left out."""
    links: tuple[LinksTo, ...] = ()
    """Of this site's workers to other sites', as they were counted last."""
    linked_s: float = float("-inf")
    """When that was."""
    is_over: bool = False
    """Whether the run has ended here."""
    stop_reason: str = ""
    seen_s: dict[str, float] = field(default_factory=dict)
    """When each worker was there last."""
    gathered_s: float | None = None
    """When all workers were first seen to be there, before any trained; None: they are not."""

    def gathered_for_s(self, now_s: float, there: int) -> float:
        """How long all have been there and none has begun to train; `there`: who is, now."""
        if self.progress.training or there < len(self.workers):
            self.gathered_s = None
        elif self.gathered_s is None:
            self.gathered_s = now_s
        return 0.0 if self.gathered_s is None else now_s - self.gathered_s
