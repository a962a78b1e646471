"""Tables of a cluster's jobs: the list, and one job with its sites and conditions."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dlion_api.status_names import ACCURACY, ConditionType
from dlion_cli.cluster.cluster_jobs import event_time
from dlion_cli.terminal.formatting import UNKNOWN
from dlion_cli.terminal.plain_table import plain_table
from dlion_cli.views.job_status import ConditionView, JobStatus, age_of, text

_STATE_STYLES = {
    "Training": "green",
    "Succeeded": "cyan",
    "Degraded": "yellow",
    "Waiting": "yellow",
    "Suspended": "dim",
    "Failed": "bold red",
    "Ready": "green",
    "Starting": "yellow",
    "Absent": "yellow",
    "Unreachable": "bold red",
    "Refused": "bold red",
}
_BAD = frozenset({ConditionType.FAILED, ConditionType.STALLED, ConditionType.DEGRADED})
_OPTIONAL = ("AGE", "STEPS/S", "SITES")
"""Columns that a narrow terminal lacks, the first one first; `-o wide` has all."""
NOT_OBSERVED = (
    "No operator has observed this job yet. Check that one is installed for this namespace: "
    "kubectl get pods -A -l app.kubernetes.io/name=dlion"
)


def list_table(
    jobs: Sequence[JobStatus],
    now: datetime,
    *,
    wide: bool,
    everywhere: bool,
    contexts: Sequence[str] = (),
) -> Table:
    """One row per job, with the printer columns of `kubectl get dlionjob`; `wide` adds more.

    `contexts` names each job's context, if several were queried.
    """
    titles = [*(["CONTEXT"] if contexts else []), *(["NAMESPACE"] if everywhere else [])]
    titles += ["NAME", "STATE", "PROGRESS", "SITES", "WORKERS", "STEPS/S", "AGE"]
    titles += ["RUN", "ETA", "LOSS", "ACCURACY", "LINKS", "WHY"] if wide else []
    table = plain_table(*titles, left_out=() if wide else _OPTIONAL)
    for index, job in enumerate(jobs):
        cells = [*contexts[index : index + 1], *([job.namespace] if everywhere else [])]
        cells += [*_list_cells(job, now), *(_wide_cells(job) if wide else [])]
        table.add_row(*map(_styled, cells))
    return table


def _list_cells(job: JobStatus, now: datetime) -> list[str]:
    return [
        job.name,
        job.state,
        job.progress,
        job.ready_sites,
        job.ready_workers,
        job.steps_per_second,
        job.age(now),
    ]


def _wide_cells(job: JobStatus) -> list[str]:
    metrics, name = job.metrics, job.accuracy_name
    accuracy = metrics.get(ACCURACY, UNKNOWN)
    ready = job.outcome or job.condition(ConditionType.READY)
    return [
        job.run_id,
        job.eta(),
        metrics.get("loss", UNKNOWN),
        accuracy if name == ACCURACY or accuracy == UNKNOWN else f"{name} {accuracy}",
        job.links,
        ready.reason if ready else UNKNOWN,
    ]


def one_job(
    job: JobStatus, events: Sequence[Mapping[str, Any]], now: datetime, *, wide: bool = False
) -> list[RenderableType]:
    """One job: its row, figures, sites, conditions and newest events."""
    parts: list[RenderableType] = [list_table([job], now, wide=wide, everywhere=False), Text("")]
    if not job.was_ever_observed:
        parts += [Text(NOT_OBSERVED, style="yellow"), Text("")]
    figures = f"ETA {job.eta()}  ·  {figures_line(job)}"
    parts += [Text(figures), Text(""), sites_table(job), Text("")]
    if job.link_pairs:
        parts += [pairs_table(job), Text("")]
    if job.conditions:
        parts += [conditions_table(job.conditions, now), Text("")]
    if events:
        parts += [Text("EVENTS", style="bold"), *(event_line(event, now) for event in events)]
    return parts


def figures_line(job: JobStatus) -> str:
    """Run, metrics and links in one line."""
    attempt = f", attempt {job.attempt}" if job.attempt > 1 else ""
    parts = [f"run {job.run_id}{attempt}"]
    parts += [f"{name} {value}" for name, value in job.named_metrics.items()]
    return "  ·  ".join([*parts, f"links {job.links}"])


def sites_table(job: JobStatus) -> Table:
    table = plain_table("SITE", "STATE", "WORKERS", folded="MESSAGE")
    for row in job.sites:
        table.add_row(*map(_styled, row))
    return table


def pairs_table(job: JobStatus) -> Table:
    """One row for each ordered pair of sites."""
    table = plain_table("FROM TO", "LINKS", "MBIT/S")
    for row in job.link_pairs:
        table.add_row(*map(_styled, row))
    return table


def conditions_table(conditions: Iterable[ConditionView], now: datetime) -> Table:
    table = plain_table("CONDITION", "STATUS", "REASON", "SINCE", folded="MESSAGE")
    for each in conditions:
        differs = each.type == ConditionType.SPEC_CONSISTENT and each.status == "False"
        style = "bold red" if differs or (each.is_true and each.type in _BAD) else ""
        cells = (each.type, each.status, each.reason, age_of(each.since, now), each.message)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def event_line(event: Mapping[str, Any], now: datetime) -> Text:
    """One event in a line: age, reason, message."""
    line = Text()
    line.append(f"{age_of(event_time(dict(event)), now):>6}  ", style="dim")
    warning = event.get("type") == "Warning"
    line.append(text(event.get("reason")), style="bold yellow" if warning else "bold")
    line.append(f"  {text(event.get('message'), '')}")
    count = event.get("count")
    if isinstance(count, int) and count > 1:
        line.append(f"  (x{count})", style="dim")
    return line


def _styled(cell: str) -> Text:
    return Text(cell, style=_STATE_STYLES.get(cell, ""))
