"""The picture of a comparison: accuracy against time, and time to the target, per environment.

Called by `dlion compare`. A line is the median over seeds, its band the range; a bar is the median
time to the target, its whisker the range. `comparison` computes the figures.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from dlion_results.comparison import CURVE_POINTS, Goal, VariantRow, accuracy_name_of, spread
from dlion_results.report.drawing import (
    FAINT,
    INK,
    Chart,
    accuracy_axis,
    chart,
    colour,
    draw_message,
    time_axis,
)
from dlion_results.report.picture import assemble_svg
from dlion_results.run_folder.storage import write_whole
from dlion_results.summary.accuracy_name import as_title, goal_text


def write_comparison(rows: Sequence[VariantRow], goal: Goal, out: Path, *, title: str = "") -> Path:
    """Write the picture of these rows to `out` and return it.

    Raises StorageError if `out` cannot be written.
    """
    write_whole(out, comparison_picture(rows, goal, title=title).encode())
    return out


def comparison_picture(rows: Sequence[VariantRow], goal: Goal, *, title: str = "") -> str:
    """An SVG document: two charts for each environment, in the order of the rows."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    legend = [(name, colour(index, len(variants))) for index, name in enumerate(variants)]
    marks = dict(legend)
    charts = []
    for environment in dict.fromkeys(row.environment for row in rows):
        own = [row for row in rows if row.environment == environment]
        charts += [_accuracy(environment, own, goal, marks), _times(environment, own, goal, marks)]
    name = accuracy_name_of(rows)
    target = goal_text(goal.target_accuracy, name)
    heading = title or f"{as_title(name)}, and time to {target}: medians and ranges"
    return assemble_svg(charts, legend, title=heading)


def _accuracy(
    environment: str, rows: Sequence[VariantRow], goal: Goal, marks: dict[str, str]
) -> Chart:
    name = accuracy_name_of(rows)

    def draw(axes: Axes) -> None:
        known = [(row, [run.curve for run in row.figures if run.curve]) for row in rows]
        if not any(curves for _, curves in known):
            draw_message(axes, f"no {name} was measured")
            return
        for row, curves in known:
            if not curves:
                continue
            values = np.array(curves, dtype=float)  # NaN before the first evaluation
            times_s = np.linspace(0, goal.at_s, CURVE_POINTS)
            mark = marks[row.variant]
            axes.fill_between(
                times_s, values.min(axis=0), values.max(axis=0), color=mark, alpha=0.15, lw=0
            )
            axes.plot(times_s, np.array(median_curve(row), dtype=float), color=mark)
        axes.axhline(goal.target_accuracy, color=FAINT, lw=0.8, ls=":")
        time_axis(axes, goal.at_s)
        accuracy_axis(axes, name, f"{name}, mean over replicas")

    return chart(f"{environment}: {name}", "Median over seeds, and their range", draw)


def median_curve(row: VariantRow) -> list[float | None]:
    """Median accuracy over seeds at each of `CURVE_POINTS`; a run without a curve, as a diverged
    one, is the least accurate. None where the median is such a run, or before the first evaluation
    of another one."""
    worst = -math.inf
    curves = [run.curve or (worst,) * CURVE_POINTS for run in row.figures]
    return [
        None if None in values else spread(values, worst=worst).median
        for values in zip(*curves, strict=True)
    ]


def _times(
    environment: str, rows: Sequence[VariantRow], goal: Goal, marks: dict[str, str]
) -> Chart:
    def draw(axes: Axes) -> None:
        for place, row in enumerate(reversed(rows)):
            spread = row.spread("time_to_target_s")
            if spread.median is None:
                axes.text(0, place, f" not in {goal.at_s:g} s", va="center", color=FAINT)
                continue
            axes.barh(place, spread.median, color=marks[row.variant], height=0.6)
            most = goal.at_s if spread.missing else spread.most
            axes.plot([spread.least or 0, most or 0], [place, place], color=INK, lw=1)
        axes.set_yticks(range(len(rows)), [row.variant for row in reversed(rows)])
        axes.grid(visible=False, axis="y")
        time_axis(axes, goal.at_s)
        axes.set_xlabel(axes.get_xlabel().replace("since the start", "to the target"))

    target = goal_text(goal.target_accuracy, accuracy_name_of(rows))
    heading = f"Median over seeds to {target}, and their range"
    height = max(3.1, 0.32 * len(rows) + 0.8)
    return chart(f"{environment}: time to {target}", heading, draw, height=height)
