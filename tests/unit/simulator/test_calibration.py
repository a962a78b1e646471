"""Tests of the law of a step's costs: measured on its own clock, fitted, stored and read again.

Left out: real steps (tests/local/test_calibrate.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_simulator.calibration.calibration import (
    MIN_COST_S,
    MIN_OBSERVATION_S,
    Observation,
    fit,
    fit_line,
    measure,
    read_costs,
)

FIXED_S, SAMPLE_S = 0.012, 0.0006
BATCHES = (8, 32, 128, 256)


def observed(
    noise: float, rounds: int = 9, fixed_s: float = FIXED_S, seed: int = 3
) -> list[Observation]:
    """Steps that follow the law with relative noise."""
    rng = np.random.default_rng(seed)
    return [
        Observation(
            batch, number, (fixed_s + SAMPLE_S * batch) * (1 + noise * rng.normal()), 0.2, 3
        )
        for number in range(rounds)
        for batch in BATCHES
    ]


def test_the_law_is_fitted() -> None:
    exact = fit(observed(0.0))
    assert exact.fixed_core_s.value == pytest.approx(FIXED_S)
    assert exact.samples_per_s_per_core == pytest.approx(1 / SAMPLE_S)
    assert exact.residual_fraction == pytest.approx(0.0, abs=1e-9)


def test_bounds_contain_the_true_values_and_are_as_narrow_as_the_noise_allows() -> None:
    """With nine rounds, 95 % by resampling is somewhat less."""
    noisy = [fit(observed(0.05, seed=seed)) for seed in range(100)]
    for name, true in (("fixed_core_s", FIXED_S), ("per_sample_core_s", SAMPLE_S)):
        found = [getattr(one, name) for one in noisy]
        assert all(one.low < one.value < one.high for one in found)
        assert np.mean([one.low < true < one.high for one in found]) > 0.82
        assert np.median([one.high - one.low for one in found]) < 0.15 * true
    assert np.median([one.residual_fraction for one in noisy]) == pytest.approx(0.05, rel=0.1)


def test_a_negative_fixed_part_becomes_zero() -> None:
    result = fit(observed(0.0, fixed_s=-0.001))
    assert result.fixed_core_s.value == 0.0
    assert result.per_sample_core_s.value == pytest.approx(SAMPLE_S, rel=0.1)


def test_batches_whose_cost_does_not_grow_give_no_law() -> None:
    falling = [
        Observation(batch, number, 0.1 - 0.0003 * batch, 0.2, 3)
        for number in range(3)
        for batch in BATCHES
    ]
    with pytest.raises(DataError, match="further apart"):
        fit(falling)


def test_a_recorded_law_always_has_a_positive_cost() -> None:
    """Steps of a run may be noisy: without a law they cost the median."""
    batch_N = np.array([10.0, 20.0, 40.0])
    fixed_s, sample_s = fit_line(batch_N, np.array([0.04, 0.04, 0.02]))
    assert (fixed_s, sample_s) == (0.0, pytest.approx(0.002))
    assert fit_line(batch_N, np.full(3, 1e-20)) == (0.0, MIN_COST_S)


def test_one_tiny_step_does_not_bend_the_law_of_a_thousand() -> None:
    batch_N = np.tile(np.array([16.0, 64.0, 256.0, 64.0]), 250)
    cost_N = FIXED_S + SAMPLE_S * batch_N
    cost_N[1] = 1e-7
    fixed_s, sample_s = fit_line(batch_N, cost_N)
    assert fixed_s == pytest.approx(FIXED_S, rel=0.15)
    assert sample_s == pytest.approx(SAMPLE_S, rel=0.15)


def test_too_few_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds"):
        fit(observed(0.0, rounds=2))
    with pytest.raises(ValueError, match="1 batch sizes"):
        fit([one for one in observed(0.0) if one.batch_size == BATCHES[0]])


def test_every_size_is_timed_once_a_round_for_long_enough() -> None:
    now_s, first = 0.0, set(BATCHES)

    def step(batch: int) -> None:
        nonlocal now_s
        now_s += FIXED_S + SAMPLE_S * batch + (3.0 if batch in first else 0.0)
        first.discard(batch)

    found = measure(step, BATCHES, rounds=4, cpu_s=lambda: now_s, wall_s=lambda: 2 * now_s)
    assert sorted((one.round_number, one.batch_size) for one in found) == [
        (number, batch) for number in range(1, 5) for batch in BATCHES
    ]
    for one in found:
        assert one.cpu_s * one.steps >= MIN_OBSERVATION_S
        assert one.cpu_s == pytest.approx(FIXED_S + SAMPLE_S * one.batch_size)
        assert one.wall_s == pytest.approx(2 * one.cpu_s)
    orders = {tuple(o.batch_size for o in found if o.round_number == r) for r in range(1, 5)}
    assert len(orders) > 1


def test_a_stored_calibration_is_read_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(fit(observed(0.0)).document()))
    assert read_costs(path) == pytest.approx((FIXED_S, SAMPLE_S))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "not a JSON object"),
        ("{", "is not a calibration"),
        ("[" * 5000, "is not a calibration"),
        ('{"version": 2}', "version 2; allowed: 1"),
        ('{"version": 1}', "fixedCoreS.value: not a number"),
        ('{"version": 1, "fixedCoreS": {"value": true}}', "fixedCoreS.value: not a number"),
        ('{"version": 1, "fixedCoreS": {"value": NaN}}', "fixedCoreS.value: nan"),
        (
            '{"version": 1, "fixedCoreS": {"value": 0.1}, "perSampleCoreS": {"value": 0}}',
            "perSampleCoreS.value: 0;",
        ),
        (
            '{"version": 1, "fixedCoreS": {"value": 1' + "0" * 400 + "}}",
            "fixedCoreS.value: 10000",
        ),
        (" " * (1 << 20) + "{}", "larger than"),
    ],
)
def test_a_file_that_is_not_a_calibration_is_refused(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words.replace("(", r"\(").replace("[", r"\[")):
        read_costs(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_costs(tmp_path / "absent.json")
