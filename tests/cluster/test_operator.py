"""Test the operator with a real API server and its controllers, without kubelets.

Its objects are accepted and owned. Deleting a job removes all of them, also without the operator.
Lines of its log name their job. kstatus, Flux and Argo CD report a status as docs/conditions.md
lists it. 301 idle jobs take little memory and cause no write. Killing the operator at any time
creates no child twice. Refusals become conditions. A change of the run id starts a new run. What an
API server accepts never crashes the operator. The test prints its memory.

Left out: pods that run (test_training), faults of the API server (test_api_faults), queues
(test_queueing).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlion_cli.__main__ import main
from fault_proxy import FaultProxy
from gitops.agreement import agree
from gitops.documents import NOT_SELECTED, STARTING, STUCK, SUSPENDED, UNSEEN
from manifest_table import changed, smallest
from operator_process import OperatorProcess

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
KINDS = "jobs,services,configmaps,deployments,pvc,pods"


@pytest.fixture
def operator(kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    home = kubectl.namespace
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home
    ) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def manifest(name: str = "digits", **changes: Any) -> dict[str, Any]:
    document = changed(smallest(), {f"spec.{path}": value for path, value in changes.items()})
    document["metadata"] = {"name": name}
    document["spec"]["sites"] = [
        {
            "name": "plant-a",
            "groups": [{"name": "small", "workers": 3}, {"name": "large", "workers": 1}],
        }
    ]
    return document


def eventually(look: Callable[[], Any], *, within_s: float = 30.0, every_s: float = 0.2) -> Any:
    """Return the result of `look` once it is true."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s"
        time.sleep(every_s)
    return found


def children(kubectl: Kubectl) -> set[str]:
    """Return kind and name of every object of a job that is not being deleted."""
    chosen = "app.kubernetes.io/managed-by=dlion-operator,dlion.dev/job-name"
    found = kubectl.get(KINDS, "-l", chosen)["items"]
    return {
        f"{each['kind']}/{each['metadata']['name']}"
        for each in found
        if not each["metadata"].get("deletionTimestamp")
    }


def condition(kubectl: Kubectl, type_: str, name: str = "digits") -> dict[str, Any]:
    """Return that condition of the job; empty if it has none."""
    status = kubectl.get("dlj", name).get("status") or {}
    found = [each for each in status.get("conditions") or () if each["type"] == type_]
    return found[0] if found else {}


def made(kubectl: Kubectl, jobs: int = 2) -> set[str]:
    """Return all children, once there are this many Jobs, each with its pods."""

    def look() -> set[str] | None:
        there = children(kubectl)
        counts = [sum(each.startswith(f"{kind}/") for each in there) for kind in ("Job", "Pod")]
        return there if counts[0] == jobs and counts[1] >= 2 * jobs else None

    found: set[str] = eventually(look)
    return found


def test_a_job_gets_its_children_and_is_deleted_with_them(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    kubectl.apply(manifest())
    there = made(kubectl)
    kinds = sorted(each.partition("/")[0] for each in there)
    # One of the five is the keeper's pod.
    eventually(lambda: sum(each.startswith("Pod/") for each in children(kubectl)) == 5)
    assert [k for k in kinds if k != "Pod"] == [
        "ConfigMap", "Deployment", "Job", "Job", "Service", "Service"
    ]  # fmt: skip
    eventually(lambda: condition(kubectl, "Ready"))
    document = kubectl.get("dlj", "digits")
    assert document["status"]["observedGeneration"] == 1
    assert document["status"]["readyWorkers"] == "0/4"
    agree(document, STARTING)
    job = kubectl.get("jobs")["items"][0]
    assert job["metadata"]["ownerReferences"][0]["kind"] == "DLionJob"
    assert "finalizers" not in kubectl.get("dlj", "digits")["metadata"]
    records = [json.loads(line) for line in operator.log.read_text().splitlines() if line[0] == "{"]
    (served,) = [each for each in records if each["message"].endswith("is served")]
    assert (served["object"]["namespace"], served["object"]["name"]) == (
        kubectl.namespace,
        "digits",
    )
    kubectl.run("delete", "dlj", "digits", "--wait=true")
    eventually(lambda: not children(kubectl))


def test_deletion_without_the_operator_leaves_nothing(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    kubectl.apply(manifest())
    made(kubectl)
    assert operator.end() == 0
    kubectl.run("delete", "dlj", "digits", "--wait=true")
    eventually(lambda: not children(kubectl))
    operator.start()


def test_an_operator_killed_at_any_time_creates_nothing_twice(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    rng = random.Random(5)
    for name in (f"job-{number}" for number in range(4)):
        kubectl.apply(manifest(name))
        time.sleep(rng.uniform(0.0, 0.4))
        operator.kill()
        operator.start()
    there = made(kubectl, jobs=8)
    assert len([each for each in there if each.startswith("Deployment/")]) == 4
    for name in (f"job-{number}" for number in range(4)):
        kubectl.run("delete", "dlj", name, "--wait=true")
    eventually(lambda: not children(kubectl))


def test_a_refusal_of_the_api_server_is_in_the_status(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    document = manifest()
    document["spec"]["podTemplate"] = {"spec": {"containers": [{"name": "trainer", "ports": 3}]}}
    kubectl.apply(document)
    stalled = eventually(
        lambda: found if (found := condition(kubectl, "Stalled")).get("status") == "True" else None
    )
    assert stalled["reason"] == "InvalidSpec"
    assert "ports" in stalled["message"]
    agree(kubectl.get("dlj", "digits"), STUCK)
    assert not [each for each in children(kubectl) if each.startswith("Job/")]
    document["spec"]["podTemplate"] = None
    kubectl.apply(document)
    made(kubectl)


@pytest.mark.usefixtures("no_running_pods")
def test_an_idle_operator_uses_little_and_writes_nothing(kubectl: Kubectl, tmp_path: Path) -> None:
    """There are 60 suspended jobs and one whose pods fit on no node. It lasts a minute by the times
    in the API server's answers, also after a restart.

    benchmarks/operator_at_rest.py measures 300 jobs.
    """
    namespaces, looks = (kubectl.namespace,), "dlion_operator_reconciles_total"
    with (
        FaultProxy(kubectl.kubeconfig, tmp_path) as proxy,
        OperatorProcess(
            tmp_path, proxy.kubeconfig, namespaces=namespaces, namespace=kubectl.namespace
        ) as operator,
    ):
        alone = operator.memory_mb()
        kubectl.apply(manifest(), *(manifest(f"job-{n}", suspend=True) for n in range(60)))
        eventually(lambda: suspended(kubectl) == 60, within_s=60)
        eventually(lambda: condition(kubectl, "Ready").get("reason") == "WorkersStarting")
        proxy.clock_ahead_s = 60.0
        kubectl.wait("--for=condition=Stalled", "dlj/digits", timeout_s=90)
        assert condition(kubectl, "Stalled")["reason"] == "Unschedulable"
        agree(kubectl.get("dlj", "digits"), STUCK)
        agree(kubectl.get("dlj", "job-0"), SUSPENDED)
        events = kubectl.get("events", "--field-selector=involvedObject.name=digits")["items"]
        reasons = {each["reason"] for each in events}
        assert {"WorkersCreated", "WorkersStarting", "Unschedulable"} <= reasons
        assert not [each for each in children(kubectl) if "job-" in each]
        eventually(lambda: proxy.is_quiet(3))
        before, looked = len(proxy.requests), operator.metric(looks)
        eventually(lambda: operator.metric(looks) > looked)
        print(f"operator: {alone:.0f} MB alone, {operator.memory_mb():.0f} MB with 61 jobs")
        assert alone <= 150
        assert operator.memory_mb() <= 220
        operator.kill()
        operator.start()
        eventually(lambda: operator.metric(looks) >= 61)
        assert proxy.is_quiet(3)
        assert proxy.mutations(before) == []


def suspended(kubectl: Kubectl) -> int:
    """Return the number of jobs whose status is suspended."""
    found = kubectl.get("dlj")["items"]
    return sum((each.get("status") or {}).get("state") == "Suspended" for each in found)


def test_jobs_of_another_controller_and_of_other_sites_are_ignored(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    elsewhere = manifest("elsewhere")
    elsewhere["spec"]["sites"][0]["name"] = "plant-b"
    theirs = manifest("theirs", managedBy="kueue.x-k8s.io/multikueue")
    kubectl.apply(theirs, manifest("ours"), elsewhere)
    eventually(lambda: condition(kubectl, "Ready", "ours"))
    eventually(lambda: condition(kubectl, "Ready", "elsewhere"))
    agree(kubectl.get("dlj", "elsewhere"), NOT_SELECTED)
    found = kubectl.get("dlj", "theirs")
    assert (found["status"]["observedGeneration"], found["status"]["conditions"]) == (-1, [])
    agree(found, UNSEEN)
    names = ("theirs", "elsewhere")
    assert not [each for each in children(kubectl) if any(name in each for name in names)]


def test_the_site_keeps_its_authority_across_restarts(
    kubectl: Kubectl, operator: OperatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.apply(manifest())
    made(kubectl)

    def bundle() -> str:
        (found,) = kubectl.get("configmap", "-l", "dlion.dev/job-name=digits")["items"]
        return str(found["data"]["ca.pem"])

    first = bundle()
    assert "BEGIN CERTIFICATE" in first
    operator.kill()
    operator.start()
    time.sleep(2)
    assert bundle() == first
    config = json.loads(
        kubectl.get("configmap", "-l", "dlion.dev/job-name=digits")["items"][0]["data"]["pod.json"]
    )
    assert config["job_document"]["metadata"]["namespace"] == kubectl.namespace
    show = ["trust", "show", "-o", "pem", "-n", kubectl.namespace]
    assert main([*show, "--kubeconfig", str(kubectl.kubeconfig)]) == 0
    assert capsys.readouterr().out == first
