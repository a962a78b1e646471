"""Interpret the reports of other sites for one run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from dlion_api.bounds import MAX_PAIRS, MAX_WORKERS_PER_GROUP
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.spec import Job
from dlion_api.spec.policies import DECODER
from dlion_api.status import LinkStatus, PairStatus
from dlion_operator.federation.drift import agree, differences
from dlion_operator.federation.node import FederationNode
from dlion_operator.federation.reports import LinksTo, ReportedWorkers, RunReport, SpecFingerprint
from dlion_operator.federation.state import SiteReachability
from dlion_operator.pki.named_authority import names_authority
from dlion_operator.plan.observed import RemoteView, RunView

RUN_ABSENT = "its operator does not have this run; apply the manifest there, or resume it"
NO_REMOTE_AUTHORITY = (
    "it has no authority for its workers yet, or its release knows of none (tls.mode); see its"
    " status"
)
SHARED_KEY = (
    "NoAuthority: its workers are not trusted, as its authority has the key of that of {other}:"
    " each could sign for the other's; give each site an authority of its own (tls)"
)
DRIFT_ADVICE = "apply the same manifest at every site"


def remote_views(
    job: Job,
    own: SiteName,
    spec_fingerprint: SpecFingerprint,
    federation: FederationNode,
    shared_keys: Mapping[SiteName, SiteName],
) -> dict[SiteName, RemoteView]:
    """The other sites of the manifest here. `shared_keys` comes from `run_trust`."""
    reports = federation.reports(job.key)
    views = {}
    for name in (SiteName(site.name) for site in job.spec.sites if site.name != own):
        view = _view(name, report := reports.get(name), spec_fingerprint, federation)
        if names_authority(job) and report and not view.problem:
            view = replace(view, problem=_trust_problem(report, shared_keys.get(name)))
        views[name] = view
    return views


def _trust_problem(report: RunReport, same_as: SiteName | None) -> str:
    """Why the workers of a site with the run are not trusted. Empty: they are."""
    if same_as is not None:
        return SHARED_KEY.format(other=same_as)
    return "" if report.bundle_pem else NO_REMOTE_AUTHORITY


def unserved_run_view(
    run: JobKey, sites: Collection[SiteName], federation: FederationNode
) -> RunView:
    """The state of a run at those sites that is not served here, whatever their manifests."""
    reports = federation.reports(run)
    members = (each for site in sites if site in reports for each in reports[site].workers.members)
    return RunView(
        open_s=0.0,
        ready=Counter(each.identity.site for each in members if each.state is MemberState.READY),
        remote={site: _view(site, reports.get(site), None, federation) for site in sites},
    )


def _view(
    name: SiteName,
    report: RunReport | None,
    spec_fingerprint: SpecFingerprint | None,
    federation: FederationNode,
) -> RemoteView:
    reachability, problem = federation.reachability(name), federation.problem(name)
    if report is None:
        return RemoteView(
            reachability.reachable, reachability.heartbeat_age_s, problem or RUN_ABSENT
        )
    agrees = spec_fingerprint is None or agree(report.spec, spec_fingerprint)
    return RemoteView(
        is_reachable=reachability.reachable,
        heartbeat_age_s=reachability.heartbeat_age_s,
        problem=problem,
        has_run=True,
        knows_all=report.workers.settled,
        agrees=agrees,
        spec_hash=report.spec.spec_hash,
        workers=len(report.workers.wanted) if agrees else None,
        iteration=report.figures.iteration,
        samples_per_s=report.figures.samples_per_s,
    )


@dataclass(frozen=True)
class RemoteReports:
    """The last reports of other sites on one run, and the manifest here."""

    own: SiteName
    job: Job
    spec_fingerprint: SpecFingerprint
    by_site: Mapping[SiteName, RunReport]

    @property
    def _agreeing(self) -> set[SiteName]:
        """The sites whose manifest agrees with the one here."""
        reports = self.by_site.items()
        return {site for site, each in reports if agree(each.spec, self.spec_fingerprint)}

    def spec_drift(self) -> str:
        """Where the sites' manifests differ, in the same text at every site. Empty: nowhere.

        Counts the sites of the manifest here, and sites whose manifest names this site.
        """
        named = {site.name for site in self.job.spec.sites}
        prints = {
            site: report.spec
            for site, report in self.by_site.items()
            if site in named or f"sites[{self.own}].name" in report.spec.fields
        }
        differing = differences({**prints, self.own: self.spec_fingerprint})
        return f"{'; '.join(map(str, differing))}; {DRIFT_ADVICE}" if differing else ""

    def with_site_pairs(
        self, links: LinkStatus | None, own_links: Collection[LinksTo]
    ) -> LinkStatus | None:
        """The link status, with the reports of all sites on their links to each other."""
        named = {SiteName(site.name) for site in self.job.spec.sites}
        reported = {site: each.figures.links for site, each in self.by_site.items()}
        links_between = [
            (site, each)
            for site, site_links in {**reported, self.own: tuple(own_links)}.items()
            for each in site_links
            if {site, each.site} <= named and each.site != site
        ]
        if not links_between:
            return links
        # Of too many pairs keep those with links down, then the slowest.
        links_between.sort(
            key=lambda pair: (pair[1].connected - pair[1].expected, pair[1].bytes_per_s)
        )
        pairs = [
            PairStatus(
                pair=f"{site} to {each.site}",
                connected=each.connected,
                expected=each.expected,
                megabits_per_second=f"{each.bytes_per_s / 125_000:.3g}" if each.bytes_per_s else "",
            )
            for site, each in links_between[:MAX_PAIRS]
        ]
        ordered = tuple(sorted(pairs, key=lambda pair: pair.pair))
        return replace(links or LinkStatus(connected=0, expected=0), pairs=ordered)

    def trusted(self) -> RemoteReports:
        """What may be acted on: reports of the manifest's sites, each on its own workers only."""
        named = {site.name for site in self.job.spec.sites} - {self.own}
        is_valid = _worker_validator(self.job)
        by_site = {
            site: replace(report, workers=_own_workers(is_valid, report.workers))
            for site, report in self.by_site.items()
            if site in named
        }
        return replace(self, by_site=by_site)

    def all_workers(self, workers: tuple[WorkerIdentity, ...]) -> tuple[WorkerIdentity, ...]:
        """The current workers of all sites, as each site reports its own.

        `workers` by this site's manifest apply to sites without a report or with another manifest.
        """
        agreeing = self._agreeing
        kept = [each for each in workers if each.site == self.own or each.site not in agreeing]
        ranks = {worker.rank for worker in kept}
        for site, report in self.by_site.items():
            for worker in report.workers.wanted if site in agreeing else ():
                if worker.rank not in ranks:  # ranks are unique; this site's own take precedence
                    kept.append(worker)
                    ranks.add(worker.rank)
        return tuple(sorted(kept))

    def members(self, membership: Membership) -> list[Member]:
        """Members of other sites that workers here should know.

        A site with another manifest adds no members; admitted ones stay. Members of a site that no
        longer has the run are LOST.
        """
        known, agreeing = {each.identity: each for each in membership.members}, self._agreeing
        reported = [
            member
            for site, report in self.by_site.items()
            for member in report.workers.members
            if site in agreeing or member.identity in known
        ]
        there = {self.own, *self.by_site}
        gone = [
            replace(member, state=MemberState.LOST)
            for member in known.values()
            if member.identity.site not in there and member.state is MemberState.READY
        ]
        return reported + gone

    def sites_without_run(
        self, reachability: Callable[[SiteName], SiteReachability]
    ) -> frozenset[SiteName]:
        """Other sites whose operators are reachable and do not serve this run.

        There it is suspended, deleted or long over. An operator that has just started may still
        open it.
        """
        silent = {SiteName(site.name) for site in self.job.spec.sites} - {self.own, *self.by_site}
        found = {site: reachability(site) for site in silent}
        return frozenset(site for site, each in found.items() if each.reachable and each.named_all)

    def over_reason(self) -> str:
        """Why this run is over: it continues at fewer than `minSites` sites, or without the only
        worker that trains. Empty: it is not over.

        Otherwise the workers would wait for a quorum, or for that worker, without end. A run is
        over at a site whose workers have all ended or failed permanently, but not at a silent or
        suspended site.
        """
        job = self.job
        left_ranks = frozenset[Rank]().union(*(one.workers.left for one in self.by_site.values()))
        if lacking := job.spec.exchange.lacks_trainer(left_ranks):
            return f"worker {DECODER} has left, and {lacking}"
        over = sorted(site for site, each in self.by_site.items() if _is_finished(each.workers))
        left = len(job.spec.sites) - len(over)
        if not over or left >= job.spec.min_sites:
            return ""
        few = f"{left} sites are left (minSites {job.spec.min_sites})"
        return f"it is over at {', '.join(over)}: {few}"

    def failed_ranks(self) -> frozenset[Rank]:
        """Permanently failed workers of sites where other workers continue."""
        sites = (each.workers for each in self.by_site.values())
        return frozenset[Rank]().union(*(each.left for each in sites if not _is_finished(each)))

    def counted_replicas(
        self,
        workers: tuple[WorkerIdentity, ...],
        membership: Membership,
        gone: frozenset[SiteName],
    ) -> list[Rank]:
        """Ranks whose accuracies count for `targetAccuracy`: workers that train or may still do so.

        `gone`: sites without the run.
        """
        members = {member.identity: member for member in membership.members}
        left = frozenset[Rank]().union(*(each.workers.left for each in self.by_site.values()))
        differing = self.by_site.keys() - self._agreeing

        def counts(worker: WorkerIdentity) -> bool:
            if worker.site in gone or worker.rank in left:
                return False
            if (member := members.get(worker)) is not None:
                return member.state is not MemberState.FINISHED
            return worker.site not in differing  # it adds no new members

        return [worker.rank for worker in workers if counts(worker)]


def _own_workers(
    is_valid: Callable[[WorkerIdentity], bool], reported: ReportedWorkers
) -> ReportedWorkers:
    """Limit a report to workers whose rank belongs to the site."""
    wanted = tuple(each for each in reported.wanted if is_valid(each))
    members = tuple(each for each in reported.members if is_valid(each.identity))
    ranks = {member.identity.rank for member in members}
    return replace(
        reported,
        wanted=wanted,
        members=members,
        accuracies={rank: each for rank, each in reported.accuracies.items() if rank in ranks},
        left=reported.left & ({worker.rank for worker in wanted} | ranks),
    )


def _worker_validator(job: Job) -> Callable[[WorkerIdentity], bool]:
    """Return a check whether the manifest has such a worker with that rank.

    Counted ranks follow from the sizes at all sites, which may differ between sites for a while.
    There the check only rejects ranks of another site.
    """
    groups = {(site.name, group.name) for site in job.spec.sites for group in site.groups}
    owners = {} if job.may_grow else {each.rank: each.site for each in job.workers()}

    def is_valid(worker: WorkerIdentity) -> bool:
        if (worker.site, worker.group) not in groups or worker.index >= MAX_WORKERS_PER_GROUP:
            return False
        if job.may_grow:
            return job.worker_at(worker.site, worker.group, worker.index) == worker
        return owners.get(worker.rank, worker.site) == worker.site

    return is_valid


def _is_finished(workers: ReportedWorkers) -> bool:
    ended = {
        m.identity.rank for m in workers.members if m.state is MemberState.FINISHED
    } | workers.left
    return bool(workers.wanted) and all(worker.rank in ended for worker in workers.wanted)
