"""Renders the report page: its sections, tables and texts.

The template escapes all values except our own SVG.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from dlion_api.names import Rank
from dlion_results.report import progress_charts, resource_charts
from dlion_results.report.drawing import Chart, colour
from dlion_results.report.runs import LoadedRun, load_runs
from dlion_results.run_folder.environment import EnvironmentFigure
from dlion_results.run_folder.storage import write_whole

PICTURE_BYTES = 2_000_000
"""Total size of all charts: the page stays below three megabytes."""
_MAX_EVENTS = 80
_MAX_ROWS = 200
_FAR_OFF = 0.1
"""A measured quantity that deviates more from the requested one is marked."""


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    labels: Sequence[str] = (),
    title: str = "",
    reference: str | None = None,
) -> Path:
    """Write the page of these result folders to `out` and return it.

    `reference` is the label of the one-worker run for the speed-up. Raises: DataError if a folder
    holds no run, or no run of one worker has that label; StorageError if `out` cannot be written.
    """
    page = render(load_runs(folders, labels, reference=reference), title=title)
    write_whole(out, page.encode())
    return out


def render(
    runs: Sequence[LoadedRun], *, title: str = "", picture_bytes: int = PICTURE_BYTES
) -> str:
    """The self-contained page as HTML text.

    Several runs share the upper charts; each has its own section below. Sections have no charts
    once those before have used up `picture_bytes`.
    """
    environment = Environment(
        loader=PackageLoader("dlion_results.report", "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({
        name: partial(_spelt, spell)
        for name, spell in (
            ("percent", lambda value, digits=1: f"{value * 100:.{digits}f} %"),
            ("size", _size),
            ("duration", _duration),
            ("figure", lambda value: f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"),
            ("whole", lambda value: f"{value:,.0f}"),
        )
    })  # fmt: skip
    progress = [
        progress_charts.accuracy_against_time(runs),
        progress_charts.accuracy_against_bytes(runs),
        progress_charts.loss_against_time(runs),
        progress_charts.drift_against_time(runs),
    ]
    left = picture_bytes - sum(len(chart.svg) for chart in progress)
    sections = []
    for index, run in enumerate(runs):
        pictures = _pictures(run) if left > 0 else None
        if pictures is not None:
            left -= sum(len(chart.svg) for charts in pictures.values() for chart in charts)
        sections.append({**_section(run), "colour": colour(index, len(runs)), "pictures": pictures})
    return environment.get_template("page.html").render(
        title=title or ", ".join(dict.fromkeys(run.job.metadata.name for run in runs)),
        runs=sections,
        levels=_levels(runs),
        progress=progress,
        scaling=progress_charts.speed_up(runs),
    )


def _pictures(run: LoadedRun) -> dict[str, list[Chart]]:
    classes = resource_charts.class_accuracy(run)
    return {
        "compute": [
            resource_charts.batch_sizes(run),
            resource_charts.capacities(run),
            resource_charts.time_use(run),
            *([classes] if classes is not None else []),
        ],
        "network": [
            resource_charts.uplinks(run),
            resource_charts.link_map(run),
            resource_charts.budget_map(run),
        ],
        "events": [resource_charts.timeline(run)],
    }


def _section(run: LoadedRun) -> dict[str, Any]:
    return {
        "label": run.label,
        "summary": run.summary,
        "reference": run.reference or "one worker",
        "legend": resource_charts.legend(run),
        "events": _events(run),
        "environment": _environment(run),
        "job_text": run.job_text,
        "bad_lines": run.bad_lines[:10],
        "bad_line_count": len(run.bad_lines),
    }


def _levels(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Accuracies that any run reached, with every run's time and bytes."""
    rows = []
    for place, level in enumerate(runs[0].summary["levels"]) if runs else ():
        entries = [run.summary["levels"][place] for run in runs]
        if any(entry["time_s"] is not None for entry in entries):
            rows.append({"accuracy": level["accuracy"], "entries": entries})
    return rows


def _events(run: LoadedRun) -> list[dict[str, Any]]:
    """The first warnings, then other events, sorted by time."""
    chosen = sorted(run.tally.events, key=lambda event: not event.warning)[:_MAX_EVENTS]
    return [
        {**asdict(event), "worker": run.worker_name(event.rank)}
        for event in sorted(chosen, key=lambda event: event.time_s)
    ]


def _environment(run: LoadedRun) -> dict[str, Any] | None:
    """Requested against measured values, a row per worker and quantity."""
    given = run.environment
    if given is None:
        return None
    rows = [_environment_row(run, figure) for figure in given.figures[:_MAX_ROWS]]
    return {"name": given.name, "notes": given.notes, "rows": rows}


def _environment_row(run: LoadedRun, figure: EnvironmentFigure) -> dict[str, Any]:
    requested, measured = figure.requested, figure.measured
    off = measured / requested - 1 if requested and measured is not None else None
    name = run.worker_name(Rank(figure.rank))
    begins_s = figure.begins_s
    return {
        **asdict(figure),
        "worker": name if figure.peer is None else f"{name} → {figure.peer}",
        "quantity": f"{figure.quantity}, from {begins_s:g} s" if begins_s else figure.quantity,
        "off": off,
        "far_off": off is not None and abs(off) > _FAR_OFF,
    }


def _spelt(spell: Callable[..., str], value: float | None, *options: int) -> str:
    return "—" if value is None else spell(value, *options)


def _size(count: float) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
