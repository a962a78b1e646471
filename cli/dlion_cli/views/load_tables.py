"""Tables of `dlion top` and `dlion describe`: a row for each worker, and for each site."""

from collections.abc import Mapping
from typing import Final

from rich.table import Table
from rich.text import Text

from dlion_cli.terminal.formatting import UNKNOWN, format_bytes, format_percent, format_rate
from dlion_cli.terminal.plain_table import plain_table
from dlion_cli.views.job_status import text
from dlion_cli.views.worker_load import JobLoad, SiteLoad, WorkerLoad

BYTES_PER_MBIT: Final = 125_000.0
_OPTIONAL: Final = (
    "OTHERS", "TEMP", "LOST", "DISK WAIT", "MEM WAIT", "CPU WAIT", "RANK", "QUOTA", "CPU",
    "ITERATION", "THROTTLED", "SHARE", "EXCHANGE", "STEPS/S",
)  # fmt: skip
"""Columns of workers that a narrow terminal lacks, the first one first."""
_WIDE: Final = ("HEAT", "GROUP")
"""Columns of workers with `-o wide` only."""


def load_tables(loads: Mapping[str, JobLoad], *, wide: bool = False) -> list[Table]:
    """A table of workers and one of sites; several contexts have a column with their names."""
    first = ("CONTEXT",) if any(loads) else ()
    workers = plain_table(
        *first, "WORKER", "RANK", "SAMPLES/S", "BATCH", "SHARE", "STEPS/S", "ITERATION", "WAIT",
        "EXCHANGE", "CPU", "QUOTA", "THROTTLED", "CPU WAIT", "MEM WAIT", "DISK WAIT", "LOST",
        "TEMP", "OTHERS", *(_WIDE if wide else ()), folded="NOTE", left_out=(*_WIDE, *_OPTIONAL),
    )  # fmt: skip
    sites = plain_table(
        *first, "LINKS TO", "BUDGET/ITERATION", "MBIT/S", "SENT MBIT/S", "USED", "ROUND TRIP",
        "LOST", left_out=("BUDGET/ITERATION", "USED"),
    )  # fmt: skip
    for context, load in loads.items():
        before = (context,) if first else ()
        for worker in load.workers:
            added = (_heat(worker), _group(worker)) if wide else ()
            row = (*before, *_worker_cells(worker), *added, worker.problem)
            workers.add_row(*map(Text, row))
        for site in load.sites:
            rates = site.bandwidth_bytes_per_second, site.sent_bytes_per_second
            mbits = (None if rate is None else rate / BYTES_PER_MBIT for rate in rates)
            budget, used = format_bytes(site.budget_bytes_per_iteration), site.used_fraction
            lost = format_percent(site.retransmitted_fraction)
            cells = (site.site, budget, *map(format_rate, mbits), format_percent(used))
            sites.add_row(*map(Text, (*before, *cells, _round_trip(site), lost)))
    return [workers, sites] if sites.row_count else [workers]


def _worker_cells(load: WorkerLoad) -> tuple[str, ...]:
    return (
        load.worker,
        text(load.rank),
        format_rate(load.samples_per_second),
        _format(load.batch_samples, "{:.0f}"),
        format_percent(load.share_fraction),
        format_rate(load.steps_per_second),
        _format(load.iteration_seconds, "{:.3g} s"),
        format_percent(load.wait_fraction),
        format_percent(load.exchange_fraction),
        _format(load.cpu_cores, "{:.2f}"),
        _format(load.quota_cores, "{:.3g}"),
        format_percent(load.throttled_fraction),
        format_percent(load.cpu_pressure_fraction),
        format_percent(load.memory_pressure_fraction),
        format_percent(load.io_pressure_fraction),
        format_percent(load.retransmitted_fraction),
        _format(load.temperature_celsius, "{:.0f} °C"),
        _others(load),
    )


def _round_trip(site: SiteLoad) -> str:
    """The shortest and the longest one, such as `41 to 180 ms`."""
    times = site.min_round_trip_seconds, site.round_trip_seconds
    known = [f"{1000 * each_s:.3g}" for each_s in times if each_s is not None]
    return f"{' to '.join(dict.fromkeys(known))} ms" if known else UNKNOWN


def _others(load: WorkerLoad) -> str:
    """Text with the cores of other work and, if the capacity follows it, the forecast."""
    now = _format(load.other_work_cores, "{:.1f}")
    if not load.follows_forecast or load.expected_other_work_cores is None:
        return now
    return f"{now} → {load.expected_other_work_cores:.1f}"


def _heat(load: WorkerLoad) -> str:
    """The part of compute that the heat budget leaves, and why, such as `62.0 % for 73 °C`."""
    if load.heat_compute_share_fraction is None:
        return UNKNOWN
    aim = _format(load.heat_target_celsius, "for {:.0f} °C")
    why = "without a sensor" if load.heat_is_blind else aim
    return f"{format_percent(load.heat_compute_share_fraction)} {why}"


def _group(load: WorkerLoad) -> str:
    """Its group and what groups are made by, such as `2 of 3 by links, gateway`."""
    if load.link_group is None or load.link_groups is None:
        return UNKNOWN
    why = "links" if load.link_grouping_version else "site"
    role = ", gateway" if load.is_gateway else ""
    return f"{load.link_group} of {load.link_groups} by {why}{role}"


def _format(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
