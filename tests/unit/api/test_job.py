"""Test the model of the manifest: ranks, hash, permitted changes during a run, and the state.

Ranks follow the manifest's order. The hash ignores exactly the fields that sites may differ in, and
whether defaults are written. Transitions follow their rules.

Left out: single fields and rules (tests/contract).
"""

from __future__ import annotations

from typing import Any

import pytest

from change_rules import change_problems
from dlion_api.document import parse, to_document
from dlion_api.errors import Problem, SpecError
from dlion_api.names import JobKey
from dlion_api.spec import Spec, load_job
from dlion_api.status import Condition, State, state_of
from manifest_table import ACCEPTED, Case, changed, smallest

GROUP = "spec.sites.0.groups.0"
EXEMPT: dict[str, Any] = {
    f"{GROUP}.workers": 7,
    f"{GROUP}.resources": {"limits": {"cpu": 2}},
    f"{GROUP}.nodeSelector": {"disk": "ssd"},
    f"{GROUP}.image": "trainer:2",
    f"{GROUP}.podTemplate": {"spec": {"runtimeClassName": "nvidia"}},
    "spec.trainer.image": "trainer:2",
    "spec.suspend": True,
    "spec.activeDeadlineSeconds": 60,
    "spec.startDeadlineSeconds": 60,
    "spec.ttlSecondsAfterFinished": 60,
    "spec.podTemplate": {"spec": {"hostNetwork": False}},
    "spec.checkpoint": {"everySeconds": 10},
    "metadata.labels": {"a": "b"},
}
HASHED: dict[str, Any] = {
    "spec.runId": "2",
    "spec.sites.0.name": "plant-c",
    f"{GROUP}.name": "tiny",
    "spec.minSites": 2,
    "spec.trainer.seed": 2,
    "spec.trainer.stop.maxSteps": 101,
    "spec.trainer.freeze": ["encoder*"],
    "spec.batching": {"globalBatchSize": {"initial": 100}},
    "spec.exchange": {"codec": "float32"},
    "spec.synchronization": {"maxStaleness": 4},
    "spec.knowledgeTransfer": {"lambda": 0.5},
    "spec.network": {"linkShape": "perPeer"},
    "spec.maxRestarts": 3,
    "spec.failureRules": [{"onEnds": ["Killed"], "action": "FailRun"}],
}
MAY_CHANGE = {
    *EXEMPT,
    "spec.minSites",
    "spec.maxRestarts",
} - {"spec.trainer.image", f"{GROUP}.image", f"{GROUP}.resources", f"{GROUP}.nodeSelector"}


def test_ranks_count_through_sites_groups_and_workers() -> None:
    job = load_job(smallest())
    assert [worker.name for worker in job.workers()] == [
        "plant-a/small-0", "plant-a/small-1", "plant-a/small-2", "plant-b/large-0"
    ]  # fmt: skip
    assert [worker.rank for worker in job.workers()] == [0, 1, 2, 3]
    assert job.key == JobKey("default", "digits", "1")


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_written_defaults_change_neither_job_nor_hash(case: Case) -> None:
    job = load_job(case.document)
    again = load_job(job.to_document())
    assert again == job
    assert again.hash() == job.hash()


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_omitted_defaults_are_set_again(case: Case) -> None:
    spec = load_job(case.document).spec
    written = to_document(spec, without_defaults=True)
    assert parse(Spec, written) == spec
    assert written.keys() <= {*case.document["spec"]}


@pytest.mark.parametrize("path", EXEMPT)
def test_the_hash_ignores_fields_that_may_differ_between_sites(path: str) -> None:
    other = load_job(changed(smallest(), {path: EXEMPT[path]}))
    assert other.hash() == load_job(smallest()).hash()


@pytest.mark.parametrize("path", HASHED)
def test_the_hash_depends_on_all_other_fields(path: str) -> None:
    other = load_job(changed(smallest(), {path: HASHED[path]}))
    assert other.hash() != load_job(smallest()).hash()


def test_the_hash_ignores_the_notation_of_numbers_and_mappings() -> None:
    first = changed(smallest(), {"spec.trainer.optimizer": {"momentum": 0, "learningRate": 1}})
    other = changed(smallest(), {"spec.trainer.optimizer": {"learningRate": 1.0, "momentum": 0.0}})
    assert load_job(first).hash() == load_job(other).hash()


@pytest.mark.parametrize("path", {**EXEMPT, **HASHED})
def test_only_permitted_fields_may_change_during_a_run(path: str) -> None:
    old = load_job(smallest())
    new = load_job(changed(smallest(), {path: {**EXEMPT, **HASHED}[path]}))
    found = change_problems(old, new, run_ended=False)
    assert (found == []) == (path in MAY_CHANGE)
    if path == "spec.runId":
        assert [p.path for p in found] == ["spec.runId"]
        assert change_problems(old, new, run_ended=True) == []
    else:
        again = load_job(changed(new.to_document(), {"spec.runId": "2"}))
        assert change_problems(old, again, run_ended=True) == []


@pytest.mark.parametrize(
    ("exchange", "batching", "grows"),
    [
        ({"policy": "dlion"}, {}, True),
        ({"policy": "dlion-published", "weighting": "dlion_ratio"}, {}, True),
        ({"policy": "adaptive"}, {}, False),
        ({"policy": "full", "weighting": "sample_mean"}, {"policy": "goodput"}, True),
        ({"policy": "adaptive"}, {"globalBatchSize": {"growth": True}}, True),
        ({"policy": "dlion"}, {"globalBatchSize": {"growth": False}}, False),
    ],
)
def test_the_batch_grows_by_default_if_the_policy_includes_it(
    exchange: dict[str, Any], batching: dict[str, Any], grows: bool
) -> None:
    document = smallest()
    document["spec"] |= {"exchange": exchange, "batching": batching}
    document["spec"]["synchronization"] = {"mode": "synchronous"}
    assert load_job(document).spec.global_batch_size.growth is grows


def condition(type_: str, status: str = "True", reason: str = "Any") -> Condition:
    return Condition(
        type=type_,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        last_transition_time="2026-01-31T12:00:00Z",
    )


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([], State.PENDING),
        ([condition("Ready", "False", "WorkersStarting")], State.PENDING),
        ([condition("Ready", "False", "WaitingForPeers")], State.WAITING),
        ([condition("Ready", "False", "BelowQuorum")], State.WAITING),
        ([condition("Ready", reason="Training")], State.TRAINING),
        ([condition("Ready"), condition("Degraded")], State.DEGRADED),
        ([condition("Ready"), condition("Degraded", "False")], State.TRAINING),
        ([condition("Ready", reason="Suspended"), condition("Suspended")], State.SUSPENDED),
        ([condition("Ready", reason="NotSelected")], State.NOT_SELECTED),
        ([condition("Ready", "False"), condition("Failed"), condition("Degraded")], State.FAILED),
        ([condition("Ready", reason="Completed"), condition("Succeeded")], State.SUCCEEDED),
    ],
)
def test_the_state_summarizes_the_conditions(conditions: list[Condition], state: State) -> None:
    assert state_of(conditions) is state
    assert state_of(reversed(conditions)) is state


def test_a_field_of_a_newer_version_is_reported_without_an_error() -> None:
    newer = changed(smallest(), {"spec.exchange.laterField": "clip", "spec.newPart": {"a": 1}})
    found: list[Problem] = []
    assert load_job(newer, unknown=found).spec == load_job(smallest()).spec
    assert [problem.path for problem in found] == ["spec.newPart", "spec.exchange.laterField"]
    with pytest.raises(SpecError):
        load_job(newer)
