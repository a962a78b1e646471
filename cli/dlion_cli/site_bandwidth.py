"""What links between sites carry, as their operators measure it for `dlion preflight --bandwidth`.

Asks one operator after the other, and each for one link after the other: two measurements at once
would share what they measure. Called by `cluster_preflight`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from dlion_api.errors import DLionError
from dlion_cli.checks import Check, Outcome
from dlion_cli.site_cluster import measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_cli.cluster_jobs import Jobs
    from dlion_cli.contexts import Contexts
    from dlion_cli.listed_sites import TrustedSite
    from dlion_cli.site_cluster import SiteCluster

ONE_LINK_S: Final = 40.0
"""An operator gives a measurement half a minute at most."""
_BYTES_PER_MBIT: Final = 125_000.0


def bandwidth_checks(
    contexts: Contexts,
    asked: Mapping[str, SiteCluster],
    sites: Sequence[TrustedSite],
    least_mbit: float | None,
) -> list[Check]:
    """Of each site that was asked, what its links to all others carry from there.

    Fails below `least_mbit` Mbit/s; None: nothing is too little.
    """
    turn = threading.Lock()
    by_context = {found.context: site for site, found in asked.items()}
    found: dict[str, dict[str, float | DLionError]] = {}

    def one(jobs: Jobs) -> None:
        site = by_context.get(jobs.cluster.context)
        if site is None or isinstance(operator := asked[site].operator, DLionError):
            return
        found[site] = {}
        for other in (each.name for each in sites if each.name != site):
            with turn:
                try:
                    rate = measured(jobs.cluster, operator, other, ONE_LINK_S)
                except DLionError as error:
                    found[site][other] = error
                else:
                    found[site][other] = rate / _BYTES_PER_MBIT

    contexts.ask(one)
    return [_check(site, found[site], least_mbit) for site in asked if site in found]


def _check(site: str, links: Mapping[str, float | DLionError], least_mbit: float | None) -> Check:
    rates = {other: rate for other, rate in links.items() if not isinstance(rate, DLionError)}
    words = [
        f"{rate:.3g} Mbit/s to {other}"
        if not isinstance(rate, DLionError)
        else f"not measured to {other} ({rate})"
        for other, rate in links.items()
    ]
    seen = "; ".join(words) or "there is no other site"
    figures = {f"{other}_mbit_per_s": rate for other, rate in rates.items()}
    narrow = [other for other, rate in rates.items() if rate < (least_mbit or 0.0)]
    if narrow:
        advice = (
            f"Less than {least_mbit:g} Mbit/s to {', '.join(narrow)}: see what else uses the link, "
            "and what the manifest lets it carry (spec.network, docs/exchange.md)"
        )
        return Check(site, "bandwidth", Outcome.FAIL, seen, advice, figures)
    outcome = Outcome.OK if len(rates) == len(links) else Outcome.UNKNOWN
    return Check(site, "bandwidth", outcome, seen, figures=figures)
