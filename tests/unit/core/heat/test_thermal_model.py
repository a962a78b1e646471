"""Tests of the thermal model.

The model learns a machine's parameters from readings of its exact solution, through a sensor of
whole degrees. It follows a change of the ambient temperature. Its predictions agree with an
independent numerical integration of the equation. A constant load, gaps and repeated times do not
spoil it.

Left out: the use of the model (test_heat_controller.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from dlion_core.heat.thermal_model import ThermalModel, ThermalParameters

CAPACITY, RESISTANCE, IDLE_W, BUSY_W = 30.0, 8.0, 2.0, 7.5
STEP_S = 2.0


def solved(celsius: float, share: float, ambient: float, seconds: float) -> float:
    """An independent oracle: C dT/dt = P - (T - A) / R, integrated numerically."""

    def slope(_time: float, state: list[float]) -> list[float]:
        watts = IDLE_W + (BUSY_W - IDLE_W) * share
        return [(watts - (state[0] - ambient) / RESISTANCE) / CAPACITY]

    found = solve_ivp(slope, (0.0, seconds), [celsius], rtol=1e-9, atol=1e-9)
    return float(found.y[0][-1])


def fed(
    share: Callable[[float], float],
    *,
    seconds: float = 1500.0,
    ambient: Callable[[float], float] = lambda _: 25.0,
    sensor: Callable[[float], float] = lambda celsius: celsius,
) -> tuple[ThermalModel, float]:
    """A model trained on a machine under that load, and the true temperature at the end."""
    model, celsius = ThermalModel(), 41.0
    kept = math.exp(-STEP_S / (CAPACITY * RESISTANCE))
    model.add(0.0, sensor(celsius), 0.0)
    for step in range(1, int(seconds / STEP_S)):
        now_s = step * STEP_S
        watts = IDLE_W + (BUSY_W - IDLE_W) * share(now_s)
        steady = ambient(now_s) + watts * RESISTANCE
        celsius = steady + (celsius - steady) * kept
        model.add(now_s, sensor(celsius), share(now_s))
    return model, celsius


def varied(now_s: float) -> float:
    return (0.2, 1.0, 0.6)[int(now_s // 90) % 3]


def test_the_parameters_of_a_machine_are_found() -> None:
    found = fed(varied)[0].parameters
    assert found.cooling_per_s == pytest.approx(1 / (CAPACITY * RESISTANCE), rel=0.03)
    assert found.rate_k_per_s == pytest.approx((BUSY_W - IDLE_W) / CAPACITY, rel=0.03)
    assert found.steady(0.0) == pytest.approx(25.0 + IDLE_W * RESISTANCE, abs=1.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_prediction_solves_the_equation(share: float) -> None:
    model, celsius = fed(varied)
    for seconds in (5.0, 30.0, 300.0):
        expected = solved(celsius, share, 25.0, seconds)
        assert model.parameters.after(celsius, share, seconds) == pytest.approx(expected, abs=0.5)


def test_a_noisy_sensor_of_whole_degrees_is_enough() -> None:
    noise = np.random.default_rng(5)
    model, celsius = fed(varied, sensor=lambda c: float(round(c + noise.normal(0.0, 0.4))))
    for share in (0.1, 1.0):
        expected = solved(celsius, share, 25.0, 60.0)
        assert model.parameters.after(celsius, share, 60.0) == pytest.approx(expected, abs=2.0)


def test_a_warmer_room_is_followed_within_two_minutes() -> None:
    model, celsius = fed(varied, ambient=lambda t: 25.0 if t < 1380 else 45.0)
    expected = solved(celsius, 1.0, 45.0, 30.0)
    assert model.parameters.after(celsius, 1.0, 30.0) == pytest.approx(expected, abs=1.0)


def test_hours_of_constant_load_keep_the_learned_effect_of_load() -> None:
    """A later change of the load gets the right share."""
    model, celsius = fed(lambda t: varied(t) if t < 1500 else 0.6, seconds=15_000)
    expected = solved(celsius, 1.0, 25.0, 60.0) - solved(celsius, 0.6, 25.0, 60.0)
    found = model.parameters
    difference = found.after(celsius, 1.0, 60.0) - found.after(celsius, 0.6, 60.0)
    assert difference == pytest.approx(expected, rel=0.15)


def test_after_a_gap_the_model_stays_with_a_new_reference() -> None:
    model, celsius = fed(varied)
    before = model.parameters.after(celsius, 1.0, 60.0)
    model.add(1e5, celsius - 10.0, 0.5)
    assert model.parameters.reference_celsius == pytest.approx(celsius - 10.0)
    assert model.parameters.after(celsius, 1.0, 60.0) == pytest.approx(before, abs=0.5)


def test_a_repeated_or_earlier_time_changes_nothing() -> None:
    model, celsius = fed(varied)
    before = model.parameters
    model.add(100.0, celsius + 20, 1.0)
    assert model.parameters == before


def test_without_a_reading_there_is_no_model() -> None:
    with pytest.raises(ValueError, match="no reading yet"):
        _ = ThermalModel().parameters


def test_the_share_for_a_target_is_the_inverse_of_the_prediction() -> None:
    model = ThermalParameters(20.0, 0.03, 0.2, 0.004)
    for share in (-0.5, 0.0, 0.4, 1.7):
        target = model.after(50.0, share, 45.0)
        assert model.share_for(50.0, target, 45.0) == pytest.approx(share, abs=1e-9)
