"""`dlion preflight --contexts`: queries clusters and merges their checks with local ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dlion_api.spec import Job
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_bandwidth import bandwidth_checks
from dlion_cli.preflight_checks.site_capacity import capacity_checks
from dlion_cli.preflight_checks.site_checks import clock_skew_checks, site_checks, site_name
from dlion_cli.preflight_checks.site_cluster import SiteCluster, query_site
from dlion_cli.terminal.failures import message_of

_LOCAL_CHECKS: Final = frozenset({"dns", "port"})
_LOCAL_ONLY_ADVICE: Final = "This machine cannot connect; `streams` shows whether the sites can. "


def cluster_checks(
    contexts: Contexts,
    sites: Sequence[TrustedSite],
    job: Job | None,
    within_s: float,
    min_mbit_per_s: float | None = None,
) -> list[Check]:
    """The checks of these contexts' clusters. A cluster that does not respond is a failed check.

    `min_mbit_per_s` requests measurements of the links between sites, each of which needs this
    rate in each direction; 0: any rate is sufficient.
    """
    answers = contexts.query(
        lambda jobs: query_site(jobs.cluster, with_nodes=job is not None, within_s=within_s)
    )
    checks = [
        Check(f"context {name}", "api", CheckOutcome.FAIL, message_of(error))
        for name, error in contexts.errors.items()
    ]
    by_site: dict[str, SiteCluster] = {}
    for cluster in answers.values():
        site = site_name(cluster)
        if site and (other := by_site.setdefault(site, cluster)) is not cluster:
            checks.append(_duplicate_site(site, other.context, cluster.context))
            continue
        checks += site_checks(cluster, sites)
        if job is not None:
            named = (each for each in job.spec.sites if each.name == site)
            checks += [check for each in named for check in capacity_checks(cluster, each, job)]
    clocks = {site: each.clock for site, each in by_site.items() if each.clock is not None}
    checks += clock_skew_checks(clocks)
    if min_mbit_per_s is not None:
        checks += bandwidth_checks(contexts, by_site, sites, min_mbit_per_s)
    return checks


def merge_checks(local: Sequence[Check], queried: Sequence[Check]) -> list[Check]:
    """Local and cluster checks, in order.

    A failure to connect from this machine becomes a warning. An inconclusive clock check by
    certificate is dropped if the cluster reported its clock.
    """
    has_clock = {check.site for check in queried if check.name == "clock"}
    kept = [
        replace(check, outcome=CheckOutcome.WARN, advice=_LOCAL_ONLY_ADVICE + check.advice)
        if check.name in _LOCAL_CHECKS and check.outcome is CheckOutcome.FAIL
        else check
        for check in local
        if not (
            check.name == "clock"
            and check.outcome is CheckOutcome.UNKNOWN
            and check.site in has_clock
        )
    ]
    return [*kept, *queried]


def _duplicate_site(site: str, first: str, second: str) -> Check:
    observed = f"contexts {first} and {second} both lead to an operator of this site"
    advice = "Give each site a site.name of its own, or name another context"
    return Check(site, "api", CheckOutcome.FAIL, observed, advice)
