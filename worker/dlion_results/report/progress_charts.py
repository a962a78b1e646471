"""Charts of learning, of one or several runs: accuracy, loss, drift, speed-up.

Each replica is a thin line, the mean over replicas a thick one. Colours stand for workers of one
run, or for several runs.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from dlion_results.report.drawing import (
    FAINT,
    INK,
    PAPER,
    Chart,
    chart,
    colour,
    draw_message,
    percent_axis,
    smoothed,
    subsampled,
    time_axis,
)
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.curves import Points, at_times
from dlion_results.summary.summary import sent_bytes_at

_MEGA = 1e6


def accuracy_against_time(runs: Sequence[LoadedRun]) -> Chart:
    """Accuracy of every replica, and the mean."""

    def draw(axes: Axes) -> None:
        lines = _line_count(runs)
        for index, run in enumerate(runs):
            for line, points in enumerate(_replicas(run)):
                _thin(axes, runs, index, line, subsampled(points, lines))
            _thick(axes, runs, index, subsampled(run.mean_accuracy(), lines))
        _accuracy_axes(axes, runs)
        time_axis(axes, _end_s(runs))

    caption = "Held-out split. Thin: each replica. Thick: mean over replicas. Dashed: the target."
    return chart("Accuracy against time", caption, draw)


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

    return chart("Accuracy against bytes", "Bytes as the exchange counts them.", draw)


def loss_against_time(runs: Sequence[LoadedRun]) -> Chart:
    """Training loss, averaged over short intervals."""

    def draw(axes: Axes) -> None:
        lines = _line_count(runs)
        losses: list[float] = []
        for index, run in enumerate(runs):
            curves = [smoothed(worker.loss_curve.points(), lines) for worker in run.workers]
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
        axes.set_ylim(0, float(np.quantile(losses, 0.99)) * 1.1)
        axes.set_ylabel("training loss")
        time_axis(axes, _end_s(runs))

    return chart("Training loss", "Means over short stretches of steps.", draw)


def drift_against_time(runs: Sequence[LoadedRun]) -> Chart:

    def draw(axes: Axes) -> None:
        curves = [subsampled(run.tally.drift_curve.points(), len(runs)) for run in runs]
        if not any(len(points) for points in curves):
            draw_message(axes, "no two replicas were evaluated with sketches of their weights")
            return
        for index, points in enumerate(curves):
            if len(points):
                axes.plot(*points.T, color=colour(index, len(runs)))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("max ‖wᵢ - wⱼ‖ / ‖w‖")
        time_axis(axes, _end_s(runs))

    return chart(
        "Drift between replicas",
        "Largest distance of two replicas over the norm of the weights, at equal times, from "
        "sketches (within about 5 %).",
        draw,
    )


def speed_up(runs: Sequence[LoadedRun]) -> Chart | None:
    """Speed-up X on Y workers; None if no run has a reference."""
    known = [
        (run, run.summary["scalability"])
        for run in runs
        if run.summary["scalability"] and run.summary["scalability"]["speed_up"]
    ]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        most = max(entry["workers"] for _, entry in known) + 1
        axes.plot([0, most], [0, most], color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            "X = Y", (most * 0.92, most * 0.92), ha="right", va="bottom", color=FAINT, fontsize=8.5
        )
        for run, entry in known:
            place = (entry["workers"], entry["speed_up"])
            mark = colour(runs.index(run), len(runs))
            axes.plot(*place, "o", color=mark, markersize=9, markeredgecolor=PAPER)
            text = f"{entry['speed_up']:.2f}x on {entry['workers']} ({entry['efficiency']:.0%})"
            axes.annotate(
                text, place, xytext=(-9, 5), textcoords="offset points", ha="right", fontsize=8.5
            )
        axes.set_xlim(0, most)
        axes.set_ylim(0, max(most, *(entry["speed_up"] * 1.15 for _, entry in known)))
        axes.set_xlabel("workers Y")
        axes.set_ylabel("speed-up X")

    levels = sorted({entry["accuracy"] for _, entry in known})
    goal = ", ".join(f"{level:.0%}" for level in levels)
    references = ", ".join(dict.fromkeys(run.reference for run, _ in known if run.reference))
    against = f"the one worker of “{references}”" if references else "one worker"
    return chart(
        "Scalability", f"In time from the first step to {goal} accuracy, against {against}.", draw
    )


def _accuracy_axes(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    if not any(len(points) for run in runs for points in _replicas(run)):
        draw_message(axes, "no replica was evaluated")
        return
    target = runs[0].job.spec.trainer.stop.target_accuracy
    if target:
        axes.axhline(target, color=INK, linestyle=(0, (5, 4)), linewidth=0.9, alpha=0.6)
    top = max(points[:, 1].max() for run in runs for points in _replicas(run))
    axes.set_ylim(0, min(1.02, max(top, target or 0) * 1.08))
    percent_axis(axes, "accuracy")


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


def _end_s(runs: Sequence[LoadedRun]) -> float:
    return max((run.tally.end_s for run in runs), default=0.0)
