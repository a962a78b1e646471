"""A job that MultiKueue dispatches: in the manager cluster, and its copy in a worker cluster.

Proves: the manager's operator makes the Workload and starts nothing; it writes the status only
while Kueue has no copy; an eviction gives the quota back after the copy's workers; suspension,
another run and a changed manifest replace the Workload, an end does not; what cannot be dispatched
says so. The copy's operator makes and deletes no Workload, owns the one that is named, and reports
its end once the keeper has recorded it.
Leaves out: Kueue itself and reading (tests/cluster/test_multikueue.py).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from dlion_api.cluster_names import MULTIKUEUE, QUEUE_LABEL, QUEUE_PREBUILT_LABEL
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.workload_view import QueueState
from dlion_operator.plan.decisions import Apply, Create, Decision
from operator_world import World, ready_reason, truths
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
TRAINS = [{"type": "Ready", "status": "True", "reason": "Training"}]


def dispatched(**spec: Any) -> World:
    """In a manager cluster whose own site has another name."""
    world = queued(managedBy=MULTIKUEUE, **spec)
    world.settings = replace(world.settings, site="control")
    return world


def waiting(**spec: Any) -> World:
    """Its Workload is there, and has no quota."""
    world = dispatched(**spec)
    (made,) = created(world.look(), "Workload")
    workload = copy.deepcopy(made)
    workload["metadata"] |= {"uid": "w-1", "resourceVersion": "7", "generation": 1}
    workload["spec"]["active"] = True
    workload["status"] = {}
    world.queue = QueueState(workload)
    return world


def copied(world: World, ready_workers: str = "2/2", **status: Any) -> None:
    """Kueue has written the copy's status."""
    run_id = world.document["spec"].get("runId", "1")
    before = {"runId": run_id, "readyWorkers": ready_workers, "conditions": TRAINS}
    world.document["status"] = {**before, **status}


def made(decision: Decision) -> list[str]:
    return [a.document["kind"] for a in decision.actions if isinstance(a, Create | Apply)]


# ---- in the manager cluster ------------------------------------------------------------------


def test_the_manager_makes_the_workload_and_starts_nothing() -> None:
    world = dispatched()
    decision = world.look()
    assert made(decision) == ["Workload"]
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
    """Kueue admits the Workload in a worker cluster, and copies the job there."""
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


def test_the_status_is_kueues_while_there_is_a_copy() -> None:
    world = waiting()
    say(world, "QuotaReserved", "False", "Pending", "insufficient quota for cpu")
    assert ready_reason(world.look())[1].endswith("insufficient quota for cpu")
    say(world, "QuotaReserved", "True")
    copied(world)  # of an earlier copy
    decision = world.look()
    assert ready_reason(decision)[0] == "Queued"
    assert "readyWorkers" not in (decision.status or {})
    assert (made(decision), patches(decision, Kind.WORKLOAD)) == ([], [])
    dispatch(world)
    decision = world.look()
    assert decision.status is None
    assert by_type(workload_status(decision))["PodsReady"] == ("True", "Started")
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 5
    assert deleted(world.look(), Kind.WORKLOAD) == []


def test_an_evicted_job_gives_its_quota_back_after_the_copys_workers() -> None:
    world = waiting()
    dispatch(world)
    evict(world)
    assert patches(world.look(), Kind.WORKLOAD) == []
    copied(world, "0/2")
    status = workload_status(world.look())
    assert status["admission"] is None
    assert by_type(status)["Requeued"] == ("True", "Preempted")
    copied(world, "2/2")
    world.pass_by(61)  # the worker cluster does not answer
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
    assert truths(decision)["Suspended"] == "True"
    assert made(decision) == []
    world.document["spec"]["suspend"] = False
    assert made(world.look()) == ["Workload"]


def test_another_run_gets_a_workload_of_the_same_name_once_the_earlier_one_is_gone() -> None:
    world = waiting(runId="1")
    dispatch(world)
    world.document["spec"]["runId"] = "2"
    decision = world.look()
    assert NAME in deleted(decision, Kind.WORKLOAD)
    assert made(decision) == []
    world.queue = QueueState()
    (workload,) = created(world.look(), "Workload")
    assert workload["metadata"]["name"] == NAME


def test_a_run_that_is_over_is_not_dispatched_again() -> None:
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
    assert (made(decision), decision.status) == ([], None)


def test_jobs_from_before_it_was_dispatched_are_deleted() -> None:
    world = queued()
    submitted(world)
    name = world.jobs["small"]["metadata"]["name"]
    world.document["spec"]["managedBy"] = MULTIKUEUE
    world.queue = QueueState()
    assert deleted(world.look(), Kind.JOB) == [name]


def test_what_cannot_be_dispatched_says_so() -> None:
    world = dispatched()
    world.document["spec"]["sites"].append({"name": "b", "groups": [{"name": "x", "workers": 1}]})
    decision = world.look()
    assert ready_reason(decision)[0] == "QueueUnusable"
    assert "name one site" in ready_reason(decision)[1]
    assert made(decision) == []
    world = dispatched(podTemplate={"spec": {"hostNetwork": True}})
    decision = world.look()
    assert truths(decision)["Stalled"] == "True"
    assert made(decision) == []
    world = dispatched()
    world.document["spec"]["trainer"] = 7
    assert ready_reason(world.look())[0] == "InvalidSpec"
    world = dispatched()
    world.queue = QueueState(problem="install Kueue")
    assert ready_reason(world.look()) == ("QueueUnusable", "install Kueue")
    assert made(world.look()) == []
    world = waiting()
    admit(world)  # by a queue without MultiKueue's check
    assert ready_reason(world.look())[0] == "QueueUnusable"
    assert "kueue.x-k8s.io/multikueue" in ready_reason(world.look())[1]


@pytest.mark.parametrize("change", ["no queue", "is being deleted"])
def test_the_operator_leaves_other_jobs_alone(change: str) -> None:
    world = dispatched()
    if change == "no queue":
        del world.document["metadata"]["labels"][QUEUE_LABEL]
    else:
        world.document["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    decision = world.look()
    assert (made(decision), decision.status) == ([], None)


# ---- the copy in a worker cluster ------------------------------------------------------------


def copy_of_a_job(**spec: Any) -> World:
    """The copy with its Jobs, and the Workload that Kueue has made for it."""
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


def own(world: World) -> None:
    assert world.queue is not None
    assert world.queue.workload is not None
    owned = {**world.queue.workload, "metadata": {**world.queue.workload["metadata"],
             "ownerReferences": [{"uid": "u-1"}]}}  # fmt: skip
    world.queue = replace(world.queue, workload=owned)


def test_a_copy_owns_the_workload_that_is_named_and_runs_by_it() -> None:
    world = copy_of_a_job()
    decision = world.look()
    (patch,) = patches(decision, Kind.WORKLOAD)
    assert (patch.name, patch.subresource) == (NAME, "")
    (owner,) = patch.patch["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("u-1", True)
    assert patch.patch["metadata"]["resourceVersion"] == "7"
    assert created(decision, "Workload") == []
    own(world)
    admit(world)
    world.queue = replace(world.queue, is_prebuilt=True)  # type: ignore[type-var]
    running(world)
    assert ready_reason(world.look())[0] == "Training"
    assert by_type(workload_status(world.look()))["PodsReady"] == ("True", "Started")
    say(world, "Evicted", "True", "Preempted")
    assert job_patches(world.look()) == [{"suspend": True}]
    stop_workers(world)
    assert workload_status(world.look())["admission"] is None


def test_a_copy_without_its_workload_runs_nothing_and_makes_none() -> None:
    world = copy_of_a_job()
    own(world)
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


def test_a_copy_leaves_its_workload_to_kueue() -> None:
    world = copy_of_a_job()
    own(world)
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 5
    assert deleted(world.look(), Kind.WORKLOAD) == []
    world.document["spec"]["suspend"] = True
    assert deleted(world.look(), Kind.WORKLOAD) == []


def test_a_copy_reports_its_end_once_the_keeper_has_recorded_it() -> None:
    world = copy_of_a_job()
    own(world)
    admit(world)
    world.queue = replace(world.queue, is_prebuilt=True)  # type: ignore[type-var]
    running(world)
    say(world, "PodsReady", "True", "Started")
    world.end("small")
    assert truths(world.look())["Succeeded"] == "True"
    decision = world.look()
    assert patches(decision, Kind.WORKLOAD) == []
    assert decision.requeue_after_s == 60
    world.pass_by(60)
    assert by_type(workload_status(world.look()))["Finished"] == ("True", "Succeeded")


def test_a_copy_at_a_site_of_another_name_says_what_to_set() -> None:
    world = copy_of_a_job()
    world.settings = replace(world.settings, site="plant-z")
    reason, message = ready_reason(world.look())
    assert reason == "QueueUnusable"
    assert "set site.name in the charts of all worker clusters" in message
