"""Tests of the predictor of a step's speed.

With a cyclic load, forecasts become trusted, and give the next step's speed before it changes.
They do so also without counters of the machine. On an idle machine, or with a measured speed that
is right, they do not. Wrong forecasts lose trust, and each loss raises the bar for the next time.
The loss that they cause is bounded. Without readings there is no prediction. After a gap the
predictor starts again. After a change of the quota the measured speed counts until the next
reading. The reason names both demands.

Left out: the resulting batches (tests/simulated/test_demand.py); figures (benchmarks/demand.py).
"""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import pytest

from dlion_api.protocol.measurements import StepTiming
from dlion_core.demand.demand_meter import MachineCpu
from dlion_core.demand.demand_predictor import (
    CREDIT_S,
    DemandDecision,
    DemandPredictor,
    DemandState,
)
from stepped_worker import CORES, SAMPLE_CORE_S, SteppedWorker, square

ALONE = CORES / SAMPLE_CORE_S


def late(before: float, _now: float) -> float:
    """A measured speed that is one step late."""
    return before


@pytest.mark.parametrize("has_counters", [True, False])
def test_with_a_cyclic_load_forecasts_give_the_speed_before_it_changes(
    *, has_counters: bool
) -> None:
    worker = SteppedWorker(square(30.0, 10.0, 2.0))
    list(worker.steps(600.0, has_counters=has_counters, measured=late))
    steps = list(worker.steps(300.0, has_counters=has_counters, measured=late))
    followed = [d for _, _, d in steps if d.state is DemandState.PREDICTED]
    assert len(followed) > 0.9 * len(steps)
    ahead = [
        decision.samples_per_s or speed
        for (now_s, speed, decision), (_, after, _) in itertools.pairwise(steps)
        if after < 0.9 * speed  # the other load starts
    ]
    assert len(ahead) >= 8
    assert fmean(ahead) < 0.85 * ALONE


def test_on_an_idle_machine_the_measured_speed_counts() -> None:
    worker = SteppedWorker(lambda _: 0.0)
    assert all(d.samples_per_s is None for _, _, d in worker.steps(300.0))
    assert worker.predictor.decision.state is DemandState.MEASURED


def test_a_measured_speed_that_is_right_is_kept() -> None:
    worker = SteppedWorker(square(30.0, 10.0, 2.0))

    def of_the_next_step(_before: float, _now: float) -> float:
        return worker.left(worker.now_s) / SAMPLE_CORE_S

    steps = list(worker.steps(900.0, measured=of_the_next_step))
    assert all(d.state is not DemandState.PREDICTED for _, _, d in steps)


def test_forecasts_that_become_wrong_lose_trust_and_cost_little() -> None:
    worker = SteppedWorker(square(30.0, 10.0, 2.0))
    list(worker.steps(900.0, measured=late))
    assert worker.predictor.decision.state is DemandState.PREDICTED
    began_s = worker.now_s
    worker.wanted = lambda now_s: 2.0 * ((now_s - began_s) % 7.3 * 997 % 11 > 5)
    steps = list(worker.steps(900.0, measured=late))
    over = [
        0.5 * max(0.0, decision.samples_per_s / after - 1.0)
        for (_, _, decision), (_, after, _) in itertools.pairwise(steps)
        if decision.samples_per_s is not None
    ]
    reactive = [
        0.5 * max(0.0, speed / after - 1.0)
        for (_, speed, _), (_, after, _) in itertools.pairwise(steps)
    ]
    assert sum(over) <= sum(reactive) + 12.0


def step(speed: float, iteration: int = 1) -> StepTiming:
    cpu_s = speed * SAMPLE_CORE_S
    return StepTiming(iteration, round(speed), 1.0, 1.0, cpu_s, cpu_s, 0.0)


def test_without_readings_there_is_no_prediction() -> None:
    predictor = DemandPredictor()
    assert predictor.sample(0.0, MachineCpu(CORES, 0.0), 100.0) == DemandDecision()
    predictor.add_step(step(200.0), 1.0, None)
    assert predictor.sample(1.0, MachineCpu(CORES, 4.0), None).state is DemandState.UNKNOWN
    predictor.add_step(step(200.0), 2.0, 200.0)
    assert predictor.sample(2.0, MachineCpu(CORES, 8.0), 200.0).state is DemandState.MEASURED


def test_steps_without_cpu_time_and_impossible_speeds_leave_the_measured_speed() -> None:
    predictor = DemandPredictor()
    asleep = StepTiming(1, 8, 1.0, 1.0, 0.0, 0.0, 0.0)
    for second in range(1, 9):
        predictor.add_step(step(200.0) if second == 1 else asleep, float(second), 100.0)
        measured = (100.0, 0.0, math.nan, math.inf)[second % 4]
        decision = predictor.sample(float(second), MachineCpu(CORES, 0.0), measured)
        assert decision.samples_per_s is None


def test_a_sample_without_a_step_keeps_the_place_in_a_cycle() -> None:
    worker = SteppedWorker(square(30.0, 10.0, 2.0))
    list(worker.steps(300.0))
    before = len(worker.predictor._forecaster._history)
    worker.now_s += 20.0
    worker.predictor.sample(worker.now_s, None, 100.0)
    assert len(worker.predictor._forecaster._history) == pytest.approx(before + 20, abs=1)


def test_a_long_gap_starts_again() -> None:
    worker = SteppedWorker(square(30.0, 10.0, 2.0))
    list(worker.steps(600.0, measured=late))
    worker.now_s += 7200.0
    (_, _, decision), *_ = worker.steps(0.1)
    assert decision.state is DemandState.UNKNOWN
    list(worker.steps(5.0))
    assert worker.predictor.decision.rule == "last reading"


def test_under_another_quota_the_measured_speed_counts_until_there_is_a_reading() -> None:
    """A forecast from the old quota's cores gives a throttled worker its old share."""
    worker = SteppedWorker(square(30.0, 10.0, 2.0))
    list(worker.steps(900.0, measured=late))
    assert worker.predictor.decision.state is DemandState.PREDICTED
    worker.predictor.set_quota(1.0)
    slow = StepTiming(1, 25, 0.5, 1.1, 0.5, 0.5, 0.6)
    worker.predictor.add_step(slow, worker.now_s + 1.1, 50.0)
    decision = worker.predictor.sample(worker.now_s + 1.1, None, 50.0)
    assert decision.samples_per_s is None
    worker.predictor.add_step(slow, worker.now_s + 2.2, 50.0)
    decision = worker.predictor.sample(worker.now_s + 2.2, None, 50.0)
    assert decision.state is DemandState.PREDICTED
    assert (decision.samples_per_s or 50.0) <= 50.5


def test_each_failure_raises_the_bar_for_trust() -> None:
    predictor = DemandPredictor()
    needed = []
    for _ in range(3):
        for wanted in (True, False):
            spent_s = 0.0
            while predictor._counts is not wanted:
                # Forecasts that save all waiting, and then those that cause it.
                predicted, measured = (100.0, 150.0) if wanted else (150.0, 100.0)
                predictor._made.clear()
                predictor._predicted = predicted
                predictor._note(0.0, measured)
                predictor._judge(100.0, 0.5, 1.0)
                spent_s += 0.25
                assert spent_s < 1000.0
            if wanted:
                needed.append(spent_s)
    assert needed[0] == pytest.approx(CREDIT_S, abs=0.26)
    assert needed[1] > 1.7 * needed[0]
    assert needed[2] > 1.7 * needed[1]


def test_the_reason_names_the_present_and_the_expected_demand_of_others() -> None:
    decision = DemandDecision(90.0, DemandState.PREDICTED, 0.1, 2.04, 4.0, "pattern of 10 s")
    assert decision.reason() == (
        "other work is expected to take 2.0 of 4 cores, now 0.1 (pattern of 10 s)"
    )
    assert not DemandDecision(None, DemandState.MEASURED, 0.1, 2.0, 4.0, "level").reason()
