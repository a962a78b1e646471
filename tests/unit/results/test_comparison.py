"""Seeds put together: a seed that never got there counts as the worst, never as absent."""

from __future__ import annotations

from dlion_results.comparison import (
    Goal,
    VariantRow,
    VariantRun,
    is_better,
    relative_result,
    spread,
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


def test_the_median_is_a_value_that_was_measured() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0]).median == 2.0
    assert spread([]).median is None


def test_a_seed_that_never_got_there_counts_as_the_worst() -> None:
    assert spread([1.0, 2.0, None]).median == 2.0
    assert spread([1.0, None, None]).median is None
    assert spread([1.0, None, None]).missing == 2


def test_a_learning_rate_is_better_where_it_gets_there_sooner_else_where_it_gets_further() -> None:
    assert is_better(row(10.0), row(20.0))
    assert is_better(row(10.0, accuracy=0.1), row(None, accuracy=0.9))
    assert not is_better(row(None, accuracy=0.9), row(10.0, accuracy=0.1))
    assert is_better(row(None, accuracy=0.9), row(None, accuracy=0.8))


def test_one_column_against_another_is_told_by_medians_in_points_and_relative() -> None:
    goal = Goal(target_accuracy=0.5, at_s=100.0)
    told = relative_result(
        row(10.0, 20.0, 30.0, accuracy=0.6), row(50.0, 60.0, 70.0, accuracy=0.5), goal
    )
    assert told.speed_up == 3.0
    assert told.points is not None
    assert abs(told.points - 10.0) < 1e-9
    assert told.relative is not None
    assert abs(told.relative - 0.2) < 1e-9


def test_over_a_column_that_never_gets_there_the_speed_up_has_a_bound_only() -> None:
    goal = Goal(target_accuracy=0.5, at_s=100.0)
    told = relative_result(row(20.0), row(None), goal)
    assert (told.speed_up, told.at_least) == (None, 5.0)
    told = relative_result(row(None), row(20.0), goal)
    assert (told.speed_up, told.at_least) == (None, None)
