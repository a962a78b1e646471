"""Test the search for a learning rate: the chosen one lies between worse ones, if any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_cli.comparison.rate_search import MAX_FURTHER_RATES, RateSearch
from dlion_results.comparison import VariantRow, diverged


def searched(
    rates: Iterable[float], time_s: Callable[[float], float | None]
) -> tuple[RateSearch, list[float]]:
    """Return the finished search, and the rates that it tried."""
    search, tried = RateSearch(rates), []
    while wanted := search.untried():
        for rate in wanted:
            tried.append(rate)
            figures = replace(diverged(101), diverged=False, time_to_target_s=time_s(rate))
            search.record(VariantRow("homo-a", "dlion", rate, (figures,)))
    return search, tried


def test_the_best_between_two_others_is_chosen_immediately() -> None:
    search, tried = searched((0.02, 0.05, 0.1), lambda rate: 10 + abs(rate - 0.05))
    assert (search.best, tried, search.is_bracketed) == (0.05, [0.02, 0.05, 0.1], True)


@pytest.mark.parametrize(
    ("best_s", "expected", "further"),
    [(lambda rate: abs(rate - 0.21), 0.2, [0.2, 0.4]), (lambda rate: rate, 0.0013, None)],
    ids=["above", "below"],
)
def test_further_rates_are_tried_while_the_best_is_at_an_end(
    best_s: Callable[[float], float], expected: float, further: list[float] | None
) -> None:
    search, tried = searched((0.02, 0.05, 0.1), lambda rate: 1 + best_s(rate))
    if further is not None:
        assert (search.best, tried[3:], search.is_bracketed) == (expected, further, True)
    else:
        assert tried[3:] == [0.008, 0.0032, 0.0013, 0.00053]
        assert not search.is_bracketed


@pytest.mark.parametrize("rates", [(1.06, 1.07), (1.043, 1.044)])
def test_a_further_rate_continues_the_sequence_also_of_near_rates(rates: tuple[float, ...]) -> None:
    """Rounding must not lead to the other side of the rates that were tried."""
    best_s = {1.06: 1.0, 1.07: 2.0, 1.043: 2.0, 1.044: 1.0}
    search, tried = searched(rates, lambda rate: best_s.get(rate, 3.0))
    assert search.best in (1.06, 1.044)
    assert tried == [*rates], "1.1 is above both, and 1 below both"
    assert not search.is_bracketed


def test_a_single_rate_is_not_tried() -> None:
    search, tried = searched((0.05,), lambda _: None)
    assert (search.best, tried, search.is_bracketed) == (0.05, [], True)


@given(
    st.lists(st.floats(1e-4, 10), min_size=2, max_size=5, unique=True),
    st.dictionaries(st.integers(-40, 40), st.floats(1, 100)),
)
def test_no_tried_rate_is_better_and_the_search_ends(
    rates: list[float], times: dict[int, float]
) -> None:
    def time_s(rate: float) -> float | None:
        return times.get(round(10 * rate))

    search, tried = searched(rates, time_s)
    assert len(set(tried)) == len(tried) <= len(rates) + MAX_FURTHER_RATES
    known = [value for rate in tried if (value := time_s(rate)) is not None]
    assert time_s(search.best) == (min(known) if known else None)
