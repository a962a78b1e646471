"""Test what the operator decides in each situation.

- A job gets its objects in a certain order. The conditions follow kstatus and Argo CD.
- The tests cover suspension, scaling, ends, failures, deadlines, a new run and the time to live.
- A second look at an unchanged world gives the same decision. A restarted operator revokes nothing.

Left out: that an API server accepts the objects (tests/cluster), and how a decision is applied
(test_reconcile).
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from dlion_api.names import SiteName
from dlion_api.spec import load_job
from dlion_operator.kubernetes.client import Kind
from dlion_operator.plan.decide import MANAGED_BY
from dlion_operator.plan.decisions import (
    Apply,
    CloseRun,
    Create,
    Decision,
    Delete,
    FinishRun,
    OpenRun,
    Patch,
    StopRun,
)
from dlion_operator.plan.observed import RejectedObject, RunView
from operator_world import SETTINGS, World, condition_statuses, dlion_job, ready_reason, stamp

CREATED = "2026-01-31T12:00:00Z"


def training(groups: dict[str, int] | None = None, **spec: object) -> World:
    world = World(dlion_job(groups, **spec))
    world.look()
    world.make_jobs()
    world.train()
    assert condition_statuses(world.look())["Ready"] == "True"
    return world


def test_a_new_job_gets_its_objects_and_then_its_workers() -> None:
    decision = World(dlion_job({"small": 3, "large": 1})).look()
    made = [
        (type(action).__name__, action.document["kind"], action.document["metadata"]["name"])
        for action in decision.actions
        if isinstance(action, Apply | Create)
    ]
    assert [each[:2] for each in made] == [
        ("Create", "ConfigMap"),
        ("Apply", "Service"),
        ("Apply", "Service"),
        ("Create", "Deployment"),
        ("Create", "Job"),
        ("Create", "Job"),
    ]
    assert all(name.startswith("digits-") for _, _, name in made)
    assert isinstance(decision.actions[0], OpenRun)
    assert decision.actions[0].job_uid == "u-1"
    conditions = condition_statuses(decision)
    assert conditions["Ready"] == "False"
    assert conditions["Reconciling"] == "True"
    assert conditions["Succeeded"] == "Unknown"
    assert decision.status is not None
    assert decision.status["observedGeneration"] == 1
    assert decision.status["state"] == "Pending"
    assert decision.status["readyWorkers"] == "0/4"


def test_every_child_is_owned_and_ends_with_its_job() -> None:
    decision = World(dlion_job()).look()
    for action in decision.actions:
        if isinstance(action, Apply | Create):
            (owner,) = action.document["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == ("u-1", True)


def test_workers_that_train_are_ready() -> None:
    world = training()
    decision = world.look()
    assert condition_statuses(decision) == {
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "Suspended": "False",
        "PeersConnected": "True",
        "SpecConsistent": "Unknown",
        "Degraded": "False",
        "Succeeded": "Unknown",
        "Failed": "False",
    }
    assert not [a for a in decision.actions if isinstance(a, Patch | Delete)]
    created = [a.document["kind"] for a in decision.actions if isinstance(a, Create)]
    assert created == ["ConfigMap", "Deployment"]  # existing objects are not created again


def test_a_second_look_gives_the_same_decision() -> None:
    world = training()
    first = world.look()
    world.advance(300)
    second = world.look()
    assert first.status == second.status
    assert second.events == ()


def test_a_lost_worker_degrades_the_job() -> None:
    world = training({"small": 3})
    world.train(ready=2)
    decision = world.look()
    assert (
        condition_statuses(decision)["Ready"] == condition_statuses(decision)["Degraded"] == "True"
    )
    assert ready_reason(decision)[0] == "PeersLost"
    assert [notice.type for notice in decision.events] == ["Warning"]


def test_below_its_quorum_a_job_waits() -> None:
    document = dlion_job()
    document["spec"]["sites"].append(
        {"name": "plant-b", "groups": [{"name": "small", "workers": 1}]}
    )
    document["spec"]["minSites"] = 2
    world = World(document)
    world.look()
    world.make_jobs()
    world.train()
    decision = world.look()
    assert condition_statuses(decision)["Ready"] == "False"
    assert ready_reason(decision)[0] == "BelowQuorum"


def test_workers_without_their_peers_wait_for_them() -> None:
    document = dlion_job()
    document["spec"]["sites"].append(
        {"name": "plant-b", "groups": [{"name": "small", "workers": 1}]}
    )
    world = World(document)
    world.look()
    world.make_jobs()
    world.run = RunView(open_s=60.0, ready={SiteName("plant-a"): 2})
    decision = world.look()
    assert ready_reason(decision) == ("WaitingForPeers", "2 of 3 workers have joined")
    assert decision.status is not None
    assert [site["state"] for site in decision.status["sites"]] == ["Ready", "Unreachable"]


@pytest.mark.parametrize(
    "template",
    [{"spec": "x"}, {"metadata": ["a"]}, {"metadata": {"labels": "x"}}, {"spec": {"volumes": 3}}],
)
def test_a_malformed_template_causes_no_crash(template: object) -> None:
    decision = World(dlion_job(podTemplate=template)).look()
    assert decision.status is not None


def test_a_job_that_creates_no_pods_is_stalled() -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    world.pods.clear()
    world.make_keeper()
    assert condition_statuses(world.look())["Stalled"] == "False"
    world.advance(61)
    decision = world.look()
    assert ready_reason(decision)[0] == "PodsRefused"
    assert condition_statuses(decision)["Stalled"] == "True"


def test_failed_pods_that_are_not_replaced_are_reported() -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    for index in range(2):
        world.fail("small", index, 1)
    world.run = RunView(open_s=3600.0)
    assert ready_reason(world.look())[0] == "WorkersStarting"
    world.advance(69)  # Kubernetes waits ten seconds of this before it replaces a pod
    assert ready_reason(world.look())[0] == "WorkersStarting"
    world.advance(1)
    reason, message = ready_reason(world.look())
    assert reason == "PodsRefused"
    assert "creates no pods for small-0, small-1: see `kubectl describe job" in message


def test_a_pod_that_kubernetes_replaces_later_is_waited_for() -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    world.fail("small", 0, 1)
    counted = {"batch.kubernetes.io/job-index-failure-count": "5"}
    world.pods["small-0"]["metadata"]["annotations"] = counted
    world.look()
    world.advance(379)  # 60 s, and 10 s doubled five times
    assert ready_reason(world.look())[0] == "WorkersStarting"
    world.advance(1)
    assert ready_reason(world.look())[0] == "PodsRefused"


def test_a_permanently_failed_worker_is_not_missing() -> None:
    world = World(dlion_job({"small": 3}, startDeadlineSeconds=60))
    world.look()
    world.make_jobs()
    world.fail("small", 0, 67)
    world.jobs["small"]["status"] |= {"failedIndexes": "0", "completedIndexes": "1"}
    del world.pods["small-1"]
    world.run = RunView(open_s=99.0)
    world.look()
    world.advance(600)
    assert ready_reason(world.look())[0] == "WorkersStarting"


def test_a_job_that_never_starts_is_stalled() -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    world.pods.clear()
    world.make_keeper()
    del world.jobs["small"]["status"]["startTime"]  # no controller handles Jobs
    world.look()
    world.advance(60)
    assert ready_reason(world.look())[0] == "PodsRefused"


def test_a_keeper_without_a_pod_is_reported() -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    del world.pods["keeper"]
    world.look()
    world.advance(60)
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}]
    decision = world.look(keeper={"status": {"conditions": conditions}})
    reason, message = ready_reason(decision)
    assert (reason, condition_statuses(decision)["Stalled"]) == ("PodsRefused", "True")
    assert "creates no pod for the keeper: exceeded quota: q; see `kubectl describe dep" in message
    world.train()
    decision = world.look()
    assert (ready_reason(decision)[0], condition_statuses(decision)["Ready"]) == (
        "KeeperUnavailable",
        "True",
    )


def test_a_run_that_grows_after_a_long_wait_is_not_stalled_immediately() -> None:
    sites = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in (("plant-a", 2), ("plant-b", 1))
    ]
    world = World(dlion_job(sites=sites))
    world.look()
    world.make_jobs()
    report_age_s = {"plant-a/small-0": 0.0, "plant-a/small-1": 0.0}
    world.run = RunView(open_s=3600.0, ready={SiteName("plant-a"): 2}, report_age_s=report_age_s)
    world.advance(3600)
    assert ready_reason(world.look())[0] == "WaitingForPeers"
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 3
    decision = world.look()
    assert (ready_reason(decision)[0], condition_statuses(decision)["Stalled"]) == (
        "WorkersStarting",
        "False",
    )
    world.jobs["small"]["spec"] |= {"parallelism": 3, "completions": 3}
    decision = world.look()
    assert (ready_reason(decision)[0], condition_statuses(decision)["Stalled"]) == (
        "WorkersStarting",
        "False",
    )
    world.advance(60)
    reason, message = ready_reason(world.look())
    assert reason == "PodsRefused"
    assert "for small-2: see" in message


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff", "ImageUnavailable"),
        ("ErrImageNeverPull", "ImageUnavailable"),
        ("SignatureValidationFailed", "ImageUnavailable"),
        ("RegistryUnavailable", "ImageUnavailable"),
        ("CreateContainerConfigError", "ContainerBroken"),
    ],
)
def test_a_pod_that_cannot_start_is_soon_stalled(waiting: str, reason: str) -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    world.wait_for("small", 1, waiting, "no such thing")
    early = world.look()
    assert condition_statuses(early)["Stalled"] == "False"
    world.advance(61)
    late = world.look()
    assert condition_statuses(late)["Stalled"] == "True"
    assert condition_statuses(late)["Reconciling"] == condition_statuses(late)["Failed"] == "False"
    assert ready_reason(late) == (reason, f"small-1, container trainer: {waiting}: no such thing")
    world.pods["small-1"]["status"] = {"phase": "Running"}
    world.train()
    assert condition_statuses(world.look())["Stalled"] == "False"


def test_a_pod_that_fits_on_no_node_is_reported() -> None:
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    message = "0/1 nodes are available: 1 Insufficient cpu."
    world.pods["small-0"]["status"] = {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
        ],
    }
    world.advance(61)
    assert ready_reason(world.look()) == ("Unschedulable", f"small-0: {message}")


def test_a_suspended_job_stops_its_workers_and_keeps_their_state() -> None:
    world = training({"small": 2, "large": 1})
    world.document["spec"]["suspend"] = True
    decision = world.look()
    patches = [a for a in decision.actions if isinstance(a, Patch)]
    assert [p.patch["spec"] for p in patches] == [{"suspend": True}] * 2
    assert [p.patch["metadata"]["uid"] for p in patches] == ["job-small", "job-large"]
    assert not [a for a in decision.actions if isinstance(a, Delete)]
    conditions = condition_statuses(decision)
    assert conditions["Ready"] == conditions["Suspended"] == "True"
    for job in world.jobs.values():
        job["spec"]["suspend"] = True
    world.pods.clear()
    again = world.look()
    assert [type(a) for a in again.actions] == [CloseRun]
    assert again.requeue_after_s is None
    world.document["spec"]["suspend"] = False
    resumed = world.look()
    resuming = [a.patch["spec"] for a in resumed.actions if isinstance(a, Patch)]
    assert resuming == [{"suspend": False}] * 2


def test_a_job_created_suspended_gets_no_objects() -> None:
    decision = World(dlion_job(suspend=True)).look()
    assert [type(a) for a in decision.actions] == [CloseRun]
    assert condition_statuses(decision)["Suspended"] == "True"


def test_a_job_for_other_sites_is_not_selected() -> None:
    document = dlion_job()
    document["spec"]["sites"][0]["name"] = "plant-b"
    decision = World(document).look()
    assert [type(a) for a in decision.actions] == [CloseRun]
    assert ready_reason(decision)[0] == "NotSelected"
    assert condition_statuses(decision)["Ready"] == "True"


def test_another_controllers_job_is_ignored() -> None:
    decision = World(dlion_job(managedBy="kueue.x-k8s.io/multikueue")).look()
    assert decision.status is None
    assert decision.actions == (CloseRun(),)
    assert World(dlion_job(managedBy=MANAGED_BY)).look().status is not None


def test_a_job_in_deletion_is_released() -> None:
    document = dlion_job()
    document["metadata"]["deletionTimestamp"] = CREATED
    decision = World(document).look()
    assert (decision.actions, decision.status) == ((CloseRun(),), None)


def test_an_unreadable_manifest_is_reported_and_ends_nothing() -> None:
    document = dlion_job()
    document["spec"]["trainer"]["optimizer"]["learningRate"] = "fast"
    decision = World(document).look()
    reason, message = ready_reason(decision)
    assert reason == "InvalidSpec"
    assert "spec.trainer.optimizer.learningRate" in message
    assert (condition_statuses(decision)["Stalled"], condition_statuses(decision)["Failed"]) == (
        "True",
        "False",
    )


def test_a_pod_template_must_comply_with_pod_security() -> None:
    volumes = [{"name": "data", "hostPath": {"path": "/data"}}]
    world = World(dlion_job(podTemplate={"spec": {"volumes": volumes, "hostNetwork": True}}))
    decision = world.look()
    reason, message = ready_reason(decision)
    assert reason == "InvalidSpec"
    assert "hostPath; use a PersistentVolumeClaim" in message
    assert "hostNetwork" in message
    assert not [a for a in decision.actions if isinstance(a, Create | Apply)]


def test_a_probe_of_another_host_is_refused_before_its_pods_are() -> None:
    probe = {"httpGet": {"host": "10.0.0.1", "port": 80}}
    containers = [{"name": "trainer", "livenessProbe": probe}]
    decision = World(dlion_job(podTemplate={"spec": {"containers": containers}})).look()
    reason, message = ready_reason(decision)
    assert reason == "InvalidSpec"
    assert "containers[trainer].livenessProbe.httpGet.host must not be set" in message


POLICY = "ValidatingAdmissionPolicy 'owner' with binding 'owner' denied request: no label owner"
WEBHOOK = 'admission webhook "x.example.com" denied the request: no'


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ("422 spec.template.spec.tolerations: Invalid value", 422, "InvalidSpec"),
        ("403 exceeded quota", 403, "Forbidden"),
        (f"422 {POLICY}", 422, "PolicyDenied"),
        (f"403 {WEBHOOK}", 403, "PolicyDenied"),
        (f"400 {WEBHOOK}", 400, "PolicyDenied"),
    ],
)
def test_a_refusal_by_the_api_server_is_named_and_retried(
    message: str, code: int, reason: str
) -> None:
    decision = World(dlion_job()).look(rejected=RejectedObject(message, code))
    assert ready_reason(decision) == (reason, message)
    assert (condition_statuses(decision)["Stalled"], condition_statuses(decision)["Failed"]) == (
        "True",
        "False",
    )
    assert [a for a in decision.actions if isinstance(a, Create)]


def test_a_job_succeeds_once_all_workers_have_trained_to_the_end() -> None:
    world = training({"small": 2, "large": 1})
    world.end("small")
    assert condition_statuses(world.look())["Succeeded"] == "Unknown"
    world.end("large")
    world.run = RunView(open_s=99.0, stop_reason="maxSteps 100 reached")
    decision = world.look()
    assert (
        condition_statuses(decision)["Succeeded"] == condition_statuses(decision)["Ready"] == "True"
    )
    assert ready_reason(decision) == ("Completed", "maxSteps 100 reached")
    assert FinishRun("maxSteps 100 reached", succeeded=True) in decision.actions
    assert decision.status is not None
    assert decision.status["trainerStatus"]["progressPercentage"] == 100
    assert decision.status["readyWorkers"] == "3/3"


def test_a_broken_keeper_degrades_a_job_that_trains() -> None:
    world = training({"small": 2})
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": CREATED}
    world.pods["keeper"]["status"] = {
        "phase": "Running",
        "conditions": [unready],
        "containerStatuses": [{"name": "keeper", "state": {"waiting": waiting}}],
    }
    assert ready_reason(world.look())[0] == "Training"
    world.advance(60)
    decision = world.look()
    reason, message = ready_reason(decision)
    assert reason == "KeeperUnavailable"
    assert "container keeper: CrashLoopBackOff: back-off 5m0s" in message
    is_true = {name for name, status in condition_statuses(decision).items() if status == "True"}
    assert is_true == {"Ready", "Degraded", "PeersConnected"}
    assert [(n.reason, n.type) for n in decision.events] == [("KeeperUnavailable", "Warning")]
    running = {
        "running": {"startedAt": stamp(world.now)}
    }  # for some seconds, and then not any more
    world.pods["keeper"]["status"]["containerStatuses"] = [
        {"name": "keeper", "state": running, "restartCount": 3}
    ]
    assert ready_reason(world.look())[0] == "KeeperUnavailable"
    world.run = RunView(open_s=99.0, training=True, stop_reason="maxSteps 100 reached")
    assert "ending: maxSteps 100 reached" in ready_reason(world.look())[1]
    world.make_keeper()
    world.train()
    assert ready_reason(world.look())[0] == "Training"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_whose_model_is_lost_has_failed(workers: int) -> None:
    world = training({"small": workers})
    world.end("small", failed="0", exit_code=73)
    decision = world.look()
    reason, message = ready_reason(decision)
    assert (reason, condition_statuses(decision)["Succeeded"]) == ("ModelLost", "False")
    assert condition_statuses(decision)["Failed"] == "True"
    assert "the site's model is lost" in message
    assert "small-0: trainer ended with 73 (MODEL_LOST)" in message


def test_workers_that_leave_at_the_end_are_not_lost() -> None:
    world = training({"small": 3})
    world.run = RunView(open_s=99.0, training=True, stop_reason="maxSteps 100 reached")
    decision = world.look()
    assert ready_reason(decision) == ("Training", "ending: maxSteps 100 reached")
    assert decision.events == ()
    assert decision.status is not None
    assert decision.status["readyWorkers"] == "3/3"


def test_a_run_that_has_ended_stays_ended() -> None:
    world = training()
    world.end("small")
    first = world.look()
    world.advance(700)
    world.jobs.clear()  # the user deleted them
    world.pods.clear()
    world.run = None
    second = world.look()
    assert second.status == first.status
    assert not [a for a in second.actions if isinstance(a, Create | Apply)]
    assert CloseRun() in second.actions


def test_a_model_without_a_worker_that_failed_is_partial() -> None:
    world = training({"small": 3})
    world.end("small", failed="1", exit_code=67)
    decision = world.look()
    assert (condition_statuses(decision)["Succeeded"], condition_statuses(decision)["Failed"]) == (
        "False",
        "True",
    )
    reason, message = ready_reason(decision)
    assert reason == "Partial"
    assert message.startswith("the model lacks small-1: failed for good")


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [(67, "ProgramFailed"), (65, "InvalidSpec"), (66, "WorkersFailed"), (1, "RestartsExceeded")],
)
def test_the_job_fails_if_no_worker_succeeded(exit_code: int, reason: str) -> None:
    world = training()
    world.end("small", failed="0,1", exit_code=exit_code)
    world.fail("small", 0, exit_code, "step 3\nValueError: no such file\n")
    decision = world.look()
    found_reason, message = ready_reason(decision)
    assert found_reason == reason
    assert "ValueError: no such file" in message
    assert condition_statuses(decision) | {
        "Failed": "True",
        "Stalled": "True",
    } == condition_statuses(decision)


def test_a_killed_trainer_is_reported_to_need_memory() -> None:
    world = training()
    world.end("small", failed="0,1", exit_code=137)
    assert "137 (SIGKILL), most often for want of memory" in ready_reason(world.look())[1]


def test_one_failure_ends_the_run_under_the_policy_fail() -> None:
    world = training({"small": 3}, failurePolicy="Fail")
    world.jobs["small"]["status"]["failedIndexes"] = "2"
    world.fail("small", 2, 67)
    decision = world.look()
    stops = [a.reason for a in decision.actions if isinstance(a, StopRun)]
    assert stops == ["small-2 failed for good, and failurePolicy is Fail"]
    assert condition_statuses(decision)["Failed"] == "False"  # the others save their state first
    world.end("small", failed="2", exit_code=67)
    assert condition_statuses(world.look())["Failed"] == "True"


def test_workers_do_not_wait_for_a_failed_one_without_end() -> None:
    world = World(dlion_job({"small": 2}))
    world.look()
    world.make_jobs()
    world.run = RunView(open_s=60.0, ready={SiteName("plant-a"): 1})
    world.jobs["small"]["status"]["failedIndexes"] = "1"
    world.fail("small", 1, 66)
    decision = world.look()
    assert condition_statuses(decision)["Failed"] == "True"
    assert not [a for a in decision.actions if isinstance(a, Patch)]  # the status is written first
    assert spec_patches(world.look()) == [{"suspend": True}]


def test_a_run_over_its_deadline_is_stopped_and_then_fails() -> None:
    world = training(activeDeadlineSeconds=600)
    world.advance(601)
    decision = world.look()
    assert [type(a) for a in decision.actions if isinstance(a, StopRun)] == [StopRun]
    assert condition_statuses(decision)["Failed"] == "False"
    world.end("small")
    assert ready_reason(world.look())[0] == "DeadlineExceeded"


def test_workers_that_do_not_stop_at_the_deadline_are_ended() -> None:
    world = training(activeDeadlineSeconds=600)
    world.advance(661)
    decision = world.look()
    assert ready_reason(decision)[0] == "DeadlineExceeded"
    assert spec_patches(world.look()) == [{"suspend": True}]


def spec_patches(decision: Decision) -> list[object]:
    """Return the patches of the specs of Jobs."""
    return [a.patch["spec"] for a in decision.actions if isinstance(a, Patch)]


def test_a_suspension_does_not_count_against_the_deadline() -> None:
    world = training(activeDeadlineSeconds=600)
    world.jobs["small"]["spec"]["suspend"] = True
    world.document["spec"]["suspend"] = True
    world.look()
    world.advance(36000)
    world.document["spec"]["suspend"] = False
    decision = world.look()
    assert condition_statuses(decision)["Failed"] == "False"
    assert spec_patches(decision) == [{"suspend": False}]


def test_a_new_run_deletes_the_objects_of_the_previous_one() -> None:
    world = training()
    world.end("small")
    world.look()
    old = load_job(world.document).key
    world.document["spec"]["runId"] = "2"
    world.document["metadata"]["generation"] = 2
    world.run = None
    decision = world.look()
    deleted = {(a.kind, a.name) for a in decision.actions if isinstance(a, Delete)}
    names = {name for _, name in deleted}
    assert world.jobs["small"]["metadata"]["name"] in names
    assert (Kind.DEPLOYMENT, f"{next(n for n in names if n.endswith('-keeper'))}") in deleted
    assert [a for a in decision.actions if isinstance(a, Create)]
    assert decision.status is not None
    assert decision.status["runId"] == "2" != old.run_id
    assert condition_statuses(decision)["Succeeded"] == "Unknown"


def test_children_are_deleted_after_their_time_to_live_and_the_job_stays() -> None:
    world = training(ttlSecondsAfterFinished=3600)
    world.end("small")
    world.look()
    world.advance(1000)
    waiting = world.look()
    assert not [a for a in waiting.actions if isinstance(a, Delete)]
    assert waiting.requeue_after_s == pytest.approx(2600)
    world.advance(2600)
    kinds = {a.kind for a in world.look().actions if isinstance(a, Delete)}
    assert kinds == {
        Kind.JOB, Kind.DEPLOYMENT, Kind.SERVICE, Kind.CONFIG_MAP, Kind.NETWORK_POLICY
    }  # fmt: skip


def test_children_stay_for_a_minute_even_with_no_time_to_live() -> None:
    """The keeper learns how the run ended before it is deleted."""
    world = training(ttlSecondsAfterFinished=0)
    world.end("small")
    world.look()
    world.advance(59)
    assert not [a for a in world.look().actions if isinstance(a, Delete)]
    world.advance(1)
    assert Kind.DEPLOYMENT in {a.kind for a in world.look().actions if isinstance(a, Delete)}


def test_a_run_that_is_over_is_served_for_ten_minutes() -> None:
    world = training()
    world.end("small")
    world.look()
    world.advance(599)
    decision = world.look()
    assert CloseRun() not in decision.actions
    assert decision.requeue_after_s == pytest.approx(1)
    world.advance(1)
    assert CloseRun() in world.look().actions


def test_a_restarted_operator_revokes_nothing() -> None:
    world = training({"small": 3})
    before = dict(world.document["status"])
    world.advance(30)
    world.run = RunView(open_s=1.0, ready={SiteName("plant-a"): 1})
    decision = world.look()
    assert decision.status is None
    assert decision.requeue_after_s is not None
    assert world.document["status"] == before
    world.run = RunView(open_s=60.0, ready={SiteName("plant-a"): 1}, training=True)
    assert ready_reason(world.look())[0] == "PeersLost"


@pytest.mark.parametrize("why", ["Unschedulable", "CrashLoopBackOff"])
def test_a_lasting_problem_is_not_reported_again_by_a_restarted_operator(why: str) -> None:
    world = training({"small": 3})
    if why == "Unschedulable":
        rejected = {"type": "PodScheduled", "reason": why, "status": "False"}
        world.pods["small-2"]["status"] = {"phase": "Pending", "conditions": [rejected]}
    else:
        world.pods["keeper"]["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": "keeper", "state": {"waiting": {"reason": why}}}],
        }
    world.advance(3600)
    world.train(ready=2)
    assert condition_statuses(world.look())["Degraded"] == "True"
    before = dict(world.document["status"])
    ready = {SiteName("plant-a"): 2}
    for run in (None, RunView(open_s=0.0), RunView(open_s=44.0, ready=ready)):
        world.run = run
        decision = world.look()
        assert (decision.status, decision.events) == (None, ())
        assert world.document["status"] == before
    world.run = RunView(open_s=45.0, ready=ready)  # they do not train
    assert (ready_reason(world.look())[0], condition_statuses(world.look())["Stalled"]) == (
        "Unschedulable" if why == "Unschedulable" else "ContainerBroken", "True"
    )  # fmt: skip


def test_a_loss_soon_after_the_start_is_reported_immediately() -> None:
    """The operator has served the run from its start: a worker that is absent is lost."""
    world = training({"small": 3})
    world.advance(20)
    world.run = RunView(open_s=20.0, ready={SiteName("plant-a"): 2}, training=True)
    assert ready_reason(world.look())[0] == "PeersLost"


def dying(world: World, name: str, *, node_answers: bool) -> None:
    """Mark the pod for deletion; its node reports that its containers have ended, or nothing."""
    pod = world.pods[name]
    pod["metadata"] |= {"deletionTimestamp": CREATED, "deletionGracePeriodSeconds": 30}
    state = {"terminated": {"exitCode": 130}} if node_answers else {"running": {}}
    pod["status"]["containerStatuses"] = [{"name": "trainer", "state": state}]


def test_a_pod_on_a_dead_node_is_released() -> None:
    world = training({"small": 2})
    world.now += timedelta(seconds=3600)  # however late the API server's clock is
    dying(world, "small-0", node_answers=False)
    for _ in range(2):
        assert not [a for a in world.look().actions if isinstance(a, Delete)]
        world.now += timedelta(seconds=90)
    world.now += timedelta(seconds=1)
    decision = world.look()
    (patch,) = [a for a in decision.actions if isinstance(a, Patch)]
    assert (patch.kind, patch.subresource) == (Kind.POD, "status")
    assert patch.patch["status"]["phase"] == "Failed"
    assert patch.patch["status"]["conditions"][-1]["type"] == "DisruptionTarget"
    (gone,) = [a for a in decision.actions if isinstance(a, Delete)]
    metadata = world.pods["small-0"]["metadata"]
    assert gone == Delete(Kind.POD, metadata["name"], metadata["uid"], grace_s=0)


def test_a_pod_whose_node_answers_is_not_released() -> None:
    world = training({"small": 2})
    dying(world, "small-0", node_answers=True)
    world.look()
    world.advance(30 + 600)  # its grace period, and the time that a node may need for the rest
    assert not [a for a in world.look().actions if isinstance(a, Delete)]
    world.pods["small-0"]["status"]["phase"] = "Failed"  # and its node failed then
    (gone,) = [a for a in world.look().actions if isinstance(a, Delete)]
    assert gone.grace_s == 0


def test_a_pod_is_released_if_its_node_dies_after_the_containers_end() -> None:
    """Its phase is still Running. Its Job replaces only failed pods and would wait without end."""
    world = training({"small": 2})
    dying(world, "small-0", node_answers=True)
    world.look()
    world.advance(30 + 600)
    assert not [a for a in world.look().actions if isinstance(a, Patch | Delete)]
    world.advance(1)
    patch, deletion = [a for a in world.look().actions if isinstance(a, Patch | Delete)]
    assert isinstance(patch, Patch)
    assert patch.patch["status"]["phase"] == "Failed"
    assert isinstance(deletion, Delete)
    assert (deletion.name, deletion.grace_s) == (world.pods["small-0"]["metadata"]["name"], 0)


def test_a_suspended_job_is_looked_at_while_its_pods_end() -> None:
    world = training({"small": 1})
    world.document["spec"]["suspend"] = True
    dying(world, "small-0", node_answers=False)
    assert world.look().requeue_after_s is not None


def test_a_run_that_returns_to_the_queue_reports_it() -> None:
    document = dlion_job()
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    world = World(document)
    world.look()
    world.make_jobs()
    (job,) = world.jobs.values()
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "edge"
    job["spec"]["suspend"] = False
    world.train()
    assert ready_reason(world.look())[0] == "Training"
    job["spec"]["suspend"] = True
    world.pods.clear()
    world.train(ready=0)
    decision = world.look()
    assert ready_reason(decision) == ("Queued", "waiting for a place in the queue")
    assert not [a for a in decision.actions if isinstance(a, Patch)]


def admitted() -> World:
    """Return a running job whose Job is queued itself, as an older operator created it."""
    document = dlion_job()
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    world = World(document)
    world.look()
    world.make_jobs()
    world.jobs["small"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "edge"
    world.jobs["small"]["spec"]["suspend"] = False
    world.train()
    assert ready_reason(world.look())[0] == "Training"
    return world


def test_a_queued_job_is_suspended_without_a_conflict_with_its_queue() -> None:
    """Kueue resumes a Job that it has admitted; an empty one still runs nothing."""
    world = admitted()
    world.document["spec"]["suspend"] = True
    assert spec_patches(world.look()) == [{"parallelism": 0}]
    world.jobs["small"]["spec"]["parallelism"] = 0
    for is_suspended in (True, False):
        world.jobs["small"]["spec"]["suspend"] = is_suspended
        assert spec_patches(world.look()) == []
    world.document["spec"]["suspend"] = False
    assert spec_patches(world.look()) == [{"suspend": True, "parallelism": 2, "completions": 2}]


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_suspension_of_a_queued_run_does_not_count_against_the_deadline(
    *, is_admitted: bool
) -> None:
    """Kueue may admit an empty Job: Kubernetes then starts it when the suspension begins."""
    world = admitted()
    world.document["spec"] |= {"activeDeadlineSeconds": 600, "suspend": True}
    world.look()
    job = world.jobs["small"]
    job["spec"] |= {"parallelism": 0, "suspend": not is_admitted}
    job["status"]["startTime"] = stamp(world.now)
    world.pods.clear()
    world.advance(3600)
    world.run = None
    world.document["spec"]["suspend"] = False
    decision = world.look()
    # In one request: no pod starts before Kueue has counted it, and `startTime` is set again.
    assert spec_patches(decision) == [{"suspend": True, "parallelism": 2, "completions": 2}]
    assert not [a for a in decision.actions if isinstance(a, FinishRun | StopRun)]
    assert condition_statuses(decision)["Failed"] == "False"
    job["spec"] |= {"parallelism": 2, "suspend": True}
    assert ready_reason(world.look())[0] == "Queued"
    job["spec"]["suspend"] = False
    job["status"] = {"startTime": stamp(world.now)}
    world.advance(599)
    assert condition_statuses(world.look())["Failed"] == "False"
    world.advance(62)
    assert ready_reason(world.look())[0] == "DeadlineExceeded"


def test_a_waiting_job_leaves_its_queue_while_suspended() -> None:
    world = admitted()
    world.jobs["small"]["spec"]["suspend"] = True
    world.document["spec"]["suspend"] = True
    assert spec_patches(world.look()) == [{"parallelism": 0}]


def test_a_finished_queued_run_ends_without_a_conflict() -> None:
    world = admitted()
    world.document["spec"]["activeDeadlineSeconds"] = 60
    world.advance(3600)
    assert ready_reason(world.look())[0] == "DeadlineExceeded"
    assert spec_patches(world.look()) == [{"parallelism": 0}]


def test_transition_times_change_with_the_status_only() -> None:
    world = training()
    began = {c["type"]: c["lastTransitionTime"] for c in world.document["status"]["conditions"]}
    world.advance(100)
    world.train(ready=1)
    decision = world.look()
    assert decision.status is not None
    now = {c["type"]: c["lastTransitionTime"] for c in decision.status["conditions"]}
    moved = {name for name in now if now[name] != began[name]}
    assert moved == {"Degraded", "PeersConnected"}


def test_a_group_requests_gpus_by_its_resources() -> None:
    document = dlion_job()
    (group,) = document["spec"]["sites"][0]["groups"]
    group["resources"] = {"limits": {"nvidia.com/gpu": "1", "memory": "4Gi"}}
    (job,) = [
        a.document
        for a in World(document).look().actions
        if isinstance(a, Create) and a.document["kind"] == "Job"
    ]
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "4Gi"}
    assert all("nvidia.com/gpu" not in str(each["resources"]) for each in pod["initContainers"])


def test_groups_of_different_sites_may_share_a_name() -> None:
    document = dlion_job({"small": 1})
    document["spec"]["sites"].insert(
        0, {"name": "plant-b", "groups": [{"name": "small", "workers": 2}]}
    )
    made = [
        a.document["spec"]["completions"]
        for a in World(document, SETTINGS).look().actions
        if isinstance(a, Create) and a.document["kind"] == "Job"
    ]
    assert made == [1]
