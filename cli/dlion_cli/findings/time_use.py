"""What the time of a job's run goes to, and what holds it up, from the figures in its status."""

import math

from rich.console import RenderableType
from rich.text import Text

from dlion_cli.terminal.formatting import printable
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.load_tables import BYTES_PER_MBIT
from dlion_cli.views.pod_status import worker_ranks
from dlion_results.summary.awaited_link import LinkUse
from dlion_results.summary.culprit import AwaitedPeer, Culprit, RunUse, find_culprit
from dlion_results.summary.time_use import shares_text

SUFFIX = "Fraction"


def culprit_of(job: JobStatus) -> Culprit | None:
    """What holds the workers of this site up most; None: nothing more than usual, or unknown."""
    figures = dict(job.time_figures)
    fraction, rank = figures.pop("waitedForFraction", None), figures.pop("waitedForRank", None)
    ranks = {rank: key for key, rank in worker_ranks(job.document).items()}
    awaited = None
    if fraction is not None and rank is not None:
        site, group, index = ranks.get(int(rank), ("", "", 0))
        name = f"{site}/{group}-{index}" if site else f"worker {rank:.0f}"
        awaited = AwaitedPeer(name, fraction, None, site_link=_slowest_link(job, site))
    shares = {name.removesuffix(SUFFIX): value for name, value in figures.items()}
    return find_culprit(RunUse(shares, max(1, len(ranks)), awaited, policy=job.policy))


def _slowest_link(job: JobStatus, site: str) -> LinkUse | None:
    """The slowest link from that site to another whose rate is known; None without any."""
    rates = [
        (rate, pair)
        for pair, _, megabits in job.link_pairs
        if pair.startswith(f"{site} to ") and (rate := _rate_bytes_per_s(megabits)) is not None
    ]
    if not rates:
        return None
    rate, pair = min(rates)
    return LinkUse(pair.replace(" to ", " → "), 0.0, rate)


def _rate_bytes_per_s(megabits: str) -> float | None:
    try:
        rate = float(megabits) * BYTES_PER_MBIT
    except ValueError:
        return None
    return rate if 0 < rate < math.inf else None


def time_parts(job: JobStatus) -> list[RenderableType]:
    """The section of `dlion describe`; empty without figures."""
    figures = job.time_figures
    if "computeFraction" not in figures or "waitFraction" not in figures:
        return []
    shares = {
        f"{name.removesuffix(SUFFIX)}_fraction": value
        for name, value in figures.items()
        if not name.startswith("waitedFor")
    }
    parts: list[RenderableType] = [Text("TIME", style="bold"), Text(shares_text(shares))]
    if (culprit := culprit_of(job)) is not None:
        parts.append(Text(printable(culprit.sentence), style="yellow"))
        parts.append(Text(printable(f"→ {culprit.advice}")))
    return [*parts, Text("")]
