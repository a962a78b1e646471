"""What the page's script draws: lines over time or bytes, and a timeline.

Each function returns a `PageChart`, whose `spec` becomes JSON in the page (for static/page.js).
Times count from the first step of any worker. Points are few enough for a small page.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dlion_api.status_names import ACCURACY
from dlion_results.report.formats import duration, rough_accuracy, shortened
from dlion_results.report.palette import WorkerGroup, coloured_groups, row_groups
from dlion_results.report.runs import LoadedRun, common_target
from dlion_results.summary.accuracy_name import as_title, common_name
from dlion_results.summary.curves import (
    Points,
    at_times,
    mean_over_replicas,
    smoothed,
    subsampled,
)
from dlion_results.summary.summary import sent_bytes_at
from dlion_results.summary.tally import WorkerTally

MAX_REPLICA_LINES: Final = 120
"""Maximum lines of replicas; with more, several runs show only their means."""
INK: Final = -1
"""Place of the text's colour, for what belongs to no worker."""
MAX_WORKER_LINES: Final = 200
"""A chart of one run has lines of so many workers."""
MAX_METRIC_PANELS: Final = 12
_TEXT_LENGTH: Final = 160
_ENDED: Final = 0.95
"""A run whose evaluations end before this part of the common time is marked as ended."""

Series = dict[str, Any]


@dataclass(frozen=True)
class PageChart:
    """A chart of the page with its texts; without `spec` the page shows `alt` alone."""

    name: str
    title: str
    caption: str
    alt: str
    """The text for a screen reader."""
    spec: dict[str, Any] = field(default_factory=dict)


def accuracy_over_time(runs: Sequence[LoadedRun]) -> PageChart:
    """Accuracy of the replicas and their mean; all runs over the same time."""
    name = common_name(run.accuracy_name for run in runs)
    title, end_s = f"{as_title(name)} over time", max(run.length_s for run in runs)
    series = _accuracies(runs, _time_axis)
    several = len(runs) > 1
    means = [one for one in series if one["m"]]
    if not means:
        return PageChart("accuracy", title, "", "No replica was evaluated.")
    for one in means:
        one["m"] = "ended" if several and one["x"][-1] < _ENDED * end_s else "end"
    ends = ", ".join(
        f"{one['n']} ends at {rough_accuracy(one['y'][-1] / _scale(runs), name)}" for one in means
    )
    caption = "Held-out samples; time from the first step of any worker." + _chosen(runs)
    if several:
        caption += " Thick: mean over replicas; thin: each replica."
        if any(one["m"] == "ended" for one in means):
            caption += " Dashed: the run had ended, its last mean."
    return PageChart(
        "accuracy",
        title,
        caption,
        f"{title} over {duration(end_s)}: {ends}.",
        _lines(series, "time", end_s, *_accuracy_axis(name), rule=_target(runs), tall=True),
    )


def accuracy_over_bytes(runs: Sequence[LoadedRun]) -> PageChart:
    """Accuracy over the bytes that all workers had sent by then."""
    name = common_name(run.accuracy_name for run in runs)
    title = f"{as_title(name)} over bytes sent"
    most = max(run.summary["sent_bytes"] for run in runs)
    sending = [run for run in runs if run.summary["sent_bytes"] > 0.001 * most]
    series = _accuracies(runs, _bytes_axis, of=sending)
    if most <= 0:
        return PageChart("bytes", title, "", "Nothing was sent between workers.")
    if not series:  # a run without exchange may have been evaluated
        return PageChart("bytes", title, "", "No replica of a run that sent bytes was evaluated.")
    silent = [run.label for run in runs if run not in sending]
    caption = "Bytes that all workers together had sent by then."
    if silent:
        names = ", ".join(shortened(name, 40) for name in silent)
        caption += f" Not drawn, as next to nothing was sent: {names}."
    spec = _lines(series, "bytes", most, *_accuracy_axis(name), rule=_target(runs))
    return PageChart("bytes", title, caption, f"{title}: {len(series)} lines.", spec)


def loss_over_time(runs: Sequence[LoadedRun]) -> PageChart:
    """Training loss, averaged over short intervals."""
    title, count, series = "Training loss", sum(len(run.workers) for run in runs), []
    for place, run in enumerate(runs):
        curves = [
            (worker, smoothed(worker.loss_curve.points(), count))
            for worker in run.workers
            if len(worker.loss_curve)
        ]
        if len(runs) == 1:
            series += _by_worker(run, curves, width=1.3)
        elif curves:
            began_s = max(points[0, 0] for _, points in curves)
            times_s = np.linspace(began_s, max(points[-1, 0] for _, points in curves), 150)
            mean = np.mean([at_times(points, times_s) for _, points in curves], axis=0)
            series.append(_series(run.label, place, place, times_s - run.began_s, mean, width=1.8))
    if not series:
        return PageChart("loss", title, "", "No training loss was reported.")
    top = 1.1 * float(np.quantile(np.concatenate([one["y"] for one in series]), 0.985))
    spec = _lines(series, "time", _end_s(runs), "number", "loss", top=top)
    caption = "Means over short stretches of steps." + _chosen(runs)
    return PageChart("loss", title, caption, title, spec)


def metrics_over_time(runs: Sequence[LoadedRun]) -> PageChart | None:
    """Other metrics of `compile()`, a panel for each; None if no run has any."""
    names = dict.fromkeys(name for run in runs for w in run.workers for name in w.metric_curves)
    if not names:
        return None
    title, shown, panels, ends = "Metrics", [*names][:MAX_METRIC_PANELS], [], []
    for name in shown:
        series = _metric(runs, name, sum(len(run.workers) + 1 for run in runs) * len(shown))
        panels.append({"n": name, "spec": _lines(series, "time", _end_s(runs), "number", "")})
        ends += [f"{shortened(name, 60)} {one['y'][-1]:.4g} ({one['n']})" for one in series[:8]]
    caption = "Of compile(), on held-out samples." + _chosen(runs)
    if len(runs) > 1:
        caption += " Means over replicas."
    if len(names) > len(shown):
        caption += f" The first {len(shown)} of {len(names)}; summary.json has the last values."
    alt = f"{title} at the end: {', '.join(ends)}."
    return PageChart("metrics", title, caption, alt, {"kind": "metrics", "panels": panels})


def drift_over_time(runs: Sequence[LoadedRun]) -> PageChart:
    title, series = "Drift between replicas", []
    for place, run in enumerate(runs):
        points = subsampled(run.tally.drift_curve.points(), len(runs))
        if len(points):
            own = INK if len(runs) == 1 else place
            name = "largest distance" if len(runs) == 1 else run.label
            series.append(_series(name, place, own, points[:, 0] - run.began_s, points[:, 1], 1.8))
    if not series:
        return PageChart("drift", title, "", "No two replicas were compared.")
    caption = (
        "Largest distance of two replicas at equal times, over the norm of the weights; "
        "0: all replicas are the same."
    )
    last = ", ".join(f"{one['n']} {one['y'][-1]:.3g}" for one in series)
    spec = _lines(series, "time", _end_s(runs), "number", "‖wᵢ - wⱼ‖ / ‖w‖")
    return PageChart("drift", title, caption, f"{title}, last comparison: {last}.", spec)


def batch_sizes(run: LoadedRun) -> PageChart:
    curves = [(worker, worker.batch_curve.points()) for worker in run.workers]
    caption = "Each worker's part of the global batch follows its capacity."
    return _steps(run, "batches", "Batch sizes", caption, curves, "samples per step")


def capacities(run: LoadedRun) -> PageChart:
    curves = [(worker, worker.capacity_curve.points()) for worker in run.workers]
    caption = "Compute power that the sidecars measured."
    return _steps(run, "capacities", "Capacities", caption, curves, "samples/s")


def timeline(run: LoadedRun, *, max_events: int = 150) -> PageChart:
    """When each worker trained, and its events; the first warnings before others.

    With many workers a row has one bar, from the first start to the last end.
    """
    groups = row_groups(run)
    rows = {rank: group for group in groups for rank in group.ranks}
    spans = [(rows[w.rank], w.started_s, w.last_step_s) for w in run.workers if w.steps]
    if len(spans) > MAX_WORKER_LINES:
        spans = [
            (group, min(starts_s), max(ends_s))
            for group in groups
            if (own := [(start_s, end_s) for row, start_s, end_s in spans if row is group])
            for starts_s, ends_s in [zip(*own, strict=True)]
        ]
    bars = [[row.name, row.place, *_rounded(span_s, run)] for row, *span_s in spans]
    of_workers = [e for e in run.tally.events if e.rank in rows and e.is_of_worker]
    chosen = sorted(of_workers, key=lambda e: not e.warning)[:max_events]
    dots: list[list[Any]] = [
        [
            rows[event.rank].name,
            int(event.warning),
            *_rounded([event.time_s], run),
            shortened(
                f"{run.worker_name(event.rank)}: {event.reason}: {event.message}", _TEXT_LENGTH
            ),
        ]
        for event in chosen
    ]
    if not bars and not dots:
        return PageChart("timeline", "Timeline", "", "Nothing happened.")
    begins_s = min([0.0, *(dot[2] for dot in dots)])
    caption = "Bars: from the first step to the last. Dots: events; diamonds: warnings."
    alt = f"Timeline of {len(run.workers)} workers with {len(dots)} events, listed below."
    names = [group.name for group in groups]
    spec = {"kind": "timeline", "rows": names, "bars": bars, "dots": dots,
            "begin": begins_s, "end": max(run.length_s, 1e-3)}  # fmt: skip
    return PageChart("timeline", "Timeline", caption, alt, spec)


def _time_axis(run: LoadedRun, curves: Sequence[Points]) -> list[Points]:
    return [points[:, 0] - run.began_s for points in curves]


def _bytes_axis(run: LoadedRun, curves: Sequence[Points]) -> list[Points]:
    """Bytes sent by all workers at the times of each curve."""
    times_s = [points[:, 0] for points in curves]
    sent = sent_bytes_at(run.workers, np.concatenate(times_s)) if times_s else np.empty(0)
    return np.split(sent, np.cumsum([len(each) for each in times_s])[:-1])


def _accuracies(
    runs: Sequence[LoadedRun],
    axis: Callable[[LoadedRun, Sequence[Points]], list[Points]],
    *,
    of: Sequence[LoadedRun] | None = None,
) -> list[Series]:
    """Lines of replicas and means, x by `axis`; `of`: the runs that have lines."""
    count = sum(len(run.workers) + 1 for run in runs)
    series: list[Series] = []
    for place, run in enumerate(runs):
        if of is not None and run not in of:
            continue
        curves = [
            (worker, subsampled(worker.accuracy_curve.points(), count))
            for worker in run.workers
            if len(worker.accuracy_curve)
        ]
        mean = subsampled(run.mean_accuracy(), count)
        *xs, mean_x = axis(run, [*(points for _, points in curves), mean])
        curves = [
            (worker, np.column_stack((x, _scale(runs) * points[:, 1])))
            for x, (worker, points) in zip(xs, curves, strict=True)
        ]
        if len(runs) == 1:
            series += _by_worker(run, curves, width=1.2, began_s=0.0)
        elif count <= MAX_REPLICA_LINES:
            series += [
                _series(
                    run.worker_name(w.rank), place, place, p[:, 0], p[:, 1], width=0.8, opacity=0.35
                )
                for w, p in curves
            ]
        if len(mean):
            x, y = mean_x, _scale(runs) * mean[:, 1]
            if len(runs) == 1:  # below the replicas, which it would cover
                series.insert(0, {**_series("mean", "mean", INK, x, y, width=3), "m": "end"})
            else:
                series.append({**_series(run.label, place, place, x, y, width=2.6), "m": "end"})
    return series


def _metric(runs: Sequence[LoadedRun], metric: str, line_count: int) -> list[Series]:
    """Lines of one metric: first its mean over replicas that count, then those of a single run."""
    series: list[Series] = []
    for place, run in enumerate(runs):
        curves = [
            (worker, subsampled(worker.metric_curves[metric].points(), line_count))
            for worker in run.workers
            if metric in worker.metric_curves
        ]
        counted = [points for worker, points in curves if not worker.quarantine]
        mean = subsampled(mean_over_replicas(counted), line_count)
        if len(mean):
            name, key, own = run.label, str(place), place
            if len(runs) == 1:
                name, key, own = "mean", "mean", INK
            x, y = mean[:, 0] - run.began_s, mean[:, 1]
            series.append(_series(name, key, own, x, y, width=2.4))
        if len(runs) == 1:
            series += _by_worker(run, curves, width=1.2)
    return series


def _steps(
    run: LoadedRun,
    name: str,
    title: str,
    caption: str,
    curves: Sequence[tuple[WorkerTally, Points]],
    unit: str,
) -> PageChart:
    known = [
        (w, np.concatenate((p := subsampled(points, len(curves)), [[run.tally.end_s, p[-1, 1]]])))
        for w, points in curves
        if len(points)
    ]  # the last value holds to the end
    if not known:
        return PageChart(name, title, "", "Nothing was reported.")
    last = [float(points[-1, 1]) for _, points in known]
    alt = f"{title} at the end: from {min(last):.4g} to {max(last):.4g} {unit}."
    spec = _lines(_by_worker(run, known, width=1.6), "time", run.length_s, "number", unit)
    return PageChart(name, title, caption + _chosen([run]), alt, {**spec, "step": 1})


def _by_worker(
    run: LoadedRun,
    curves: Sequence[tuple[WorkerTally, Points]],
    *,
    width: float,
    began_s: float | None = None,
) -> list[Series]:
    """Lines in the workers' colours; their first column is a time unless `began_s` is 0."""
    groups: dict[int, WorkerGroup] = {
        rank: group for group in coloured_groups(run) for rank in group.ranks
    }
    origin = run.began_s if began_s is None else began_s
    if len(curves) > MAX_WORKER_LINES:  # evenly chosen, as workers of a site have adjacent ranks
        places = np.linspace(0, len(curves) - 1, MAX_WORKER_LINES).round().astype(int)
        curves = [curves[place] for place in places.tolist()]
    opacity = 0.9 if len(curves) <= len(groups) <= 8 else 0.5
    return [
        _series(
            run.worker_name(worker.rank), groups[worker.rank].place, groups[worker.rank].place,
            points[:, 0] - origin, points[:, 1], width=width, opacity=opacity,
        )
        for worker, points in curves
    ]  # fmt: skip


def _chosen(runs: Sequence[LoadedRun]) -> str:
    """A sentence for the caption of a single run, if not every worker has a line."""
    if len(runs) > 1 or len(runs[0].workers) <= MAX_WORKER_LINES:
        return ""
    return f" At most {MAX_WORKER_LINES} of {len(runs[0].workers):,} workers have a line."


def _series(
    name: str, key: int | str, place: int, x: Points, y: Points, width: float, opacity: float = 1.0
) -> Series:
    """One line: its name, its key in the legend, its colour, and rounded points."""
    return {
        "n": shortened(name, 80), "k": str(key), "c": place, "w": width, "o": opacity, "m": "",
        "x": _digits(x, 5), "y": _digits(y, 4),
    }  # fmt: skip


def _lines(
    series: Sequence[Series],
    x_kind: str,
    end: float,
    y_kind: str,
    label: str,
    *,
    top: float | None = None,
    rule: float | None = None,
    tall: bool = False,
) -> dict[str, Any]:
    known = [0.0, rule or 0.0, *(y for one in series for y in one["y"] if math.isfinite(y))]
    bottom, limit = 0.0, 100.0
    if y_kind != "percent":
        bottom = 1.06 * min(known)
        limit = max(1.06 * max(known) if top is None else top, -0.06 * min(known))
    return {"kind": "lines", "x": x_kind, "end": end or 1.0, "y": y_kind, "label": label,
            "bottom": bottom, "top": limit or 1.0, "rule": rule, "tall": int(tall),
            "series": series}  # fmt: skip


def _digits(values: Points, count: int) -> list[float]:
    return [float(f"{value:.{count}g}") for value in values.tolist()]


def _rounded(times_s: Sequence[float], run: LoadedRun) -> list[float]:
    return [round(time_s - run.began_s, 2) for time_s in times_s]


def _end_s(runs: Sequence[LoadedRun]) -> float:
    return max(run.length_s for run in runs)


def _target(runs: Sequence[LoadedRun]) -> float | None:
    target = common_target(runs)
    return _scale(runs) * target if target else None


def _scale(runs: Sequence[LoadedRun]) -> float:
    """What accuracies are drawn with: in per cent, R² as it is."""
    return 100 if common_name(run.accuracy_name for run in runs) == ACCURACY else 1


def _accuracy_axis(name: str) -> tuple[str, str]:
    """Kind and label of the axis."""
    return ("percent", f"{name}, %") if name == ACCURACY else ("number", name)
