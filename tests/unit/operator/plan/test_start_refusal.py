"""Test that a job gets no object if it exceeds what its site allows.

- Neither its workers nor its keeper get an object. The condition names the reason, the field and
  the remedy, and there is an event.
- No template removes the operator's containers or their commands. No job starts in an excluded
  namespace.
- A run that has its pods continues, whatever becomes of its template or of the site's values.
- The rights of the writer count only if the site has an admission policy that is in force and older
  than the job. A corrected job starts.

Left out: which fields are refused (tests/unit/operator/children/test_template_limits.py).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlion_operator.model.settings import Settings
from dlion_operator.model.tenancy import SYSTEM_NAMESPACES, Tenancy
from dlion_operator.plan.decisions import Apply, Create, Decision
from dlion_operator.plan.objects.manifest_changes import POLICY_SETTLE_TIME
from operator_world import (
    SETTINGS,
    START,
    World,
    condition_statuses,
    dlion_job,
    ready_reason,
    stamp,
)

SECRET = {"spec": {"volumes": [{"name": "key", "secret": {"secretName": "db"}}]}}
ACCOUNT = {"spec": {"serviceAccountName": "admin", "automountServiceAccountToken": True}}
NODE = {"spec": {"nodeName": "control-plane"}}
POLICY = replace(SETTINGS, tenancy=Tenancy(admission_policy="dlion-tenancy"))


def written(decision: Decision) -> list[str]:
    return [each.document["kind"] for each in decision.actions if isinstance(each, Create | Apply)]


def world(template: Any = None, settings: Settings = SETTINGS, created: Any = START) -> World:
    made = World(dlion_job(podTemplate=template), settings)
    made.document["metadata"]["creationTimestamp"] = stamp(created)
    return made


@pytest.mark.parametrize("template", [SECRET, ACCOUNT, NODE])
def test_a_job_over_the_limits_gets_no_object(template: Any) -> None:
    job = world(template)
    decision = job.look()
    reason, message = ready_reason(decision)
    assert reason == "TemplateNotAllowed"
    assert "tenancy.podTemplate." in message
    assert "Remove it" in message
    assert written(decision) == []
    assert (condition_statuses(decision)["Stalled"], condition_statuses(decision)["Failed"]) == (
        "True",
        "False",
    )
    assert [event.reason for event in decision.events] == ["TemplateNotAllowed"]
    assert decision.events[0].type == "Warning"
    job.document["spec"]["podTemplate"] = None
    assert "Job" in written(job.look())


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (
            {"containers": [{"name": "trainer", "$patch": "delete"}]},
            "containers[trainer] is missing",
        ),
        (
            {"containers": [{"$patch": "replace"}, {"name": "mine"}]},
            "containers[trainer] is missing",
        ),
        (
            {"containers": [{"name": "trainer", "$patch": "replace", "image": "mine:1"}]},
            "containers[trainer].command must end with -m dlion_worker.pod trainer",
        ),
        (
            {"containers": [{"name": "trainer", "command": None}]},
            "containers[trainer].command must",
        ),
        (
            {"containers": [{"name": "trainer", "command": ["sh"]}]},
            "containers[trainer].command must",
        ),
        (
            {"containers": [{"name": "trainer", "$retainKeys": ["name"]}]},
            "containers[trainer].command must",
        ),
        (
            {"initContainers": [{"name": "sidecar", "$patch": "delete"}]},
            "initContainers[sidecar] is missing",
        ),
        ({"initContainers": [{"$patch": "replace"}]}, "initContainers[sidecar] is missing"),
        ({"initContainers": None}, "initContainers[sidecar] is missing"),
        ({"$patch": "replace", "containers": []}, "initContainers[sidecar] is missing"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_of_group", [False, True])
def test_a_template_without_the_operators_containers_gets_no_object(
    spec: Any, what: str, *, is_of_group: bool
) -> None:
    document = dlion_job()
    owner = document["spec"]["sites"][0]["groups"][0] if is_of_group else document["spec"]
    owner["podTemplate"] = {"spec": spec}
    decision = World(document).look()
    reason, message = ready_reason(decision)
    assert reason == "InvalidSpec"
    assert what in message
    assert written(decision) == []


def test_a_command_before_the_operators_own_is_allowed() -> None:
    command = ["numactl", "--localalloc", "python3", "-m", "dlion_worker.pod", "trainer"]
    job = world({"spec": {"containers": [{"name": "trainer", "command": command}]}})
    assert "Job" in written(job.look())


def test_a_job_gets_no_object_if_one_group_exceeds_the_limits() -> None:
    document = dlion_job({"small": 1, "gpu": 1})
    document["spec"]["sites"][0]["groups"][1]["podTemplate"] = SECRET
    assert written(World(document).look()) == []


@pytest.mark.parametrize("namespace", SYSTEM_NAMESPACES)
def test_no_job_starts_in_an_excluded_namespace(namespace: str) -> None:
    job = world()
    job.document["metadata"]["namespace"] = namespace
    decision = job.look()
    reason, message = ready_reason(decision)
    assert reason == "NamespaceExcluded"
    assert namespace in message
    assert "tenancy.excludedNamespaces" in message
    assert written(decision) == []
    open_ = replace(SETTINGS, tenancy=Tenancy(excluded_namespaces=()))
    job.settings = open_
    assert "Job" in written(job.look())


@pytest.mark.parametrize(
    "after", [SETTINGS, replace(SETTINGS, tenancy=Tenancy(excluded_namespaces=("default",)))]
)
def test_a_run_that_has_its_pods_continues(after: Settings) -> None:
    job = world()
    job.make_jobs()
    job.train()
    job.document["spec"]["podTemplate"] = SECRET
    job.settings = after
    decision = job.look()
    assert ready_reason(decision)[0] == "Training"
    assert "ConfigMap" in written(decision)


OLDER = START - timedelta(days=1)
AFTER = START + POLICY_SETTLE_TIME


@pytest.mark.parametrize("template", [SECRET, ACCOUNT])
@pytest.mark.parametrize(
    ("settings", "since", "created", "words"),
    [
        (SETTINGS, START, AFTER, ""),  # the site has no policy, whatever is found
        (POLICY, None, AFTER, "is not in force"),
        (POLICY, START, OLDER, "delete the job and create it again"),
        (POLICY, START, AFTER - timedelta(seconds=1), "is older than"),
        (POLICY, START, AFTER, None),
    ],
)
def test_rights_count_only_if_a_policy_has_checked_them(
    template: Any, settings: Settings, since: Any, created: Any, words: str | None
) -> None:
    decision = world(template, settings, created).look(policy_since=since)
    reason, message = ready_reason(decision)
    if words is None:
        assert reason == "WorkersStarting"
        assert "Job" in written(decision)
    else:
        assert reason == "TemplateNotAllowed"
        assert words in message
        assert ("ValidatingAdmissionPolicy" in message) is bool(words)
        assert written(decision) == []


def test_a_job_without_a_creation_time_counts_as_oldest() -> None:
    job = world(SECRET, POLICY)
    del job.document["metadata"]["creationTimestamp"]
    assert ready_reason(job.look(policy_since=OLDER))[0] == "TemplateNotAllowed"


def test_rights_do_not_allow_other_fields() -> None:
    decision = world(NODE, POLICY, AFTER).look(policy_since=START)
    assert ready_reason(decision)[0] == "TemplateNotAllowed"
