"""Heat control with any sensor readings.

The share stays between the floor and 1, and is finite, for any readings at any times. Some
first-order machines can keep below the threshold at the floor; these are below it at least 94 % of
the time.

Left out: examples with names (tests/unit/core/heat).
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.heated_machine import HeatedMachine

from dlion_core.heat.heat_controller import ALLOWED_FRACTION, HeatController

any_float = st.floats(allow_nan=True, allow_infinity=True)
readings = st.one_of(st.none(), any_float, st.floats(-80.0, 220.0))


@given(
    st.lists(st.tuples(st.floats(-5.0, 200.0), readings, any_float), min_size=1, max_size=60),
    st.floats(-20.0, 150.0),
    st.floats(0.01, 1.0),
)
def test_any_readings_leave_the_share_within_its_bounds(
    samples: list[tuple[float, float | None, float]], threshold: float, floor: float
) -> None:
    controller, now_s = HeatController(threshold, floor), 0.0
    for step_s, celsius, used in samples:
        now_s += step_s  # may go back, although no caller's clock should
        decision = controller.sample(now_s, celsius, used)
        assert floor <= decision.share <= 1.0
        assert floor <= decision.mean_share <= 1.0


@settings(max_examples=12)
@given(
    time_constant_s=st.floats(40.0, 2000.0),
    rise_k=st.floats(20.0, 120.0),
    ambient=st.floats(-10.0, 50.0),
    threshold=st.floats(60.0, 95.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_capable_machine_keeps_to_the_budget(
    time_constant_s: float, rise_k: float, ambient: float, threshold: float, seed: int
) -> None:
    floor = 0.05
    if ambient + floor * rise_k > threshold - 4:
        return  # at the floor it is as hot as that
    random = np.random.default_rng(seed)
    pairs = HeatedMachine(time_constant_s, rise_k, ambient=lambda _: ambient).driven(
        HeatController(threshold, floor),
        seconds=3600,
        sensor=lambda _, celsius: float(round(celsius + random.normal(0.0, 0.4))),
    )
    assert fmean(celsius > threshold for celsius, _ in pairs) <= ALLOWED_FRACTION
