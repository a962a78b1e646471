"""What each other site said last, as a state machine without I/O: events in, instructions out.

Owns which stream of a site counts, what is kept of a site that has fallen silent, and what a
restarted operator there, which knows nobody yet, does not undo. Called by the gRPC skin and by the
tests; knows no clock, no thread, no gRPC, and trusts `messages` and `credentials` to have checked
form and certificate: who greets is one of the sites.

What a site said stands until it says otherwise: training goes on with the last membership known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dlion_api.membership import Member, MemberState
from dlion_api.names import JobKey, Rank, SiteName
from dlion_operator.federation.events import (
    Event,
    Greeted,
    Instruction,
    News,
    RefusalReason,
    Refuse,
    Told,
)
from dlion_operator.federation.memory import kept_bytes
from dlion_operator.federation.reports import (
    MAX_WORKERS,
    Beat,
    Figures,
    RunReport,
    Said,
    SaidGone,
    SiteWorkers,
)

SILENT_AFTER_S = 15.0
"""Three heartbeats."""
GONE_AFTER_S = 60.0
"""A run that a new stream has not named after so long is served there no more. An operator that
has started anew opens its runs long before."""
MAX_RUNS = 1024
"""Of one site."""
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""Of one site's reports in memory: some 40,000 workers, or `MAX_RUNS` runs of a few."""


@dataclass
class _Site:
    stream: int | None = None
    greeted_s: float = 0.0
    heard_s: float | None = None
    reports: dict[JobKey, RunReport] = field(default_factory=dict)
    named: dict[JobKey, int] = field(default_factory=dict)
    """The stream that named each run last."""
    kept_bytes: dict[JobKey, int] = field(default_factory=dict)
    """What each report takes in memory."""


@dataclass(frozen=True)
class Hearing:
    """How a site is heard just now."""

    reachable: bool = False
    heartbeat_age_s: float | None = None
    """Since anything was heard of it; None: nothing ever was."""
    named_all: bool = False
    """Whether its stream has stood so long that it has named every run that it serves."""


class Federation:
    """What this site knows of the others."""

    def __init__(self, own: SiteName, others: Collection[SiteName]) -> None:
        self._own = own
        self._sites = {site: _Site() for site in others}
        self._sites_of_streams: dict[int, SiteName] = {}

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """What is to be done about that event, in order."""
        match event:
            case Greeted():
                return self._greeted(event)
            case Told():
                return self._told(event)

    def forget(self, stream: int) -> None:
        """That stream is no more; what it brought stands."""
        site = self._sites_of_streams.pop(stream, None)
        if site is not None and self._sites[site].stream == stream:
            self._sites[site].stream = None

    def hearing(self, site: SiteName, now_s: float) -> Hearing:
        """Whether that site is heard."""
        known = self._sites.get(site)
        if known is None or known.heard_s is None:
            return Hearing()
        age_s = max(0.0, now_s - known.heard_s)
        has_named_all = known.stream is not None and now_s - known.greeted_s >= GONE_AFTER_S
        return Hearing(age_s <= SILENT_AFTER_S, age_s, has_named_all)

    def reports(self, run: JobKey) -> Mapping[SiteName, RunReport]:
        """What each site that has that run said of it last."""
        return {
            site: known.reports[run] for site, known in self._sites.items() if run in known.reports
        }

    def _greeted(self, event: Greeted) -> tuple[Instruction, ...]:
        if event.to_site != self._own:
            message = f"this is site {self._own}, not {event.to_site!r:.80}; see its address there"
            return (Refuse(RefusalReason.WRONG_SITE, message),)
        site = self._sites[event.site]
        if site.stream is not None:
            del self._sites_of_streams[site.stream]  # the newest counts
        self._sites_of_streams[event.stream] = event.site
        site.stream, site.greeted_s, site.heard_s = event.stream, event.now_s, event.now_s
        return ()

    def _told(self, event: Told) -> tuple[Instruction, ...]:
        name = self._sites_of_streams.get(event.stream)
        if name is None:
            return (Refuse(RefusalReason.REPLACED, "a newer stream has taken this one's place"),)
        site = self._sites[name]
        site.heard_s = event.now_s
        told: tuple[Instruction, ...] = ()
        match event.statement:
            case Said() as said:
                told = self._said(site, said, event.stream)
            case SaidGone(run):
                told = self._gone(site, [run])
            case Beat():
                pass
        if event.now_s - site.greeted_s < GONE_AFTER_S:
            return told
        unnamed = [run for run in site.reports if site.named[run] != event.stream]
        return told + self._gone(site, unnamed)

    def _said(self, site: _Site, said: Said, stream: int) -> tuple[Instruction, ...]:
        before = site.reports.get(said.run)
        if before is None or site.named[said.run] != stream:
            if said.spec is None or said.workers is None:
                message = f"run {said.run}: the first report on a stream says all; this does not"
                return (Refuse(RefusalReason.MALFORMED, message),)
            if before is None and len(site.reports) >= MAX_RUNS:
                message = f"more than {MAX_RUNS} runs; end some"
                return (Refuse(RefusalReason.TOO_MUCH, message),)
        report = _joined(before, said)
        if report == before:
            site.named[said.run] = stream
            return ()
        links = len(before.figures.links) if before is not None else 0
        if (said.spec, said.workers, said.bundle_pem) != (None, None, None) or (
            len(report.figures.links) > links
        ):
            size = kept_bytes(report)
            others = sum(each for run, each in site.kept_bytes.items() if run != said.run)
            if others + size > MAX_KEPT_BYTES:
                message = f"runs that take more than {MAX_KEPT_BYTES} bytes here; end some"
                return (Refuse(RefusalReason.TOO_MUCH, message),)
            site.kept_bytes[said.run] = size
        site.reports[said.run] = report
        site.named[said.run] = stream
        return (News(said.run),)

    def _gone(self, site: _Site, runs: Collection[JobKey]) -> tuple[Instruction, ...]:
        news = []
        for run in runs:
            if site.reports.pop(run, None) is not None:
                del site.named[run], site.kept_bytes[run]
                news.append(News(run))
        return tuple(news)


def _joined(before: RunReport | None, said: Said) -> RunReport:
    """What is known once that has been said, too."""
    if before is None:
        assert said.spec is not None
        assert said.workers is not None
        figures = said.figures or Figures()
        return RunReport(said.spec, said.workers, figures, said.bundle_pem or b"")
    return RunReport(
        said.spec or before.spec,
        before.workers if said.workers is None else _merged(before.workers, said.workers),
        said.figures or before.figures,
        before.bundle_pem if said.bundle_pem is None else said.bundle_pem,
    )


def _merged(before: SiteWorkers, said: SiteWorkers) -> SiteWorkers:
    """The newest of each worker. An operator that has started anew names nobody at first: whom it
    does not name is where it was, until it knows better."""
    members = {member.identity.rank: member for member in before.members}
    named: set[Rank] = set()
    for member in said.members:
        rank = member.identity.rank
        named.add(rank)
        known = members.get(rank)
        if known is None or known.identity != member.identity or not _is_older(member, known):
            members[rank] = member
    if said.settled:
        wanted = set(said.wanted)
        for rank in members.keys() - named:
            there = members[rank].identity in wanted
            state = MemberState.LOST if there else MemberState.FINISHED
            if members[rank].state is not MemberState.FINISHED:
                members[rank] = replace(members[rank], state=state)
    if len(members) > MAX_WORKERS:
        members = {rank: members[rank] for rank in named}
    accuracies = {**before.accuracies, **said.accuracies}
    return replace(
        said,
        members=tuple(members[rank] for rank in sorted(members)),
        accuracies={rank: accuracies[rank] for rank in accuracies.keys() & members.keys()},
    )


def _is_older(member: Member, known: Member) -> bool:
    return member.incarnation < known.incarnation
