"""Tests of whole simulated jobs beside other work.

If a worker's machine has cyclic other work, forecasts become trusted and directives state so. All
workers then wait less than with measured speeds alone. Other work that ends earlier changes
nothing. A machine without other work is as before. The same run repeats bit by bit.

Left out: the predictor (tests/unit/core/demand); comparisons (benchmarks/demand.py).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.simulations import Case, Simulated, SimulatedCases

SECONDS = 300
CYCLE = {"phases": [{"seconds": 14, "cores": 0}, {"seconds": 6, "cores": 2}]}
IDLE = {"phases": [{"seconds": 20, "cores": 0}]}


def case(demand: dict[str, Any], prediction: str, seconds: int = SECONDS) -> Case:
    """A job of four equal workers, with other work beside the last."""
    settings: dict[str, Any] = {
        "trainer.stop": {"maxSeconds": seconds},
        "trainer.evaluation.everySamples": 10_000_000,
        "batching.globalBatchSize.initial": 192,
        "nodePolicies": {"demand": {"prediction": prediction}},
    }
    workers = [{"count": 3, "cores": 4}, {"cores": 4, "demand": demand}]
    return Case({"name": "shared", "workers": workers}, settings)


CASES = {
    "auto": case(CYCLE, "auto"),
    "short": case(CYCLE, "auto", 200),
    "again": case(CYCLE, "auto", 200),
    "none": case(CYCLE, "none"),
    "idle": case(IDLE, "auto", 60),
    "idle, none": case(IDLE, "none", 60),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCases:
    return SimulatedCases(tmp_path_factory.mktemp("demand"), CASES)


def summary(run: Simulated) -> str:
    (event,) = (record for record in run.records if record.get("reason") == "OtherWork")
    assert event["rank"] == 3
    return str(event["message"])


def late_waiting_s(run: Simulated) -> float:
    """The waiting time of all workers in the second half."""
    return sum(
        step["waited_s"]
        for steps in run.steps.values()
        for step in steps
        if step["time_s"] > SECONDS / 2
    )


def test_forecasts_become_trusted_and_all_workers_wait_less(runs: SimulatedCases) -> None:
    found = re.search(r"forecasts counted for (\d+)% of the steps", summary(runs["auto"]))
    assert found
    assert int(found[1]) >= 40
    assert "forecasts" not in summary(runs["none"])
    assert late_waiting_s(runs["auto"]) < 0.9 * late_waiting_s(runs["none"])


def test_directives_state_the_expected_demand(runs: SimulatedCases) -> None:
    reasons = [
        record["reason"]
        for record in runs["auto"].records
        if record["kind"] == "directive" and "other work is expected" in record["reason"]
    ]
    assert reasons
    assert re.search(r"is expected to take \d\.\d of 4 cores, now \d\.\d \([\w ]+\)", reasons[-1])


def test_an_idle_machine_trains_as_without_forecasts(runs: SimulatedCases) -> None:
    assert "took 0.0% of the worker's compute" in summary(runs["idle"])
    assert runs["idle"].steps == runs["idle, none"].steps


@pytest.mark.slow
def test_a_run_repeats_bit_by_bit(runs: SimulatedCases) -> None:
    assert runs["again"].trace_hash == runs["short"].trace_hash
    assert "forecasts counted for 0%" not in summary(runs["short"])
