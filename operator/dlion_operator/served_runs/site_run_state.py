"""State of one run that this site's coordinator serves. Plain data, owned by `site_runs`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.accusations import Accusations
from dlion_api.spec import Job
from dlion_operator.federation.reports import LinksTo, SpecFingerprint
from dlion_operator.pki.job_authority import JobAuthority
from dlion_operator.pki.run_trust import Bundles
from dlion_operator.plan.decisions import JobEvent
from dlion_operator.plan.objects.exposure import Addresses
from dlion_operator.served_runs.progress import RunProgress
from dlion_operator.served_runs.revocations import RunRevocations
from dlion_operator.served_runs.target_accuracy import TargetAccuracyMonitor
from dlion_operator.served_runs.worker_events import WorkerEvents


@dataclass
class SiteRunState:
    """State of one run."""

    job: Job
    spec_fingerprint: SpecFingerprint
    """Fingerprint of the current manifest."""
    wanted: tuple[WorkerIdentity, ...]
    """Workers of all sites, from this site's manifest."""
    workers: tuple[WorkerIdentity, ...]
    """Workers of all sites; other sites' as they report them."""
    progress: RunProgress
    target: TargetAccuracyMonitor
    events: WorkerEvents
    opened_s: float
    failed: frozenset[Rank]
    """Workers of this site that failed permanently."""
    addresses: Addresses | None
    """Where other sites reach this site's workers; None: at the addresses that workers report."""
    authority: JobAuthority | None
    """The authority that the job names here; None: the site's own authority signs."""
    revocations: RunRevocations
    kept_bundles: Bundles
    """CA bundles that were stored before this operator started."""
    bundles: Bundles = field(default_factory=dict)
    """Current CA bundles, if the job names authorities."""
    shared_keys: Mapping[SiteName, SiteName] = field(default_factory=dict)
    """Untrusted sites whose authority shares another site's key, and that other site."""
    links: tuple[LinksTo, ...] = ()
    """Links of this site's workers to other sites', as last counted."""
    linked_s: float = float("-inf")
    """When `links` was counted."""
    is_over: bool = False
    """Whether the run has ended here."""
    stop_reason: str = ""
    counted_workers: tuple[WorkerIdentity, ...] = ()
    """Workers whose figures count."""
    accusations: Accusations = field(default_factory=Accusations)
    last_notes: tuple[JobEvent, ...] = ()
    """The operator's last events in the records, which came together."""
    last_present_s: dict[str, float] = field(default_factory=dict)
    """When each worker was last connected, by name."""
    gathered_s: float | None = None
    """Time since which all workers are connected without training; None: they are not."""

    @property
    def trusted_workers(self) -> tuple[WorkerIdentity, ...]:
        """Workers of all sites without revoked ones."""
        return self.revocations.without_revoked(self.workers)

    def gathered_for_s(self, now_s: float, there: int) -> float:
        """Return how long all workers have been connected without any training.

        `there` is the number of connected workers.
        """
        if self.progress.training or there < len(self.trusted_workers):
            self.gathered_s = None
        elif self.gathered_s is None:
            self.gathered_s = now_s
        return 0.0 if self.gathered_s is None else now_s - self.gathered_s
