"""Test the other work on the machines of an environment.

Each machine of a group has the stated demand. Impossible values are refused with their path. Real
processes refuse other work. The published file loads.

Left out: its effect in the simulator (tests/unit/simulator/test_shared_machine.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import CoLocatedDemand

WORKERS = tuple(WorkerIdentity(Rank(rank), SiteName("a"), "g", rank) for rank in range(3))
PHASES = [{"seconds": 25, "cores": 0}, {"seconds": 15, "cores": 2.5}]


def environment(**demand: Any) -> Environment:
    machine = {"count": 2, "cores": 4, "demand": {"phases": PHASES, **demand}}
    return parse(Environment, {"name": "e", "workers": [{"cores": 1}, machine]}, source="e.yaml")


def test_each_machine_of_a_group_has_the_other_work() -> None:
    expected = CoLocatedDemand(((25.0, 0.0), (15.0, 2.5)), repeats=True)
    assert environment().plan(WORKERS, None).demands == {Rank(1): expected, Rank(2): expected}
    once = environment(repeat=False).plan(WORKERS, None).demands[Rank(1)]
    assert not once.repeats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phases", []), ("phases", [{"seconds": 0, "cores": 1}]),
        ("phases", [{"seconds": 1, "cores": -1}]), ("phases", [{"seconds": 1}]),
        ("phases", [{"seconds": float("nan"), "cores": 1}]), ("phases", "busy"),
        ("phases", [{"seconds": 1, "cores": 1}] * 1001), ("repeat", "yes"), ("unknown", 1),
    ],
)  # fmt: skip
def test_values_outside_their_bounds_are_refused(field: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        environment(**{field: value})
    assert all(
        problem.path.startswith(f"workers[1].demand.{field}") for problem in caught.value.problems
    )


def test_real_processes_refuse_it() -> None:
    with pytest.raises(SpecError) as caught:
        environment().plan(WORKERS, 8.0)
    (problem,) = caught.value.problems
    assert problem.path == "workers[1].demand"
    assert "`dlion simulate` only" in problem.message


def test_the_published_file_is_for_runs_of_any_length() -> None:
    shared = load_environment("shared")
    assert not shared.run_lengths
    assert [machine.demand is not None for machine in shared.workers] == [True, True, False, True]
