"""Test that events in a cluster end no run that can continue: real API servers, no pods.

A matrix of run states and events is tested (a few cells here, all of them in `make slow`). There
also: a degraded run continues for 50 s after its operator restarts and the failed worker is scaled
away; an admission policy denies and then allows. Left out: single decisions
(tests/unit/operator/plan/test_run_outcome.py), several sites (test_fleet_correction), an API server
that is restored (test_api_restore), workers that train (test_run_ends_with_pods).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from admission_policy import BINDING, POLICY, label_policy
from dlion_api.endings import EndReport
from operator_process import OperatorProcess
from podless_jobs import conditions, end_workers, is_over, jobs, manifest, workers
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
LATEST = "2026-01-31T12:00:00Z"


def small(kubectl: Kubectl) -> dict[str, Any]:
    (found,) = kubectl.get("jobs", "-l", "dlion.dev/group=small")["items"]
    return dict(found)


def have_trained(kubectl: Kubectl) -> None:
    """Record that its workers train, as an operator does."""
    trained = {"status": {"trainingStartTime": LATEST, "trainerStatus": {"progressPercentage": 12}}}
    kubectl.run("patch", "dlj", "digits", "--subresource=status", "--type=merge",
                "-p", json.dumps(trained))  # fmt: skip


def fail(kubectl: Kubectl, index: int) -> None:
    """In the kubelet's place, report that a worker of group small has failed for good."""
    of_index = f"dlion.dev/group=small,batch.kubernetes.io/job-completion-index={index}"
    (pod,) = kubectl.get("pods", "-l", of_index)["items"]
    terminated = {"exitCode": 67, "reason": "Error", "startedAt": LATEST, "finishedAt": LATEST}
    ended = {"status": {"phase": "Failed", "containerStatuses": [
        {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
         "state": {"terminated": terminated}}]}}  # fmt: skip
    kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge",
                "-p", json.dumps(ended))  # fmt: skip
    eventually(lambda: small(kubectl)["status"].get("failedIndexes") == str(index))


def degraded(kubectl: Kubectl) -> None:
    kubectl.apply(manifest())
    eventually(lambda: len(workers(kubectl)) == 3)
    have_trained(kubectl)
    fail(kubectl, 1)


@pytest.mark.slow
def test_a_degraded_run_survives_its_operator_and_scaling(
    kubectl: Kubectl, shared_operator: OperatorProcess
) -> None:
    """After 45 s the operator assumes that every worker has called."""
    degraded(kubectl)
    shared_operator.kill()
    shared_operator.start()
    kubectl.apply(manifest(small=1))
    eventually(lambda: small(kubectl)["spec"]["completions"] == 1)
    until_s = time.monotonic() + 50.0
    while time.monotonic() < until_s:
        assert not is_over(kubectl), conditions(kubectl)
        time.sleep(1.0)
    status = kubectl.get("dlj", "digits")["status"]
    assert status["trainingStartTime"] == LATEST
    assert status["trainerStatus"]["progressPercentage"] == 12


@pytest.mark.parametrize("way_out", ["label", "policy"])
def test_a_denied_object_is_reported_and_created_once_allowed(
    kubectl: Kubectl, shared_operator: OperatorProcess, way_out: str
) -> None:
    policy, binding = label_policy(kubectl)
    kubectl.apply(policy, binding)
    time.sleep(2.0)  # a policy takes effect a moment after its creation
    try:
        kubectl.apply(manifest())
        eventually(lambda: conditions(kubectl).get("Stalled", ("",))[0] == "True")
        status, reason, message = conditions(kubectl)["Stalled"]
        assert (status, reason) == ("True", "PolicyDenied")
        assert "a Job needs an owner" in message
        assert conditions(kubectl)["Failed"][0] == "False"
        assert jobs(kubectl) == []
        if way_out == "label":
            document = manifest()
            document["metadata"]["labels"] = {"owner": "plant"}
            kubectl.apply(document)
        else:
            kubectl.run("delete", POLICY, policy["metadata"]["name"])
        eventually(lambda: len(jobs(kubectl)) == 2)
        eventually(lambda: conditions(kubectl)["Stalled"][0] == "False")
    finally:
        kubectl.run("delete", POLICY, policy["metadata"]["name"], "--ignore-not-found")
        kubectl.run("delete", BINDING, binding["metadata"]["name"])


# ---- the matrix: state of a run x event


def healthy(kubectl: Kubectl) -> None:
    kubectl.apply(manifest())
    eventually(lambda: len(workers(kubectl)) == 3)
    have_trained(kubectl)


def suspended(kubectl: Kubectl) -> None:
    healthy(kubectl)
    kubectl.apply(manifest(suspend=True))
    eventually(lambda: conditions(kubectl)["Suspended"][0] == "True")


def waiting(kubectl: Kubectl) -> None:
    kubectl.apply(manifest())
    eventually(lambda: len(workers(kubectl)) == 3)


def ending(kubectl: Kubectl) -> None:
    """One group has ended, another has not."""
    healthy(kubectl)
    (pod,) = kubectl.get("pods", "-l", "dlion.dev/group=large")["items"]
    report = EndReport("maxSteps 100 reached", 100).to_json()
    terminated = {"exitCode": 0, "startedAt": LATEST, "finishedAt": LATEST, "message": report}
    ended = {"status": {"phase": "Succeeded", "containerStatuses": [
        {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
         "state": {"terminated": terminated}}]}}  # fmt: skip
    kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge",
                "-p", json.dumps(ended))  # fmt: skip
    eventually(lambda: sum(job["status"].get("succeeded", 0) for job in jobs(kubectl)) == 1)


def restarted(kubectl: Kubectl, shared_operator: OperatorProcess) -> None:
    shared_operator.kill()
    shared_operator.start()


def scaled(workers_wanted: int) -> Callable[[Kubectl, OperatorProcess], None]:
    def scale(kubectl: Kubectl, _: OperatorProcess) -> None:
        patch = [{"op": "replace", "path": "/spec/sites/0/groups/0/workers",
                  "value": workers_wanted}]  # fmt: skip
        kubectl.run("patch", "dlj", "digits", "--type=json", "-p", json.dumps(patch))
        if conditions(kubectl)["Suspended"][0] == "False":
            eventually(lambda: small(kubectl)["spec"]["parallelism"] == workers_wanted)

    return scale


def newer_crd(kubectl: Kubectl, _: OperatorProcess) -> None:
    """A defaulted field is added with the next write, as in the documented order of upgrades."""
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/exchange/properties"
    value = {"type": "string", "default": "clip"}
    added = {"op": "add", "path": f"{path}/laterField", "value": value}
    removed = {"op": "remove", "path": f"{path}/laterField"}
    crd = "dlionjobs.dlion.dev"
    kubectl.run("patch", "crd", crd, "--type=json", "-p", json.dumps([added]))
    try:
        kubectl.run("annotate", "dlj", "digits", "looked=at")
        time.sleep(3.0)
        assert not is_over(kubectl)
        found = kubectl.get("dlj", "digits")
        assert found["spec"]["exchange"]["laterField"] == "clip"
    finally:
        kubectl.run("patch", "crd", crd, "--type=json", "-p", json.dumps([removed]))


def rolled_back(kubectl: Kubectl, shared_operator: OperatorProcess) -> None:
    """Objects of a newer operator are not changed."""
    shared_operator.kill()
    for job in jobs(kubectl):
        kubectl.run("annotate", "job", job["metadata"]["name"], "dlion.dev/of-a-later-version=x")
    shared_operator.start()


def denied_then_allowed(kubectl: Kubectl, shared_operator: OperatorProcess) -> None:
    policy, binding = label_policy(kubectl, "UPDATE")
    kubectl.apply(policy, binding)
    time.sleep(2.0)
    try:
        patch = [{"op": "replace", "path": "/spec/sites/0/groups/0/workers", "value": 1}]
        kubectl.run("patch", "dlj", "digits", "--type=json", "-p", json.dumps(patch))
        time.sleep(3.0)
        assert not is_over(kubectl)
    finally:
        kubectl.run("delete", POLICY, policy["metadata"]["name"])
        kubectl.run("delete", BINDING, binding["metadata"]["name"])
    if conditions(kubectl)["Suspended"][0] == "False":
        eventually(lambda: small(kubectl)["spec"]["parallelism"] == 1)


def label_off_and_on(kubectl: Kubectl, _: OperatorProcess) -> None:
    name = small(kubectl)["metadata"]["name"]
    kubectl.run("label", "job", name, "dlion.dev/job-name-")

    def is_back() -> bool:
        labels = kubectl.get("job", name)["metadata"]["labels"]
        return bool(labels.get("dlion.dev/job-name") == "digits")

    eventually(is_back, within_s=20)


def keeper_deleted(kubectl: Kubectl, _: OperatorProcess) -> None:
    for kind in ("deployment", "configmap"):
        if not (found := kubectl.get(kind, "-l", "dlion.dev/job-name=digits")["items"]):
            continue
        before = found[0]["metadata"]
        kubectl.run("delete", kind, before["name"])

        def is_back(kind: str = kind, uid: str = before["uid"]) -> bool:
            there = kubectl.get(kind, "-l", "dlion.dev/job-name=digits")["items"]
            return any(each["metadata"]["uid"] != uid for each in there)

        if conditions(kubectl)["Suspended"][0] == "False":
            eventually(is_back, within_s=20)


STATES = (healthy, degraded, suspended, waiting, ending)
EVENTS: dict[str, Callable[[Kubectl, OperatorProcess], None]] = {
    "restarted": restarted,
    "scaled down": scaled(1),
    "scaled up": scaled(3),
    "CRD newer": newer_crd,
    "rolled back": rolled_back,
    "denied, then allowed": denied_then_allowed,
    "label off and on": label_off_and_on,
    "keeper deleted": keeper_deleted,
}
CORE = {
    ("healthy", "CRD newer"), ("healthy", "label off and on"), ("healthy", "keeper deleted"),
    ("degraded", "restarted"), ("degraded", "denied, then allowed"), ("suspended", "scaled up"),
    ("ending", "restarted"),
}  # fmt: skip


@pytest.mark.usefixtures("no_running_pods")
@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(
            state,
            event,
            id=f"{state.__name__}-{event}",
            marks=() if (state.__name__, event) in CORE else pytest.mark.slow,
        )
        for state in STATES
        for event in EVENTS
    ],
)
def test_a_run_continues(
    kubectl: Kubectl,
    shared_operator: OperatorProcess,
    state: Callable[[Kubectl], None],
    event: str,
) -> None:
    state(kubectl)
    EVENTS[event](kubectl, shared_operator)
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        assert not is_over(kubectl), conditions(kubectl)
        time.sleep(0.5)
    assert len(jobs(kubectl)) == 2
    started = kubectl.get("dlj", "digits")["status"].get("trainingStartTime")
    assert started == (None if state is waiting else LATEST)


@pytest.mark.usefixtures("no_running_pods", "shared_operator")
def test_workers_that_succeed_complete_the_run(kubectl: Kubectl) -> None:
    healthy(kubectl)
    end_workers(kubectl)
    eventually(lambda: is_over(kubectl), within_s=40)
    assert conditions(kubectl)["Succeeded"][:2] == ("True", "Completed")
    status = kubectl.get("dlj", "digits")["status"]
    assert (status["readySites"], status["readyWorkers"]) == ("1/1", "3/3")
    # No pod has reported why it ended: the status has no progress.
    assert status["trainerStatus"]["progressPercentage"] == 12
