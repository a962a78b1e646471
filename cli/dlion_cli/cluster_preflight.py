"""`dlion preflight --contexts`: the sites' clusters, asked and joined with what was dialled.

Called by `preflight`. Judges nothing itself: `site_checks` and `site_room` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dlion_cli.checks import Check, Outcome
from dlion_cli.failures import message_of
from dlion_cli.site_bandwidth import bandwidth_checks
from dlion_cli.site_checks import clocks_check, site_checks, site_of
from dlion_cli.site_cluster import SiteCluster, ask
from dlion_cli.site_room import room_checks

if TYPE_CHECKING:
    from dlion_api.spec import Job
    from dlion_cli.contexts import Contexts
    from dlion_cli.listed_sites import TrustedSite

_FROM_HERE: Final = frozenset({"dns", "port"})
_HERE_ALONE: Final = (
    "This machine does not get there; whether the sites do is what `streams` says. "
)


@dataclass(frozen=True)
class Bandwidth:
    """That links are to be measured."""

    least_mbit: float | None
    """Mbit/s that each is to carry in either direction; None: whatever it carries will do."""


def cluster_checks(
    contexts: Contexts,
    sites: Sequence[TrustedSite],
    job: Job | None,
    within_s: float,
    bandwidth: Bandwidth | None = None,
) -> list[Check]:
    """What the clusters of these contexts say; one that does not answer is a check that failed.

    With `bandwidth` the links between the sites are measured.
    """
    answers = contexts.ask(
        lambda jobs: ask(jobs.cluster, with_nodes=job is not None, within_s=within_s)
    )
    checks = [
        Check(f"context {name}", "api", Outcome.FAIL, message_of(error))
        for name, error in contexts.errors.items()
    ]
    asked: dict[str, SiteCluster] = {}
    for found in answers.values():
        site = site_of(found)
        if site and (other := asked.setdefault(site, found)) is not found:
            checks.append(_twice(site, other.context, found.context))
            continue
        checks += site_checks(found, sites)
        if job is not None:
            named = (each for each in job.spec.sites if each.name == site)
            checks += [check for each in named for check in room_checks(found, each, job)]
    clocks = {site: found.clock for site, found in asked.items() if found.clock is not None}
    checks += clocks_check(clocks)
    if bandwidth is not None:
        checks += bandwidth_checks(contexts, asked, sites, bandwidth.least_mbit)
    return checks


def joined(dialled: Sequence[Check], asked: Sequence[Check]) -> list[Check]:
    """Both, site by site as they come.

    What only this machine does not reach becomes a warning, and a clock of which a certificate
    tells nothing is left out where the cluster has told it.
    """
    told = {check.site for check in asked if check.name == "clock"}
    kept = [
        replace(check, outcome=Outcome.WARN, advice=_HERE_ALONE + check.advice)
        if check.name in _FROM_HERE and check.outcome is Outcome.FAIL
        else check
        for check in dialled
        if not (check.name == "clock" and check.outcome is Outcome.UNKNOWN and check.site in told)
    ]
    return [*kept, *asked]


def _twice(site: str, first: str, second: str) -> Check:
    seen = f"contexts {first} and {second} both lead to an operator of this site"
    advice = "Give each site a site.name of its own, or name another context"
    return Check(site, "api", Outcome.FAIL, seen, advice)
