"""Matplotlib charts of learning for the picture: accuracy, loss, drift.

Each replica is a thin line, the mean over replicas a thick one. Colours stand for workers of one
run, or for several runs.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from dlion_api.status_names import ACCURACY
from dlion_results.report.drawing import (
    INK,
    Chart,
    accuracy_axis,
    chart,
    colour,
    draw_message,
    time_axis,
)
from dlion_results.report.runs import LoadedRun, common_target
from dlion_results.summary.accuracy_name import as_title, common_name
from dlion_results.summary.curves import Points, at_times, smoothed, subsampled
from dlion_results.summary.summary import sent_bytes_at

_MEGA = 1e6


def accuracy_against_time(runs: Sequence[LoadedRun]) -> Chart:
    """Accuracy of every replica, and the mean."""

    def draw(axes: Axes) -> None:
        lines = _line_count(runs)
        for index, run in enumerate(runs):
            for line, points in enumerate(_replicas(run)):
                _thin(axes, runs, index, line, _trained(run, subsampled(points, lines)))
            _thick(axes, runs, index, _trained(run, subsampled(run.mean_accuracy(), lines)))
        _accuracy_axes(axes, runs)
        _time_axis(axes, runs)

    caption = "Held-out split. Thin: each replica. Thick: mean over replicas. Dashed: the target."
    return chart(f"{as_title(_name(runs))} against time", caption, draw)


def accuracy_against_bytes(runs: Sequence[LoadedRun]) -> Chart:
    """Accuracy over the bytes that all workers had sent by then."""

    def draw(axes: Axes) -> None:
        lines = _line_count(runs)
        total = max((run.summary["sent_bytes"] for run in runs), default=0)
        if total <= 0:
            draw_message(axes, "nothing was sent between workers")
            return
        scale, unit = (1e9, "GB") if total >= 2e9 else (_MEGA, "MB")
        for index, run in enumerate(runs):
            if not run.summary["sent_bytes"]:
                continue
            for line, points in enumerate(_replicas(run)):
                _thin(axes, runs, index, line, _over_bytes(run, subsampled(points, lines), scale))
            _thick(
                axes, runs, index, _over_bytes(run, subsampled(run.mean_accuracy(), lines), scale)
            )
        _accuracy_axes(axes, runs)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"sent by all workers together [{unit}]")

    heading = f"{as_title(_name(runs))} against bytes"
    return chart(heading, "Bytes as the exchange counts them.", draw)


def loss_against_time(runs: Sequence[LoadedRun]) -> Chart:
    """Training loss, averaged over short intervals."""

    def draw(axes: Axes) -> None:
        lines = _line_count(runs)
        losses: list[float] = []
        for index, run in enumerate(runs):
            curves = [
                _trained(run, smoothed(worker.loss_curve.points(), lines)) for worker in run.workers
            ]
            curves = [points for points in curves if len(points)]
            for line, points in enumerate(curves):
                _thin(axes, runs, index, line, points, strength=0.9 if len(runs) == 1 else 0.35)
                losses.extend(points[:, 1])
            if curves and len(runs) > 1:
                began_s = max(points[0, 0] for points in curves)
                times_s = np.linspace(began_s, max(points[-1, 0] for points in curves), 150)
                mean = np.mean([at_times(points, times_s) for points in curves], axis=0)
                _thick(axes, runs, index, np.column_stack((times_s, mean)))
        if not losses:
            draw_message(axes, "no training loss was reported")
            return
        bottom = 1.06 * min(0.0, *losses)  # a custom loss may be negative
        top = max(1.1 * float(np.quantile(losses, 0.99)), -0.06 * bottom)
        axes.set_ylim(bottom, top or 1.0)
        axes.set_ylabel("training loss")
        _time_axis(axes, runs)

    return chart("Training loss", "Means over short stretches of steps.", draw)


def drift_against_time(runs: Sequence[LoadedRun]) -> Chart:

    def draw(axes: Axes) -> None:
        curves = [
            _trained(run, subsampled(run.tally.drift_curve.points(), len(runs))) for run in runs
        ]
        if not any(len(points) for points in curves):
            draw_message(axes, "no two replicas were evaluated with sketches of their weights")
            return
        for index, points in enumerate(curves):
            if len(points):
                axes.plot(*points.T, color=colour(index, len(runs)))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("max ‖wᵢ - wⱼ‖ / ‖w‖")
        _time_axis(axes, runs)

    return chart(
        "Drift between replicas",
        "Largest distance of two replicas over the norm of the weights, at equal times, from "
        "sketches (within about 5 %).",
        draw,
    )


def _accuracy_axes(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    if not any(len(points) for run in runs for points in _replicas(run)):
        draw_message(axes, "no replica was evaluated")
        return
    target = common_target(runs)
    if target:
        axes.axhline(target, color=INK, linestyle=(0, (5, 4)), linewidth=0.9, alpha=0.6)
    values = np.concatenate([points[:, 1] for run in runs for points in _replicas(run)])
    least, most = min(0.0, values.min()), max(0.0, values.max(), target or 0)
    bottom = 0.0 if _name(runs) == ACCURACY else 1.08 * least
    axes.set_ylim(bottom, min(1.02, max(1.08 * most, -0.08 * bottom)) or 1.0)
    accuracy_axis(axes, _name(runs), _name(runs))


def _name(runs: Sequence[LoadedRun]) -> str:
    return common_name(run.accuracy_name for run in runs)


def _replicas(run: LoadedRun) -> list[Points]:
    curves = [worker.accuracy_curve.points() for worker in run.workers]
    return [points for points in curves if len(points)]


def _over_bytes(run: LoadedRun, points: Points, scale: float) -> Points:
    if len(points) == 0:
        return points
    return np.column_stack((sent_bytes_at(run.workers, points[:, 0]) / scale, points[:, 1]))


def _thin(
    axes: Axes, runs: Sequence[LoadedRun], run: int, line: int, points: Points,
    *, strength: float | None = None,
) -> None:  # fmt: skip
    own = colour(line, len(runs[run].workers)) if len(runs) == 1 else colour(run, len(runs))
    alpha = strength or (0.75 if len(runs) == 1 else 0.28)
    axes.plot(*points.T, color=own, linewidth=0.9, alpha=alpha)


def _thick(axes: Axes, runs: Sequence[LoadedRun], run: int, points: Points) -> None:
    own = INK if len(runs) == 1 else colour(run, len(runs))
    axes.plot(*points.T, color=own, linewidth=2.3, zorder=3)


def _line_count(runs: Sequence[LoadedRun]) -> int:
    return sum(len(run.workers) + 1 for run in runs)


def _trained(run: LoadedRun, points: Points) -> Points:
    """The same over the time from the first step of any worker."""
    shifted: Points = points - np.array([run.began_s, *[0.0] * (points.shape[1] - 1)])
    return shifted


def _time_axis(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    time_axis(axes, max((run.length_s for run in runs), default=0.0), "the first step")
