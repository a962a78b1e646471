"""The scaling curve of part `two-step` on the page: its table, and its picture.

`bars` computes the figures. This module is called by `page`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bars import RING, scaling_curve, times_by_workers
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from published import TWO_STEP

from dlion_results.report.drawing import FAINT, chart, colour
from dlion_results.report.picture import assemble_svg
from dlion_results.run_folder.storage import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bars import Results
    from matplotlib.axes import Axes

SCALING_NOTE = (
    "A ring all-reduce is computed, not simulated: it makes the ideal's iterations. Each takes its"
    " compute time and 2 (n - 1) transfers of 1 / n of the gradient, of latency + bytes /"
    " bandwidth. Values have 16 bits in all columns."
)
NOT_KNOWN = "-"
_NAMES = {"ideal": "ideal", RING: f"{RING}, computed", "full": "full", TWO_STEP: TWO_STEP}
"""Columns in the order of the table and of the picture."""

Curve = dict[str, dict[int, float | None]]


def curve_table(results: Results) -> list[str]:
    """Return the seconds to the target of a ring all-reduce, and the speed-up of each column."""
    times = times_by_workers(results)
    curve = scaling_curve(times)
    workers = sorted({n for by_n in times.values() for n in by_n})
    rows = {
        f"{_NAMES[name]}: {what}": [_number(of[name].get(n), form) for n in workers]
        for of, what, form, names in (
            (times, "seconds", "{:.0f}", [RING]),
            (curve, "speed-up", "{:.2f}", list(_NAMES)),
        )
        for name in names
        if name in of
    }
    heads = ["speed-up over one worker", *(f"{n} worker{'s' * (n > 1)}" for n in workers)]
    return [SCALING_NOTE, "", *_lines(heads, rows)]


def _lines(heads: list[str], rows: Mapping[str, list[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*lines, *(f"| {' | '.join([name, *row])} |" for name, row in rows.items())]


def _number(value: float | None, form: str) -> str:
    return NOT_KNOWN if value is None else form.format(value)


def write_curve(results: Results, out: Path) -> None:
    """Draw time to the target and speed-up against the number of workers."""
    times = times_by_workers(results)
    curve = scaling_curve(times)
    names = [name for name in _NAMES if name in times]
    marks = {name: colour(index, len(names)) for index, name in enumerate(names)}
    charts = [
        chart(
            "Time to the target", "Median over seeds", lambda axes: _draw(axes, times, marks, "s")
        ),
        chart(
            "Speed-up over one worker",
            "Of medians; dotted: as many times as workers",
            lambda axes: _draw(axes, curve, marks, "", with_linear=True),
        ),
    ]
    legend = [(_NAMES[name], marks[name]) for name in names]
    write_whole(out, assemble_svg(charts, legend, title="two-step, by workers").encode())


def _draw(
    axes: Axes, curve: Curve, marks: dict[str, str], unit: str, *, with_linear: bool = False
) -> None:
    """Draw lines with logarithmic axes, on which a linear speed-up is straight."""
    workers = sorted({n for by_n in curve.values() for n in by_n})
    if with_linear:
        axes.plot(workers, workers, color=FAINT, lw=0.8, ls=":")
    for name, mark in marks.items():
        known = [(n, value) for n, value in sorted(curve[name].items()) if value is not None]
        axes.plot([n for n, _ in known], [value for _, value in known], color=mark, marker="o")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(workers))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("workers")
    axes.set_ylabel(f"time to the target [{unit}]" if unit else "times one worker")
