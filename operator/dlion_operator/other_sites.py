"""What other sites' words mean for one run here: who counts, who is let in, where manifests differ.
Pure.

Called by `site_runs` with what the federation knows; `findings` and `statuses` read the outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from dlion_api.membership import Member, Membership, MemberState
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job
from dlion_api.spec.bounds import MOST_WORKERS
from dlion_api.status import MOST_PAIRS, LinkStatus, PairStatus
from dlion_operator.federation.drift import agree, differences
from dlion_operator.federation.reports import LinksTo, RunReport, SiteWorkers, SpecPrint
from dlion_operator.federation.state import Hearing
from dlion_operator.observed import RemoteView, RunView
from dlion_operator.run_trust import names_authority

NOT_THERE = "its operator does not have this run; apply the manifest there, or resume it"
NO_AUTHORITY_THERE = (
    "it has no authority for its workers yet, or its release knows of none (tls.mode); see its"
    " status"
)
SAME_KEY = (
    "NoAuthority: its workers are not believed, as its authority has the key of that of {other}:"
    " each could sign for the other's; give each site an authority of its own (tls)"
)
DRIFT_ADVICE = "apply the same manifest at every site"


class Neighbours(Protocol):
    """The federation (`dlion_operator.federation.node`), as a run needs it."""

    def reports(self, run: JobKey) -> Mapping[SiteName, RunReport]:
        """What each site that has that run said of it last."""
        ...

    def hearing(self, site: SiteName) -> Hearing:
        """Whether that site is heard just now."""
        ...

    def problem(self, site: SiteName) -> str:
        """What stands between this site and that one, for people; empty: nothing."""
        ...

    def has_bundle(self, site: SiteName) -> bool:
        """Whether that site is trusted here: by the bundle of its own authority."""
        ...


def remote_views(
    job: Job,
    own: SiteName,
    spec_print: SpecPrint,
    neighbours: Neighbours,
    same_keys: Mapping[SiteName, SiteName],
) -> dict[SiteName, RemoteView]:
    """The other sites that the manifest here names. `same_keys` as `run_trust` finds them."""
    reports = neighbours.reports(job.key)
    views = {
        name: _view(name, reports.get(name), spec_print, neighbours)
        for name in (SiteName(site.name) for site in job.spec.sites)
        if name != own
    }
    if not names_authority(job):
        return views
    return {
        name: replace(view, problem=view.problem or _disbelief(reports[name], same_keys.get(name)))
        if name in reports
        else view
        for name, view in views.items()
    }


def _disbelief(report: RunReport, same_as: SiteName | None) -> str:
    """Why the workers of a site that has the run are not believed; empty: they are."""
    if same_as is not None:
        return SAME_KEY.format(other=same_as)
    return "" if report.bundle_pem else NO_AUTHORITY_THERE


def seen_from_outside(run: JobKey, sites: Collection[SiteName], neighbours: Neighbours) -> RunView:
    """How a run that is not served here stands at those sites, whatever their manifests."""
    told = neighbours.reports(run)
    members = (each for site in sites if site in told for each in told[site].workers.members)
    return RunView(
        open_s=0.0,
        ready=Counter(each.identity.site for each in members if each.state is MemberState.READY),
        remote={site: _view(site, told.get(site), None, neighbours) for site in sites},
    )


def _view(
    name: SiteName, report: RunReport | None, spec_print: SpecPrint | None, neighbours: Neighbours
) -> RemoteView:
    hearing, problem = neighbours.hearing(name), neighbours.problem(name)
    if report is None:
        return RemoteView(hearing.reachable, hearing.heartbeat_age_s, problem or NOT_THERE)
    agrees = spec_print is None or agree(report.spec, spec_print)
    return RemoteView(
        is_reachable=hearing.reachable,
        heartbeat_age_s=hearing.heartbeat_age_s,
        problem=problem,
        has_run=True,
        knows_all=report.workers.settled,
        agrees=agrees,
        spec_hash=report.spec.spec_hash,
        workers=len(report.workers.wanted) if agrees else None,
        iteration=report.figures.iteration,
        samples_per_s=report.figures.samples_per_s,
    )


def drift(
    job: Job, own: SiteName, spec_print: SpecPrint, reports: Mapping[SiteName, RunReport]
) -> str:
    """Where the sites' manifests differ, in words that are the same everywhere; empty: nowhere.

    Sites count that the manifest here names, and those whose manifest names this site.
    """
    named = {site.name for site in job.spec.sites}
    prints = {
        site: report.spec
        for site, report in reports.items()
        if site in named or f"sites[{own}].name" in report.spec.fields
    }
    found = differences({**prints, own: spec_print})
    return f"{'; '.join(map(str, found))}; {DRIFT_ADVICE}" if found else ""


def with_pairs(
    job: Job,
    own: SiteName,
    links: LinkStatus | None,
    own_links: Collection[LinksTo],
    reports: Mapping[SiteName, RunReport],
) -> LinkStatus | None:
    """The same, with what each site of the manifest says of its links to each other one."""
    named = {SiteName(site.name) for site in job.spec.sites}
    told = {site: report.figures.links for site, report in reports.items() if site in named}
    found = [
        (site, each)
        for site, said in {**told, own: tuple(own_links)}.items()
        for each in said
        if each.site in named and each.site != site
    ]
    if not found:
        return links
    # Which of too many matter: those with links down, then the slowest.
    found.sort(key=lambda pair: (pair[1].connected - pair[1].expected, pair[1].bytes_per_s))
    pairs = [
        PairStatus(
            pair=f"{site} to {each.site}",
            connected=each.connected,
            expected=each.expected,
            megabits_per_second=f"{each.bytes_per_s / 125_000:.3g}" if each.bytes_per_s else "",
        )
        for site, each in found[:MOST_PAIRS]
    ]
    ordered = tuple(sorted(pairs, key=lambda pair: pair.pair))
    return replace(links or LinkStatus(connected=0, expected=0), pairs=ordered)


def believed(
    job: Job, own: SiteName, reports: Mapping[SiteName, RunReport]
) -> dict[SiteName, RunReport]:
    """What may be acted on: sites that the manifest here names, and of each its own workers."""
    named, is_place = {site.name for site in job.spec.sites} - {own}, _places(job)
    return {
        site: replace(report, workers=_own_workers(is_place, report.workers))
        for site, report in reports.items()
        if site in named
    }


def _own_workers(is_place: Callable[[WorkerIdentity], bool], told: SiteWorkers) -> SiteWorkers:
    """Those whose rank is theirs, and what was said of them."""
    wanted = tuple(each for each in told.wanted if is_place(each))
    members = tuple(each for each in told.members if is_place(each.identity))
    ranks = {member.identity.rank for member in members}
    return replace(
        told,
        wanted=wanted,
        members=members,
        accuracies={rank: each for rank, each in told.accuracies.items() if rank in ranks},
        left=told.left & ({worker.rank for worker in wanted} | ranks),
    )


def _places(job: Job) -> Callable[[WorkerIdentity], bool]:
    """Whether the manifest has such a group, and that rank in it. Counted ranks follow the counts
    of all sites, which need not be the same everywhere at once: there no other is held."""
    groups = {(site.name, group.name) for site in job.spec.sites for group in site.groups}
    owners = {} if job.may_grow else {each.rank: each.site for each in job.workers()}

    def is_place(worker: WorkerIdentity) -> bool:
        if (worker.site, worker.group) not in groups or worker.index >= MOST_WORKERS:
            return False
        if job.may_grow:
            return job.worker_at(worker.site, worker.group, worker.index) == worker
        return owners.get(worker.rank, worker.site) == worker.site

    return is_place


def workers_of_all(
    workers: tuple[WorkerIdentity, ...],
    own: SiteName,
    spec_print: SpecPrint,
    reports: Mapping[SiteName, RunReport],
) -> tuple[WorkerIdentity, ...]:
    """The workers that there should be, each site's as that site says; `workers` by this site's
    manifest, for sites that have said nothing, or differ."""
    told = {
        site: report.workers.wanted
        for site, report in reports.items()
        if agree(report.spec, spec_print)
    }
    kept = [worker for worker in workers if worker.site == own or worker.site not in told]
    ranks = {worker.rank for worker in kept}
    for wanted in told.values():
        for worker in wanted:
            if worker.rank not in ranks:  # a rank is one worker's, and this site's own come first
                kept.append(worker)
                ranks.add(worker.rank)
    return tuple(sorted(kept))


def members_elsewhere(
    own: SiteName,
    spec_print: SpecPrint,
    reports: Mapping[SiteName, RunReport],
    membership: Membership,
) -> list[Member]:
    """Members of other sites that workers here are to know.

    Of a site whose manifest differs no new ones: those that are in go on. Of a site that has the
    run no more, those that were there are lost.
    """
    known = {member.identity: member for member in membership.members}
    agreeing = {site for site, report in reports.items() if agree(report.spec, spec_print)}
    told = [
        member
        for site, report in reports.items()
        for member in report.workers.members
        if site in agreeing or member.identity in known
    ]
    gone = [
        replace(member, state=MemberState.LOST)
        for member in known.values()
        if member.identity.site not in {own, *reports} and member.state is MemberState.READY
    ]
    return told + gone


def without_the_run(
    job: Job,
    own: SiteName,
    reports: Mapping[SiteName, RunReport],
    hearing: Callable[[SiteName], Hearing],
) -> frozenset[SiteName]:
    """The other sites of the manifest whose operators are heard and do not serve this run: it is
    suspended or deleted there, or long over. An operator that has just started may yet open it."""
    silent = {SiteName(site.name) for site in job.spec.sites} - {own, *reports}
    heard = {site: hearing(site) for site in silent}
    return frozenset(site for site, each in heard.items() if each.reachable and each.named_all)


def too_few_go_on(job: Job, reports: Mapping[SiteName, RunReport]) -> str:
    """Why a run here is over: of the sites where it may go on there are fewer than `minSites`, and
    so workers that hold still for want of others do so for ever. Empty: there are enough.

    It is over at a site whose workers have all ended, or failed for good. Of a site that says
    nothing, or has been suspended, it may go on.
    """
    over = sorted(site for site, report in reports.items() if _is_over(report.workers))
    left = len(job.spec.sites) - len(over)
    if not over or left >= job.spec.min_sites:
        return ""
    return f"it is over at {', '.join(over)}: {left} sites are left (minSites {job.spec.min_sites})"


def failed_elsewhere(reports: Mapping[SiteName, RunReport]) -> frozenset[Rank]:
    """Workers of other sites that failed for good, where others of their site go on."""
    going_on = (each.workers for each in reports.values() if not _is_over(each.workers))
    return frozenset[Rank]().union(*(told.left for told in going_on))


def _is_over(told: SiteWorkers) -> bool:
    ended = {m.identity.rank for m in told.members if m.state is MemberState.FINISHED} | told.left
    return bool(told.wanted) and all(worker.rank in ended for worker in told.wanted)


def judged_replicas(
    workers: tuple[WorkerIdentity, ...],
    spec_print: SpecPrint,
    reports: Mapping[SiteName, RunReport],
    membership: Membership,
    gone: frozenset[SiteName],
) -> list[Rank]:
    """Those of all sites' workers whose accuracies make the mean that `targetAccuracy` is held
    against: those that train along or may yet. `gone` are sites without the run."""
    members = {member.identity: member for member in membership.members}
    left = frozenset[Rank]().union(*(report.workers.left for report in reports.values()))
    differing = {site for site, each in reports.items() if not agree(each.spec, spec_print)}

    def counts(worker: WorkerIdentity) -> bool:
        if worker.site in gone or worker.rank in left:
            return False
        if (member := members.get(worker)) is not None:
            return member.state is not MemberState.FINISHED
        return worker.site not in differing  # nobody new of it is let in

    return [worker.rank for worker in workers if counts(worker)]
