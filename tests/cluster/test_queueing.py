"""Test queued jobs with a real API server and Kueue's own definitions, and with Kueue itself.

The API server accepts the Workload, and the Jobs and keeper after an admission. Without Kueue's
definitions a job reports that. It is queued once they exist, when the operator requests a restart
for its watch. Nothing runs before the admission. An evicted run ends its pods before it frees its
quota, and starts with the next flavors. A suspended job leaves its queue.

With Kueue's own manager (slow) two jobs for one quota run one after the other, the higher priority
first. A finished job frees its quota, a deactivated Workload waits, and Kueue leaves the Jobs to
the operator.

Left out: pods that run (the test reports their end in the kubelet's place); Kueue's webhooks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import kueue
from kueue import Kueue, admit, evict, resource_flavor, workload_of
from operator_process import OperatorProcess
from podless_jobs import end_workers, manifest, workers
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_running_pods")]
KEEPER = "app.kubernetes.io/component=keeper"


@pytest.fixture
def operator(kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    home = kubectl.namespace
    with OperatorProcess(
        tmp_path,
        kubectl.kubeconfig,
        namespaces=(home,),
        namespace=home,
        settings={"kueue": True, "keeper": {"size": "1Gi"}},
    ) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def queued(name: str = "digits", *, cpu: str = "1", **labels: str) -> dict[str, Any]:
    """Return a job in queue `edge` whose three workers request this much each."""
    document = manifest(name)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge", **labels}
    for group in document["spec"]["sites"][0]["groups"]:
        group["resources"] = {"requests": {"cpu": cpu}}
    return document


def install_kueue(kubectl: Kubectl, operator: OperatorProcess) -> None:
    """Install Kueue's kinds. An operator that started without them requests a restart, and gets it
    as from a kubelet.
    """
    if kubectl.knows("workloads.kueue.x-k8s.io"):
        return
    kueue.install(kubectl)
    eventually(lambda: operator.livez()[0] == 503, what="a restart asked for")
    assert "Workloads are not watched yet" in operator.livez()[1]
    operator.kill()
    operator.start()
    assert operator.livez()[0] == 200


def ready(kubectl: Kubectl, name: str = "digits") -> tuple[str, str]:
    """Return reason and message."""
    conditions = (kubectl.get("dlj", name).get("status") or {}).get("conditions") or ()
    found = [(c["reason"], c["message"]) for c in conditions if c["type"] == "Ready"]
    return found[0] if found else ("", "")


def reserved(kubectl: Kubectl, name: str = "digits") -> bool:
    """Report whether quota is reserved for the job."""
    return "admission" in ((workload_of(kubectl, name) or {}).get("status") or {})


def condition(kubectl: Kubectl, type_: str, name: str = "digits") -> tuple[str, str]:
    """Return status and reason of that condition of the job's Workload."""
    found = ((workload_of(kubectl, name) or {}).get("status") or {}).get("conditions") or ()
    found_conditions = [(each["status"], each["reason"]) for each in found if each["type"] == type_]
    return found_conditions[0] if found_conditions else ("", "")


def live_workers(kubectl: Kubectl, name: str = "digits") -> list[dict[str, Any]]:
    """Return the workers that have not ended."""
    return [pod for pod in workers(kubectl, name) if pod["status"]["phase"] == "Pending"]


def test_a_run_is_admitted_evicted_and_admitted_elsewhere_as_a_whole(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    if not kubectl.knows("workloads.kueue.x-k8s.io"):
        kubectl.apply(queued())
        eventually(lambda: ready(kubectl)[0] == "QueueUnusable", what="QueueUnusable")
        assert "install Kueue 0.15 or newer" in ready(kubectl)[1]
        install_kueue(kubectl, operator)
        eventually(lambda: ready(kubectl)[0] == "Queued", what="Queued")
        kubectl.run("delete", "dlj", "digits")
    toleration = {"key": "arm", "operator": "Exists", "effect": "NoSchedule"}
    kubectl.apply(
        queued(),
        resource_flavor("arm", {"arch": "arm"}, tolerations=[toleration]),
        resource_flavor("x86", {"arch": "x86"}),
    )
    workload = eventually(lambda: workload_of(kubectl, "digits"), what="a Workload")
    sets = {each["name"]: each["count"] for each in workload["spec"]["podSets"]}
    assert sets == {"worker-small": 2, "worker-large": 1, "keeper": 1}
    eventually(lambda: ready(kubectl)[0] == "Queued", what="Queued")
    eventually(lambda: len(kubectl.get("jobs")["items"]) == 2, what="both Jobs")
    assert not workers(kubectl)
    assert not kubectl.get("deployments", "-l", KEEPER)["items"]

    admit(kubectl, "digits", "arm")
    eventually(lambda: len(workers(kubectl)) == 3, what="all workers")
    eventually(lambda: kubectl.get("pods", "-l", KEEPER)["items"], what="the keeper")
    for pod in (*workers(kubectl), *kubectl.get("pods", "-l", KEEPER)["items"]):
        assert pod["spec"]["nodeSelector"] == {"arch": "arm"}
        assert toleration in pod["spec"]["tolerations"]
    eventually(lambda: condition(kubectl, "PodsReady")[0] == "False", what="PodsReady")

    evict(kubectl, "digits")
    eventually(lambda: not reserved(kubectl), what="its quota given back")
    assert not live_workers(kubectl)
    assert not kubectl.get("pods", "-l", KEEPER)["items"]
    assert condition(kubectl, "Requeued") == ("True", "Preempted")
    assert condition(kubectl, "Admitted") == ("False", "NoReservation")
    eventually(lambda: ready(kubectl)[0] == "Queued", what="Queued")

    admit(kubectl, "digits", "x86")
    eventually(lambda: len(live_workers(kubectl)) == 3, what="all workers once more")
    eventually(lambda: kubectl.get("pods", "-l", KEEPER)["items"], what="the keeper once more")
    for pod in (*live_workers(kubectl), *kubectl.get("pods", "-l", KEEPER)["items"]):
        assert pod["spec"]["nodeSelector"] == {"arch": "x86"}
        assert toleration not in pod["spec"]["tolerations"]

    operator.kill()
    operator.start()
    kubectl.run("patch", "dlj", "digits", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    eventually(lambda: workload_of(kubectl, "digits") is None, what="the queue left")
    assert not live_workers(kubectl)
    kubectl.run("patch", "dlj", "digits", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    eventually(lambda: workload_of(kubectl, "digits"), what="another Workload")
    admit(kubectl, "digits", "x86")
    eventually(lambda: len(live_workers(kubectl)) == 3, what="all workers after the pause")
    end_workers(kubectl)
    kubectl.wait("--for=condition=Succeeded", "dlj/digits")
    eventually(lambda: condition(kubectl, "Finished") == ("True", "Succeeded"), what="Finished")
    kubectl.run("delete", "dlj", "digits")
    eventually(lambda: workload_of(kubectl, "digits") is None, what="the Workload gone")


def test_more_groups_than_a_workload_allows_are_refused(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    install_kueue(kubectl, operator)
    document = queued()
    groups = [{"name": f"g{number}", "workers": 1} for number in range(8)]
    document["spec"]["sites"][0]["groups"] = groups
    kubectl.apply(document)
    eventually(lambda: ready(kubectl)[0] == "InvalidSpec", what="InvalidSpec")
    assert "podSets" in ready(kubectl)[1]
    assert not kubectl.get("jobs")["items"]
    document["spec"]["sites"][0]["groups"] = groups[:7]
    kubectl.apply(document)
    eventually(lambda: ready(kubectl)[0] == "Queued", what="Queued")


@pytest.mark.slow
@pytest.mark.root
def test_kueue_itself_runs_two_jobs_one_after_the_other(
    kubectl: Kubectl, operator: OperatorProcess, tmp_path: Path
) -> None:
    folder = kueue.built()
    if folder is None:
        pytest.skip("Kueue is not built yet: run `tools/testbed build-kueue`")
    install_kueue(kubectl, operator)
    label = "kueue.x-k8s.io/priority-class"
    kubectl.apply(
        resource_flavor("arm", {"arch": "arm"}),
        kueue.priority_class("low", 1),
        kueue.priority_class("high", 9),
        kueue.cluster_queue("all", "arm", cpu="4"),
        kueue.local_queue("edge", "all"),
    )
    with Kueue(folder, kubectl, tmp_path) as manager:
        kubectl.apply(queued("low", **{label: "low"}))
        eventually(lambda: len(live_workers(kubectl, "low")) == 3, what="the first job's workers")
        manager.check()
        assert all(
            pod["spec"]["nodeSelector"] == {"arch": "arm"} for pod in workers(kubectl, "low")
        )

        kubectl.apply(queued("high", **{label: "high"}))
        eventually(lambda: len(live_workers(kubectl, "high")) == 3, what="the second job's")
        assert not live_workers(kubectl, "low")
        assert condition(kubectl, "Evicted", "low") == ("True", "Preempted")
        eventually(lambda: ready(kubectl, "low")[0] == "Queued", what="Queued")
        assert ready(kubectl, "low")[1].startswith("waiting for a place in the queue: ")

        end_workers(kubectl, "high")
        kubectl.wait("--for=condition=Succeeded", "dlj/high")
        eventually(lambda: len(live_workers(kubectl, "low")) == 3, what="the first once more")

        name = (workload_of(kubectl, "low") or {})["metadata"]["name"]
        for active, what in ((False, "QueueInactive"), (True, "WorkersStarting")):
            patch = json.dumps({"spec": {"active": active}})
            kind = "workloads.kueue.x-k8s.io"
            kubectl.run("patch", kind, name, "--type=merge", "-p", patch)
            eventually(lambda what=what: ready(kubectl, "low")[0] == what, what=what)
        eventually(lambda: len(live_workers(kubectl, "low")) == 3, what="active once more")
        manager.check()
        owners = {
            each["metadata"]["ownerReferences"][0]["kind"]
            for each in kubectl.get("workloads.kueue.x-k8s.io")["items"]
        }
        assert owners == {"DLionJob"}, "Kueue created Workloads for Jobs"
