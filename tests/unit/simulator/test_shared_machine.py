"""Tests of a machine shared with other work.

Other work takes the cores of its phases, repeatedly or once, and the worker keeps at least half.
The counters equal an independent sum over small steps, for any steps of time. Pressure counts only
while the worker computes and cores are short. With even shares nothing is predicted.

Left out: the worker's reaction (tests/simulated/test_demand.py).
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.document import parse
from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_environments.model import Environment
from dlion_environments.plan import CoLocatedDemand
from dlion_simulator.machines.demand import worker_demands
from dlion_simulator.machines.shared_machine import SharedMachine
from local_run import job_document

UNITS = 4.0
PHASES = ((3.0, 0.0), (2.0, 3.0), (1.5, 1.0))


@pytest.mark.parametrize(
    ("now_s", "wanted", "change_s"),
    [(0.0, 0.0, 3.0), (2.9, 0.0, 3.0), (3.0, 3.0, 5.0), (5.5, 1.0, 6.5), (6.5, 0.0, 9.5),
     (6.5e6 + 3.5, 3.0, 6.5e6 + 5.0)],
)  # fmt: skip
def test_phases_repeat(now_s: float, wanted: float, change_s: float) -> None:
    machine = SharedMachine(CoLocatedDemand(PHASES))
    assert machine.wanted(now_s) == wanted
    assert machine.next_change_s(now_s) == pytest.approx(change_s)
    assert machine.left(now_s, UNITS) == max(UNITS - wanted, UNITS / 2)


def test_without_repetition_the_last_phase_stays() -> None:
    machine = SharedMachine(CoLocatedDemand(PHASES, repeats=False))
    assert machine.wanted(4.0) == 3.0
    assert machine.next_change_s(4.0) == 5.0
    assert machine.next_change_s(5.0) == math.inf
    assert machine.wanted(1e9) == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.booleans()), max_size=12))
def test_the_counters_are_the_sum_of_all_work(steps: list[tuple[float, bool]]) -> None:
    machine, now_s = SharedMachine(CoLocatedDemand(PHASES)), 0.0
    busy_s = pressure_s = 0.0
    for seconds, is_busy in steps:
        slices = 400
        for index in range(slices):
            at_s = (now_s + seconds * (index + 0.5) / slices) % 6.5
            others = 0.0 if at_s < 3.0 else 3.0 if at_s < 5.0 else 1.0
            used = UNITS if is_busy else others
            busy_s += used * seconds / slices
            pressure_s += (is_busy and others > 0) * seconds / slices
        now_s += seconds
        machine.advance(now_s, UNITS, is_busy=is_busy)
    counters = machine.counters(UNITS)
    tolerance = 0.15 * len(steps) + 1e-6
    assert counters.busy_s == pytest.approx(busy_s, abs=tolerance)
    assert counters.pressure_s == pytest.approx(pressure_s, abs=tolerance)
    assert counters.cores == UNITS


def test_the_steps_of_time_make_no_difference() -> None:
    many, once = (SharedMachine(CoLocatedDemand(PHASES)) for _ in range(2))
    for tick in range(1, 1001):
        many.advance(tick / 7, UNITS, is_busy=True)
    once.advance(1000 / 7, UNITS, is_busy=True)
    assert many.counters(UNITS).busy_s == pytest.approx(once.counters(UNITS).busy_s)
    assert many.summary() == once.summary()


@pytest.mark.parametrize(("policy", "predicts"), [("weighted", True), ("even", False)])
def test_with_even_shares_nothing_is_predicted(policy: str, *, predicts: bool) -> None:
    """The same holds in a sidecar."""
    job = load_job(job_document(1, batching={"policy": policy}))
    worker = {"cores": 4, "demand": {"phases": [{"seconds": 5, "cores": 1}]}}
    environment = parse(Environment, {"name": "e", "workers": [worker]}, source="e.yaml")
    demands = worker_demands(job, environment.plan(job.workers(), None, duration_s=60))
    assert ("forecasts" in demands[Rank(0)].summary()) == predicts
