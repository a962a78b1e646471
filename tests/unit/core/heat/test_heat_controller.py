"""Tests of the heat controller against the exact solution of a machine's equation.

The temperature stays below the threshold at least 94 % of the time, and close to it. The controller
acts early and does not overshoot. A machine that cannot get so hot is not limited. Missing, frozen,
noisy and absurd readings are safe.

Left out: second-order machines and other rules (benchmarks/heat.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest
from tests.support.heated_machine import HeatedMachine

from dlion_core.heat.heat_controller import (
    ALLOWED_FRACTION,
    BLIND_AFTER_S,
    SAMPLE_S,
    HeatController,
    HeatDecision,
    HeatState,
)

THRESHOLD, FLOOR = 70.0, 0.1
BOARD = HeatedMachine(time_constant_s=240.0, rise_k=60.0)
Pairs = list[tuple[float, HeatDecision]]


def controller() -> HeatController:
    return HeatController(THRESHOLD, FLOOR)


def above_fraction(pairs: Pairs) -> float:
    return fmean(celsius > THRESHOLD for celsius, _ in pairs)


def noisy(seed: int, deviation: float) -> Callable[[float, float], float]:
    random = np.random.default_rng(seed)
    return lambda _, celsius: float(round(celsius + random.normal(0.0, deviation)))


@pytest.mark.parametrize("time_constant_s", [30.0, 240.0, 1500.0])
@pytest.mark.parametrize("rise_k", [50.0, 100.0])
def test_the_temperature_keeps_to_the_budget_and_uses_it(
    time_constant_s: float, rise_k: float
) -> None:
    machine = HeatedMachine(time_constant_s, rise_k)
    pairs = machine.driven(controller(), seconds=4500, sensor=noisy(1, 0.4))
    assert above_fraction(pairs) <= ALLOWED_FRACTION
    late = pairs[len(pairs) // 2 :]
    assert fmean(celsius for celsius, _ in late) == pytest.approx(THRESHOLD, abs=2.0)
    # The share that keeps exactly the threshold is the oracle.
    ideal = (THRESHOLD - 30.0) / rise_k
    assert fmean(decision.share for _, decision in late) == pytest.approx(ideal, rel=0.06)


def test_a_worker_slows_down_before_the_threshold_and_does_not_overshoot() -> None:
    pairs = BOARD.driven(controller(), seconds=3600)
    first = next(celsius for celsius, decision in pairs if decision.state is HeatState.LIMITED)
    assert 60.0 < first < THRESHOLD
    assert max(celsius for celsius, _ in pairs) < THRESHOLD + 0.5


def test_a_machine_that_stays_cool_is_never_limited() -> None:
    pairs = HeatedMachine(240.0, 35.0).driven(controller(), seconds=3600, sensor=noisy(2, 0.4))
    assert all(decision.share == 1.0 for _, decision in pairs)


def test_the_share_follows_a_change_of_the_room_temperature() -> None:
    machine = HeatedMachine(240.0, 60.0, ambient=lambda t: 50.0 if 3600 <= t < 7200 else 30.0)
    pairs = machine.driven(controller(), seconds=10_800, sensor=noisy(3, 0.4))
    hour = int(3600 / SAMPLE_S)
    shares = [decision.share for _, decision in pairs]
    assert fmean(shares[2 * hour - 300 : 2 * hour]) == pytest.approx(20 / 60, rel=0.1)
    assert fmean(shares[3 * hour - 300 :]) == pytest.approx(40 / 60, rel=0.1)
    assert above_fraction(pairs) <= ALLOWED_FRACTION


def test_a_room_that_is_too_hot_leads_to_the_floor() -> None:
    pairs = HeatedMachine(240.0, 60.0, ambient=lambda _: 75.0).driven(controller(), seconds=1800)
    assert {decision.share for _, decision in pairs[30:]} == {FLOOR}


# ---- the sensor ----------------------------------------------------------------------------------


def test_without_a_sensor_nothing_is_limited() -> None:
    pairs = BOARD.driven(controller(), seconds=600, sensor=lambda _time, _celsius: None)
    assert {(d.share, d.state) for _, d in pairs} == {(1.0, HeatState.UNKNOWN)}


ABSURD = [None, math.nan, math.inf, -math.inf, -273.2, 1e9, 65_535.0]


@pytest.mark.parametrize("reading", ABSURD)
def test_readings_that_end_or_become_absurd_lead_to_the_floor(reading: float | None) -> None:
    pairs = BOARD.driven(
        controller(), seconds=3600, sensor=lambda t, celsius: celsius if t < 1800 else reading
    )
    shares = [decision.share for _, decision in pairs]
    lost = int(1800 / SAMPLE_S)
    grace = int(BLIND_AFTER_S / SAMPLE_S)
    assert set(shares[lost : lost + grace - 1]) == {shares[lost - 1]}
    assert shares[lost:] == sorted(shares[lost:], reverse=True)
    assert shares[-1] == pytest.approx(FLOOR, abs=0.01)
    assert pairs[-1][1].state is HeatState.BLIND
    assert max(celsius for celsius, _ in pairs) < THRESHOLD + 1.0


def test_readings_that_resume_end_the_fallback() -> None:
    pairs = BOARD.driven(
        controller(), seconds=7200, sensor=lambda t, c: None if 1800 <= t < 2400 else c
    )
    assert pairs[-1][1].state is HeatState.LIMITED
    assert pairs[-1][1].share == pytest.approx(40 / 60, rel=0.05)


@pytest.mark.parametrize("at", [0.0, 150.0])
def test_a_sensor_that_freezes_below_the_threshold_leads_to_the_floor(at: float) -> None:
    """It freezes while the machine warms up (150 s), or is stuck at the ambient temperature."""
    held: list[float] = []

    def sensor(now_s: float, celsius: float) -> float:
        if now_s <= at:
            held[:] = [celsius]
        return held[0]

    pairs = BOARD.driven(controller(), seconds=3600, sensor=sensor)
    # A value that never changed has no information: the hardware's own throttle is left.
    expected = FLOOR if at else 1.0
    assert pairs[-1][1].share == pytest.approx(expected, abs=0.01)


def test_single_wild_readings_are_ignored() -> None:
    clean = BOARD.driven(controller(), seconds=3600)
    wild = BOARD.driven(
        controller(), seconds=3600, sensor=lambda t, celsius: 127.0 if t % 100 == 50 else celsius
    )
    assert above_fraction(wild) <= ALLOWED_FRACTION
    assert fmean(d.share for _, d in wild) == pytest.approx(
        fmean(d.share for _, d in clean), rel=0.02
    )


def test_a_jump_that_stays_is_accepted() -> None:
    pairs = HeatedMachine(5.0, 20.0, ambient=lambda t: 30.0 if t < 600 else 90.0).driven(
        controller(), seconds=700
    )
    assert pairs[-1][1].share == FLOOR


def test_a_machine_that_is_hot_at_the_start_has_a_small_batch_at_once() -> None:
    """This is the case after a restart of the sidecar. Otherwise peers wait for a whole share."""
    again = controller()
    assert again.sample(0.0, None, 0.0).mean_share == 1.0
    hot = again.sample(2.0, 200.0, 1.0)
    assert hot.mean_share == hot.share == FLOOR


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_a_noisy_sensor_costs_work_but_keeps_the_budget(deviation: float) -> None:
    pairs = BOARD.driven(controller(), seconds=7200, sensor=noisy(4, deviation))
    assert above_fraction(pairs) <= ALLOWED_FRACTION
    assert fmean(decision.share for _, decision in pairs) > 0.5


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "floor"), [(math.nan, 0.1), (math.inf, 0.1), (70.0, 0.0), (70.0, 1.1)]
)
def test_arguments_out_of_bounds_are_refused(threshold: float, floor: float) -> None:
    with pytest.raises(ValueError, match="threshold_celsius"):
        HeatController(threshold, floor)
