"""Tests of the forecaster.

Without evidence the last reading stays. A cycle of up to some minutes is continued, with its edges
in time. So is the end of a burst that starts at random. Noise is smoothed. A load without memory is
predicted about as well as by the last reading. The method of analogues agrees with a naive search.
Readings that are not finite are refused.

Left out: the use of a forecast (test_demand_predictor).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, median

import numpy as np
import pytest

from dlion_core.demand.forecaster import MAX_HISTORY, NEIGHBOURS, PERSISTENCE, DemandForecaster


def errors(series: list[float], readings: int = 2, after: int = 0) -> tuple[float, float]:
    """Mean absolute errors of the forecaster and of the last reading, over the later part."""
    forecaster = DemandForecaster()
    own, last = [], []
    for index in range(len(series) - readings):
        forecaster.add(series[index])
        value, _ = forecaster.forecast(readings)
        actual = fmean(series[index + 1 : index + 1 + readings])
        if index >= after:
            own.append(abs(value - actual))
            last.append(abs(series[index] - actual))
    return fmean(own), fmean(last)


def cycle(period: int, busy: int, count: int) -> list[float]:
    return [3.0 if second % period < busy else 0.0 for second in range(count)]


def test_without_evidence_the_last_reading_stays() -> None:
    forecaster = DemandForecaster()
    with pytest.raises(ValueError, match="no reading yet"):
        forecaster.forecast(1)
    forecaster.add(1.5)
    assert forecaster.forecast(3) == (1.5, PERSISTENCE)


@pytest.mark.parametrize(("period", "busy"), [(7, 3), (30, 10), (61, 20), (180, 15), (240, 100)])
def test_a_cycle_is_continued_with_its_edges(period: int, busy: int) -> None:
    own, last = errors(cycle(period, busy, 3 * period + 400), after=2 * period + 250)
    assert own < 0.1 * last


def test_the_end_of_a_burst_is_predicted_although_its_start_is_random() -> None:
    random = np.random.default_rng(5)
    series: list[float] = []
    while len(series) < 1500:
        series += [0.0] * int(10 + random.integers(0, 60)) + [2.0] * 12
    own, last = errors(series, readings=3, after=600)
    assert own < 0.9 * last


def test_noise_is_smoothed() -> None:
    random = np.random.default_rng(2)
    own, last = errors([float(2 + random.normal(0, 0.3)) for _ in range(600)], after=200)
    assert own < 0.9 * last


@pytest.mark.parametrize("seed", range(4))
def test_a_load_without_memory_is_predicted_about_as_well_as_by_the_last_reading(seed: int) -> None:
    random = np.random.default_rng(seed)
    level, series = 2.0, []
    for _ in range(1200):
        level = float(np.clip(level + random.normal(0, 0.2), 0, 4))
        series.append(level)
    own, last = errors(series, after=100)
    assert own < 1.1 * last


def test_the_analogues_are_those_of_a_naive_search() -> None:
    random = np.random.default_rng(9)
    series = [float(x) for x in np.round(random.uniform(0, 4, 120), 2)]
    forecaster = DemandForecaster()
    for value in series:
        forecaster.add(value)
    memory, readings = 10.0, 2
    apart = {}
    for lag in range(1, len(series)):
        weights = [math.exp(-k / memory) for k in range(len(series) - lag)]
        pairs = zip(reversed(series), reversed(series[:-lag]), strict=False)
        apart[lag] = sum(w * abs(a - b) for w, (a, b) in zip(weights, pairs, strict=True))
    possible = [lag for lag in apart if readings <= lag < len(series) - int(memory)]
    nearest = sorted(possible, key=apart.__getitem__)[:NEIGHBOURS]
    continued = [fmean(series[len(series) - lag : len(series) - lag + readings]) for lag in nearest]
    by_rule = forecaster._by_rule(readings)
    assert by_rule["pattern of 10 s"] == pytest.approx(median(continued))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_readings_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        DemandForecaster().add(wrong)


def test_a_long_history_is_bounded() -> None:
    forecaster = DemandForecaster()
    for second in _long():
        forecaster.add(float(second % 5))
    assert len(forecaster._history) <= MAX_HISTORY
    assert all(len(each) <= MAX_HISTORY for each in forecaster._distances)
    assert math.isfinite(forecaster.forecast(10_000)[0])


def _long() -> Iterable[int]:
    return range(1200)
