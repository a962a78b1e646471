"""Seeds put together: a seed that never got there counts as the worst, never as absent."""

from __future__ import annotations

from dlion_worker.results.comparison import Figures, Row, better, spread


def row(*times_s: float | None, accuracy: float = 0.5) -> Row:
    return Row(
        "homo-b",
        "dlion",
        0.1,
        tuple(
            Figures(seed, time_s, None, accuracy, None, None, None, 0.0, None)
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
    assert better(row(10.0), row(20.0))
    assert better(row(10.0, accuracy=0.1), row(None, accuracy=0.9))
    assert not better(row(None, accuracy=0.9), row(10.0, accuracy=0.1))
    assert better(row(None, accuracy=0.9), row(None, accuracy=0.8))
