"""Test a job that MultiKueue dispatches, with real API servers and Kueue's own definitions.

A copy of a job owns the Workload that its label names, runs by its admission and reports to it. It
does not use a missing Workload or one of another job.

Slow test: two clusters, each with Kueue's own manager. The manager cluster starts nothing, and the
copy runs in the other one. Its status is copied back, and `dlion describe` names its cluster. An
eviction there ends the copy. So does a suspension, a deletion, a lost label or another `managedBy`
here. The copy is created again if the job continues. A finished run is finished in both, also if it
is evicted at its end. A copy at a site of another name reports that and frees its quota.

Left out: pods that run (the test reports their end in the kubelet's place); several worker
clusters; Kueue's webhooks.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import kueue
from dlion_api.cluster_names import MULTIKUEUE, QUEUE_LABEL, QUEUE_PREBUILT_LABEL
from kueue import Kueue, admit, resource_flavor, workload_of
from operator_process import OperatorProcess
from podless_jobs import end_workers, manifest, workers
from several_contexts import SeveralContexts
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_running_pods")]
WORKLOADS = "workloads.kueue.x-k8s.io"


def operator_of(kubectl: Kubectl, folder: Path, site: str) -> OperatorProcess:
    folder.mkdir()
    home = kubectl.namespace
    return OperatorProcess(
        folder, kubectl.kubeconfig, site=site, namespaces=(home,), namespace=home,
        settings={"kueue": True},
    )  # fmt: skip


@pytest.fixture
def worker_cluster(bare_site: Site, kubectl: Kubectl) -> Iterator[Kubectl]:
    """Another cluster with the same namespace."""
    there = bare_site.kubectl
    there.run("apply", "-f", "crds/dlionjob.yaml")
    there.wait_until_known("dlj")
    there.run("create", "namespace", kubectl.namespace)
    try:
        yield replace(there, namespace=kubectl.namespace)
    finally:
        there.run("delete", "namespace", kubectl.namespace, "--wait=false")


def dispatched(name: str = "digits") -> dict[str, Any]:
    """Return a job in queue `edge` whose three workers request one CPU each."""
    document = manifest(name, managedBy=MULTIKUEUE)
    document["metadata"]["labels"] = {QUEUE_LABEL: "edge"}
    for group in document["spec"]["sites"][0]["groups"]:
        group["resources"] = {"requests": {"cpu": "1"}}
    return document


def ready(kubectl: Kubectl, name: str = "digits") -> tuple[str, str]:
    """Return reason and message."""
    conditions = (kubectl.get("dlj", name).get("status") or {}).get("conditions") or ()
    found = [(c["reason"], c["message"]) for c in conditions if c["type"] == "Ready"]
    return found[0] if found else ("", "")


def copies(kubectl: Kubectl) -> list[str]:
    return [each["metadata"]["name"] for each in kubectl.get("dlj")["items"]]


def test_a_copy_runs_by_the_workload_of_its_label(kubectl: Kubectl, tmp_path: Path) -> None:
    if not kubectl.knows(WORKLOADS):
        kueue.install(kubectl)
    kubectl.apply(resource_flavor("arm", {"arch": "arm"}))
    with operator_of(kubectl, tmp_path / "operator", "plant-a") as operator:
        kubectl.apply(dispatched())
        made = eventually(lambda: workload_of(kubectl, "digits"), what="a Workload")
        assert made["metadata"]["name"] == "digits-dispatch"
        eventually(lambda: ready(kubectl)[0] == "Queued", what="Queued")
        assert not kubectl.get("jobs")["items"]
        assert not kubectl.get("configmaps", "-l", "dlion.dev/job-name=digits")["items"]
        kubectl.run("delete", "dlj", "digits")
        eventually(lambda: workload_of(kubectl, "digits") is None, what="its Workload gone")
        _check_copy(kubectl, made)
        assert operator.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def _check_copy(kubectl: Kubectl, made: dict[str, Any]) -> None:
    """Check a copy whose Workload is `made`."""
    copy = dispatched()
    del copy["spec"]["managedBy"]
    copy["metadata"]["labels"][QUEUE_PREBUILT_LABEL] = "digits-dispatch"
    kubectl.apply(copy)
    eventually(lambda: ready(kubectl)[0] == "QueueUnusable", what="QueueUnusable")
    assert "Workload digits-dispatch, which label" in ready(kubectl)[1]
    cloned = {name: made["metadata"][name] for name in ("name", "labels", "annotations")}
    others = {**cloned, "labels": {**cloned["labels"], "dlion.dev/job-name": "other"}}
    kind = {"apiVersion": made["apiVersion"], "kind": "Workload", "spec": made["spec"]}
    kubectl.apply({**kind, "metadata": others})
    eventually(lambda: "of another job" in ready(kubectl)[1], what="another's")
    kubectl.run("delete", WORKLOADS, "digits-dispatch")

    kubectl.apply({**kind, "metadata": cloned})
    uid = kubectl.get("dlj", "digits")["metadata"]["uid"]

    def owners() -> list[str]:
        found = workload_of(kubectl, "digits") or {"metadata": {}}
        return [each["uid"] for each in found["metadata"].get("ownerReferences", ())]

    eventually(lambda: owners() == [uid], what="its owner")
    assert not workers(kubectl)
    admit(kubectl, "digits", "arm")
    eventually(lambda: len(workers(kubectl)) == 3, what="all workers")
    assert all(pod["spec"]["nodeSelector"] == {"arch": "arm"} for pod in workers(kubectl))
    kubectl.run("delete", "dlj", "digits")
    eventually(lambda: workload_of(kubectl, "digits") is None, what="its Workload gone")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
def test_kueue_itself_runs_a_job_in_another_cluster(
    kubectl: Kubectl, worker_cluster: Kubectl, tmp_path: Path
) -> None:
    folder = kueue.built()
    if folder is None:
        pytest.skip("Kueue is not built yet: run `tools/testbed build-kueue`")
    there = worker_cluster
    check = {"admissionChecks": [{"name": "edge-1"}]}
    with ExitStack() as stack:
        for place, each, checks in (
            ("manager", kubectl, {"admissionChecksStrategy": check}),
            ("worker", there, {}),
        ):
            kueue.install(each)
            wide = replace(each, namespace="")
            if checks:
                wide.apply(*kueue.worker_cluster("edge-1", there.kubeconfig))
            wide.apply(
                resource_flavor("arm", {"arch": "arm"}),
                kueue.cluster_queue("all", "arm", cpu="4", **checks),
            )
            each.apply(kueue.local_queue("edge", "all"))
            (work := tmp_path / f"kueue-{place}").mkdir()
            stack.enter_context(Kueue(folder, each, work))
        manager = stack.enter_context(operator_of(kubectl, tmp_path / "manager", "control"))
        with operator_of(there, tmp_path / "worker", "plant-a") as worker:
            _check_life_of_a_job(kubectl, there, tmp_path)
            assert worker.metric('dlion_operator_reconciles_total{result="defect"}') == 0
        there.run("delete", "secret", "dlion-authority")  # of the site plant-a
        with operator_of(there, tmp_path / "stranger", "plant-z"):
            _check_copy_at_another_site(kubectl, there)
        assert manager.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def _check_life_of_a_job(kubectl: Kubectl, there: Kubectl, tmp_path: Path) -> None:
    kubectl.apply(dispatched())
    eventually(lambda: len(workers(there)) == 3, within_s=120, what="the copy's workers")
    eventually(lambda: ready(kubectl)[0] == "WorkersStarting", what="the copy's status")
    (workload,) = kubectl.get(WORKLOADS)["items"]
    assert workload["status"]["clusterName"] == "edge-1"
    assert not kubectl.get("jobs")["items"]
    command = SeveralContexts({"manager": kubectl}, tmp_path)
    assert "its copy is in cluster edge-1" in command.at("manager", "describe", "digits")
    stop_queue(there, "HoldAndDrain")
    eventually(lambda: not copies(there), within_s=120, what="the evicted copy gone")
    eventually(lambda: ready(kubectl)[0] == "Queued", what="Queued")
    stop_queue(there, "None")
    eventually(lambda: len(workers(there)) == 3, within_s=120, what="the workers once more")

    kubectl.run("patch", "dlj", "digits", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    eventually(lambda: not copies(there), what="the suspended copy gone")
    eventually(lambda: ready(kubectl)[0] == "Suspended", what="Suspended")
    assert not kubectl.get(WORKLOADS)["items"]
    kubectl.run("patch", "dlj", "digits", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    eventually(lambda: len(workers(there)) == 3, within_s=120, what="the workers after it")

    for taken, given in (
        (
            ["label", "dlj", "digits", f"{QUEUE_LABEL}-"],
            ["label", "dlj", "digits", f"{QUEUE_LABEL}=edge"],
        ),
        (managed_by("dlion.dev/operator"), managed_by(MULTIKUEUE)),
    ):
        kubectl.run(*taken)
        eventually(lambda: not copies(there), within_s=120, what=f"no copy after {taken}")
        assert not kubectl.get(WORKLOADS)["items"]
        kubectl.run(*given)
        eventually(lambda: len(workers(there)) == 3, within_s=120, what=f"workers after {given}")
    kubectl.run("delete", "dlj", "digits")
    eventually(lambda: not copies(there), what="the deleted copy gone")
    eventually(lambda: not there.get(WORKLOADS)["items"], what="its Workload gone")

    kubectl.apply(dispatched("second"))
    eventually(lambda: len(workers(there, "second")) == 3, within_s=120, what="the second's")
    end_workers(there, "second")
    kubectl.wait("--for=condition=Succeeded", "dlj/second")
    stop_queue(kubectl, "HoldAndDrain")
    eventually(lambda: not copies(there), within_s=120, what="the copy of the run that is over")
    assert ready(kubectl, "second")[0] == "Completed"
    assert end_of_workload(kubectl, "second") == "Succeeded"
    stop_queue(kubectl, "None")


def _check_copy_at_another_site(kubectl: Kubectl, there: Kubectl) -> None:
    """Check that its reason is copied back before Kueue deletes it, and both quotas are freed."""
    kubectl.apply(dispatched("third"))
    eventually(lambda: end_of_workload(kubectl, "third") == "OutOfSync", within_s=120, what="end")
    eventually(lambda: not copies(there), what="the unusable copy gone")
    reason, message = ready(kubectl, "third")
    assert (reason, "set site.name in the charts" in message) == ("QueueUnusable", True)


def end_of_workload(kubectl: Kubectl, job: str) -> str:
    """Return the reason of its end; empty: it has not ended."""
    conditions = ((workload_of(kubectl, job) or {}).get("status") or {}).get("conditions") or ()
    return next((each["reason"] for each in conditions if each["type"] == "Finished"), "")


def stop_queue(kubectl: Kubectl, policy: str) -> None:
    patch = json.dumps({"spec": {"stopPolicy": policy}})
    kubectl.run("patch", "clusterqueue", "all", "--type=merge", "-p", patch)


def managed_by(manager: str) -> list[str]:
    patch = json.dumps({"spec": {"managedBy": manager}})
    return ["patch", "dlj", "digits", "--type=merge", "-p", patch]
