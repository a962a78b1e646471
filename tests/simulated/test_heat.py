"""Tests of whole simulated jobs on machines that become too hot.

Under a heat budget every machine is below the threshold at least 94 % of the time, and the hot
worker's part of the batch shrinks. Without one the hardware throttles. If all machines are hot,
rests keep to the budget although no share shrinks. The same run repeats bit by bit.

Left out: the controller (tests/unit/core/heat); comparisons (benchmarks/heat.py).
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any

import pytest
from tests.support.simulations import Case, Simulated, SimulatedCases

THRESHOLD, SECONDS = 75, 300
HOT: dict[str, Any] = {
    "joulesPerKelvin": 8, "kelvinPerWatt": 8, "idleWatts": 2, "busyWatts": 7.5,
    "ambientCelsius": 40, "throttle": {"tripCelsius": 85, "resumeCelsius": 75, "speed": 0.3},
}  # fmt: skip


def case(hot: int, *, budget: bool) -> Case:
    """A job of four equal workers, the last `hot` of them on hot machines."""
    cool = [{"count": 4 - hot, "cores": 4}] if hot < 4 else []
    workers = [*cool, {"count": hot, "cores": 4, "thermals": HOT}]
    settings: dict[str, Any] = {
        "trainer.stop": {"maxSeconds": SECONDS},
        "trainer.evaluation.everySamples": 10_000_000,
        "batching.globalBatchSize.initial": 480,
    }
    if budget:
        settings["nodePolicies"] = {"heat": {"thresholdCelsius": THRESHOLD}}
    return Case({"name": "hot", "workers": workers}, settings)


CASES = {
    "hardware": case(1, budget=False),
    "budget": case(1, budget=True),
    "again": case(1, budget=True),
    "all": case(4, budget=True),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCases:
    return SimulatedCases(tmp_path_factory.mktemp("heat"), CASES)


def temperatures(run: Simulated) -> dict[int, str]:
    """The summary of each machine, by rank."""
    events = [record for record in run.records if record.get("reason") == "MachineTemperature"]
    return {event["rank"]: event["message"] for event in events}


def percent_above(summary: str) -> float:
    found = re.search(rf"above {THRESHOLD} °C for ([\d.]+)% of the time", summary)
    assert found, summary
    return float(found[1])


def late_batch(run: Simulated, rank: int) -> float:
    batches = [step["local_batch_size"] for step in run.steps[rank]]
    return fmean(batches[len(batches) // 2 :])


def test_without_a_budget_the_hardware_throttles(runs: SimulatedCases) -> None:
    (summary,) = temperatures(runs["hardware"]).values()
    assert "hottest 85.0 °C" in summary
    assert "throttled by the hardware for 0.0%" not in summary


def test_under_a_budget_the_hot_worker_stays_cool_with_a_smaller_batch(
    runs: SimulatedCases,
) -> None:
    summaries = temperatures(runs["budget"])
    assert set(summaries) == {3}
    assert percent_above(summaries[3]) <= 6.0
    assert "throttled by the hardware for 0.0%" in summaries[3]
    # The temperature allows (75 - 56) / 44 of its time; the others have the rest.
    share = late_batch(runs["budget"], 3) / late_batch(runs["budget"], 0)
    assert share == pytest.approx(19 / 44, rel=0.15)


def test_if_all_machines_are_hot_rests_keep_to_the_budget(runs: SimulatedCases) -> None:
    run = runs["all"]
    summaries = temperatures(run)
    assert set(summaries) == {0, 1, 2, 3}
    assert max(map(percent_above, summaries.values())) <= 6.0
    assert late_batch(run, 3) == pytest.approx(late_batch(run, 0), rel=0.1)


@pytest.mark.slow
def test_a_run_under_a_budget_repeats_bit_by_bit(runs: SimulatedCases) -> None:
    assert runs["again"].trace_hash == runs["budget"].trace_hash
