"""Test a job that MultiKueue dispatches: in the manager cluster, and its copy in a worker cluster.

The manager's operator:

- It creates the Workload and starts nothing. It writes the status only while Kueue has no copy,
  also for a manifest that it cannot read.
- An eviction returns the quota after the copy's workers have ended, and after the run's end.
- Suspension, another run and a changed manifest replace the Workload; an end does not. A job that
  is no longer dispatched loses it.
- It reports a job that cannot be dispatched.

The copy's operator:

- It creates and deletes no Workload, and owns the named one.
- It reports the end of the copy once the keeper has recorded it. It ends the Workload of a copy
  that it cannot run.
- It names the requests that Kueue does not count.

Left out: Kueue itself and reading (tests/cluster/test_multikueue.py).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from dlion_api.cluster_names import MULTIKUEUE, QUEUE_LABEL, QUEUE_PREBUILT_LABEL
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.workload_view import QueueState
from dlion_operator.plan.decisions import Apply, CloseRun, Create, Decision
from operator_world import START, World, condition_statuses, ready_reason, stamp
from queued_world import (
    admit,
    by_type,
    created,
    deleted,
    job_patches,
    patches,
    queued,
    running,
    say,
    stop_workers,
    submitted,
    workload_status,
)

NAME = "digits-dispatch"
NOW = stamp(START)
TRAINS = [{"type": "Ready", "status": "True", "reason": "Training"}]


def dispatched(**spec: Any) -> World:
    """Return a job in a manager cluster whose own site has another name."""
    world = queued(managedBy=MULTIKUEUE, **spec)
    world.settings = replace(world.settings, site="control")
    return world


def waiting(**spec: Any) -> World:
    """Return a dispatched job whose Workload has no quota yet."""
    world = dispatched(**spec)
    (first,) = created(world.look(), "Workload")
    workload = copy.deepcopy(first)
    workload["metadata"] |= {"uid": "w-1", "resourceVersion": "7", "generation": 1}
    workload["spec"]["active"] = True
    workload["status"] = {}
    world.queue = QueueState(workload)
    return world


def copied(world: World, ready_workers: str = "2/2", **status: Any) -> None:
    """Write the copy's status as Kueue does."""
    run_id = world.document["spec"].get("runId", "1")
    before = {"runId": run_id, "readyWorkers": ready_workers, "conditions": TRAINS}
    world.document["status"] = {**before, **status}


def created_kinds(decision: Decision) -> list[str]:
    return [a.document["kind"] for a in decision.actions if isinstance(a, Create | Apply)]


# ---- in the manager cluster ------------------------------------------------------------------


def test_the_manager_creates_the_workload_and_starts_nothing() -> None:
    world = dispatched()
    decision = world.look()
    assert created_kinds(decision) == ["Workload"]
    (workload,) = created(decision, "Workload")
    assert workload["metadata"]["name"] == NAME
    assert workload["spec"]["queueName"] == "edge"
    sets = {each["name"]: each["count"] for each in workload["spec"]["podSets"]}
    assert sets == {"worker-small": 2, "keeper": 1}
    assert ready_reason(decision)[0] == "Queued"
    (here,) = created(queued().look(), "Workload")
    wanted = here["spec"]["podSets"][0]["template"]["spec"]
    assert workload["spec"]["podSets"][0]["template"]["spec"] == wanted


def dispatch(world: World) -> None:
    """Admit the Workload in a worker cluster and copy the job there, as Kueue does."""
    admit(world)
    assert world.queue is not None
    assert world.queue.workload is not None
    world.queue.workload["status"]["clusterName"] = "edge-1"
    copied(world)


def evict(world: World) -> None:
    assert world.queue is not None
    assert world.queue.workload is not None
    del world.queue.workload["status"]["clusterName"]
    say(world, "Evicted", "True", "Preempted", "to make room")


def test_kueue_writes_the_status_while_a_copy_exists() -> None:
    world = waiting()
    say(world, "QuotaReserved", "False", "Pending", "insufficient quota for cpu")
    assert ready_reason(world.look())[1].endswith("insufficient quota for cpu")
    say(world, "QuotaReserved", "True")
    copied(world)  # of an earlier copy
    decision = world.look()
    assert ready_reason(decision)[0] == "Queued"
    assert "readyWorkers" not in (decision.status or {})
    assert (created_kinds(decision), patches(decision, Kind.WORKLOAD)) == ([], [])
    dispatch(world)
    decision = world.look()
    assert decision.status is None
    assert by_type(workload_status(decision))["PodsReady"] == ("True", "Started")
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 5
    assert deleted(world.look(), Kind.WORKLOAD) == []


def test_an_evicted_job_returns_its_quota_after_the_copys_workers() -> None:
    world = waiting()
    dispatch(world)
    evict(world)
    assert patches(world.look(), Kind.WORKLOAD) == []
    copied(world, "0/2")
    status = workload_status(world.look())
    assert status["admission"] is None
    assert by_type(status)["Requeued"] == ("True", "Preempted")
    copied(world, "2/2")
    world.advance(61)  # the worker cluster does not answer
    assert by_type(workload_status(world.look()))["QuotaReserved"] == ("False", "Pending")
    say(world, "QuotaReserved", "False", "Pending", "to make room")
    assert ready_reason(world.look())[0] == "Queued"


def test_a_suspended_job_loses_its_workload_and_with_it_the_copy() -> None:
    world = waiting()
    dispatch(world)
    world.document["spec"]["suspend"] = True
    assert deleted(world.look(), Kind.WORKLOAD) == [NAME]
    world.queue = QueueState()
    decision = world.look()
    assert condition_statuses(decision)["Suspended"] == "True"
    assert created_kinds(decision) == []
    world.document["spec"]["suspend"] = False
    assert created_kinds(world.look()) == ["Workload"]


def test_another_run_gets_a_workload_of_that_name_after_its_deletion() -> None:
    world = waiting(runId="1")
    dispatch(world)
    world.document["spec"]["runId"] = "2"
    decision = world.look()
    assert NAME in deleted(decision, Kind.WORKLOAD)
    assert created_kinds(decision) == []
    world.queue = QueueState()
    (workload,) = created(world.look(), "Workload")
    assert workload["metadata"]["name"] == NAME


def test_a_finished_run_is_not_dispatched_again() -> None:
    world = waiting()
    dispatch(world)
    say(world, "Finished", "True", "Succeeded")
    say(world, "QuotaReserved", "False", "Pending")
    decision = world.look()  # Kueue may still write the copy's last status
    assert decision.status is None
    assert deleted(decision, Kind.WORKLOAD) == []
    copied(world, conditions=[{"type": "Succeeded", "status": "True", "reason": "Completed"}])
    world.queue = QueueState()
    decision = world.look()
    assert (created_kinds(decision), decision.status) == ([], None)


def test_earlier_jobs_of_a_dispatched_run_are_deleted() -> None:
    world = queued()
    submitted(world)
    name = world.jobs["small"]["metadata"]["name"]
    world.document["spec"]["managedBy"] = MULTIKUEUE
    world.queue = QueueState()
    assert deleted(world.look(), Kind.JOB) == [name]


def test_a_job_that_cannot_be_dispatched_reports_it() -> None:
    world = dispatched()
    world.document["spec"]["sites"].append({"name": "b", "groups": [{"name": "x", "workers": 1}]})
    decision = world.look()
    assert ready_reason(decision)[0] == "QueueUnusable"
    assert "name one site" in ready_reason(decision)[1]
    assert created_kinds(decision) == []
    world = dispatched(podTemplate={"spec": {"hostNetwork": True}})
    decision = world.look()
    assert condition_statuses(decision)["Stalled"] == "True"
    assert created_kinds(decision) == []
    world = dispatched()
    world.document["spec"]["trainer"] = 7
    assert ready_reason(world.look())[0] == "InvalidSpec"
    world = dispatched()
    world.queue = QueueState(problem="install Kueue")
    assert ready_reason(world.look()) == ("QueueUnusable", "install Kueue")
    assert created_kinds(world.look()) == []
    world = waiting()
    admit(world)  # by a queue without MultiKueue's check
    assert ready_reason(world.look())[0] == "QueueUnusable"
    assert "kueue.x-k8s.io/multikueue" in ready_reason(world.look())[1]


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_an_eviction_right_after_the_end_returns_the_quota(end: str) -> None:
    world = waiting()
    dispatch(world)
    copied(world, conditions=[{"type": end, "status": "True", "lastTransitionTime": NOW}])
    decision = world.look()
    assert (patches(decision, Kind.WORKLOAD), decision.requeue_after_s) == ([], 90)
    evict(world)
    world.advance(89)
    assert world.look().requeue_after_s == 1, "the copy's own report comes first"
    world.advance(1)
    decision = world.look()
    assert by_type(workload_status(decision))["Finished"] == ("True", end)
    assert decision.status is None
    say(world, "Finished", "True", end)
    decision = world.look()
    assert (decision.actions, decision.requeue_after_s) == ((CloseRun(),), None)


def test_a_finished_run_is_not_dispatched_again_after_an_eviction() -> None:
    world = waiting(runId="1")
    copied(world, conditions=[{"type": "Succeeded", "status": "True", "lastTransitionTime": NOW}])
    assert by_type(workload_status(world.look()))["Finished"] == ("True", "Succeeded")
    world.document["spec"]["runId"] = "2"
    world.document["status"]["runId"] = "2"  # the Workload is still that of run 1
    assert deleted(world.look(), Kind.WORKLOAD)[-1] == NAME


def test_an_unreadable_manifest_changes_neither_a_copy_nor_its_status() -> None:
    world = waiting()
    dispatch(world)
    say(world, "PodsReady", "True", "Started")
    world.document["spec"]["trainer"] = 7
    decision = world.look()
    assert (decision.status, patches(decision, Kind.WORKLOAD)) == (None, [])
    evict(world)
    copied(world, "0/2")
    assert by_type(workload_status(world.look()))["QuotaReserved"] == ("False", "Pending")
    say(world, "QuotaReserved", "False", "Pending")
    decision = world.look()
    assert ready_reason(decision)[0] == "InvalidSpec"
    assert deleted(decision, Kind.WORKLOAD) == [NAME], "otherwise Kueue creates another copy"


def test_an_extra_site_does_not_change_the_status_of_a_copy() -> None:
    world = waiting()
    dispatch(world)
    world.document["spec"]["sites"].append({"name": "b", "groups": [{"name": "x", "workers": 1}]})
    assert world.look().status is None


def test_a_job_with_a_field_of_a_newer_definition_is_dispatched() -> None:
    world = dispatched()
    world.document["spec"]["ofALaterVersion"] = True
    assert created_kinds(world.look()) == ["Workload"]


@pytest.mark.parametrize("change", ["no queue", "is being deleted"])
def test_the_operator_ignores_other_jobs(change: str) -> None:
    world = dispatched()
    if change == "no queue":
        del world.document["metadata"]["labels"][QUEUE_LABEL]
    else:
        world.document["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    decision = world.look()
    assert (created_kinds(decision), decision.status) == ([], None)


@pytest.mark.parametrize(
    ("label", "manager"),
    [
        (False, MULTIKUEUE),
        (True, "example.com/another"),
        (True, "dlion.dev/operator"),
        (False, "dlion.dev/operator"),
    ],
)
def test_a_job_that_leaves_multikueue_loses_its_workload_and_its_copy(
    label: bool, manager: str
) -> None:
    world = waiting()
    dispatch(world)
    world.document["spec"]["managedBy"] = manager
    if not label:
        del world.document["metadata"]["labels"][QUEUE_LABEL]
    world.queue = QueueState() if label else None
    world.settings = replace(world.settings, site="plant-a")
    assert NAME in deleted(world.look(), Kind.WORKLOAD)
    world.settings = replace(world.settings, kueue=False)
    assert deleted(world.look(), Kind.WORKLOAD) == [], "without the right"


def test_a_job_that_leaves_multikueue_with_a_bad_manifest_loses_its_copy() -> None:
    world = waiting()
    world.document["spec"] |= {"managedBy": "dlion.dev/operator", "trainer": 7}
    assert NAME in deleted(world.look(), Kind.WORKLOAD)


# ---- the copy in a worker cluster ------------------------------------------------------------


def copy_of_a_job(**spec: Any) -> World:
    """Return the copy with its Jobs, and the Workload that Kueue has created for it."""
    (workload,) = created(dispatched(**spec).look(), "Workload")
    world = queued(**spec)
    submitted(world)
    del workload["metadata"]["ownerReferences"]
    workload["metadata"] |= {"uid": "w-1", "resourceVersion": "7", "generation": 1}
    workload["spec"]["active"] = True
    workload["status"] = {}
    world.document["metadata"]["labels"][QUEUE_PREBUILT_LABEL] = NAME
    world.queue = QueueState(workload, is_prebuilt=True)
    return world


def admitted_copy() -> World:
    """Return a copy that owns its Workload, which has quota."""
    world = copy_of_a_job()
    own_workload(world)
    admit(world)
    world.queue = replace(world.queue, is_prebuilt=True)  # type: ignore[type-var]
    return world


def own_workload(world: World) -> None:
    assert world.queue is not None
    assert world.queue.workload is not None
    owned = {**world.queue.workload, "metadata": {**world.queue.workload["metadata"],
             "ownerReferences": [{"uid": "u-1"}]}}  # fmt: skip
    world.queue = replace(world.queue, workload=owned)


def test_a_copy_owns_the_named_workload_and_runs_under_it() -> None:
    world = copy_of_a_job()
    decision = world.look()
    (patch,) = patches(decision, Kind.WORKLOAD)
    assert (patch.name, patch.subresource) == (NAME, "")
    (owner,) = patch.patch["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("u-1", True)
    assert patch.patch["metadata"]["resourceVersion"] == "7"
    assert created(decision, "Workload") == []
    own_workload(world)
    admit(world)
    world.queue = replace(world.queue, is_prebuilt=True)  # type: ignore[type-var]
    running(world)
    assert ready_reason(world.look())[0] == "Training"
    assert by_type(workload_status(world.look()))["PodsReady"] == ("True", "Started")
    say(world, "Evicted", "True", "Preempted")
    assert job_patches(world.look()) == [{"suspend": True}]
    stop_workers(world)
    assert workload_status(world.look())["admission"] is None


def test_a_copy_names_the_requests_that_kueue_does_not_count() -> None:
    """The manager has created the Workload without the worker cluster's DLionRuntime."""
    world = admitted_copy()
    running(world)
    assert "Kueue counts" not in ready_reason(world.look())[1]
    (container,) = world.jobs["small"]["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"cpu": "2", "memory": "1Gi"}}
    reason, message = ready_reason(world.look())
    assert reason == "Training"
    uncounted = "more than Kueue counts: cpu of worker-small, memory of worker-small; set resources"
    assert uncounted in message
    world.queue = replace(world.queue, is_prebuilt=False)
    assert "Kueue counts" not in ready_reason(world.look())[1]


def test_a_copy_without_its_workload_runs_nothing_and_creates_none() -> None:
    world = copy_of_a_job()
    own_workload(world)
    admit(world)
    running(world)
    world.queue = QueueState(is_prebuilt=True)
    decision = world.look()
    assert job_patches(decision) == [{"suspend": True}]
    assert created(decision, "Workload") == []
    stop_workers(world)
    reason, message = ready_reason(world.look())
    assert reason == "QueueUnusable"
    assert f"Workload {NAME}, which label {QUEUE_PREBUILT_LABEL} names, does not exist" in message


def test_a_copy_does_not_change_its_workload() -> None:
    world = copy_of_a_job()
    own_workload(world)
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 5
    assert deleted(world.look(), Kind.WORKLOAD) == []
    world.document["spec"]["suspend"] = True
    assert deleted(world.look(), Kind.WORKLOAD) == []


def test_a_copy_reports_its_end_once_the_keeper_has_recorded_it() -> None:
    world = admitted_copy()
    running(world)
    say(world, "PodsReady", "True", "Started")
    world.end("small")
    assert condition_statuses(world.look())["Succeeded"] == "True"
    decision = world.look()
    assert patches(decision, Kind.WORKLOAD) == []
    assert decision.requeue_after_s == 60
    world.advance(60)
    assert by_type(workload_status(world.look()))["Finished"] == ("True", "Succeeded")


def test_a_copy_at_a_site_of_another_name_names_the_value_to_set() -> None:
    world = copy_of_a_job()
    world.settings = replace(world.settings, site="plant-z")
    reason, message = ready_reason(world.look())
    assert reason == "QueueUnusable"
    assert "set site.name in the charts of all worker clusters" in message
    assert message.endswith("suspend and resume the job in the manager cluster")


@pytest.mark.parametrize("defect", ["site", "manifest"])
def test_a_copy_that_cannot_run_ends_its_workload_after_its_report(defect: str) -> None:
    world = admitted_copy()
    if defect == "site":
        world.settings = replace(world.settings, site="plant-z")
        world.jobs.clear()
    else:
        world.document["spec"]["trainer"] = 7
    decision = world.look()
    assert patches(decision, Kind.WORKLOAD) == [], "otherwise MultiKueue deletes it with its status"
    decision = world.look()
    assert by_type(workload_status(decision))["Finished"] == ("True", "OutOfSync")
    assert deleted(decision, Kind.WORKLOAD) == [], "MultiKueue would create it again"
    say(world, "Evicted", "True", "Preempted")
    assert by_type(workload_status(world.look()))["Requeued"] == ("True", "Preempted")
    say(world, "QuotaReserved", "False")
    assert patches(world.look(), Kind.WORKLOAD) == []


def test_a_copy_that_cannot_be_read_keeps_its_quota_while_its_workers_run() -> None:
    world = admitted_copy()
    running(world)
    world.document["spec"]["trainer"] = 7
    for _ in range(2):
        assert patches(world.look(), Kind.WORKLOAD) == []


def test_an_ended_copy_with_an_unreadable_manifest_reports_its_end() -> None:
    world = admitted_copy()
    running(world)
    world.end("small")
    assert condition_statuses(world.look())["Succeeded"] == "True"
    world.document["spec"]["trainer"] = 7
    decision = world.look()
    assert (patches(decision, Kind.WORKLOAD), decision.requeue_after_s) == ([], 60)
    world.advance(60)
    assert by_type(workload_status(world.look()))["Finished"] == ("True", "Succeeded")


def test_a_copy_that_has_ended_reports_it_once_its_workload_is_known() -> None:
    """Neither the manifest nor the Workload can be read."""
    world = admitted_copy()
    running(world)
    world.end("small")
    world.look()
    world.document["spec"]["trainer"] = 7
    world.advance(60)
    workload, world.queue = world.queue, QueueState(problem="cannot be read")
    for _ in range(20):
        assert patches(world.look(), Kind.WORKLOAD) == []
        world.advance(60)
    world.queue = workload
    decision = world.look()
    assert by_type(workload_status(decision))["Finished"] == ("True", "Succeeded")
    assert decision.requeue_after_s is None
