"""Demand estimates from any steps, clocks and counters.

A speed is positive and finite, or the measured one counts; demand is between none and the whole
machine. For any other load, following forecasts costs at most a few seconds of waiting more than
following the measured speed.

Left out: examples with names (tests/unit/core/demand).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stepped_worker import SAMPLE_CORE_S, STEP_S, SteppedWorker

from dlion_api.protocol.measurements import StepTiming
from dlion_core.demand.demand_meter import MachineCpu
from dlion_core.demand.demand_predictor import DemandPredictor

any_float = st.floats(allow_nan=True, allow_infinity=True)
seconds = st.one_of(any_float, st.floats(0.0, 5.0))
steps = st.builds(
    StepTiming, st.integers(-5, 10**6), st.integers(-5, 10**9), seconds, seconds, seconds,
    st.one_of(st.none(), seconds), st.one_of(st.none(), seconds),
    quota_changed=st.booleans(),
)  # fmt: skip
machines = st.one_of(
    st.none(),
    st.builds(MachineCpu, st.floats(1.0, 64.0), seconds, seconds, st.one_of(st.none(), seconds)),
)


@given(
    st.lists(
        st.tuples(
            st.floats(-5.0, 100.0), steps, machines, st.one_of(st.none(), st.floats(1e-3, 1e9))
        ),
        max_size=60,
    )
)
def test_any_readings_give_a_valid_speed(
    moments: list[tuple[float, StepTiming, MachineCpu | None, float | None]],
) -> None:
    predictor, now_s = DemandPredictor(), 0.0
    for passed_s, step, machine, measured in moments:
        now_s += passed_s  # may go back, although no caller's clock should
        predictor.add_step(step, now_s, measured)
        if not predictor.is_due(now_s):
            continue
        decision = predictor.sample(now_s, machine, measured)
        if decision.samples_per_s is not None:
            assert 0.0 < decision.samples_per_s < math.inf
        if decision.expected_cores is not None and decision.machine_cores is not None:
            assert 0.0 <= decision.expected_cores <= decision.machine_cores


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.floats(2.0, 60.0), st.floats(0.1, 2.0), st.floats(0.0, 1.0))
def test_following_forecasts_costs_at_most_a_few_seconds(
    seed: int, length_s: float, cores: float, regular: float
) -> None:
    random = np.random.default_rng(seed)
    ends_s = np.cumsum(
        [
            length_s if random.random() < regular else random.exponential(length_s)
            for _ in range(900)
        ]
    )
    worker = SteppedWorker(lambda t: cores * (int(np.searchsorted(ends_s, t)) % 2))
    followed, reactive = 0.0, 0.0
    pairs = list(worker.steps(900.0, measured=lambda before, _: before))
    before = worker.left(0.0) / SAMPLE_CORE_S
    for (_, speed, decision), (_, after, _) in itertools.pairwise(pairs):
        measured, before = before, speed
        reactive += _waiting(measured / after)
        followed += _waiting((decision.samples_per_s or measured) / after)
    assert followed <= 1.03 * reactive + 12.0


def _waiting(ratio: float) -> float:
    return STEP_S * (ratio - 1.0 if ratio > 1.0 else 0.5 * (1.0 - ratio))
