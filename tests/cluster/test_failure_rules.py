"""Test failure rules and retries with a real API server and its Job controller, without pods.

The API server accepts the `podFailurePolicy` of every rule. In the kubelet's place the test ends a
pod, and each action has its result: another pod that is counted, another that is not, none, or the
end of the run. An evicted and killed pod is not counted. The next attempt at a run has new Jobs of
the same names, whenever the operator is killed, and there is none after the last. An invalid
manifest is refused, and rules are fixed once workers train.

Left out: single decisions (tests/unit/operator/test_run_ends), workers that train
(tests/local/test_drained_workers).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.errors import UnavailableError
from operator_process import OperatorProcess
from podless_jobs import conditions, is_over, jobs, manifest, workers
from trained_jobs import eventually

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_running_pods")]
LATEST = "2026-01-31T12:00:00Z"
SIGKILL = 137


def alone(**changes: Any) -> dict[str, Any]:
    """Return a job of one group of two workers."""
    document = manifest(**changes)
    document["spec"]["sites"][0]["groups"].pop()
    return document


def training(kubectl: Kubectl, document: dict[str, Any], pods: int) -> None:
    """Record that its workers have trained, as an operator does."""
    kubectl.apply(document)
    eventually(lambda: len(workers(kubectl)) == pods)
    status = {"status": {"trainingStartTime": LATEST}}
    kubectl.run("patch", "dlj", "digits", "--subresource=status", "--type=merge",
                "-p", json.dumps(status))  # fmt: skip


def pods_of(kubectl: Kubectl, group: str, index: int) -> list[dict[str, Any]]:
    chosen = f"dlion.dev/group={group},batch.kubernetes.io/job-completion-index={index}"
    found: list[dict[str, Any]] = kubectl.get("pods", "-l", chosen)["items"]
    return found


def fail(kubectl: Kubectl, group: str, index: int, code: int, *, evicted: bool = False) -> None:
    """In the kubelet's place, end the trainer of that worker's running pod with this code."""
    (pod,) = [p for p in pods_of(kubectl, group, index) if p["status"]["phase"] != "Failed"]
    terminated = {"exitCode": code, "reason": "Error", "startedAt": LATEST, "finishedAt": LATEST}
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                 "lastTransitionTime": LATEST}  # fmt: skip
    status: dict[str, Any] = {"phase": "Failed", "containerStatuses": [
        {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
         "state": {"terminated": terminated}}]}  # fmt: skip
    status |= {"conditions": [condition]} if evicted else {}
    kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge",
                "-p", json.dumps({"status": status}))  # fmt: skip


def replaced(kubectl: Kubectl, group: str, index: int, *, counted: int, ignored: int) -> None:
    """Wait for another pod that records this many earlier failures of its index."""

    def is_there() -> bool:
        living = [p for p in pods_of(kubectl, group, index) if p["status"]["phase"] != "Failed"]
        notes = living[0]["metadata"]["annotations"] if living else {}
        prefix = "batch.kubernetes.io/job-index"
        return bool(living) and (
            int(notes.get(f"{prefix}-failure-count", 0)),
            int(notes.get(f"{prefix}-ignored-failure-count", 0)),
        ) == (counted, ignored)

    eventually(is_there, within_s=90)


def failed_indexes(kubectl: Kubectl, group: str) -> str:
    (job,) = kubectl.get("jobs", "-l", f"dlion.dev/group={group}")["items"]
    return str((job.get("status") or {}).get("failedIndexes", ""))


def end_living(kubectl: Kubectl) -> None:
    """In the kubelet's place, end the other workers in order."""
    ended = json.dumps({"status": {"phase": "Succeeded"}})
    for pod in workers(kubectl):
        if pod["status"]["phase"] != "Failed":
            name = pod["metadata"]["name"]
            kubectl.run("patch", "pod", name, "--subresource=status", "--type=merge", "-p", ended)


def rule(end: str, action: str, *groups: str) -> dict[str, Any]:
    return {"onEnds": [end], "action": action, "groups": list(groups)}


@pytest.mark.usefixtures("shared_operator")
def test_each_action_has_its_result(kubectl: Kubectl) -> None:
    rules = [
        rule("ProgramFailed", "Restart"),
        rule("Killed", "Ignore", "small"),
        rule("Killed", "FailWorker", "large"),
        rule("Crashed", "FailRun"),
        rule("RestartsExceeded", "FailRun", "large"),
    ]
    training(kubectl, manifest(small=2, failureRules=rules, maxRestarts=3), 3)
    # Restart: fatal without a rule.
    fail(kubectl, "small", 0, 67)
    replaced(kubectl, "small", 0, counted=1, ignored=0)
    # Ignore, and an eviction that had to be killed, for which no rule is needed.
    fail(kubectl, "small", 1, SIGKILL)
    replaced(kubectl, "small", 1, counted=0, ignored=1)
    fail(kubectl, "small", 1, SIGKILL, evicted=True)
    replaced(kubectl, "small", 1, counted=0, ignored=2)
    # FailWorker: the others continue.
    fail(kubectl, "large", 0, SIGKILL)
    eventually(lambda: failed_indexes(kubectl, "large") == "0")
    time.sleep(3.0)
    assert not is_over(kubectl), conditions(kubectl)
    # FailRun: the others are asked to end, and the run has failed.
    fail(kubectl, "small", 0, 139)
    eventually(lambda: failed_indexes(kubectl, "small") == "0")
    time.sleep(3.0)
    assert not is_over(kubectl), "the others save their state first"
    end_living(kubectl)
    eventually(lambda: is_over(kubectl))
    status, reason, message = conditions(kubectl)["Failed"]
    assert (status, reason) == ("True", "FailedByRule")
    assert message.startswith("failureRules[3] is FailRun for Crashed; ")


@pytest.mark.usefixtures("shared_operator")
def test_a_drained_worker_is_never_counted(kubectl: Kubectl) -> None:
    """Without any restarts, neither an eviction nor a requested end counts."""
    training(kubectl, alone(small=1, maxRestarts=0), 1)
    fail(kubectl, "small", 0, 130, evicted=True)
    replaced(kubectl, "small", 0, counted=0, ignored=1)
    fail(kubectl, "small", 0, 130)
    replaced(kubectl, "small", 0, counted=0, ignored=2)
    assert not is_over(kubectl)


def attempts(kubectl: Kubectl) -> dict[str, str]:
    """Return the attempt of each Job that is not being deleted, by its UID."""
    return {
        job["metadata"]["uid"]: job["metadata"]["annotations"].get("dlion.dev/attempt", "1")
        for job in jobs(kubectl)
        if not job["metadata"].get("deletionTimestamp")
    }


def test_a_failed_run_is_retried_until_its_last_attempt(
    kubectl: Kubectl, shared_operator: OperatorProcess
) -> None:
    training(kubectl, manifest(small=1, maxRestarts=0, maxRetries=1), 2)
    first, names = attempts(kubectl), {job["metadata"]["name"] for job in jobs(kubectl)}
    (keeper,) = kubectl.get("deployment", "-l", "dlion.dev/job-name=digits")["items"]
    for group in ("small", "large"):
        fail(kubectl, group, 0, SIGKILL)
    eventually(lambda: conditions(kubectl)["Ready"][1] == "Retrying")
    assert conditions(kubectl)["Failed"][0] == "False"
    status = kubectl.get("dlj", "digits")["status"]
    assert status["attempt"]["number"] == 2
    assert status["attempt"]["lastFailure"].startswith("RestartsExceeded: ")
    assert attempts(kubectl) == first, "the failed pods are kept"
    shared_operator.kill()
    shared_operator.start()
    eventually(lambda: sorted(attempts(kubectl).values()) == ["2", "2"])
    assert not attempts(kubectl).keys() & first.keys()
    assert {job["metadata"]["name"] for job in jobs(kubectl)} == names
    eventually(lambda: len(workers(kubectl)) == 2)
    (same,) = kubectl.get("deployment", "-l", "dlion.dev/job-name=digits")["items"]
    assert same["metadata"]["uid"] == keeper["metadata"]["uid"], "it has the checkpoints"
    assert len(kubectl.get("configmap", "-l", "dlion.dev/job-name=digits")["items"]) == 1
    assert kubectl.get("dlj", "digits")["status"]["trainingStartTime"] == LATEST
    eventually(lambda: conditions(kubectl)["Ready"][1] == "WorkersStarting")
    for group in ("small", "large"):
        fail(kubectl, group, 0, SIGKILL)
    eventually(lambda: is_over(kubectl))
    assert conditions(kubectl)["Failed"][1] == "RestartsExceeded"
    assert conditions(kubectl)["Failed"][2].endswith("this was attempt 2")
    time.sleep(12.0)
    assert set(attempts(kubectl).values()) == {"2"}
    assert len(attempts(kubectl)) == 2


@pytest.mark.usefixtures("shared_operator")
def test_a_waiting_run_may_be_replaced_by_another(kubectl: Kubectl) -> None:
    training(kubectl, alone(small=1, maxRestarts=0, maxRetries=5), 1)
    fail(kubectl, "small", 0, SIGKILL)
    eventually(lambda: conditions(kubectl)["Ready"][1] == "Retrying")
    with pytest.raises(UnavailableError, match="runId may change only after"):
        kubectl.apply(alone(small=1, maxRestarts=0, maxRetries=5, runId="2"))
    kubectl.apply(alone(small=1, maxRestarts=0))
    eventually(lambda: is_over(kubectl))
    kubectl.apply(alone(small=1, maxRestarts=0, runId="2"))
    eventually(lambda: len(workers(kubectl)) == 1 and not is_over(kubectl))
    assert set(attempts(kubectl).values()) == {"1"}
    assert "attempt" not in kubectl.get("dlj", "digits")["status"]


@pytest.mark.usefixtures("shared_operator")
def test_rules_without_effect_are_refused_and_rules_are_fixed_in_training(
    kubectl: Kubectl,
) -> None:
    unknown = alone(failureRules=[rule("Killed", "FailRun", "medium")])
    with pytest.raises(UnavailableError, match="failureRules may name groups"):
        kubectl.apply(unknown)
    two = alone(maxRetries=1)
    two["spec"]["sites"].append({"name": "plant-b", "groups": [{"name": "g", "workers": 1}]})
    with pytest.raises(UnavailableError, match="maxRetries needs a job of one site"):
        kubectl.apply(two)
    training(kubectl, alone(failureRules=[rule("Killed", "FailRun")]), 2)
    with pytest.raises(UnavailableError, match="failureRules may change only together with runId"):
        kubectl.apply(alone(failureRules=[rule("Killed", "Ignore")]))
