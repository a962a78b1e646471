"""Tests of the meter of other processes' CPU demand.

Other processes take the machine's busy time less that of trainer and sidecar. While a step is held
up, they take what the step did not get, also if the step waits between. Without counters of the
machine only the second is known. Without CPU pressure the demand is zero. A quota is not a demand.
Gaps, counters that decrease, absurd jumps and values that are not finite give no reading. No
reading is below 0 or above the machine's cores.

Left out: files (tests/unit/worker/sidecar/test_demand_prediction.py).
"""

from __future__ import annotations

import math

import pytest

from dlion_api.protocol.measurements import StepTiming
from dlion_core.demand.demand_meter import DemandMeter, MachineCpu, TakenCores, cores_left


def step(cores: float, *, compute_s: float = 1.0, wait_s: float = 0.0) -> StepTiming:
    """A step that gets so many cores while it computes."""
    cpu_s = cores * compute_s
    return StepTiming(1, 8, compute_s, compute_s + wait_s, cpu_s, cpu_s, wait_s)


def left(taken: TakenCores) -> float:
    """Cores that remain for the trainer."""
    return cores_left(taken.cores, taken.machine_cores, taken.wanted_cores)


def alone(meter: DemandMeter, cores: float = 2.0, machine: float = 4.0) -> None:
    """Learn in two seconds what the trainer uses alone."""
    meter.take(0.0, MachineCpu(machine, 0.0))
    for second in (1.0, 2.0):
        meter.add(step(cores))
        taken = meter.take(second, MachineCpu(machine, cores * second))
        assert taken is not None
        assert taken.cores == pytest.approx(0.0)
        assert left(taken) == pytest.approx(cores)


def test_the_demand_of_others_is_what_trainer_and_sidecar_do_not_use() -> None:
    meter = DemandMeter()
    alone(meter)
    meter.add(step(2.0))
    taken = meter.take(3.0, MachineCpu(4.0, 4.0 + 2.0 + 1.25 + 0.05, own_s=0.05))
    assert taken is not None
    assert taken.cores == pytest.approx(1.25)
    assert left(taken) == pytest.approx(2.0)  # they fit beside the trainer


def test_a_delayed_step_shows_the_demand_of_others_while_it_computes() -> None:
    meter = DemandMeter()
    alone(meter)
    # The step waits half of the time. Others have three cores, and 2.8 while it computes.
    meter.add(step(1.2, compute_s=1.0, wait_s=1.0))
    taken = meter.take(4.0, MachineCpu(4.0, 4.0 + 1.2 + 2.8 + 3.0))
    assert taken is not None
    assert taken.cores == pytest.approx(2.8)
    assert left(taken) == pytest.approx(1.2)


def test_without_counters_only_demand_that_delays_steps_is_known() -> None:
    meter = DemandMeter()
    meter.take(0.0, None)
    meter.add(step(2.0))
    assert meter.take(1.0, None) == TakenCores(0.0, 2.0, 2.0, 1.0)
    meter.add(step(0.5))
    taken = meter.take(2.0, None)
    assert taken is not None
    assert taken.cores == pytest.approx(1.5, abs=0.01)
    assert left(taken) == pytest.approx(0.5, abs=0.01)


def test_without_cpu_pressure_the_demand_of_others_is_zero() -> None:
    meter = DemandMeter()
    meter.take(0.0, MachineCpu(4.0, 0.0, pressure_s=0.0))
    meter.add(step(2.0))
    meter.take(1.0, MachineCpu(4.0, 2.0, pressure_s=0.0))
    for pressure_s, expected in ((0.0, 2.0), (0.5, 0.7)):  # a slow disk, then others
        meter.add(step(0.7))
        meter._last = MachineCpu(4.0, 2.0, pressure_s=0.0)
        taken = meter.take(2.0 + pressure_s, MachineCpu(4.0, 2.7, pressure_s=pressure_s))
        assert taken is not None
        assert left(taken) == pytest.approx(expected, abs=0.01)


def test_a_smaller_quota_is_not_a_demand() -> None:
    meter = DemandMeter()
    meter.set_quota(2.0)
    alone(meter)
    meter.set_quota(0.5)
    meter.take(2.0, MachineCpu(4.0, 4.0))
    for second in (3.0, 4.0):
        meter.add(step(0.5))
        taken = meter.take(second, MachineCpu(4.0, 4.0 + 0.5 * (second - 2.0)))
        assert taken is not None
        assert taken.cores == pytest.approx(0.0)
        assert left(taken) == pytest.approx(0.5)


def test_a_restarted_trainer_begins_a_new_interval() -> None:
    meter = DemandMeter()
    alone(meter)
    meter.trainer_started()
    meter.add(step(2.0))
    assert meter.take(9.0, MachineCpu(4.0, 30.0)) is None


@pytest.mark.parametrize(
    ("now_s", "machine"),
    [
        (2.0, MachineCpu(4.0, 6.0)),  # no time has passed
        (1.0, MachineCpu(4.0, 6.0)),  # the clock went back
        (math.nan, MachineCpu(4.0, 6.0)),
        (2.0 + 3600.0, MachineCpu(4.0, 1e4)),  # the machine slept
    ],
)
def test_clocks_that_jump_give_no_reading(now_s: float, machine: MachineCpu) -> None:
    meter = DemandMeter()
    alone(meter)
    meter.add(step(2.0))
    assert meter.take(now_s, machine) is None


@pytest.mark.parametrize(
    "machine",
    [
        MachineCpu(4.0, 1.0),  # counters decrease after a migration
        MachineCpu(4.0, 1e9),
        MachineCpu(4.0, math.nan),
        MachineCpu(4.0, math.inf),
        MachineCpu(8.0, 6.0),  # processors are added
        MachineCpu(4.0, 6.0, own_s=-1.0),
    ],
)
def test_impossible_counters_give_no_reading(machine: MachineCpu) -> None:
    meter = DemandMeter()
    alone(meter)
    meter.add(step(2.0))
    assert meter.take(3.0, machine) is None


def test_steps_without_time_or_with_values_that_are_not_finite_are_left_out() -> None:
    meter = DemandMeter()
    alone(meter)
    for wrong in (
        step(math.nan),
        step(2.0, compute_s=math.inf),
        step(-1.0),
        step(2.0, compute_s=0),
    ):
        meter.add(wrong)
    assert meter.take(3.0, MachineCpu(4.0, 6.0)) is None


def test_the_cores_left_are_never_negative_nor_above_the_wanted_cores() -> None:
    assert cores_left(1.0, 4.0, 2.0) == 2.0
    assert cores_left(3.5, 4.0, 2.0) == 0.5
    assert cores_left(9.0, 4.0, 2.0) == 0.0
