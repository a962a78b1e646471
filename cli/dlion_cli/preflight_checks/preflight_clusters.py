"""`dlion preflight --contexts`: queries clusters and merges their checks with local ones."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from dlion_api.errors import DLionError
from dlion_api.spec import Job
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.job_runtime import runtime_checks
from dlion_cli.preflight_checks.site_capacity import capacity_checks
from dlion_cli.preflight_checks.site_checks import clock_skew_checks, site_checks, site_name
from dlion_cli.preflight_checks.site_cluster import SiteCluster, measure_link, query_site
from dlion_cli.terminal.failures import message_of

LINK_TIMEOUT_S: Final = 40.0
"""Operators limit a measurement to half a minute."""
_BYTES_PER_MBIT: Final = 125_000.0
_LOCAL_CHECKS: Final = frozenset({"dns", "port", "mtu"})
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
    answers = contexts.query(lambda jobs: query_site(jobs.cluster, job, within_s=within_s))
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
            for each in job.spec.sites:
                if each.name == site:
                    checks += runtime_checks(cluster, each, job)
                    checks += capacity_checks(cluster, each, job)
    clocks = {site: each.clock for site, each in by_site.items() if each.clock is not None}
    checks += clock_skew_checks(clocks)
    if min_mbit_per_s is not None:
        checks += _bandwidth_checks(contexts, by_site, sites, min_mbit_per_s)
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


def _bandwidth_checks(
    contexts: Contexts,
    clusters: Mapping[str, SiteCluster],
    sites: Sequence[TrustedSite],
    min_mbit_per_s: float,
) -> list[Check]:
    """For each queried site, the bandwidth of its links to all others, by their operators.

    Measures one link at a time, because simultaneous measurements would share the bandwidth.
    Fails below `min_mbit_per_s` Mbit/s in any direction.
    """
    turn = threading.Lock()
    by_context = {cluster.context: site for site, cluster in clusters.items()}
    rates: dict[str, dict[str, float | DLionError]] = {}

    def one(jobs: JobClient) -> None:
        site = by_context.get(jobs.cluster.context)
        if site is None or isinstance(operator := clusters[site].operator, DLionError):
            return
        rates[site] = {}
        for other in (each.name for each in sites if each.name != site):
            with turn:
                try:
                    rate = measure_link(jobs.cluster, operator, other, LINK_TIMEOUT_S)
                except DLionError as error:
                    rates[site][other] = error
                else:
                    rates[site][other] = rate / _BYTES_PER_MBIT

    contexts.query(one)
    return [_bandwidth(site, rates[site], min_mbit_per_s) for site in clusters if site in rates]


def _bandwidth(site: str, links: Mapping[str, float | DLionError], min_mbit_per_s: float) -> Check:
    rates = {other: rate for other, rate in links.items() if not isinstance(rate, DLionError)}
    parts = [
        f"{rate:.3g} Mbit/s to {other}"
        if not isinstance(rate, DLionError)
        else f"not measured to {other} ({rate})"
        for other, rate in links.items()
    ]
    observed = "; ".join(parts) or "there is no other site"
    figures = {f"{other}_mbit_per_s": rate for other, rate in rates.items()}
    narrow = [other for other, rate in rates.items() if rate < min_mbit_per_s]
    if narrow:
        advice = (
            f"Less than {min_mbit_per_s:g} Mbit/s to {', '.join(narrow)}: check what else uses the "
            "link, and the manifest's limits (spec.network, docs/exchange.md)"
        )
        return Check(site, "bandwidth", CheckOutcome.FAIL, observed, advice, figures)
    outcome = CheckOutcome.OK if len(rates) == len(links) else CheckOutcome.UNKNOWN
    return Check(site, "bandwidth", outcome, observed, figures=figures)
