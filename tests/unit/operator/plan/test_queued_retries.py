"""Test a queued run between its attempts, and other cases where the queue and failures meet.

- Between attempts a run keeps its Workload and its quota. It returns them if Kueue evicts it, also
  while pods of the failed attempt run.
- An attempt with other requests is admitted again; an equal one is not, whatever set its priority.
- Kueue does not wait for a worker that failed permanently. No group grows while the admission
  cannot be read.
- A run that has trained queues with the pods of its Jobs, whatever the podTemplate has become.
- The Workload of an earlier run is deleted, also if the manifest names no queue, is invalid or
  leaves the site.
- A run continues without its queue and its rights. Messages of Kueue are bounded.

Left out: Kueue itself (tests/cluster/test_queueing.py), retries without a queue (test_run_ends).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.workload_view import PriorityOfQueue, QueueState
from dlion_operator.plan.decisions import Decision
from operator_world import World, ready_reason
from queued_world import (
    QUEUE,
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

SIGKILL = 137


def between_attempts(**changes: Any) -> World:
    """Return a queued run whose first attempt has failed and whose second one has not started."""
    world = queued(claim="store", **{"maxRetries": 3, **changes})
    submitted(world)
    admit(world)
    running(world)
    world.look()
    say(world, "PodsReady", "True", "Started")
    world.end("small", failed="0,1", exit_code=SIGKILL)
    assert ready_reason(world.look())[0] == "Retrying"
    world.run = None
    return world


def begin(world: World) -> Decision:
    """Advance to the start of the next attempt, whose Jobs are then created."""
    world.advance(11)
    world.look()
    world.jobs.clear()
    world.pods = {name: pod for name, pod in world.pods.items() if name == "keeper"}
    return world.look()


def test_a_run_keeps_its_quota_between_attempts() -> None:
    world = between_attempts()
    decision = world.look()
    assert deleted(decision, Kind.WORKLOAD) == []
    assert patches(decision, Kind.WORKLOAD) == [], "neither finished nor without ready pods"
    decision = begin(world)
    assert deleted(decision, Kind.WORKLOAD) == []
    (job,) = created(decision, "Job")
    assert job["spec"]["suspend"] is True


def test_a_run_evicted_between_attempts_returns_its_quota_immediately() -> None:
    world = between_attempts()
    say(world, "Evicted", "True", "Preempted")
    (scaled,) = patches(world.look(), Kind.DEPLOYMENT)
    assert scaled.patch["spec"] == {"replicas": 0}
    assert world.keeper is not None
    world.keeper["spec"]["replicas"] = 0
    del world.pods["keeper"]
    decision = world.look()
    assert workload_status(decision)["admission"] is None
    assert ready_reason(decision)[0] == "Retrying"


def test_pods_of_a_failed_attempt_stop_if_it_is_evicted() -> None:
    """One worker failed before the others trained. This ends an attempt and keeps their pods."""
    world = queued(
        {"small": 2, "large": 1}, maxRetries=1, failurePolicy="Fail", startDeadlineSeconds=60
    )
    submitted(world)
    admit(world)
    running(world)
    world.run = None
    world.fail("small", 0, SIGKILL)
    world.jobs["small"]["status"]["failedIndexes"] = "0"
    assert ready_reason(world.look())[0] == "Retrying"
    assert job_patches(world.look()) == []
    say(world, "Evicted", "True", "Preempted")
    assert job_patches(world.look()) == [{"suspend": True}, {"suspend": True}]


def test_an_attempt_that_requests_more_is_admitted_again() -> None:
    world = between_attempts()
    (group,) = world.document["spec"]["sites"][0]["groups"]
    group["podTemplate"] = {"spec": {"nodeSelector": {"gpu": "large"}}}
    decision = begin(world)
    assert len(deleted(decision, Kind.WORKLOAD)) == 1
    assert job_patches(decision) == []
    world.queue = QueueState()
    (made,) = created(world.look(), "Workload")
    template = made["spec"]["podSets"][0]["template"]
    assert template["spec"]["nodeSelector"]["gpu"] == "large"


def test_an_equal_attempt_keeps_its_place_whatever_set_its_priority() -> None:
    """The class of a Workload with quota is not read again."""
    priority = PriorityOfQueue("kueue.x-k8s.io", "WorkloadPriorityClass", "urgent", 7)
    world = queued(maxRetries=3)
    world.queue = QueueState(priority=priority)
    workload = submitted(world)
    assert workload["spec"]["priority"] == 7
    admit(world)
    running(world)
    world.end("small", failed="0,1", exit_code=SIGKILL)
    world.look()
    assert deleted(begin(world), Kind.WORKLOAD) == []


def test_kueue_does_not_wait_for_a_permanently_failed_worker() -> None:
    """Otherwise Kueue would evict the run repeatedly (`waitForPodsReady`)."""
    world = queued({"small": 3}, failurePolicy="Continue")
    submitted(world)
    admit(world)
    running(world)
    say(world, "PodsReady", "True", "Started")
    world.fail("small", 2, SIGKILL)
    assert by_type(workload_status(world.look()))["PodsReady"][0] == "False"
    world.jobs["small"]["status"]["failedIndexes"] = "2"
    world.train(ready=2)
    decision = world.look()
    assert patches(decision, Kind.WORKLOAD) == []
    world.pods.pop("small-1")
    assert by_type(workload_status(world.look()))["PodsReady"] == ("False", "WaitForRecovery")


def test_no_group_grows_while_its_admission_cannot_be_read() -> None:
    world = queued({"small": 4})
    submitted(world)
    admit(world, small=3)
    running(world)
    assert world.jobs["small"]["spec"]["parallelism"] == 3
    world.queue = QueueState(problem="forbidden")
    assert job_patches(world.look()) == []


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"nodeSelector": {"gpu": "none"}}, "metadata": {"labels": {"a": "b"}}},
        {"spec": {"containers": [3]}, "specs": {}},
    ],
)
def test_a_run_that_has_trained_queues_again_with_the_pods_of_its_jobs(template: Any) -> None:
    """A later podTemplate takes effect in the next run, also a malformed one.

    The waiting pods are not those of the manifest.
    """
    world = queued(podTemplate={"spec": {"nodeSelector": {"gpu": "large"}}})
    submitted(world)
    admit(world, {"spec": {"nodeLabels": {"arch": "arm64"}}})
    running(world)
    world.look()
    say(world, "Evicted", "True", "Preempted")
    stop_workers(world)
    world.document["spec"]["podTemplate"] = template
    world.queue = QueueState()
    (made,) = created(world.look(), "Workload")
    pod = made["spec"]["podSets"][0]["template"]
    assert pod["spec"]["nodeSelector"] == {"gpu": "large"}
    assert "a" not in pod["metadata"]["labels"]
    workload = copy.deepcopy(made)
    workload["metadata"] |= {"uid": "w-2", "resourceVersion": "9"}
    world.queue = QueueState(workload)
    decision = world.look()
    assert deleted(decision, Kind.WORKLOAD) == [], "the run keeps its place"
    assert ready_reason(decision)[0] == "Queued"


@pytest.mark.parametrize("change", ["no label", "invalid", "not selected"])
def test_the_workload_of_an_earlier_run_is_deleted_without_a_queue(change: str) -> None:
    """It would hold its quota for the lifetime of the job."""
    world = queued()
    name = submitted(world)["metadata"]["name"]
    admit(world)
    running(world)
    world.look()
    world.document = copy.deepcopy(world.document)
    spec = world.document["spec"]
    spec["runId"] = "2"
    if change == "no label":
        del world.document["metadata"]["labels"][QUEUE]
    elif change == "invalid":
        spec["trainer"]["stop"] = {}
    else:
        spec["sites"][0]["name"] = "plant-b"
    world.queue = None
    assert name in deleted(world.look(), Kind.WORKLOAD)


def test_a_site_that_may_not_queue_never_deletes_workloads() -> None:
    world = queued()
    submitted(world)
    world.look()
    world.document["spec"]["runId"] = "2"
    world.settings = replace(world.settings, kueue=False)
    world.queue = QueueState(problem="this site's operator may not queue jobs")
    assert deleted(world.look(), Kind.WORKLOAD) == []
    world.queue = None
    assert deleted(world.look(), Kind.WORKLOAD) == []


def test_a_run_continues_without_its_queue_and_the_rights_for_it() -> None:
    """Its pods stay where the last admission placed them.

    A change needs the right to the status of Jobs, which kueue.enabled grants.
    """
    world = queued()
    submitted(world)
    admit(world, {"spec": {"nodeLabels": {"arch": "arm64"}}})
    running(world)
    world.look()
    stop_workers(world)
    del world.document["metadata"]["labels"][QUEUE]
    world.queue, world.settings = None, replace(world.settings, kueue=False)
    decision = world.look()
    assert [each.subresource for each in patches(decision, Kind.JOB)] == [""]
    assert job_patches(decision) == [{"suspend": False}]


def test_messages_of_kueue_are_bounded_in_the_status() -> None:
    world = queued()
    submitted(world)
    say(world, "QuotaReserved", "False", "Pending", "no quota " * 10_000)
    assert len(ready_reason(world.look())[1]) <= 4096
    admit(world)
    running(world)
    say(world, "Evicted", "True", "R" * 1024, "to make room " * 10_000)
    stop_workers(world)
    decision = world.look()
    assert len(ready_reason(decision)[1]) <= 4096
    held = workload_status(decision)["conditions"]
    assert max(len(each["message"]) for each in held if each["type"] != "Evicted") <= 1024


def test_a_run_that_stopped_ends_its_workload_once_that_is_known() -> None:
    """It would hold its quota. All jobs get a pass once Workloads can be listed (`resync`)."""
    world = queued()
    submitted(world)
    admit(world)
    running(world)
    world.look()
    world.end("small")
    workload, world.queue = world.queue, QueueState(problem="cannot be read")
    world.look()
    world.run = None
    assert patches(world.look(), Kind.WORKLOAD) == []
    world.queue = workload
    decision = world.look()
    assert by_type(workload_status(decision))["Finished"] == ("True", "Succeeded")
    assert decision.requeue_after_s == pytest.approx(600)


def test_a_suspended_run_is_looked_at_until_its_workload_can_be_deleted() -> None:
    world = queued()
    name = submitted(world)["metadata"]["name"]
    world.look()
    world.document["spec"]["suspend"] = True
    workload, world.queue = world.queue, QueueState(problem="cannot be read")
    assert world.look().requeue_after_s == pytest.approx(10)
    world.queue = workload
    decision = world.look()
    assert deleted(decision, Kind.WORKLOAD) == [name]
    world.queue = None
    assert world.look().requeue_after_s is None
