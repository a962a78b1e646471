"""Renders the report page: one file with its figures, texts, styles and scripts.

The templates escape all values. A content security policy in the page names the hashes of its
scripts and allows no request, so a browser runs nothing else and fetches nothing.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dlion_api.names import Rank
from dlion_results.report import curve_charts, formats, link_charts, time_charts
from dlion_results.report.curve_charts import PageChart
from dlion_results.report.headline import differences, ending_words, headline
from dlion_results.report.palette import (
    DARK,
    DARK_PAPER,
    LIGHT,
    LIGHT_PAPER,
    coloured_groups,
    css_colours,
)
from dlion_results.report.runs import LoadedRun, load_runs
from dlion_results.report.tiles import shares, tiles
from dlion_results.run_folder.environment import EnvironmentFigure
from dlion_results.run_folder.storage import write_whole
from dlion_results.run_folder.stored_values import text_of
from dlion_results.summary.accuracy_name import accuracy_text, common_name
from dlion_results.summary.time_use import start_and_end_s, time_sentences

PAGE_BYTES: Final = 1_900_000
"""Size from which on further runs have no section of their own, and that of a single run is
shortened: the page stays below 2 MB."""
MAX_RUNS: Final = 80
"""Further runs are only named."""
SCRIPTS: Final = ("d3.min.js", "plot.umd.min.js", "page.js")
_UNIT: Final = re.compile(r"(\d) (%|s\b|min\b|h\b)")
"""A number and its unit, between which a headline has no line break."""
_MAX_MESSAGE: Final = 600
_MAX_TITLE: Final = 200
_MAX_NAMED: Final = 1000
"""Characters of the names of runs that are not shown."""
_MAX_DIFFERENCES: Final = 12
_FAR_OFF: Final = 0.1
"""A measured quantity that deviates more from the requested one is marked."""


@dataclass(frozen=True)
class SectionLimits:
    """How much of each long part a run's section has."""

    workers: int = 4000
    events: int = 80
    dots: int = 150
    """Events in the timeline."""
    notes: int = 100
    rows: int = 200
    """Rows of the environment."""
    manifest: int = 1_000_000
    """Characters."""


_SHORTENED: Final = SectionLimits(
    workers=100, events=20, dots=40, notes=10, rows=40, manifest=20_000
)


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
    page = render(load_runs(folders, labels, reference=reference), title=text_of(title))
    write_whole(out, page.encode("utf-8", "replace"))
    return out


@np.errstate(all="ignore")  # infinite figures of damaged files become gaps
def render(runs: Sequence[LoadedRun], *, title: str = "", page_bytes: int = PAGE_BYTES) -> str:
    """The self-contained page as HTML text.

    Several runs share the upper part; each has its own section below. Sections that would make
    the page larger than `page_bytes` are replaced by a line with the reason; that of a single run
    is shortened. Runs after the first `MAX_RUNS` are only named.
    """
    environment = _environment()
    all_runs, runs = runs, runs[:MAX_RUNS]
    top = _shared_charts(runs)
    overviews = [_overview(run) for run in runs]
    environment.globals["accuracy_name"] = common_name(run.accuracy_name for run in runs)
    curves = environment.get_template("curves.html").render(
        runs=overviews, charts={chart.name: chart for chart in top}, levels=_levels(runs)
    )
    scripts = [_static(name) for name in SCRIPTS]

    def page(sections: Sequence[str], specs: dict[str, Any]) -> str:
        return environment.get_template("page.html").render(
            title=formats.shortened(
                title or ", ".join(dict.fromkeys(run.job.metadata.name for run in runs)), _MAX_TITLE
            ),
            headline=_UNIT.sub("\\1\u00a0\\2", headline(all_runs)),
            culprit=all_runs[0].summary["culprit"] if len(all_runs) == 1 else None,
            run_count=len(all_runs),
            not_shown=_not_shown(all_runs[MAX_RUNS:]),
            runs=overviews,
            tiles=tiles(runs),
            charts={chart.name: chart for chart in top},
            differences=_differences(runs),
            curves=Markup(curves),  # noqa: S704 - the template escaped it
            sections=sections,
            data=_json(specs),
            scripts=scripts,
            policy=_policy(scripts),
            style=_style(),
            licences=_static("LICENSES.txt"),
        )

    specs = _specs(top, "")
    single = len(runs) == 1
    sections = [
        _without_details(environment, run, place, single=single) for place, run in enumerate(runs)
    ]
    used = len(page(sections, specs).encode())
    for place, run in enumerate(runs):
        for limits in (SectionLimits(), _SHORTENED) if single else (SectionLimits(),):
            html, own = _section(environment, run, place, limits, curves=curves if single else "")
            grown = used + len((html + _json(own)).encode()) - len(sections[place].encode())
            if grown <= page_bytes:
                break
        else:
            break
        used = grown
        specs.update(own)
        sections[place] = html
    return page(sections, specs)


def _shared_charts(runs: Sequence[LoadedRun]) -> list[PageChart]:
    charts = [
        curve_charts.accuracy_over_time(runs),
        curve_charts.metrics_over_time(runs),
        curve_charts.accuracy_over_bytes(runs),
        curve_charts.loss_over_time(runs),
        curve_charts.drift_over_time(runs),
    ]
    return [chart for chart in charts if chart is not None]


def _not_shown(runs: Sequence[LoadedRun]) -> str:
    """Names of those runs, as far as there is room for them."""
    names = ", ".join(formats.shortened(run.label, 60) for run in runs)
    return formats.shortened(names, _MAX_NAMED)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dlion_results.report", "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    spelt = (
        formats.percent, formats.size, formats.duration, formats.figure, formats.whole,
    )  # fmt: skip
    spellings: dict[str, Callable[..., str]] = {
        each.__name__: partial(formats.or_unknown, each) for each in spelt
    }
    environment.filters.update(spellings, accuracy=accuracy_text, shortened=formats.shortened)
    return environment


def _section(
    environment: Environment, run: LoadedRun, place: int, limits: SectionLimits, *, curves: str
) -> tuple[Markup, dict[str, Any]]:
    """The details of one run, and the data of their charts."""
    prefix = f"run{place}-"
    charts = [
        time_charts.time_bars(run),
        link_charts.uplinks(run),
        curve_charts.batch_sizes(run),
        curve_charts.capacities(run),
        curve_charts.timeline(run, max_events=limits.dots),
    ]
    html = environment.get_template(
        "run.html"
    ).render(
        **_overview(run),
        place=place,
        single=bool(curves),
        curves=Markup(curves),  # noqa: S704 - the template escaped it
        prefix=prefix,
        charts={chart.name: chart for chart in charts},
        waited_for=time_charts.waited_for(run),
        maps=[link_charts.link_map(run), link_charts.budget_map(run)],
        kinds=link_charts.byte_map(run),
        losses=link_charts.loss_table(run),
        ends={worker["rank"]: start_and_end_s(worker) for worker in run.summary["workers"]},
        classes=link_charts.class_map(run),
        events=_events(run, limits.events),
        event_count=run.tally.reasons.total(),
        decisions=_decisions(run, limits.events),
        decision_count=len(run.tally.decisions.decisions) + run.tally.decisions.left_out,
        environment=_imposed(run, limits),
        limits=limits,
        job_text=run.job_text[: limits.manifest],
        job_text_is_cut=len(run.job_text) > limits.manifest,
        bad_lines=run.bad_lines[:10],
        bad_line_count=len(run.bad_lines),
    )
    return Markup(html), _specs(charts, prefix)  # noqa: S704 - the template escaped it


def _without_details(
    environment: Environment, run: LoadedRun, place: int, *, single: bool
) -> Markup:
    template = environment.get_template("left_out.html")
    text = template.render(label=run.label, place=place, single=single)
    return Markup(text)  # noqa: S704 - escaped there


def _overview(run: LoadedRun) -> dict[str, Any]:
    return {
        "label": run.label,
        "summary": run.summary,
        "policy": run.job.spec.exchange.policy,
        "ending": ending_words(run),
        "shares": shares(run),
        "sentences": time_sentences(run.summary),
        "reference": run.reference or "one worker",
        "environment_name": run.environment.name if run.environment else "",
        "groups": coloured_groups(run),
    }


def _differences(runs: Sequence[LoadedRun]) -> list[tuple[str, list[str]]]:
    """Settings in which runs differ; none for one run or for many differences."""
    rows = differences([run.job for run in runs])
    if not 0 < len(rows) <= _MAX_DIFFERENCES:
        return []
    return [
        (name, ["" if v is None else formats.shortened(str(v), 60) for v in values])
        for name, values in rows.items()
    ]


def _levels(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Accuracies that any run reached, with every run's time and bytes."""
    rows = []
    for place, level in enumerate(runs[0].summary["levels"]):
        entries = [run.summary["levels"][place] for run in runs]
        if any(entry["time_s"] is not None for entry in entries):
            rows.append({"accuracy": level["accuracy"], "entries": entries})
    return rows


def _events(run: LoadedRun, most: int) -> list[dict[str, Any]]:
    """The first warnings, then other events, sorted by time."""
    chosen = sorted(run.tally.events, key=lambda event: not event.warning)[:most]
    return [
        {
            **asdict(event),
            "time_s": event.time_s - run.began_s,
            "worker": run.worker_name(event.rank) if event.is_of_worker else "job",
            "message": formats.shortened(event.message, _MAX_MESSAGE),
        }
        for event in sorted(chosen, key=lambda event: event.time_s)
    ]


def _decisions(run: LoadedRun, most: int) -> list[dict[str, Any]]:
    """The first decisions of sidecars on heat, other work and groups."""
    return [
        {
            "time_s": decision.time_s - run.began_s,
            "worker": run.worker_name(decision.rank),
            "reason": decision.reason,
        }
        for decision in run.tally.decisions.decisions[:most]
    ]


def _imposed(run: LoadedRun, limits: SectionLimits) -> dict[str, Any] | None:
    """Requested against measured values, a row per worker and quantity."""
    given = run.environment
    if given is None:
        return None
    rows = [_environment_row(run, figure) for figure in given.figures[: limits.rows]]
    is_cut = len(rows) < len(given.figures)
    return {
        "name": given.name, "notes": given.notes[: limits.notes], "rows": rows, "is_cut": is_cut,
    }  # fmt: skip


def _environment_row(run: LoadedRun, figure: EnvironmentFigure) -> dict[str, Any]:
    requested, measured = figure.requested, figure.measured
    off = measured / requested - 1 if requested and measured is not None else None
    name = run.worker_name(Rank(figure.rank))
    begins_s = figure.begins_s
    return {
        **asdict(figure),
        "worker": name if figure.peer is None else f"{name} → {run.worker_name(Rank(figure.peer))}",
        "quantity": f"{figure.quantity}, from {begins_s:g} s" if begins_s else figure.quantity,
        "off": off,
        "far_off": off is not None and abs(off) > _FAR_OFF,
    }


def _specs(charts: Sequence[PageChart], prefix: str) -> dict[str, Any]:
    return {prefix + chart.name: _finite(chart.spec) for chart in charts if chart.spec}


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have: gaps of a line."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: Any) -> Markup:
    """JSON for a script element: no text in it can end the element or begin another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


def _static(name: str) -> Markup:
    text = files("dlion_results.report").joinpath("static", name).read_text("utf-8")
    return Markup(text)  # noqa: S704 - our own, or of known hash


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy: these scripts and inline styles, and no request to anywhere."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts)
    own = " ".join(f"'sha256-{value.decode()}'" for value in hashes)
    return f"default-src 'none'; script-src {own}; style-src 'unsafe-inline'; base-uri 'none'"


def _style() -> Markup:
    text = str(_static("page.css"))
    for name, value in (
        ("light-colours", f"--paper: {LIGHT_PAPER}; {css_colours(LIGHT)}"),
        ("dark-colours", f"--paper: {DARK_PAPER}; {css_colours(DARK)}"),
    ):
        text = text.replace(f"/* {name} */", value)
    return Markup(text)  # noqa: S704 - our own
