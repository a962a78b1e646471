"""Tests of a simulated machine's temperature.

It agrees with an independent numerical integration of its equation, for any steps of time. The
throttle acts at the theoretical times, with hysteresis. The temperature follows changes of the air.
A heat budget stays below its threshold, while the hardware alone does not.

Left out: the worker's reaction (tests/simulated/test_heat.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from dlion_api.spec.node_policies import Heat
from dlion_environments.plan import HardwareThrottle, Thermals
from dlion_simulator.machines.heat import MachineHeat
from dlion_simulator.machines.thermal import ThermalMachine

BOARD = Thermals(30.0, 8.0, 2.0, 7.5, ((0.0, 25.0),))
HOT = Thermals(30.0, 8.0, 2.0, 7.5, ((0.0, 45.0),), HardwareThrottle(80.0, 70.0, 0.5, 0.2))


def solved(celsius: float, watts: float, ambient: float, seconds: float) -> float:
    found = solve_ivp(
        lambda _, state: [(watts - (state[0] - ambient) / 8.0) / 30.0],
        (0.0, seconds), [celsius], rtol=1e-9, atol=1e-9,
    )  # fmt: skip
    return float(found.y[0][-1])


@given(st.floats(0.0, 1.0), st.floats(0.0, 2000.0))
def test_the_temperature_solves_the_equation(load: float, seconds: float) -> None:
    machine = ThermalMachine(BOARD)
    assert machine.celsius == pytest.approx(25.0 + 2.0 * 8.0)
    machine.advance(seconds, load)
    expected = solved(41.0, 2.0 + 5.5 * load, 25.0, seconds)
    assert machine.celsius == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.floats(0.0, 400.0), max_size=20))
def test_the_steps_of_time_make_no_difference(steps: list[float]) -> None:
    thermals = replace(HOT, ambient=((0.0, 45.0), (300.0, 20.0), (900.0, 60.0)))
    many, once, now_s = ThermalMachine(thermals), ThermalMachine(thermals), 0.0
    for step_s in steps:
        now_s += step_s
        many.advance(now_s, 1.0)
    once.advance(now_s, 1.0)
    assert many.celsius == pytest.approx(once.celsius, abs=1e-5)
    assert many.is_throttled == once.is_throttled


def test_the_throttle_trips_and_resumes_at_the_theoretical_times() -> None:
    machine = ThermalMachine(HOT)  # 61 degrees; to 105 at full load, to 69.8 throttled
    trips_s = 240.0 * math.log((105.0 - 61.0) / (105.0 - 80.0))
    assert machine.next_event_s(1.0) == pytest.approx(trips_s)
    machine.advance(trips_s - 0.01, 1.0)
    assert machine.speed == 1.0
    machine.advance(trips_s + 0.01, 1.0)
    assert machine.speed == 0.5
    resumes_s = trips_s + 240.0 * math.log((80.0 - 69.8) / (70.0 - 69.8))
    machine.advance(resumes_s - 1.0, 1.0)
    assert machine.speed == 0.5
    machine.advance(resumes_s + 1.0, 1.0)
    assert machine.speed == 1.0


def test_a_throttle_that_is_too_weak_stays_on() -> None:
    machine = ThermalMachine(replace(HOT, ambient=((0.0, 60.0),)))
    machine.advance(1e5, 1.0)
    assert machine.is_throttled
    assert machine.next_event_s(1.0) == math.inf


def test_a_change_of_the_air_is_an_event() -> None:
    machine = ThermalMachine(replace(BOARD, ambient=((0.0, 25.0), (100.0, 35.0))))
    assert machine.next_event_s(0.0) == 100.0
    machine.advance(1e6, 0.0)
    assert machine.celsius == pytest.approx(35.0 + 16.0)


@pytest.mark.timeout(30)
def test_air_that_changes_at_the_start_counts_from_then_on() -> None:
    """An environment may say so: the run would stand still at its start."""
    heat = MachineHeat(replace(BOARD, ambient=((0.0, 25.0), (0.0, 35.0))), None)
    heat.advance(1e6, is_busy=False)
    assert "hottest 51.0 °C, now 51.0 °C" in heat.summary()


@pytest.mark.parametrize("budget", [None, Heat(threshold_celsius=75.0)])
def test_a_budget_stays_below_its_threshold_and_the_hardware_does_not(budget: Heat | None) -> None:
    heat, now_s = MachineHeat(HOT, budget), 0.0
    while now_s < 3600:
        busy_s = 0.5
        heat.advance(now_s + busy_s, is_busy=True)
        now_s += busy_s / heat.share
        heat.advance(now_s, is_busy=False)
    if budget is None:
        assert "hottest 80.0 °C" in heat.summary()
        assert heat.share == 1.0
    else:
        assert "throttled by the hardware for 0.0%" in heat.summary()
        above = float(heat.summary().split("for ")[2].split("%")[0])
        assert above <= 6.0
        assert heat.share == pytest.approx((75.0 - 61.0) / 44.0, rel=0.1)
