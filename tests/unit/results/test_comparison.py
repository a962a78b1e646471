"""Tests of the summary of seeds in a comparison.

A seed that does not reach the goal counts as the worst, never as absent. The winner is reported
with the second, the ratio and its range over seeds, and whether the ratio is conclusive.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlion_results.comparison import (
    Goal,
    VariantRow,
    VariantRun,
    diverged,
    is_better,
    relative_result,
    spread,
    verdict,
)


def row(*times_s: float | None, accuracy: float = 0.5) -> VariantRow:
    return VariantRow(
        "homo-b",
        "dlion",
        0.1,
        tuple(
            VariantRun(seed, time_s, None, accuracy, None, None, None, 0.0, None)
            for seed, time_s in enumerate(times_s)
        ),
    )


def test_the_median_is_a_measured_value() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0]).median == 2.0
    assert spread([]).median is None


def test_a_seed_that_does_not_reach_the_goal_counts_as_the_worst() -> None:
    assert spread([1.0, 2.0, None]).median == 2.0
    assert spread([1.0, None, None]).median is None
    assert spread([1.0, None, None]).missing == 2


def test_a_diverged_run_counts_as_the_least_accurate() -> None:
    two = named("a", (None, None), 0.8, 0.9)
    with_diverged = replace(two, figures=(*two.figures, diverged(2)))
    assert with_diverged.spread("accuracy").median == 0.8
    assert not is_better(with_diverged, named("b", (None,) * 3, 0.85, 0.85, 0.85))
    assert with_diverged.spread("sent_bytes").missing == 1


def test_a_learning_rate_is_better_if_it_reaches_the_goal_sooner_or_else_gets_further() -> None:
    assert is_better(row(10.0), row(20.0))
    assert is_better(row(10.0, accuracy=0.1), row(None, accuracy=0.9))
    assert not is_better(row(None, accuracy=0.9), row(10.0, accuracy=0.1))
    assert is_better(row(None, accuracy=0.9), row(None, accuracy=0.8))


def test_two_columns_are_compared_by_medians_in_points_and_relative() -> None:
    goal = Goal(target_accuracy=0.5, at_s=100.0)
    result = relative_result(
        row(10.0, 20.0, 30.0, accuracy=0.6), row(50.0, 60.0, 70.0, accuracy=0.5), goal
    )
    assert result.speed_up == 3.0
    assert result.points is not None
    assert abs(result.points - 10.0) < 1e-9
    assert result.relative is not None
    assert abs(result.relative - 0.2) < 1e-9


def test_over_a_column_that_does_not_reach_the_goal_the_speed_up_is_a_lower_bound() -> None:
    goal = Goal(target_accuracy=0.5, at_s=100.0)
    result = relative_result(row(20.0), row(None), goal)
    assert (result.speed_up, result.at_least) == (None, 5.0)
    result = relative_result(row(None), row(20.0), goal)
    assert (result.speed_up, result.at_least) == (None, None)


def named(name: str, times_s: tuple[float | None, ...], *accuracies: float) -> VariantRow:
    figures = tuple(
        VariantRun(seed, time_s, None, accuracy, None, None, None, 0.0, None)
        for seed, (time_s, accuracy) in enumerate(zip(times_s, accuracies, strict=True))
    )
    return VariantRow("homo-b", name, 0.1, figures)


FIRST = "a is first at 50 %:"
HIGHEST = "no column reaches 50 %; a is the most accurate:"


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            named("a", (10.0, 20.0), 0.9, 0.9), named("b", (30.0, 30.0), 0.9, 0.9),
            "a is first at 50 %: 3.00 times as soon as b (1.50 to 3.00 over 2 seeds)",
        ),
        (
            named("a", (10.0, 40.0), 0.9, 0.9), named("b", (30.0, 30.0), 0.9, 0.9),
            f"{FIRST} 3.00 times as soon as b (0.75 to 3.00 over 2 seeds: no clear winner)",
        ),
        (
            named("a", (10.0,), 0.9), named("b", (25.0,), 0.9),
            "a is first at 50 %: 2.50 times as soon as b",
        ),
        (
            named("a", (25.0, None), 0.9, 0.4), named("b", (None, None), 0.4, 0.4),
            "a is first at 50 %: over 4.00 times as soon as b, which never is there",
        ),
        (
            named("a", (10.0, None, 12.0), 0.9, 0.4, 0.9),
            named("b", (30.0, 30.0, 30.0), 0.9, 0.9, 0.9),
            f"{FIRST} 2.50 times as soon as b (2.50 to 3.00 over 2 seeds: no clear winner)",
        ),
        (
            named("a", (20.0, 20.0, 30.0), 0.9, 0.9, 0.9),
            named("b", (None, 10.0, None), 0.4, 0.9, 0.4),
            f"{FIRST} over 5.00 times as soon as b, which is there with 1 of 3 seeds",
        ),
        (
            named("a", (None, None), 0.4, 0.3), named("b", (None, None), 0.2, 0.2),
            f"{HIGHEST} 10.0 points above b (10.0 to 20.0 over 2 seeds)",
        ),
    ],
)  # fmt: skip
def test_the_winner_is_reported_with_its_ratio_and_range(
    first: VariantRow, second: VariantRow, text: str
) -> None:
    goal = Goal(target_accuracy=0.5, at_s=100.0)
    for rows in ([first, second], [second, first]):
        judged = verdict(rows, goal)
        assert judged is not None
        assert (judged.winner, judged.text) == ("a", text)


def test_with_one_column_or_without_figures_there_is_no_winner() -> None:
    goal = Goal(target_accuracy=0.5, at_s=100.0)
    assert verdict([named("a", (1.0,), 0.9)], goal) is None
    assert verdict([], goal) is None
    empty = VariantRow("homo-b", "b", 0.1, (diverged(1),))
    assert verdict([empty, empty], goal) is None
    won = verdict([empty, named("a", (1.0,), 0.9)], goal)
    assert won is not None
    assert won.text == "a is first at 50 %: over 100.00 times as soon as b, which never is there"
