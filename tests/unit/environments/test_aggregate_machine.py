"""Test the single machine that replaces all machines of an environment.

It has the sum of their cores at every time, through changes, permutations and absences, in a file
that loads.

Left out: its use by `dlion compare` (tests/local).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.aggregate_machine import single_machine_document
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment

ONE = (WorkerIdentity(Rank(0), SiteName("all"), "all", 0),)
MACHINES = [{"count": 2, "cores": 3}, {"cores": 5}]


def cores_at(times: tuple[float, ...], **fields: Any) -> list[float | None]:
    environment = parse(Environment, {"name": "test", "workers": MACHINES, **fields})
    one = parse(Environment, single_machine_document(environment, duration_s=100))
    plan = one.plan(ONE, None, duration_s=100)
    return [plan.at(time_s).worker(Rank(0)).quota_cores for time_s in times]


def test_without_changes_the_machine_has_the_sum_and_no_network() -> None:
    document = single_machine_document(load_environment("hetero-sys-a"), duration_s=100)
    assert document == {
        "name": "hetero-sys-a-as-one",
        "workers": [{"cores": 80.0}],
        "samplesPerSPerCore": load_environment("hetero-sys-a").samples_per_s_per_core,
    }


def test_changed_cores_are_followed_and_a_permutation_is_the_same_sum() -> None:
    changes = [
        {"at": {"seconds": 10}, "cores": [1, 1, 1]},
        {"at": {"seconds": 20}, "betweenSitesMbitPerS": 5},
        {"at": {"fraction": 0.5}, "permutation": [2, 0, 1]},
    ]
    assert cores_at((0, 9, 10, 20, 49, 50, 99), changes=changes) == [11, 11, 3, 3, 3, 11, 11]


def test_an_absent_worker_adds_no_cores() -> None:
    absences = [
        {"worker": 0, "comes": {"seconds": 5}},
        {"worker": 2, "leaves": {"seconds": 30}, "comes": {"seconds": 40}},
        {"worker": 1, "leaves": {"seconds": 60}},
    ]
    times = (0, 5, 30, 40, 60, 99)
    assert cores_at(times, absences=absences) == [8, 11, 6, 11, 8, 8]


def test_the_machine_keeps_its_cores_while_all_workers_are_absent() -> None:
    absences = [
        {"worker": worker, "leaves": {"seconds": 30}, "comes": {"seconds": 40}}
        for worker in range(3)
    ]
    assert cores_at((29, 30, 40), absences=absences) == [11, 11, 11]


@pytest.mark.parametrize("duration_s", [5, 10])
def test_changes_after_the_end_are_omitted(duration_s: float) -> None:
    environment = parse(
        Environment,
        {
            "name": "test",
            "workers": MACHINES,
            "changes": [{"at": {"seconds": 10}, "cores": [1, 1, 1]}],
        },
    )
    assert "changes" not in single_machine_document(environment, duration_s=duration_s)
