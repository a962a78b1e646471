"""Charts of one run's resources: batches, capacities, time, links, and a timeline.

Colours stand for workers.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlion_results.report.drawing import (
    FAINT,
    INK,
    PAPER,
    Chart,
    chart,
    colour,
    draw_message,
    styled,
    subsampled,
    time_axis,
    to_svg,
)
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.curves import Curve, Points, at_times
from dlion_results.summary.tally import LinkTally, WorkerTally

_MEGA = 1e6
_MAX_PANELS = 24
_BINS = 60
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}
_DASHES = ("solid", (0, (4, 4)), (0, (2, 6)), (3, (1, 7)))
"""For a line that overlaps none, one, two or more others."""


def batch_sizes(run: LoadedRun) -> Chart:
    curves = [(worker, worker.batch_curve) for worker in run.workers]
    draw = partial(_over_time, run, curves, "local batch size [samples]", "no step was done")
    return chart("Batch sizes", "Each worker's part of the global batch.", draw)


def capacities(run: LoadedRun) -> Chart:
    """Relative compute power as measured by the sidecars."""
    curves, none = [(w, w.capacity_curve) for w in run.workers], "no sidecar reported a capacity"
    draw = partial(_over_time, run, curves, "compute power [samples/s]", none)
    return chart("Capacities", "Relative compute power that batches follow.", draw)


def time_use(run: LoadedRun) -> Chart:
    """How each worker spent its time."""
    workers = [worker for worker in run.workers if worker.steps]

    def draw(axes: Axes) -> None:
        if not workers:
            draw_message(axes, "no step was done")
            return
        spans_s = np.array([max(w.last_step_s - w.started_s, 1e-9) for w in workers])
        compute = np.array([w.compute_s for w in workers]) / spans_s
        waited = np.array([w.waited_s for w in workers]) / spans_s
        rest = np.clip(1 - compute - waited, 0, None)
        places = np.arange(len(workers))
        left = np.zeros(len(workers))
        marks = [_colour(run, worker) for worker in workers]
        for share, alpha in ((compute, 0.95), (waited, 0.4), (rest, 0.13)):
            axes.barh(places, share, left=left, color=marks, alpha=alpha, height=0.66)
            for place, start, width in zip(range(len(workers)), left, share, strict=True):
                if width > 0.09:
                    axes.text(start + width / 2, place, f"{width:.0%}", **_CENTRED)
            left = left + share
        axes.set_yticks(places, [run.worker_name(w.rank) for w in workers])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axes.set_xlabel("share of the worker's time [%]")
        axes.grid(visible=False, axis="y")

    caption = (
        "Strong: computing gradients. Middle: held by synchronisation. Faint: everything else."
    )
    return chart("Where time went", caption, draw, height=_height(len(workers)))


def uplinks(run: LoadedRun) -> Chart:
    """Use, budget and bandwidth of each worker's links together, one panel per worker."""
    senders = [worker for worker in run.workers if worker.links][:_MAX_PANELS]
    title = "Uplinks over time"
    caption = (
        "All links of a worker together. Filled: bytes sent. Solid line: budget (bytes per "
        "iteration times iterations per second). Dotted: measured bandwidth."
    )
    with styled(run.label + title):
        columns = min(3, max(1, len(senders)))
        rows = max(1, math.ceil(len(senders) / columns))
        figure = Figure(figsize=(11.4, 0.5 + 1.75 * rows), layout="constrained")
        if not senders:
            draw_message(figure.subplots(), "no worker sent anything")
            return Chart(title, caption, to_svg(figure, title), wide=True)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for worker, axes in zip(senders, panels.flat, strict=False):
            _uplink(axes, run, worker)
        for axes in panels.flat[len(senders) :]:
            axes.set_axis_off()
        for axes in panels[-1]:
            time_axis(axes, run.tally.end_s)
            axes.set_xlabel(axes.get_xlabel().replace("time since the start", "time"))
        figure.supylabel("on all links together [MB/s]", fontsize=9.5)
        return Chart(title, caption, to_svg(figure, title), wide=True)


def link_map(run: LoadedRun) -> Chart:
    """Mean rate of every link, sender by receiver."""
    rate = _matrix(run, lambda link, span_s: link.sent_bytes / span_s / _MEGA)
    caption = "Mean over the time in which the sender trained [MB/s]; rows send, columns receive."
    known = rate[~np.isnan(rate)]
    return _map(run, "Rate of each link", caption, rate, "{:.3g}", top=known.max(initial=0.0))


def budget_map(run: LoadedRun) -> Chart:
    """Use of every link's budget, sender by receiver."""
    share = _matrix(run, lambda link, _: _budget_use(link))
    caption = "Bytes sent over the sum of budgets [%]; rows send, columns receive."
    return _map(run, "Use of each link's budget", caption, share * 100, "{:.0f}", top=100.0)


def class_accuracy(run: LoadedRun) -> Chart | None:
    """Accuracy per class and replica at the end; None if it was not reported."""
    rows = [worker["accuracy"]["classes"] for worker in run.summary["workers"]]
    count = max((len(row) for row in rows), default=0)
    if count == 0 or count > 100:
        return None
    values = np.array([[*row, *[None] * (count - len(row))] for row in rows], dtype=np.float64)
    title = "Accuracy per class"

    def draw(axes: Axes) -> None:
        names = [worker["name"] for worker in run.summary["workers"]]
        _heat(axes, values * 100, "{:.0f}", top=100.0, labelled=len(names) * count <= 400)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("class")
        axes.set_xticks(range(0, count, max(1, count // 20)))

    return chart(title, "Each replica's last evaluation [%].", draw, height=_height(len(rows)))


def timeline(run: LoadedRun) -> Chart:
    """When each worker trained, and its events."""
    workers = run.workers

    def draw(axes: Axes) -> None:
        lanes = {worker.rank: place for place, worker in enumerate(workers)}
        for worker in workers:
            if worker.steps:
                span = (worker.started_s, worker.last_step_s)
                axes.plot(
                    span, [lanes[worker.rank]] * 2, color=_colour(run, worker), linewidth=7,
                    alpha=0.3, solid_capstyle="butt",
                )  # fmt: skip
        for warning, mark, face in ((False, "o", FAINT), (True, "D", "#e0383e")):
            events = [e for e in run.tally.events if e.warning is warning and e.rank in lanes]
            axes.plot(
                [event.time_s for event in events], [lanes[event.rank] for event in events], mark,
                color=face, markersize=7 if warning else 4.5, markeredgecolor=PAPER,
                markeredgewidth=0.8,
            )  # fmt: skip
        axes.set_yticks(range(len(workers)), [run.worker_name(w.rank) for w in workers])
        axes.set_ylim(len(workers) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        time_axis(axes, run.tally.end_s)

    return chart(
        "Timeline",
        "Bars: from the first step to the last. Dots: events. Red: warnings. All are listed below.",
        draw,
        wide=True,
        height=_height(len(workers)),
    )


def _over_time(
    run: LoadedRun,
    curves: Sequence[tuple[WorkerTally, Curve]],
    label: str,
    if_none: str,
    axes: Axes,
) -> None:
    """Step lines in the workers' colours; overlapping lines are dashed to stay visible."""
    known = [(worker, curve.points()) for worker, curve in curves if len(curve)]
    if not known:
        draw_message(axes, if_none)
        return
    lines = [(subsampled(points, len(known)), _colour(run, worker)) for worker, points in known]
    drawn: list[Points] = []
    top = max((points[:, 1].max() for points, _ in lines), default=0.0)
    for points, mark in lines:
        apart = [np.abs(at_times(other, points[:, 0]) - points[:, 1]) for other in drawn]
        below = sum(bool(np.median(distance) < 0.01 * top) for distance in apart)
        axes.plot(
            points[:, 0],
            points[:, 1],
            color=mark,
            linewidth=1.8,
            drawstyle="steps-post",
            linestyle=_DASHES[min(below, len(_DASHES) - 1)],
            dash_capstyle="butt",
        )
        drawn.append(points)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    time_axis(axes, run.tally.end_s)


def _uplink(axes: Axes, run: LoadedRun, worker: WorkerTally) -> None:
    edges_s = np.linspace(0, run.tally.end_s, _BINS + 1)
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2
    span_s = edges_s[1] - edges_s[0]
    sent, budget, bandwidth = np.zeros(_BINS), np.zeros(_BINS), np.zeros(_BINS)
    for link in worker.links.values():
        points = np.concatenate((np.zeros((1, 5)), link.curve.points()))
        sent += np.diff(at_times(points, edges_s)) / span_s
        iterations_per_s = np.diff(at_times(points, edges_s, 4)) / span_s
        budget += _held(points, middle_s, 2) * iterations_per_s
        bandwidth += _held(points, middle_s, 3)
    mark = _colour(run, worker)
    axes.fill_between(middle_s, sent / _MEGA, step="mid", color=mark, alpha=0.35, linewidth=0)
    axes.plot(middle_s, budget / _MEGA, color=mark, linewidth=1.4, drawstyle="steps-mid")
    axes.plot(middle_s, bandwidth / _MEGA, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_title(run.worker_name(worker.rank), loc="left", pad=3)
    axes.set_ylim(bottom=0)


def _held(points: Points, times_s: Points, column: int) -> Points:
    """The last known value of the column at those times; NaN before the first."""
    known = points[1:][~np.isnan(points[1:, column])]
    if len(known) == 0:
        return np.full(len(times_s), np.nan)
    index = np.searchsorted(known[:, 0], times_s, side="right") - 1
    held: Points = np.where(index >= 0, known[np.maximum(index, 0), column], np.nan)
    return held


def _budget_use(link: LinkTally) -> float:
    """Bytes sent over budget times iterations, while there was a budget."""
    points = link.curve.points()
    if len(points) < 2:
        return math.nan
    iterations = np.diff(points[:, 4])
    budget = points[1:, 2]
    known = ~np.isnan(budget)
    allowed = float((budget[known] * iterations[known]).sum())
    return float(np.diff(points[:, 1])[known].sum()) / allowed if allowed > 0 else math.nan


def _matrix(run: LoadedRun, value: Callable[[LinkTally, float], float]) -> Points:
    workers = run.workers
    places = {worker.rank: place for place, worker in enumerate(workers)}
    matrix = np.full((len(workers), len(workers)), np.nan)
    for worker in workers:
        span_s = max(worker.last_step_s - worker.started_s, 1e-9)
        for peer, link in worker.links.items():
            if peer in places:
                matrix[places[worker.rank], places[peer]] = value(link, span_s)
    return matrix


def _map(
    run: LoadedRun, title: str, caption: str, matrix: Points, spelling: str, *, top: float
) -> Chart:
    workers = run.workers

    def draw(axes: Axes) -> None:
        if np.isnan(matrix).all():
            draw_message(axes, "nothing to show: no links, or no budgets")
            return
        _heat(axes, matrix, spelling, top=top, labelled=len(workers) <= 12)
        places = range(0, len(workers), max(1, len(workers) // 16))
        axes.set_yticks(places, [run.worker_name(workers[i].rank) for i in places])
        axes.set_xticks(places, [f"→ {workers[i].rank}" for i in places])
        axes.set_xlabel("receiver (rank)")

    return chart(title, caption, draw, height=max(2.4, _height(len(workers))))


def _heat(axes: Axes, matrix: Points, spelling: str, *, top: float, labelled: bool) -> None:
    image = axes.imshow(
        matrix, cmap="YlGnBu", vmin=0, vmax=top or 1, aspect="auto", interpolation="nearest"
    )
    image.set_rasterized(True)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if labelled:
        for (row, column), value in np.ndenumerate(matrix):
            if not math.isnan(value):
                shade = "#ffffff" if value > 0.55 * (top or 1) else "#14303f"
                axes.text(column, row, spelling.format(value), color=shade, **_CENTRED)


def _colour(run: LoadedRun, worker: WorkerTally) -> str:
    return colour(run.workers.index(worker), len(run.workers))


def _height(lanes: int) -> float:
    return min(9.0, 1.0 + 0.36 * max(2, lanes))


def legend(run: LoadedRun) -> Sequence[tuple[str, str]]:
    """(name, colour) of every worker, for the page's legend."""
    workers = run.workers
    return [(run.worker_name(w.rank), colour(i, len(workers))) for i, w in enumerate(workers)]
