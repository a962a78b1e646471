"""What other sites reported last, as a state machine without I/O.

Owns which stream of a site is current and which reports of a silent or restarted site stay. A
report stays until the site changes it, so that training continues with the last known membership.
No clock, threads or gRPC; `messages` and `credentials` have checked form and certificate.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dlion_api.names import JobKey, Rank, SiteName
from dlion_api.protocol.membership import Member, MemberState
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.federation.reports import (
    MAX_WORKERS,
    Heartbeat,
    ReportedWorkers,
    RunRemoved,
    RunReport,
    RunReported,
    Statement,
    TrainingFigures,
)


def memory_bytes(report: RunReport) -> int:
    """Return the memory of that report in bytes: at least its real size, less than twice that.

    Besides its strings it counts bytes for one of each part. A test compares the sum with Python's
    real sizes.
    """
    spec, workers = report.spec, report.workers
    addresses = (
        text for each in workers.members for text in (each.exchange_address, each.measuring_address)
    )
    parts = (
        (128, spec.fields),
        (96, spec.defaults),
        (256, workers.wanted),
        (384, workers.members),
        (128, workers.accuracies),
        (96, workers.left),
        (288, report.figures.links),
        (128, report.revocations),
    )
    revoked = (text for each in report.revocations for text in (each.name, each.reason))
    strings = sum(map(sys.getsizeof, (report.bundle_pem, *spec.fields, *addresses, *revoked)))
    return 4096 + strings + sum(one_bytes * len(each) for one_bytes, each in parts)


SILENT_AFTER_S = 15.0
"""Three heartbeats."""
GONE_AFTER_S = 60.0
"""A run that a new stream has not reported after this time is no longer served there. A restarted
operator opens its runs long before."""
MAX_RUNS = 1024
"""Per site."""
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""Memory of one site's reports: some 40,000 workers, or `MAX_RUNS` runs of a few workers."""


@dataclass
class _Site:
    stream: int | None = None
    opened_s: float = 0.0
    heard_s: float | None = None
    reports: dict[JobKey, RunReport] = field(default_factory=dict)
    named: dict[JobKey, int] = field(default_factory=dict)
    """The stream that last reported each run."""
    memory_bytes: dict[JobKey, int] = field(default_factory=dict)
    """Memory of each report."""


@dataclass(frozen=True)
class SiteReachability:
    """Whether a site is reachable now."""

    reachable: bool = False
    heartbeat_age_s: float | None = None
    """Time since the last message; None: there was none."""
    named_all: bool = False
    """Whether its stream is old enough to have reported every run that the site serves."""


class FederationState:
    """What this site knows of the other sites."""

    def __init__(self, own: SiteName, others: Collection[SiteName]) -> None:
        self._own = own
        self._sites = {site: _Site() for site in others}
        self._sites_of_streams: dict[int, SiteName] = {}

    def forget(self, stream: int) -> None:
        """Remove an ended stream; its reports stay."""
        site = self._sites_of_streams.pop(stream, None)
        if site is not None and self._sites[site].stream == stream:
            self._sites[site].stream = None

    def reachability(self, site: SiteName, now_s: float) -> SiteReachability:
        known = self._sites.get(site)
        if known is None or known.heard_s is None:
            return SiteReachability()
        age_s = max(0.0, now_s - known.heard_s)
        has_named_all = known.stream is not None and now_s - known.opened_s >= GONE_AFTER_S
        return SiteReachability(age_s <= SILENT_AFTER_S, age_s, has_named_all)

    def reports(self, run: JobKey) -> Mapping[SiteName, RunReport]:
        """Return the last report of that run from each site that has it."""
        return {
            site: known.reports[run] for site, known in self._sites.items() if run in known.reports
        }

    def open_stream(self, stream: int, name: SiteName, to_site: SiteName, now_s: float) -> None:
        """Take a new stream of a site with a verified certificate, which meant to reach `to_site`.

        `service` numbers the streams. Times are monotonic. Raises: StreamRefusedError.
        """
        if to_site != self._own:
            message = f"this is site {self._own}, not {to_site!r:.80}; see its address there"
            raise StreamRefusedError(FederationRefusalReason.WRONG_SITE, message)
        site = self._sites[name]
        if site.stream is not None:
            del self._sites_of_streams[site.stream]  # only the newest stream counts
        self._sites_of_streams[stream] = name
        site.stream, site.opened_s, site.heard_s = stream, now_s, now_s

    def receive(self, stream: int, statement: Statement, now_s: float) -> tuple[JobKey, ...]:
        """Take a statement. Return the runs of which the site's report has changed.

        Raises: StreamRefusedError.
        """
        name = self._sites_of_streams.get(stream)
        if name is None:
            message = "a newer stream has taken this one's place"
            raise StreamRefusedError(FederationRefusalReason.REPLACED, message)
        site = self._sites[name]
        site.heard_s = now_s
        changed: tuple[JobKey, ...] = ()
        match statement:
            case RunReported():
                changed = self._run_reported(site, statement, stream)
            case RunRemoved(run):
                changed = self._runs_removed(site, [run])
            case Heartbeat():
                pass
        if now_s - site.opened_s < GONE_AFTER_S:
            return changed
        unnamed = [run for run in site.reports if site.named[run] != stream]
        return changed + self._runs_removed(site, unnamed)

    def _run_reported(self, site: _Site, reported: RunReported, stream: int) -> tuple[JobKey, ...]:
        before = site.reports.get(reported.run)
        if before is None or site.named[reported.run] != stream:
            if reported.spec is None or reported.workers is None:
                message = f"run {reported.run}: the first report on a stream must be complete"
                raise StreamRefusedError(FederationRefusalReason.MALFORMED, message)
            if before is None and len(site.reports) >= MAX_RUNS:
                message = f"more than {MAX_RUNS} runs; end some"
                raise StreamRefusedError(FederationRefusalReason.TOO_MUCH, message)
            if reported.revocations is None:  # none: those of an earlier stream are lifted
                reported = replace(reported, revocations=())
        report = _joined(before, reported)
        if report == before:
            site.named[reported.run] = stream
            return ()
        links = len(before.figures.links) if before is not None else 0
        large = (reported.spec, reported.workers, reported.bundle_pem, reported.revocations)
        if any(each is not None for each in large) or len(report.figures.links) > links:
            size = memory_bytes(report)
            others = sum(each for run, each in site.memory_bytes.items() if run != reported.run)
            if others + size > MAX_KEPT_BYTES:
                message = f"runs that take more than {MAX_KEPT_BYTES} bytes here; end some"
                raise StreamRefusedError(FederationRefusalReason.TOO_MUCH, message)
            site.memory_bytes[reported.run] = size
        site.reports[reported.run] = report
        site.named[reported.run] = stream
        return (reported.run,)

    def _runs_removed(self, site: _Site, runs: Collection[JobKey]) -> tuple[JobKey, ...]:
        known = tuple(run for run in runs if run in site.reports)
        for run in known:
            del site.reports[run], site.named[run], site.memory_bytes[run]
        return known


def _joined(before: RunReport | None, reported: RunReported) -> RunReport:
    """Return the report after that change."""
    if before is None:
        assert reported.spec is not None
        assert reported.workers is not None
        figures = reported.figures or TrainingFigures()
        bundle_pem, revocations = reported.bundle_pem or b"", reported.revocations or ()
        return RunReport(reported.spec, reported.workers, figures, bundle_pem, revocations)
    return RunReport(
        reported.spec or before.spec,
        before.workers if reported.workers is None else _merged(before.workers, reported.workers),
        reported.figures or before.figures,
        before.bundle_pem if reported.bundle_pem is None else reported.bundle_pem,
        before.revocations if reported.revocations is None else reported.revocations,
    )


def _merged(before: ReportedWorkers, reported: ReportedWorkers) -> ReportedWorkers:
    """Return the newest state of each worker.

    A restarted operator reports no members at first: members that it omits keep their state until
    its report is settled.
    """
    members = {member.identity.rank: member for member in before.members}
    named: set[Rank] = set()
    for member in reported.members:
        rank = member.identity.rank
        named.add(rank)
        known = members.get(rank)
        if known is None or known.identity != member.identity or not _is_older(member, known):
            members[rank] = member
    if reported.settled:
        wanted = set(reported.wanted)
        for rank in members.keys() - named:
            there = members[rank].identity in wanted
            state = MemberState.LOST if there else MemberState.FINISHED
            if members[rank].state is not MemberState.FINISHED:
                members[rank] = replace(members[rank], state=state)
    if len(members) > MAX_WORKERS:
        members = {rank: members[rank] for rank in named}
    accuracies = {**before.accuracies, **reported.accuracies}
    return replace(
        reported,
        members=tuple(members[rank] for rank in sorted(members)),
        accuracies={rank: accuracies[rank] for rank in accuracies.keys() & members.keys()},
    )


def _is_older(member: Member, known: Member) -> bool:
    return member.incarnation < known.incarnation
