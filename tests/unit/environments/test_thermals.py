"""Test the thermals of an environment.

Each machine has the stated values for the length of the run. Impossible values are refused with the
allowed ones and the path. Real processes refuse thermals.

Left out: their effect in the simulator (tests/unit/simulator/test_thermal.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import HardwareThrottle

THERMALS: dict[str, Any] = {
    "joulesPerKelvin": 30, "kelvinPerWatt": 8, "idleWatts": 2, "busyWatts": 7.5,
    "ambientCelsius": 28,
}  # fmt: skip
THROTTLE = {"tripCelsius": 85, "resumeCelsius": 75, "speed": 0.3}
WORKERS = tuple(WorkerIdentity(Rank(rank), SiteName("a"), "g", rank) for rank in range(3))


def environment(**thermals: Any) -> Environment:
    machine = {"count": 2, "cores": 1, "thermals": {**THERMALS, **thermals}}
    return parse(Environment, {"name": "e", "workers": [{"cores": 1}, machine]}, source="e.yaml")


def refused(**thermals: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        environment(**thermals)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_each_machine_of_a_group_has_the_thermals() -> None:
    later = [{"at": {"fraction": 0.5}, "celsius": 42}, {"at": {"seconds": 90}, "celsius": 20}]
    plan = environment(throttle=THROTTLE, ambient=later).plan(WORKERS, None, duration_s=100)
    assert set(plan.thermals) == {1, 2}
    assert plan.thermals[Rank(1)].ambient == ((0.0, 28.0), (50.0, 42.0), (90.0, 20.0))
    assert plan.thermals[Rank(1)].throttle == HardwareThrottle(85.0, 75.0, 0.3, 0.3)


def test_real_processes_refuse_them() -> None:
    with pytest.raises(SpecError) as caught:
        environment().plan(WORKERS, 8.0)
    (problem,) = caught.value.problems
    assert problem.path == "workers[1].thermals"
    assert "`dlion simulate` only" in problem.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("joulesPerKelvin", 0), ("joulesPerKelvin", 1e99), ("kelvinPerWatt", -1),
        ("kelvinPerWatt", "8"), ("idleWatts", -0.1), ("busyWatts", float("nan")),
        ("ambientCelsius", 1e6), ("ambient", [{"celsius": 3}]), ("ambient", 25), ("unknown", 1),
        ("throttle", {"tripCelsius": 85}), ("throttle", {**THROTTLE, "speed": 0}),
        ("throttle", {**THROTTLE, "speed": 1}), ("throttle", {**THROTTLE, "power": 1.5}),
    ],
)  # fmt: skip
def test_values_outside_their_bounds_are_refused(field: str, value: object) -> None:
    assert all(
        path.startswith(f"workers[1].thermals.{field}") for path in refused(**{field: value})
    )


def test_contradictions_are_refused() -> None:
    assert "below tripCelsius" in str(refused(throttle={**THROTTLE, "resumeCelsius": 85}))
    assert "below busyWatts" in str(refused(idleWatts=7.5))
    backwards = [{"at": {"seconds": 90}, "celsius": 42}, {"at": {"seconds": 80}, "celsius": 20}]
    assert set(refused(ambient=backwards)) == {"workers[1].thermals.ambient[1].at"}


def test_a_time_that_the_run_does_not_reach_is_named() -> None:
    late = environment(ambient=[{"at": {"seconds": 90}, "celsius": 42}])
    assert late.unreached(60.0) == ["workers[1].thermals.ambient[0].at"]


def test_the_published_file_is_for_runs_of_any_length() -> None:
    fanless = load_environment("fanless")
    assert not fanless.run_lengths
    assert [machine.thermals is not None for machine in fanless.workers] == [False, True, True]
