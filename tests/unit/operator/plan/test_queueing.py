"""Test a queued run: one Workload admits it as a whole, and the operator follows Kueue's protocol.

- The Workload has the priority and a pod set for each group and the keeper, with the requests of
  their pods.
- No pod runs before the admission. Flavors and admission checks reach the pods, also new ones after
  an eviction.
- An evicted run stops its workers, then its keeper, and then returns the quota, as Kueue's own
  controller does.
- The tests cover a deactivated, ended, lost or foreign Workload, and sizes above the admission.
- Any status of a Workload leads to a decision. Pods run only if it is admitted.

Left out: Kueue itself (tests/cluster/test_queueing.py), reading (test_workload_reader).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.spec import load_job
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.workload_view import PriorityOfQueue, QueueState
from operator_world import condition_statuses, ready_reason
from queued_world import (
    QUEUE,
    admit,
    apply_merge,
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

Document = dict[str, Any]


# ---- before the admission --------------------------------------------------------------------


def test_the_workload_has_a_pod_set_for_each_group_and_the_keeper() -> None:
    decision = queued({"small": 3, "keeper": 1}).look()
    (workload,) = created(decision, "Workload")
    assert workload["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    assert workload["spec"]["queueName"] == "edge"
    sets = {each["name"]: each for each in workload["spec"]["podSets"]}
    assert {name: each["count"] for name, each in sets.items()} == {
        "worker-small": 3, "worker-keeper": 1, "keeper": 1
    }  # fmt: skip
    (owner,) = workload["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["kind"], owner["controller"]) == ("u-1", "DLionJob", True)
    # Kueue counts the requests of the pods: the templates are the same.
    for job in created(decision, "Job"):
        name = f"worker-{job['metadata']['labels']['dlion.dev/group']}"
        assert sets[name]["template"] == job["spec"]["template"]
    keeper = sets["keeper"]["template"]["spec"]["containers"][0]
    assert keeper["name"] == "keeper"


def test_no_pod_can_run_before_kueue_admits_the_run() -> None:
    world = queued()
    decision = world.look()
    (job,) = created(decision, "Job")
    assert job["spec"]["suspend"] is True
    assert created(decision, "Deployment") == []
    submitted(world)
    decision = world.look()
    assert ready_reason(decision) == ("Queued", "waiting for a place in the queue")
    assert job_patches(decision) == []
    assert created(decision, "Deployment") == []
    say(world, "QuotaReserved", "False", "Pending", "insufficient quota for cpu")
    assert ready_reason(world.look())[1].endswith("queue: insufficient quota for cpu")
    say(world, "QuotaReserved", "True")
    say(world, "Admitted", "False", "UnsatisfiedChecks", "not all checks ready")
    assert job_patches(world.look()) == []
    assert ready_reason(world.look())[1].endswith("queue: not all checks ready")


def test_jobs_and_pods_have_no_queue_label() -> None:
    decision = queued().look()
    for document in (*created(decision, "Job"), *created(decision, "Workload")):
        assert QUEUE not in document["metadata"]["labels"]
        assert document["metadata"]["labels"]["team"] == "vision"
    (job,) = created(decision, "Job")
    assert QUEUE not in job["spec"]["template"]["metadata"]["labels"]


def test_the_workload_takes_over_the_priority() -> None:
    world = queued()
    world.queue = QueueState(
        priority=PriorityOfQueue("kueue.x-k8s.io", "WorkloadPriorityClass", "urgent", 900)
    )
    (workload,) = created(world.look(), "Workload")
    assert workload["spec"]["priority"] == 900
    assert workload["spec"]["priorityClassRef"] == {
        "group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"
    }  # fmt: skip


def test_a_waiting_workload_follows_the_manifest() -> None:
    world = queued({"small": 2})
    name = submitted(world)["metadata"]["name"]
    assert deleted(world.look(), Kind.WORKLOAD) == []
    world.document["metadata"]["labels"][QUEUE] = "night"
    assert deleted(world.look(), Kind.WORKLOAD) == [name]
    world.document["metadata"]["labels"][QUEUE] = "edge"
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 5
    assert deleted(world.look(), Kind.WORKLOAD) == [name]
    say(world, "QuotaReserved", "True")  # Kueue allows no change from now on
    assert deleted(world.look(), Kind.WORKLOAD) == []


# ---- admission and flavors -------------------------------------------------------------------

ARM = {
    "spec": {
        "nodeLabels": {"kubernetes.io/arch": "arm64"},
        "tolerations": [{"key": "arm", "operator": "Exists", "effect": "NoSchedule"}],
    }
}


def test_an_admitted_run_starts_as_a_whole_on_its_flavors() -> None:
    world = queued({"small": 2, "big": 1})
    submitted(world)
    admit(world, ARM)
    decision = world.look()
    for spec in job_patches(decision):
        assert spec["suspend"] is False
        pod = spec["template"]["spec"]
        assert pod["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
        assert ARM["spec"]["tolerations"][0] in pod["tolerations"]  # type: ignore[index]
        assert {"key": "node.kubernetes.io/not-ready"}.items() <= pod["tolerations"][0].items()
    assert len(job_patches(decision)) == 2
    (keeper,) = created(decision, "Deployment")
    assert keeper["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    running(world)
    decision = world.look()
    assert ready_reason(decision)[0] == "Training"
    assert job_patches(decision) == []


def test_admission_checks_add_to_the_pods() -> None:
    world = queued()
    workload = submitted(world)
    admit(world, ARM)
    workload["status"]["admissionChecks"] = [
        {
            "name": "provision",
            "state": "Ready",
            "podSetUpdates": [
                {"name": "worker-small", "annotations": {"a.example/consume": "r-1"},
                 "labels": {"b.example/pool": "x"}, "nodeSelector": {"pool": "x"}},
                {"name": "unknown", "nodeSelector": {"pool": "y"}},
            ],
        }
    ]  # fmt: skip
    (spec,) = job_patches(world.look())
    template = spec["template"]
    assert template["metadata"]["annotations"] == {"a.example/consume": "r-1"}
    assert template["metadata"]["labels"]["b.example/pool"] == "x"
    assert template["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64", "pool": "x"}


def test_a_flavor_that_contradicts_the_pods_starts_nothing() -> None:
    world = queued()
    world.document["spec"]["sites"][0]["groups"][0]["nodeSelector"] = {
        "kubernetes.io/arch": "amd64"
    }
    submitted(world)
    admit(world, ARM)
    decision = world.look()
    reason, message = ready_reason(decision)
    assert reason == "QueueUnusable"
    assert "'amd64'" in message
    assert "'arm64'" in message
    assert condition_statuses(decision)["Stalled"] == "True"
    assert job_patches(decision) == []
    assert created(decision, "Deployment") == []


def test_pods_get_only_the_flavors_of_the_latest_admission() -> None:
    world = queued(claim="store")
    world.document["spec"]["sites"][0]["groups"][0]["nodeSelector"] = {"zone": "a"}
    submitted(world)
    admit(world, ARM)
    running(world)
    say(world, "Evicted", "True", "Preempted")
    stop_workers(world)
    admit(world, {"spec": {"nodeLabels": {"gpu": "yes"}}})
    decision = world.look()
    first, second = patches(decision, Kind.JOB)
    # Kubernetes allows a change of a started Job's template only without a start time.
    assert (first.subresource, first.patch["status"]) == ("status", {"startTime": None})
    job = world.jobs["small"]
    apply_merge(job, second.patch)
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"zone": "a", "gpu": "yes"}
    assert "arm" not in {each.get("key") for each in pod["tolerations"]}
    assert job["spec"]["suspend"] is False


def test_kueue_learns_when_all_pods_are_ready_and_when_some_are_lost() -> None:
    world = queued({"small": 2})
    submitted(world)
    admit(world)
    assert by_type(workload_status(world.look()))["PodsReady"] == ("False", "WaitForStart")
    say(world, "PodsReady", "False", "WaitForStart")
    assert patches(world.look(), Kind.WORKLOAD) == []
    running(world)
    status = workload_status(world.look())
    assert by_type(status)["PodsReady"] == ("True", "Started")
    assert by_type(status)["Admitted"] == ("True", "ByKueue")
    say(world, "PodsReady", "True", "Started")
    lost = world.pods.pop("small-1")
    assert by_type(workload_status(world.look()))["PodsReady"] == ("False", "WaitForRecovery")
    say(world, "PodsReady", "False", "WaitForRecovery")
    world.pods["small-1"] = lost
    assert by_type(workload_status(world.look()))["PodsReady"] == ("True", "Recovered")


# ---- eviction --------------------------------------------------------------------------------


def test_an_evicted_run_stops_in_order_before_it_returns_its_quota() -> None:
    world = queued(claim="store")
    submitted(world)
    admit(world)
    running(world)
    say(world, "Evicted", "True", "Preempted", "to make room for urgent")
    decision = world.look()
    assert job_patches(decision) == [{"suspend": True}]
    assert patches(decision, Kind.DEPLOYMENT) == []  # the workers store their state in the keeper
    assert patches(decision, Kind.WORKLOAD) == []
    stop_workers(world)
    decision = world.look()
    assert ready_reason(decision) == (
        "Queued", "waiting for a place in the queue: Preempted: to make room for urgent"
    )  # fmt: skip
    (scaled,) = patches(decision, Kind.DEPLOYMENT)
    assert scaled.patch["spec"] == {"replicas": 0}
    assert patches(decision, Kind.WORKLOAD) == []
    assert world.keeper is not None
    world.keeper["spec"]["replicas"] = 0
    assert patches(world.look(), Kind.WORKLOAD) == []  # the keeper's pod still runs
    del world.pods["keeper"]
    status = workload_status(world.look())
    assert status["admission"] is None
    conditions = by_type(status)
    assert conditions["QuotaReserved"] == ("False", "Pending")
    assert conditions["Admitted"] == ("False", "NoReservation")
    assert conditions["Requeued"] == ("True", "Preempted")
    assert conditions["Evicted"] == ("True", "Preempted")
    say(world, "QuotaReserved", "False", "Pending", "to make room for urgent")
    say(world, "Admitted", "False")
    decision = world.look()
    assert patches(decision, Kind.WORKLOAD) == []
    assert ready_reason(decision)[0] == "Queued"
    admit(world)
    decision = world.look()
    assert [each["suspend"] for each in job_patches(decision)] == [False]
    (scaled,) = patches(decision, Kind.DEPLOYMENT)
    assert scaled.patch["spec"] == {"replicas": 1}


@pytest.mark.parametrize(
    ("reason", "at_once"),
    [
        ("Preempted", "True"),
        ("NodeFailures", "True"),
        ("PodsReadyTimeout", "False"),
        ("ClusterQueueStopped", "False"),
        ("AdmissionCheck", "False"),
        ("Deactivated", "False"),
    ],
)
def test_kueue_decides_when_an_evicted_run_queues_again(reason: str, at_once: str) -> None:
    world = queued()
    submitted(world)
    admit(world)
    say(world, "Evicted", "True", reason)
    assert by_type(workload_status(world.look()))["Requeued"] == (at_once, reason)


def test_a_keeper_without_a_claim_outlives_an_eviction() -> None:
    """Its pod has the only copy of the run's checkpoints."""
    world = queued()
    submitted(world)
    admit(world)
    running(world)
    say(world, "Evicted", "True", "Preempted")
    stop_workers(world)
    decision = world.look()
    assert patches(decision, Kind.DEPLOYMENT) == []
    assert workload_status(decision)["admission"] is None


def test_a_deactivated_run_reports_it_and_stays_inactive() -> None:
    world = queued()
    workload = submitted(world)
    workload["spec"]["active"] = False
    decision = world.look()
    assert ready_reason(decision)[0] == "QueueInactive"
    assert condition_statuses(decision)["Stalled"] == "True"
    say(world, "Evicted", "True", "Deactivated", "exceeding the number of retries")
    assert "exceeding the number of retries" in ready_reason(world.look())[1]
    decision = world.look()
    assert patches(decision, Kind.WORKLOAD) == []
    assert deleted(decision, Kind.WORKLOAD) == []


def test_a_run_that_loses_its_quota_in_any_way_stops() -> None:
    world = queued()
    submitted(world)
    admit(world)
    running(world)
    world.queue = QueueState()  # a user has deleted the Workload
    decision = world.look()
    assert job_patches(decision) == [{"suspend": True}]
    assert len(created(decision, "Workload")) == 1


def test_a_workload_that_another_program_ended_is_recreated_after_the_pods() -> None:
    world = queued()
    name = submitted(world)["metadata"]["name"]
    admit(world)
    running(world)
    say(world, "Finished", "True", "OutOfSync")
    decision = world.look()
    assert job_patches(decision) == [{"suspend": True}]
    assert deleted(decision, Kind.WORKLOAD) == []
    stop_workers(world)
    assert deleted(world.look(), Kind.WORKLOAD) == [name]


def test_an_unreadable_workload_neither_starts_nor_stops_pods() -> None:
    world = queued()
    submitted(world)
    world.queue = QueueState(problem="this cluster serves no Workload")
    decision = world.look()
    assert ready_reason(decision) == ("QueueUnusable", "this cluster serves no Workload")
    assert condition_statuses(decision)["Stalled"] == "True"
    assert job_patches(decision) == []
    submitted_again = queued()
    submitted(submitted_again)
    admit(submitted_again)
    running(submitted_again)
    submitted_again.queue = QueueState(problem="forbidden")
    decision = submitted_again.look()
    assert job_patches(decision) == []
    assert ready_reason(decision)[0] == "Training"
    assert "forbidden" in ready_reason(decision)[1]


# ---- suspension, end, sizes ------------------------------------------------------------------


def test_a_suspended_run_leaves_its_queue_after_its_pods() -> None:
    world = queued(claim="store")
    name = submitted(world)["metadata"]["name"]
    admit(world)
    running(world)
    world.document["spec"]["suspend"] = True
    decision = world.look()
    assert job_patches(decision) == [{"suspend": True}]
    assert deleted(decision, Kind.WORKLOAD) == []
    stop_workers(world)
    (scaled,) = patches(world.look(), Kind.DEPLOYMENT)
    assert scaled.patch["spec"] == {"replicas": 0}
    del world.pods["keeper"]
    assert deleted(world.look(), Kind.WORKLOAD) == [name]
    world.queue = QueueState()
    world.document["spec"]["suspend"] = False
    decision = world.look()
    assert len(created(decision, "Workload")) == 1
    assert job_patches(decision) == []


def test_a_suspended_run_leaves_its_queue_if_its_class_is_missing() -> None:
    world = queued()
    workload = submitted(world)
    world.queue = QueueState(workload, problem="WorkloadPriorityClass urgent does not exist")
    assert deleted(world.look(), Kind.WORKLOAD) == []
    world.document["spec"]["suspend"] = True
    assert deleted(world.look(), Kind.WORKLOAD) == [workload["metadata"]["name"]]


def test_an_unreadable_run_returns_its_quota_once_it_has_no_pods() -> None:
    world = queued()
    name = submitted(world)["metadata"]["name"]
    admit(world)
    running(world)
    mode = world.document["spec"]["tls"]["mode"]
    world.document["spec"]["tls"]["mode"] = "OfALaterVersion"
    world.queue = None
    assert deleted(world.look(), Kind.WORKLOAD) == []
    for job in world.jobs.values():
        job["spec"]["suspend"] = True
    assert deleted(world.look(), Kind.WORKLOAD) == []
    stop_workers(world)
    assert deleted(world.look(), Kind.WORKLOAD) == [name]
    world.document["spec"]["tls"]["mode"] = mode
    world.queue = QueueState()
    assert len(created(world.look(), "Workload")) == 1


def test_an_unreadable_run_leaves_its_queue() -> None:
    world = queued()
    name = submitted(world)["metadata"]["name"]
    say(world, "QuotaReserved", "True")
    world.document["spec"]["tls"]["mode"] = "OfALaterVersion"
    world.queue = None
    assert deleted(world.look(), Kind.WORKLOAD) == [name]


def test_pods_without_quota_stop_if_a_class_is_missing() -> None:
    world = queued()
    workload = submitted(world)
    admit(world)
    running(world)
    say(world, "QuotaReserved", "False", "Pending")
    world.queue = QueueState(workload, problem="WorkloadPriorityClass urgent does not exist")
    assert job_patches(world.look()) == [{"suspend": True}]


def test_a_finished_run_reports_its_end_to_kueue() -> None:
    world = queued()
    submitted(world)
    admit(world)
    running(world)
    world.end("small")
    assert condition_statuses(world.look())["Succeeded"] == "True"
    status = workload_status(world.look())
    assert by_type(status)["Finished"] == ("True", "Succeeded")
    assert "admission" not in status
    say(world, "Finished", "True", "Succeeded")
    assert patches(world.look(), Kind.WORKLOAD) == []


def test_a_failed_run_is_finished_after_its_last_pod() -> None:
    world = queued(activeDeadlineSeconds=60)
    submitted(world)
    admit(world)
    running(world)
    world.advance(3600)
    assert condition_statuses(world.look())["Failed"] == "True"
    assert patches(world.look(), Kind.WORKLOAD) == []
    world.pods = {"keeper": world.pods["keeper"]}
    assert by_type(workload_status(world.look()))["Finished"] == ("True", "Failed")


def test_a_run_does_not_grow_beyond_its_admission() -> None:
    world = queued({"small": 2})
    submitted(world)
    admit(world)
    running(world)
    groups = world.document["spec"]["sites"][0]["groups"]
    groups[0]["workers"] = 5
    decision = world.look()
    assert job_patches(decision) == []
    assert "5 workers wanted, and the queue has admitted 2" in ready_reason(decision)[1]
    groups[0]["workers"] = 1
    assert job_patches(world.look()) == [{"parallelism": 1, "completions": 1}]


def test_a_partly_admitted_run_starts_with_the_admitted_workers() -> None:
    world = queued({"small": 4})
    submitted(world)
    admit(world, small=3)
    (spec,) = job_patches(world.look())
    assert (spec["parallelism"], spec["completions"], spec["suspend"]) == (3, 3, False)


def test_a_job_that_loses_its_label_runs_without_a_workload() -> None:
    world = queued()
    name = submitted(world)["metadata"]["name"]
    del world.document["metadata"]["labels"][QUEUE]
    world.queue = None
    decision = world.look()
    assert deleted(decision, Kind.WORKLOAD) == [name]
    assert job_patches(decision) == [{"suspend": False}]


def test_jobs_that_are_queued_themselves_stay_queued() -> None:
    """They are Jobs of an older operator, and Jobs that Kueue's webhook put into a default
    queue."""
    world = queued()
    name = submitted(world)["metadata"]["name"]
    world.jobs["small"]["metadata"]["labels"][QUEUE] = "default"
    decision = world.look()
    assert ready_reason(decision)[0] == "Queued"
    assert deleted(decision, Kind.WORKLOAD) == [name]
    assert job_patches(decision) == []


def test_a_new_run_deletes_the_workload_of_the_earlier_one() -> None:
    world = queued()
    name = submitted(world)["metadata"]["name"]
    world.look()
    world.document["spec"]["runId"] = "2"
    world.queue = QueueState()
    decision = world.look()
    assert name in deleted(decision, Kind.WORKLOAD)
    (made,) = created(decision, "Workload")
    assert made["metadata"]["name"] != name


# ---- hostile Workloads -----------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**31) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["Admitted", "QuotaReserved", "Evicted", "Finished", "New"]),
            "status": st.sampled_from(["True", "False", "Unknown"]),
        },
        optional={"reason": st.text(max_size=8), "message": st.text(max_size=2000)},
    ),
    max_size=5,
    unique_by=lambda each: each["type"],
)


@given(
    conditions=CONDITIONS,
    assignments=JSON,
    checks=JSON,
    active=st.sampled_from([True, False, None, "no"]),
    flavor=JSON,
)
def test_pods_start_only_if_the_workload_is_admitted_whatever_it_holds(
    conditions: list[Document], assignments: Any, checks: Any, active: Any, flavor: Any
) -> None:
    world = queued(claim="store")
    workload = submitted(world)
    workload["spec"]["active"] = active
    workload["status"] = {
        "conditions": conditions,
        "admission": {"podSetAssignments": assignments},
        "admissionChecks": checks,
        "future": assignments,
    }
    world.queue = QueueState(workload, flavors={"arm": {"spec": flavor}})
    decision = world.look()
    holds = {each["type"] for each in conditions if each["status"] == "True"}
    may_run = {"Admitted", "QuotaReserved"} <= holds and not holds & {"Evicted", "Finished"}
    if not may_run or active is False:
        assert job_patches(decision) == []
        assert created(decision, "Deployment") == []
    assert decision.status is not None


@pytest.mark.parametrize("entry", [{"name": "worker-small", "count": True}, {"name": 7}, "x", None])
def test_a_malformed_assignment_counts_as_none(entry: Any) -> None:
    world = queued({"small": 2})
    workload = submitted(world)
    admit(world)
    workload["status"]["admission"]["podSetAssignments"] = [entry]
    (spec,) = job_patches(world.look())
    assert spec["suspend"] is False
    assert "parallelism" not in spec


def test_an_edited_record_of_the_placement_does_not_stop_a_run() -> None:
    world = queued()
    submitted(world)
    world.jobs["small"]["metadata"]["annotations"]["dlion.dev/queue-placement"] = "[" * 9000
    admit(world, ARM)
    (spec,) = job_patches(world.look())
    assert spec["template"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}


def test_the_keeper_in_the_workload_equals_the_created_one() -> None:
    world = queued(claim="store")
    (workload,) = created(world.look(), "Workload")
    job, owner = load_job(world.document), {"uid": "u-1"}
    deployment = keeper_objects(job, world.settings, owner)[-1]
    assert workload["spec"]["podSets"][-1]["template"] == deployment["spec"]["template"]
