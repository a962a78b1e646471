"""Test that a run with real pods continues whatever happens to its operator, and ends correctly.

A job has two workers, of which one fails for good. It continues while the operator restarts, the
keeper's Deployment and the run's ConfigMap are deleted, it is suspended across a restart, and the
failed worker is scaled away. Before its end it never reports 100 %; the end names the stop rule. If
the failed worker is still wanted, the run ends as Partial. The test prints each event and its
duration. Left out: tests without pods (test_run_ends).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from trained_jobs import (
    SYSTEM,
    degraded,
    eventually,
    iteration,
    manifest,
    status_of,
    wait_until_trains,
)

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
OPERATOR = "app.kubernetes.io/component=operator"


def fail_for_good(kubectl: Kubectl, index: int) -> None:
    """With `maxRestarts: 0` one failed pod exceeds the limit."""
    chosen = f"dlion.dev/group=a,batch.kubernetes.io/job-completion-index={index}"
    (pod,) = [each["metadata"]["name"] for each in kubectl.get("pods", "-l", chosen)["items"]]
    kill = (
        "import os; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
        " and b'dlion_worker.trainer' in open(f'/proc/{p}/cmdline','rb').read()"
        " and p != '1' and int(p) != os.getpid()]"
    )
    kubectl.run("exec", pod, "-c", "trainer", "--", "python3", "-c", kill)
    eventually(lambda: degraded(kubectl), what="Degraded")

    def failed() -> bool:
        (job,) = kubectl.get("jobs")["items"]
        return bool(job["status"].get("failedIndexes") == str(index))

    eventually(failed, within_s=120, what="a worker failed for good")


def restart_operator(kubectl: Kubectl) -> None:
    operator = replace(kubectl, namespace=SYSTEM)
    operator.run("delete", "pod", "-l", OPERATOR)
    operator.wait("--for=condition=Ready", "pod", "-l", OPERATOR, timeout_s=120)


def trains_on(kubectl: Kubectl, seconds: float, *, what: str) -> None:
    """Check for this long that the run is not over, reports no end and makes iterations."""
    before, began_s = iteration(kubectl), time.monotonic()
    while time.monotonic() - began_s < seconds or iteration(kubectl) <= before:
        assert time.monotonic() - began_s < seconds + 120, f"no iteration after: {what}"
        status = status_of(kubectl)
        over = [c["reason"] for c in status["conditions"]
                if c["type"] in ("Succeeded", "Failed") and c["status"] == "True"]  # fmt: skip
        assert over == [], (what, status)
        assert (status.get("trainerStatus") or {}).get("progressPercentage", 0) < 100
        time.sleep(1.0)
    print(f"| {what} | iteration {before} to {iteration(kubectl)} |")


def patch(kubectl: Kubectl, *changes: tuple[str, Any]) -> None:
    operations = [{"op": "replace", "path": path, "value": value} for path, value in changes]
    kubectl.run("patch", "dlj", "digits", "--type=json", "-p", json.dumps(operations))


def small_job(seconds: float) -> dict[str, Any]:
    document = manifest({"a": 400}, workers=2, maxRestarts=0)
    document["spec"]["trainer"] |= {
        "stop": {"maxSeconds": seconds},
        "evaluation": {"everySamples": 100_000},
    }
    document["spec"]["suspend"] = False
    return document


def ready(kubectl: Kubectl) -> dict[str, Any]:
    (found,) = [c for c in status_of(kubectl)["conditions"] if c["type"] == "Ready"]
    return dict(found)


def test_a_degraded_run_continues_through_all_events(restricted: Kubectl) -> None:
    kubectl = restricted
    kubectl.apply(small_job(420))
    wait_until_trains(kubectl)
    print("\n| what happens | the run |\n|---|---|")
    fail_for_good(kubectl, 1)
    trains_on(kubectl, 5, what="a worker fails for good")
    restart_operator(kubectl)
    trains_on(kubectl, 70, what="the operator is restarted")
    chosen = "dlion.dev/job-name=digits"
    for kind in ("deployment", "configmap"):
        (gone,) = kubectl.get(kind, "-l", chosen)["items"]
        kubectl.run("delete", kind, gone["metadata"]["name"])
        uid = gone["metadata"]["uid"]
        began_s = time.monotonic()

        def is_back(kind: str = kind, uid: str = uid) -> bool:
            found = kubectl.get(kind, "-l", chosen)["items"]
            return any(each["metadata"]["uid"] != uid for each in found)

        eventually(is_back, within_s=30, what=f"another {kind}")
        print(f"| {kind} deleted | there again after {time.monotonic() - began_s:.0f} s |")
    trains_on(kubectl, 5, what="its objects are there again")
    patch(kubectl, ("/spec/suspend", True))
    eventually(lambda: status_of(kubectl)["state"] == "Suspended", what="Suspended")
    restart_operator(kubectl)
    patch(kubectl, ("/spec/suspend", False))
    eventually(lambda: degraded(kubectl), within_s=180, what="Degraded again")
    trains_on(kubectl, 50, what="suspended over a restart")
    patch(kubectl, ("/spec/sites/0/groups/0/workers", 1))
    wait_until_trains(kubectl)
    trains_on(kubectl, 50, what="the failed worker is scaled away")
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=600)
    assert (ready(kubectl)["reason"], ready(kubectl)["message"]) == (
        "Completed",
        "maxSeconds 420 reached",
    )
    status = status_of(kubectl)
    assert status["trainerStatus"]["progressPercentage"] == 100
    assert (status["readySites"], status["readyWorkers"]) == ("1/1", "1/1")


def test_a_run_without_a_wanted_worker_ends_as_partial(restricted: Kubectl) -> None:
    kubectl = restricted
    kubectl.apply(small_job(90))
    wait_until_trains(kubectl)
    fail_for_good(kubectl, 1)
    restart_operator(kubectl)
    kubectl.wait("--for=condition=Failed", "dlj/digits", timeout_s=300)
    found = ready(kubectl)
    assert found["reason"] == "Partial"
    assert found["message"].startswith("the model lacks a-1: failed for good")
    assert "maxSeconds 90 reached" in found["message"]
