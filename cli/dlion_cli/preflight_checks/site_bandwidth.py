"""Bandwidth of the links between sites, measured by their operators for `dlion preflight
--bandwidth`.

Measures one link at a time, because simultaneous measurements would share the bandwidth.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from dlion_api.errors import DLionError
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_cluster import SiteCluster, measure_link

LINK_TIMEOUT_S: Final = 40.0
"""Operators limit a measurement to half a minute."""
_BYTES_PER_MBIT: Final = 125_000.0


def bandwidth_checks(
    contexts: Contexts,
    clusters: Mapping[str, SiteCluster],
    sites: Sequence[TrustedSite],
    min_mbit_per_s: float,
) -> list[Check]:
    """For each queried site, the bandwidth of its links to all others.

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
    return [_check(site, rates[site], min_mbit_per_s) for site in clusters if site in rates]


def _check(site: str, links: Mapping[str, float | DLionError], min_mbit_per_s: float) -> Check:
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
