"""Matplotlib charts of one run's batches and links, for its picture.

Colours stand for workers.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlion_results.report.drawing import (
    INK,
    Chart,
    chart,
    colour,
    draw_message,
    styled,
    time_axis,
    to_svg,
)
from dlion_results.report.link_charts import BINS, uplink_curves
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.curves import Curve, Points, at_times, subsampled
from dlion_results.summary.tally import WorkerTally

_MEGA = 1e6
_MAX_PANELS = 24
_DASHES = ("solid", (0, (4, 4)), (0, (2, 6)), (3, (1, 7)))
"""Dashes of a line that overlaps none, one, two or more others."""


def batch_sizes(run: LoadedRun) -> Chart:
    curves = [(worker, worker.batch_curve) for worker in run.workers]
    draw = partial(_over_time, run, curves, "local batch size [samples]", "no step was done")
    return chart("Batch sizes", "Each worker's part of the global batch.", draw)


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
            time_axis(axes, run.length_s)
            axes.set_xlabel(axes.get_xlabel().replace("time since the start", "time"))
        figure.supylabel("on all links together [MB/s]", fontsize=9.5)
        return Chart(title, caption, to_svg(figure, title), wide=True)


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
            points[:, 0] - run.began_s,
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
    time_axis(axes, run.length_s, "the first step")


def _uplink(axes: Axes, run: LoadedRun, worker: WorkerTally) -> None:
    edges_s = np.linspace(run.began_s, run.tally.end_s, BINS + 1)
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2 - run.began_s
    curves = uplink_curves([worker], edges_s)
    mark = _colour(run, worker)
    axes.fill_between(
        middle_s, curves.sent / _MEGA, step="mid", color=mark, alpha=0.35, linewidth=0
    )
    axes.plot(middle_s, curves.budget / _MEGA, color=mark, linewidth=1.4, drawstyle="steps-mid")
    axes.plot(middle_s, curves.bandwidth / _MEGA, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_title(run.worker_name(worker.rank), loc="left", pad=3)
    axes.set_ylim(bottom=0)


def _colour(run: LoadedRun, worker: WorkerTally) -> str:
    return colour(run.workers.index(worker), len(run.workers))


def legend(run: LoadedRun) -> Sequence[tuple[str, str]]:
    """(name, colour) of every worker, for the page's legend."""
    workers = run.workers
    return [(run.worker_name(w.rank), colour(i, len(workers))) for i, w in enumerate(workers)]
