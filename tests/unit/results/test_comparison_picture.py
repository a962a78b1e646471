"""Tests of the picture of a comparison.

It has a line and a bar for each column, and names goals that were not reached. A diverged run
counts in the line as in the table. Its appearance is not tested.
"""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from dlion_results.comparison import CURVE_POINTS, Goal, VariantRow, VariantRun, diverged
from dlion_results.report.comparison_picture import comparison_picture, median_curve

GOAL = Goal(target_accuracy=0.5, at_s=120.0)


def run(seed: int, time_s: float | None) -> VariantRun:
    curve = (None, *(0.01 * point for point in range(1, CURVE_POINTS)))
    return VariantRun(seed, time_s, 1e6, 0.6, 0.6, 0.6, 0.0, 2e6, 0.5, curve=curve)


def test_each_environment_has_its_charts_and_each_column_its_place() -> None:
    rows = [
        VariantRow(place, name, 0.1, (run(1, time_s), run(2, time_s)))
        for place in ("homo-a", "homo-b")
        for name, time_s in (("dlion & co", 30.0), ("full", None))
    ]
    text = comparison_picture(rows, GOAL)
    ElementTree.fromstring(text)
    for words in ("homo-a: accuracy", "homo-b: time to 50%", "dlion &amp; co", "not in 120 s"):
        assert words in text, words


def test_if_all_runs_diverged_the_picture_states_that_nothing_was_measured() -> None:
    text = comparison_picture([VariantRow("homo-a", "full", 9.0, (diverged(1),))], GOAL)
    ElementTree.fromstring(text)
    assert "no accuracy was measured" in text


def test_a_diverged_run_is_the_least_accurate_of_the_line_too() -> None:
    def median_of(*runs: VariantRun) -> list[float | None]:
        row = VariantRow("homo-a", "full", 0.1, runs)
        line = median_curve(row)
        assert line[-1] is None or line[-1] == row.spread("accuracy").median
        return line

    better = replace(run(1, 30.0), curve=(None, *(0.9,) * (CURVE_POINTS - 1)), accuracy=0.9)
    worse = replace(better, curve=(None, *(0.4,) * (CURVE_POINTS - 1)), accuracy=0.4)
    assert median_of(better, worse, better)[:2] == [None, 0.9]
    assert median_of(better, worse, diverged(2))[:2] == [None, 0.4]
    assert median_of(better, diverged(2), diverged(3)) == [None] * CURVE_POINTS
